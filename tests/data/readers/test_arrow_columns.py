from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import by_row, values

from clickline.data.readers.arrow_columns import to_raw, to_rows
from clickline.errors import DataError
from clickline.records import IntegerColumn, NumberColumn, RawRows, TextColumn

TEXTS = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.uint32(), pa.large_binary()),
]
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def rows_of(array: pa.Array | pa.ChunkedArray) -> list[list[Any]]:
    column = to_raw("c", array)
    raw = RawRows(len(array), {"c": column}, np.arange(len(array)))
    return [row["c"] for row in by_row(raw)]


def sliced(items: list[Any], kind: pa.DataType, start: int, stop: int) -> tuple[list[Any], pa.Array]:
    return items[start:stop], pa.array(items, kind).slice(start, max(0, min(stop, len(items)) - start))


@given(
    st.lists(st.none() | st.text(min_size=1, max_size=5), max_size=9),
    st.integers(0, 4),
    st.integers(0, 9),
    st.sampled_from(TEXTS),
)
def test_texts(items: list[str | None], start: int, stop: int, kind: pa.DataType) -> None:
    items, array = sliced(items, kind, min(start, len(items)), stop)
    column = to_raw("c", array)
    assert isinstance(column, TextColumn)
    assert values(column) == [None if item is None else item.encode() for item in items]
    assert column.starts_N.dtype == column.ends_N.dtype == np.int64


@given(
    st.lists(st.none() | st.lists(st.none() | st.text(min_size=1, max_size=5), max_size=3), max_size=9),
    st.integers(0, 4),
    st.integers(0, 9),
    st.sampled_from(TEXTS),
    st.sampled_from(LISTS),
)
def test_lists_of_texts(items: list[Any], start: int, stop: int, kind: pa.DataType, list_of: Any) -> None:
    items, array = sliced(items, list_of(kind), min(start, len(items)), stop)
    column = to_raw("c", array)
    expected = [[None if text is None else text.encode() for text in item or []] for item in items]
    assert values(column) == [text for item in expected for text in item]
    assert column.offsets_B1 is not None
    assert column.offsets_B1.tolist() == np.cumsum([0, *map(len, expected)]).tolist()


@given(st.lists(st.none() | st.integers(0, 127), max_size=9), st.integers(0, 4), st.sampled_from(INTEGERS))
def test_integers(items: list[int | None], start: int, kind: pa.DataType) -> None:
    items, array = sliced(items, kind, min(start, len(items)), 9)
    column = to_raw("c", array)
    assert isinstance(column, IntegerColumn)
    assert values(column) == items
    assert column.signed == str(kind).startswith("int")


def test_the_largest_and_smallest_integers() -> None:
    assert rows_of(pa.array([2**64 - 1, 2**63], pa.uint64())) == [[2**64 - 1], [2**63]]
    assert rows_of(pa.array([-(2**63), -1, 2**63 - 1])) == [[-(2**63)], [-1], [2**63 - 1]]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_numbers(kind: pa.DataType) -> None:
    items = [1.5, None, -2.25, 0.0]
    column = to_raw("c", pa.array(items, kind))
    assert isinstance(column, NumberColumn)
    assert values(column) == items
    assert column.values_N.dtype == np.float64


@pytest.mark.parametrize("kind", [pa.decimal128(20, 0), pa.decimal256(40, 0)])
def test_ids_in_decimals_are_not_merged_by_a_double(kind: pa.DataType) -> None:
    ids = [2**64 - 1, 2**64 - 2, 2**53 + 1, 0, -7]
    column = to_raw("c", pa.array([Decimal(i) for i in ids] + [None], kind))
    assert isinstance(column, TextColumn)
    assert values(column) == [b"%d" % i for i in ids] + [None]
    lists = pa.array([[Decimal(2**64 - 1), None], None, [Decimal(5)]], pa.list_(kind))
    assert rows_of(lists) == [[b"%d" % (2**64 - 1), None], [], [b"5"]]
    assert rows_of(pa.array([Decimal(2**63)], kind).dictionary_encode()) == [[b"%d" % 2**63]]


@pytest.mark.parametrize("kind", [pa.decimal128(9, 3), pa.decimal256(50, 3), pa.decimal128(38, 18)])
def test_decimals_are_written_without_exponent(kind: pa.DataType) -> None:
    items = ["1.5", "-2.25", "0", "0.001", "-100000"] + ["0.000000000000000001"] * (kind.scale == 18)
    array = pa.array([None, *map(Decimal, items)], kind)
    expected = [f"{Decimal(item):.{kind.scale}f}".encode() for item in items]
    assert values(to_raw("c", array)) == [None, *expected]
    assert values(to_raw("c", array.slice(2))) == expected[1:]


def test_decimals_of_thousands_are_written_out() -> None:
    assert rows_of(pa.array([Decimal(1200), Decimal(0)], pa.decimal128(9, -2))) == [[b"1200"], [b"0"]]


def test_booleans() -> None:
    assert rows_of(pa.array([True, None, False])) == [[1], [], [0]]


def test_timestamps_are_seconds_since_1970_utc_rounded_down() -> None:
    zone = dt.timezone(dt.timedelta(hours=2))
    at = dt.datetime(2020, 4, 1, 3, 0, 0, 999_999, tzinfo=zone)
    seconds = 1585702800
    before = dt.datetime(1969, 12, 31, 23, 59, 59, 500_000)
    for unit in ("ms", "us", "ns"):
        kind = pa.timestamp(unit, "Europe/Berlin")
        assert rows_of(pa.array([at, None], kind)) == [[seconds], []]
        assert rows_of(pa.array([before], pa.timestamp(unit))) == [[-1]]
    assert rows_of(pa.array([seconds], pa.timestamp("s"))) == [[seconds]]


