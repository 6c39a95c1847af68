"""Row at a time, in a batch, from text, from Arrow-like columns or from a request: the same bits."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from clickline.features import DenseField, Encoder, FeatureSpec, FieldStatistics, SlotField
from clickline.features.raw_columns import raw_column, to_float32
from clickline.records import EncodedRows, NumberColumn, RawRows, TextColumn

STATISTICS = FieldStatistics(100, -3.0, 64.5, 7.25, 11.5, (0.0, 1.0, 2.5, 100.0), 6.5, 9.25)
SPEC = FeatureSpec(
    dense=(
        DenseField("plain", "n", "none"),
        DenseField("log", "n", "log1p"),
        DenseField("ranged", "n", "minmax", STATISTICS),
        DenseField("standard", "n", "zscore", STATISTICS),
        DenseField("robust", "n", "robust", STATISTICS),
    ),
    slots=(
        SlotField("text", "t", 11),
        SlotField("tags", "tags", 12, multi=True, separator="|"),
        SlotField("list", "list", 13, multi=True),
        SlotField("sign", "f", 14, "feasign"),
        SlotField("log2", "n", 15, "log2"),
        SlotField("share", "n", 16, "quantiles", buckets=5, statistics=STATISTICS),
    ),
    missing=("?", "-1"),
)
ENCODER = Encoder(SPEC)

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
whole = st.integers(-(2**53), 2**53)
text = st.text(st.characters(codec="utf-8"), max_size=40)
value = st.one_of(
    st.none(), text, whole, floats, st.booleans(), st.sampled_from(["?", "-1", "", -1, -1.0, 7.0, "7"])
)
number = st.one_of(
    st.none(), floats, whole, st.sampled_from([-1, -1.0, "-1", "?", "", "1e3", "0.1", -0.0, "-0"])
)
row = st.fixed_dictionaries(
    {
        "n": number,
        "t": value,
        "tags": st.one_of(st.none(), text),
        "list": st.one_of(value, st.lists(st.one_of(st.none(), text, whole), max_size=4)),
        "f": st.one_of(
            st.none(), st.integers(0, 2**64 - 1), st.sampled_from(["0", "17", "18446744073709551615"])
        ),
    }
)


def bits(encoded: EncodedRows, b: int) -> list[object]:
    ids = []
    for slot in encoded.slots:
        if slot.offsets_B1 is None:
            ids.append(int(slot.ids_N[b]))
        else:
            ids.append(tuple(slot.ids_N[slot.offsets_B1[b] : slot.offsets_B1[b + 1]].tolist()))
    return [encoded.dense_DB[:, b].view(np.uint32).tolist(), ids]


@given(st.lists(row, min_size=1, max_size=8))
@example(
    [
        {"n": 7, "t": 7, "tags": None, "list": [], "f": 1},
        {"n": "7", "t": "7", "tags": "a|b||a", "list": ["x"], "f": 0},
    ]
)
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(rows):
    batch, faults = ENCODER.encode_values(rows)
    assert not faults
    for b, alone in enumerate(rows):
        single, _ = ENCODER.encode_values([alone])
        assert bits(batch, b) == bits(single, 0)


def as_text(value: object) -> str:
    """A value as text in a CSV file."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def text_column(values: list[str]) -> TextColumn:
    parts = [v.encode() for v in values]
    ends = np.cumsum([len(p) for p in parts], dtype=np.int64)
    return TextColumn(
        np.frombuffer(b"".join(parts) + b" ", dtype=np.uint8), np.concatenate([[0], ends[:-1]]), ends
    )


@given(st.lists(row.filter(lambda r: not isinstance(r["list"], list)), min_size=1, max_size=8))
def test_a_request_and_the_text_of_a_log_get_the_same_bits(rows):
    columns = {name: text_column([as_text(r[name]) for r in rows]) for name in SPEC.columns}
    logged, faults = ENCODER.encode(RawRows(len(rows), columns, np.arange(len(rows))))
    asked, _ = ENCODER.encode_values(rows)
    assert not faults
    for b in range(len(rows)):
        assert bits(logged, b) == bits(asked, b)


@given(st.lists(st.one_of(st.none(), floats), min_size=1, max_size=20))
def test_numbers_in_a_float_column_and_in_a_request_get_the_same_bits(values):
    column = NumberColumn(np.array([math.nan if v is None else v for v in values]))
    stored, _ = ENCODER.encode(RawRows(len(values), {"n": column}, np.arange(len(values))))
    asked, _ = ENCODER.encode_values([{"n": v} for v in values])
    for b in range(len(values)):
        assert bits(stored, b) == bits(asked, b)


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["{!r}", "{:e}", "{:.20f}", "{:+}", "{:.3g}"]),
)
@example(9007199254740993.0, "{:.0f}")
@example(1e22, "{:.0f}")
@example(123456789.123456789, "{!r}")
def test_text_is_read_as_the_nearest_double(number, form):
    written = form.format(number)
    values, faults = to_float32(text_column([written]), "n", 1)
    with np.errstate(over="ignore"):
        expected = np.float64(float(written)).astype(np.float32)
    if np.isinf(expected):
        assert faults[0].reason == "not a number"
    else:
        assert not faults
        assert values[0] == expected


def test_a_spec_survives_a_json_round_trip():
    import json

    assert FeatureSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC


def test_python_values_become_the_columns_a_reader_would_deliver():
    assert raw_column(["a", None, 1], "x").__class__.__name__ == "TextColumn"
    assert raw_column([1, None, 2**64 - 1], "x").__class__.__name__ == "IntegerColumn"
    assert raw_column([1.5, None], "x").__class__.__name__ == "NumberColumn"
