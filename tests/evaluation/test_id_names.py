"""Buckets of numbers have readable names."""

from __future__ import annotations

import pytest

from clickline.evaluation.id_names import id_names_of
from clickline.features import Encoder, FeatureSpec, SlotField
from clickline.features.feature_spec import FieldStatistics


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
