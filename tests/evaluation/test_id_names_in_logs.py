"""Ids of raw logs are named by the values that the encoder hashed."""

from __future__ import annotations

import numpy as np
import pytest

from clickline.evaluation.id_names import _values_with
from clickline.features import Encoder, FeatureSpec, SlotField
from clickline.features.raw_columns import raw_column
from clickline.records import RawRows


@pytest.mark.parametrize(
    ("text", "separator", "pieces"),
    [
        ("7.0", ".", {b"7", b"0"}),
        (" 7.0 |8.0", "|", {b"7", b"8"}),
        ("-0", "-", {b"0"}),
        ("7.0", None, {b"7"}),
    ],
)
def test_value_is_split_before_canonicalisation_like_in_the_encoder(
    text: str, separator: str | None, pieces: set[bytes]
):
    slot = SlotField("v", "v", 7, multi=True, separator=separator)
    encoder = Encoder(FeatureSpec((), (slot,)))
    column = raw_column([text], "v")
    found = encoder.encode(RawRows(1, {"v": column}, np.arange(1)))[0].slots[0]
    assert set(_values_with(set(found.ids_N.tolist()), found, column, separator)) == pieces
    again = encoder.encode_values([{"v": [piece.decode() for piece in pieces]}])[0].slots[0]
    assert set(again.ids_N.tolist()) == set(found.ids_N.tolist())