def test_dates_become_iso_text_as_in_a_csv() -> None:
    days = [dt.date(1969, 12, 30), None, dt.date(2026, 1, 31)]
    for kind in (pa.date32(), pa.date64()):
        assert rows_of(pa.array(days, kind)) == [[b"1969-12-30"], [], [b"2026-01-31"]]
        lists = pa.array([days[:1], None], pa.list_(kind))
        assert rows_of(lists) == [[b"1969-12-30"], []]


def test_lists_of_numbers_and_dictionaries_of_numbers() -> None:
    assert rows_of(pa.array([[1, None], None, [], [3]], pa.list_(pa.int32()))) == [[1, None], [], [], [3]]
    assert rows_of(pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))) == [[1.0, 2.0], []]
    assert rows_of(pa.array([5, None, 5]).dictionary_encode()) == [[5], [], [5]]
    assert rows_of(pa.array([[b"ab"], [b"cd"]], pa.list_(pa.binary(2)))) == [[b"ab"], [b"cd"]]


def test_a_null_list_with_values_behind_it_is_empty() -> None:
    array = pa.ListArray.from_arrays(
        pa.array([0, 2, 4], pa.int32()), pa.array([1, 2, 3, 4]), mask=pa.array([True, False])
    )
    assert rows_of(array) == [[], [3, 4]]


def test_nulls_without_a_type_and_empty_columns() -> None:
    assert rows_of(pa.nulls(2)) == [[], []]
    assert rows_of(pa.array([None, None], pa.string())) == [[], []]
    assert rows_of(pa.array([None], pa.dictionary(pa.int8(), pa.string()))) == [[]]
    for kind in (*TEXTS, *INTEGERS, pa.list_(pa.string())):
        assert rows_of(pa.array([], kind)) == []


def test_chunks_are_joined() -> None:
    assert rows_of(pa.chunked_array([["a"], [], ["b", None]], pa.string())) == [[b"a"], [b"b"], []]


def test_text_is_not_copied() -> None:
    array = pa.array(["some text", "more"])
    column = to_raw("c", array)
    assert isinstance(column, TextColumn)
    assert column.data.ctypes.data == array.buffers()[2].address


@pytest.mark.parametrize(
    "array",
    [
        pa.array([{"a": 1}]),
        pa.array([[[1]]]),
        pa.array([dt.time(3)]),
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([[{"a": 1}]]),
        pa.array([dt.timedelta(1)]),
    ],
)
def test_a_type_that_cannot_be_used_is_named_with_those_that_can(array: pa.Array) -> None:
    with pytest.raises(DataError) as caught:
        to_raw("day.parquet: column 'when'", array)
    assert str(caught.value) == (
        f"day.parquet: column 'when' has the Arrow type {array.type}; readable are text, binary, integers, floats, decimals,"
        " booleans, dates, timestamps, dictionaries and lists of those; cast it, or leave it out"
    )


def test_rows_with_text_that_is_not_utf8_are_bad() -> None:
    broken = pa.array([b"ok", b"\xff\xfe", b"fine", None, b"good"]).view(pa.string())
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 4, 4, 4], pa.int32()), pa.array([b"a", b"b", b"c", b"\x80"]).view(pa.string())
    )
    batch = pa.record_batch({"t": broken, "l": lists, "n": pa.array(range(5)), "other": broken})
    rows = to_rows("f.parquet", 11, batch, ("n", "t", "l"))
    assert rows.lines_B.tolist() == [11, 14, 15]
    assert by_row(rows) == [
        {"n": [0], "t": [b"ok"], "l": [b"a"]},
        {"n": [3], "t": [], "l": []},
        {"n": [4], "t": [b"good"], "l": []},
    ]
    assert [(row.line, row.reason, row.text) for row in rows.bad] == [
        (12, "bad UTF-8", "\\xff\\xfe"),
        (13, "bad UTF-8", "\\x80"),
    ]
    assert rows.bad[1].detail == "column 'l' holds bytes that are not UTF-8"


def test_the_first_of_many_bad_rows_are_listed_and_the_rest_counted() -> None:
    batch = pa.record_batch({"t": pa.array([b"\xff"] * 3000 + [b"a"]).view(pa.string())})
    rows = to_rows("f", 1, batch, ("t",))
    assert rows.rows == 1
    assert len(rows.bad) == 1001
    assert sum(row.count for row in rows.bad) == 3000


def test_bytes_need_not_be_utf8() -> None:
    rows = to_rows("f", 1, pa.record_batch({"t": pa.array([b"\xff"])}), ("t",))
    assert by_row(rows) == [{"t": [b"\xff"]}]


def test_a_missing_or_duplicate_column_is_an_error() -> None:
    batch = pa.record_batch([pa.array([1]), pa.array([1]), pa.array([1])], ["click", "C1", "C1"])
    with pytest.raises(DataError) as caught:
        to_rows("f", 1, batch, ("clicks",))
    assert (
        str(caught.value) == "f has no column 'clicks'; its columns are click, C1, C1; did you mean 'click'?"
    )
    with pytest.raises(DataError, match=r"f has 2 columns named 'C1'; rename all but one"):
        to_rows("f", 1, batch, ("C1",))
