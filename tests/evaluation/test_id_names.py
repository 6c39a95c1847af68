"""Ids are named by the values that the encoder hashed, and buckets of numbers have readable names."""

from __future__ import annotations

import numpy as np
import pytest

from clickline.evaluation.id_names import _values_with, id_names_of
from clickline.features import Encoder, FeatureSpec, SlotField
from clickline.features.feature_spec import FieldStatistics
from clickline.features.raw_columns import raw_column
from clickline.records import RawRows


@pytest.mark.parametrize(
    ("edges", "number", "name"),
    [
        ((1.0, 5.0), 0.5, "below 1"),
        ((1.0, 5.0), 1.0, "1 to 5"),
        ((1.0, 5.0), 7.0, "5 and more"),
        ((2.0,), 1.0, "below 2"),
        ((), 3.0, "any number"),  # nearly every row has the same number, so there is no edge
    ],
)
def test_number_is_in_the_bucket_of_that_name(edges: tuple[float, ...], number: float, name: str) -> None:
    statistics = FieldStatistics(9, 0.0, 9.0, 1.0, 1.0, edges)
    slot = SlotField("price", "price", 3, "quantiles", buckets=3, statistics=statistics)
    encoded, _ = Encoder(FeatureSpec((), (slot,))).encode_values([{"price": number}])
    assert id_names_of(slot, [])[int(encoded.slots[0].ids_N[0])] == name


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
