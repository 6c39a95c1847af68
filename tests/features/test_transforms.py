"""Dense transforms and buckets: what they compute, and the errors for values they cannot use."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickline.errors import ArtifactError, DataError
from clickline.features import DenseField, Encoder, FeatureSpec, FieldStatistics, SlotField

STATISTICS = FieldStatistics(4, 0.0, 10.0, 4.0, 2.0, (1.0, 5.0), median=3.0, spread=2.0)


def dense(
    transform: str, values: list[object], statistics: FieldStatistics | None = STATISTICS
) -> list[float]:
    spec = FeatureSpec((DenseField("x", "x", transform, statistics),), ())
    encoded, faults = Encoder(spec).encode_values([{"x": v} for v in values])
    assert not faults
    return encoded.dense_DB[0].tolist()


def test_each_transform():
    assert dense("none", [1.5, None, -2]) == [1.5, 0.0, -2.0]
    assert dense("minmax", [0, 5, 10, 20, -1, None]) == [0.0, 0.5, 1.0, 1.0, 0.0, 0.0]
    assert dense("zscore", [4, 6, 0, None]) == [0.0, 1.0, -2.0, 0.0]
    assert dense("log1p", [0, None]) == [0.0, 0.0]


@given(st.floats(0, 2.0**127, width=32))
def test_log1p_is_the_correctly_rounded_one_and_safe_for_both_signs(value):
    up, down = dense("log1p", [value, -value])
    assert up == pytest.approx(math.log1p(value), rel=1.2e-7)
    assert down == -up


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_robust_is_the_logarithm_of_the_distance_from_the_median_in_spreads(value):
    away = min(abs(value - 3.0) / 2.0, math.expm1(10))
    (found,) = dense("robust", [value])
    assert found == pytest.approx(math.copysign(math.log1p(away), value - 3.0), rel=1e-5, abs=1e-6)


def test_bits_of_robust_do_not_change():
    """Stored datasets and versions depend on them."""
    assert dense("robust", [3, None, 5, 1, 1e19, -1e19]) == [
        0.0,
        0.0,
        0.6931471824645996,
        -0.6931471824645996,
        9.999979019165039,
        -9.999979019165039,
    ]


def test_a_constant_field_is_zero_not_infinite():
    flat = FieldStatistics(3, 2.0, 2.0, 2.0, 0.0)
    assert dense("minmax", [2.0, 3.0], flat) == [0.0, 0.0]
    assert dense("zscore", [2.0, 3.0], flat) == [0.0, 0.0]
    assert dense("robust", [2.0, 3.0], flat) == [0.0, 0.0]


def buckets(source: str, values: list[object]) -> list[int]:
    spec = FeatureSpec((), (SlotField("x", "x", 1, source, statistics=STATISTICS),))
    return Encoder(spec).encode_values([{"x": v} for v in values])[0].slots[0].ids_N.tolist()


def test_log2_buckets_are_bounded_by_powers_of_two():
    ids = buckets("log2", [1, 1.99, 2, 3.99, 4, 0, -1, -1.5, -2, None])
    assert ids[0] == ids[1] and ids[2] == ids[3] and ids[6] == ids[7]
    assert len(set(ids)) == 7


def test_quantile_buckets_are_bounded_by_the_edges():
    ids = buckets("quantiles", [0, 0.99, 1, 4.99, 5, 1e9, None])
    assert ids[0] == ids[1] and ids[2] == ids[3] and ids[4] == ids[5]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("abc", "x is 'abc', a number expected"),
        ("1.2.3", "x is '1.2.3', a number expected"),
        ("nan", "x is 'nan', a number expected"),
        ("inf", "x is 'inf', a number expected"),
        ("1e39", "x is beyond the range of a 32-bit float"),
        ("1e999", "x is beyond the range of a 32-bit float"),
        ([1.0, 2.0], "x has 2 values, only one is allowed"),
    ],
)
def test_a_value_that_is_not_a_number_is_reported(value, words):
    spec = FeatureSpec((DenseField("x", "x", "none"),), ())
    encoded, faults = Encoder(spec).encode_values([{"x": 1.0}, {"x": value}])
    assert [(fault.row, fault.detail) for group in faults for fault in group] == [(1, words)]
    assert encoded.dense_DB[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("value", ["12a", "-", "18446744073709551616", "-9223372036854775809", "1.5", 1.5])
def test_a_value_that_is_not_a_feature_id_is_reported(value):
    spec = FeatureSpec((), (SlotField("s", "s", 1, "feasign"),))
    _, faults = Encoder(spec).encode_values([{"s": value}])
    ((fault,),) = faults
    assert fault.reason == "not a number"
    assert "a 64-bit integer expected" in fault.detail


def test_a_feasign_may_be_written_signed_or_unsigned():
    spec = FeatureSpec((), (SlotField("s", "s", 1, "feasign"),))
    values = [-5, "-5", 2**64 - 5, str(2**64 - 5), -(2**63), 2**63]
    encoded, faults = Encoder(spec).encode_values([{"s": value} for value in values])
    alone = [Encoder(spec).encode_values([{"s": value}])[0].slots[0].ids_N[0] for value in values]
    assert not faults
    assert encoded.slots[0].ids_N.tolist() == alone
    assert len(set(alone)) == 2


def test_several_values_in_a_single_valued_slot_are_reported():
    spec = FeatureSpec((), (SlotField("s", "s", 1),))
    _, faults = Encoder(spec).encode_values([{"s": ["a", "b"]}])
    ((fault,),) = faults
    assert fault.detail == "s has 2 values, only one is allowed; set multi: true"


def test_missing_values_among_several_are_dropped_and_an_empty_list_is_missing():
    slot = SlotField("s", "s", 1, multi=True, separator="|")
    encoded, _ = Encoder(FeatureSpec((), (slot,))).encode_values(
        [{"s": "a||b"}, {"s": "|"}, {"s": None}, {"s": [None, "a"]}]
    )
    ids, offsets = encoded.slots[0].ids_N.tolist(), encoded.slots[0].offsets_B1.tolist()
    assert offsets == [0, 2, 3, 4, 5]
    assert ids[2] == ids[3] == slot.missing_id
    assert ids[4] == ids[0]


def test_a_list_and_a_separated_text_agree_about_missing():
    slot = SlotField("s", "s", 1, multi=True, separator="|")
    encoded, _ = Encoder(FeatureSpec((), (slot,), ("NULL",))).encode_values(
        [{"s": "x|NULL"}, {"s": ["x", "NULL"]}]
    )
    assert encoded.slots[0].offsets_B1.tolist() == [0, 1, 2]
    assert encoded.slots[0].ids_N[0] == encoded.slots[0].ids_N[1]


def test_an_unusable_value_is_rejected():
    spec = FeatureSpec((), (SlotField("s", "s", 1),))
    with pytest.raises(DataError, match="s holds dict; text, a number, null or a list of these is allowed"):
        Encoder(spec).encode_values([{"s": {"a": 1}}])


def test_missing_statistics_are_an_error():
    with pytest.raises(DataError, match="transform zscore needs statistics of the training data"):
        dense("zscore", [1.0], None)


def test_features_of_another_format_are_refused():
    with pytest.raises(ArtifactError, match="format 99; this release of Clickline encodes in format 2"):
        FeatureSpec.from_json({"encoder_format": 99, "dense": [], "slots": [], "missing": []})
