"""A request is encoded like a log: the same ids, floats and errors, whatever type holds the values."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from clickline.errors import DataError
from clickline.features import DenseField, Encoder, FeatureSpec, FieldStatistics, SlotField
from clickline.features.request_encoder import RequestEncoder
from clickline.records import (
    ABSENT,
    FEATURE_ID,
    FLOAT64,
    INTEGER,
    PRECISION,
    TEXT,
    IntegerColumn,
    NumberColumn,
    RawRows,
    RequestRows,
    TextColumn,
)

STATISTICS = FieldStatistics(4, -3.0, 10.0, 4.0, 2.0, (-1.0, 0.5, 5.0), 3.5, 1.75)
FLAT = FieldStatistics(3, 2.0, 2.0, 2.0, 0.0, (2.0,))
COLUMNS = ("a", "b", "c", "d")
MISSING = (
    "-1",
    "-1.0",
    " NULL",
    "NULL",
    "0.1",
    "0",
    "7",
    "0.5",
    "1e3",
    "-0",
    "100000000000000000000",
    "18446744073709551615",
    "nan",
)

texts = st.one_of(
    st.sampled_from(
        [
            "",
            "0",
            "7",
            "-1",
            "7.0",
            " 7.0\t",
            "-0.00",
            " ",
            "0.5",
            "1e3",
            "NULL",
            "nan",
            "inf",
            "1e400",
            "-0",
            "abc",
            "a|b",
            "|",
        ]
    ),
    st.sampled_from(
        ["18446744073709551615", "18446744073709551616", "-9223372036854775808", "0.1234567890123456789"]
    ),
    st.text(max_size=40),
    st.integers(-(10**6), 10**6).map(str),
).map(lambda text: text.encode())
integers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 7, -1, 1000, 16777217]))
numbers = st.one_of(
    st.floats(allow_infinity=False),
    st.integers(-(2**53), 2**53).map(float),
    st.sampled_from([0.0, -0.0, 7.0, -1.0, 0.5, 1e3, 1e20, 2.0**63, -(2.0**63), 3.5e38, float("nan")]),
)
bits = st.integers(0, 2**64 - 1)


@st.composite
def specs(draw: st.DrawFn) -> FeatureSpec:
    dense, slots = [], []
    for n in range(draw(st.integers(0, 4))):
        transform = draw(st.sampled_from(["none", "log1p", "minmax", "zscore", "robust"]))
        statistics = draw(st.sampled_from([STATISTICS, FLAT]))
        dense.append(DenseField(f"d{n}", draw(st.sampled_from(COLUMNS)), transform, statistics))
    for n in range(draw(st.integers(0, 5))):
        source = draw(st.sampled_from(["text", "feasign", "log2", "quantiles"]))
        named = source in ("text", "feasign")
        slots.append(
            SlotField(
                f"s{n}",
                draw(st.sampled_from(COLUMNS)),
                draw(bits),
                source,
                named and draw(st.booleans()),
                "|" if named and draw(st.booleans()) else None,
                statistics=draw(st.sampled_from([STATISTICS, FLAT])),
            )
        )
    return FeatureSpec(
        tuple(dense), tuple(slots), tuple(draw(st.lists(st.sampled_from(MISSING), max_size=3)))
    )


@st.composite
def columns_of_values(draw: st.DrawFn, rows: int):
    """What a column holds: its kind, its values, and whether a row has several."""
    kind = draw(st.sampled_from([ABSENT, TEXT, TEXT, *PRECISION, INTEGER, "unsigned"]))
    several = kind != ABSENT and draw(st.integers(0, 5)) == 0
    width = draw(st.integers(0, 3)) if several else 1
    of_kind = {TEXT: texts, INTEGER: integers, "unsigned": bits, ABSENT: st.none()}.get(kind, numbers)
    return (
        kind,
        draw(st.lists(of_kind, min_size=rows * width, max_size=rows * width)),
        width if several else None,
    )


def rows_of(rows: int, held: dict[str, tuple], columns: tuple[str, ...]) -> tuple[RequestRows, RawRows]:
    """The same values as a request holds them and as a reader does."""
    shape = len(columns), rows
    data = b"".join(text for kind, values, _ in held.values() if kind == TEXT for text in values) + b"\0"
    buffer = np.frombuffer(data, dtype=np.uint8)
    kind_C = np.zeros(len(columns), dtype=np.uint8)
    starts_CB, ends_CB, integers_CB = (np.full(shape, 10**12, dtype=np.int64) for _ in range(3))
    numbers_CB = np.full(shape, 12345.0)
    several, raw, at = {}, {}, 0
    for name, (kind, values, width) in held.items():
        offsets_B1 = None if width is None else np.arange(rows + 1, dtype=np.int64) * width
        if kind == ABSENT:
            continue
        if kind == TEXT:
            bounds = at + np.cumsum([0, *map(len, values)])
            at = bounds[-1]
            raw[name] = TextColumn(buffer, bounds[:-1], bounds[1:], offsets_B1)
        elif kind in PRECISION:
            raw[name] = NumberColumn(np.array(values, dtype=np.float64), offsets_B1, PRECISION[kind])
        else:
            held_bits = np.array([value % 2**64 for value in values], dtype=np.uint64)
            there = np.zeros(len(values), dtype=np.bool_)
            raw[name] = IntegerColumn(held_bits, there, kind == INTEGER, offsets_B1)
        if name not in columns:
            continue
        c = columns.index(name)
        if offsets_B1 is not None or kind == "unsigned":
            several[name] = raw[name]
            continue
        kind_C[c] = kind
        if kind == TEXT:
            starts_CB[c], ends_CB[c] = bounds[:-1], bounds[1:]
        elif kind in PRECISION:
            numbers_CB[c] = values
        else:
            integers_CB[c] = values
    request = RequestRows(rows, buffer, kind_C, starts_CB, ends_CB, numbers_CB, integers_CB, several)
    return request, RawRows(rows, raw, np.arange(1, rows + 1))


def assert_same(mine, other) -> None:
    (encoded, faults), (expected, complaints) = mine, other
    assert encoded.rows == expected.rows
    np.testing.assert_array_equal(encoded.dense_DB.view(np.uint32), expected.dense_DB.view(np.uint32))
    assert len(encoded.slots) == len(expected.slots)
    for ids, wanted in zip(encoded.slots, expected.slots, strict=True):
        np.testing.assert_array_equal(ids.ids_N, wanted.ids_N)
        assert (ids.offsets_B1 is None) == (wanted.offsets_B1 is None)
        if ids.offsets_B1 is not None:
            np.testing.assert_array_equal(ids.offsets_B1, wanted.offsets_B1)
    assert [fault for some in faults for fault in some] == [fault for some in complaints for fault in some]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_request_is_encoded_as_a_log_is(data):
    spec = data.draw(specs())
    rows = data.draw(st.integers(1, 5))
    held = {name: data.draw(columns_of_values(rows)) for name in COLUMNS}
    request, raw = rows_of(rows, held, spec.columns)
    assert_same(RequestEncoder(spec).encode(request), Encoder(spec).encode(raw))

    chosen = frozenset(data.draw(st.sets(st.sampled_from(COLUMNS))))
    part = RequestEncoder(spec, chosen)
    assert part.dense == tuple(d for d, f in enumerate(spec.dense) if f.column in chosen)
    assert part.slots == tuple(s for s, f in enumerate(spec.slots) if f.column in chosen)
    assert_same(part.encode(request), Encoder(spec.subset(chosen)).encode(raw))


EDGES = {
    TEXT: [b"", b"0", b"7", b"-1", b"7.0", b"NULL", b"0.5", b"18446744073709551615", b"-9223372036854775808"],
    INTEGER: [0, 7, -1, 1000, 2**63 - 1, -(2**63), 16777217],
    FLOAT64: [0.0, -0.0, 7.0, -1.0, 1e3, 2.0**53, 2.0**62, -(2.0**62), float("nan")],
}


@pytest.mark.parametrize("source", ["text", "feasign", "log2", "quantiles"])
@pytest.mark.parametrize("missing", [(), MISSING])
def test_values_at_the_edges(source, missing):
    dense = tuple(DenseField(t, "x", t, STATISTICS) for t in ("none", "log1p", "minmax", "zscore"))
    slot = SlotField("x", "x", 9, source, statistics=STATISTICS)
    for kind, values in [
        *EDGES.items(),
        *((FLOAT64, [odd]) for odd in (2.0**63, -(2.0**63), 1e19, 1e20, 0.5, 3.5e38)),
    ]:
        for spec in (FeatureSpec(dense, (), missing), FeatureSpec((), (slot,), missing)):
            request, raw = rows_of(len(values), {"x": (kind, values, None)}, spec.columns)
            assert_same(RequestEncoder(spec).encode(request), Encoder(spec).encode(raw))


def one(kind: int, values: list, spec: FeatureSpec):
    request, _ = rows_of(len(values), {"x": (kind, values, None)}, spec.columns)
    return RequestEncoder(spec).encode(request)


def test_one_value_has_one_id_however_it_is_written():
    spec = FeatureSpec((), (SlotField("x", "x", 3),))
    ids = [
        one(kind, [value], spec)[0].slots[0].ids_N[0]
        for kind, value in [(TEXT, b"7"), (INTEGER, 7), (FLOAT64, 7.0)]
    ]
    assert len(set(ids)) == 1


@pytest.mark.parametrize(("kind", "value"), [(TEXT, b""), (FLOAT64, float("nan")), (ABSENT, None)])
def test_empty_value_is_missing_in_every_type(kind, value):
    spec = FeatureSpec(
        (DenseField("x", "x", "log1p"),), (SlotField("y", "x", 3), SlotField("z", "x", 4, "log2"))
    )
    encoded, faults = one(kind, [value], spec)
    assert not faults
    assert encoded.dense_DB.tolist() == [[0.0]]
    assert [int(ids.ids_N[0]) for ids in encoded.slots] == [slot.missing_id for slot in spec.slots]


def test_a_bad_value_is_reported():
    spec = FeatureSpec((DenseField("age", "x", "none"),), ())
    _, faults = one(TEXT, [b"4", b"old"], spec)
    assert [fault.detail for some in faults for fault in some] == ["age is 'old', a number expected"]
    _, faults = one(FLOAT64, [1e39], spec)
    assert [fault.detail for some in faults for fault in some] == [
        "age is beyond the range of a 32-bit float"
    ]


def test_absent_statistics_are_reported_before_the_first_request():
    with pytest.raises(DataError, match="x: transform minmax needs statistics"):
        RequestEncoder(FeatureSpec((DenseField("x", "x", "minmax"),), ()))


def test_ids_of_all_slots_are_in_one_array():
    spec = FeatureSpec(
        (), (SlotField("x", "x", 3), SlotField("y", "x", 4), SlotField("m", "y", 5, multi=True))
    )
    request, _ = rows_of(
        2, {"x": (TEXT, [b"a", b"b"], None), "y": (TEXT, [b"p", b"q", b"", b"r"], 2)}, spec.columns
    )
    encoded, _ = RequestEncoder(spec).encode_arrays(request)
    slotwise = encoded.by_slot()
    assert encoded.ids_SB.shape == (3, 2) and set(encoded.multi) == {2}
    assert slotwise.slots[0].ids_N.base is not None
    np.testing.assert_array_equal(slotwise.slots[1].ids_N, encoded.ids_SB[1])
    assert slotwise.slots[2].offsets_B1.tolist() == [0, 2, 3]


def test_feasigns_of_texts_encode_as_the_texts_themselves():
    """ElasticCTR's clients send the hash of a value where others send the value."""
    spec = FeatureSpec(
        dense=(),
        slots=(SlotField("city", "city", 3), SlotField("tags", "tags", 4, multi=True)),
        missing=("none",),
    )
    texts = [b"paris", b"", b"none", b"rome"]
    data = np.frombuffer(b"".join(texts), dtype=np.uint8)
    ends_B = np.cumsum([len(text) for text in texts])
    as_text = TextColumn(data, ends_B - [len(text) for text in texts], ends_B)
    wanted, _ = Encoder(spec).encode(RawRows(4, {"city": as_text, "tags": as_text}, np.arange(4)))
    hashes = np.array([xxhash.xxh64_intdigest(text) if text else 0 for text in texts], dtype=np.uint64)
    tags = np.where(hashes == np.uint64(xxhash.xxh64_intdigest(b"none")), np.uint64(0), hashes)
    none_CB = np.zeros((2, 4), dtype=np.int64)
    rows = RequestRows(
        4,
        np.zeros(0, dtype=np.uint8),
        np.array([FEATURE_ID, FEATURE_ID], dtype=np.uint8),
        none_CB,
        none_CB,
        none_CB.astype(np.float64),
        np.stack([hashes.view(np.int64), tags.view(np.int64)]),
    )
    found, faults = RequestEncoder(spec).encode(rows)
    assert faults == []
    np.testing.assert_array_equal(found.slots[0].ids_N, wanted.slots[0].ids_N)
    np.testing.assert_array_equal(found.slots[1].ids_N, wanted.slots[1].ids_N)
    np.testing.assert_array_equal(found.slots[1].offsets_B1, wanted.slots[1].offsets_B1)
