from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import by_row
from record_writers import entry, example, feature, field, varint

from clickline.data.readers.tf_example import ExampleParser, Records
from clickline.records import Block, IntegerColumn, NumberColumn, RawRows, TextColumn


def parse(records: list[bytes], *wanted: str) -> RawRows:
    """The rows of the records, with other bytes around each record, which must not be read."""
    data, starts, ends = b"", [], []
    for record in records:
        data += b"\xff\xff"
        starts.append(len(data))
        data += record
        ends.append(len(data))
    spans = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
    block = Block("f", 1, Records(np.frombuffer(data, np.uint8), *spans), len(data))
    return ExampleParser(wanted).rows(block)


def only(record: bytes, *wanted: str) -> dict[str, list[object]]:
    rows = parse([record], *wanted)
    assert not rows.bad
    return by_row(rows)[0]


names = st.text(min_size=1, max_size=6)
texts = st.lists(st.binary(min_size=1, max_size=9), max_size=4)
floats = st.lists(st.floats(width=32, allow_nan=False), max_size=4)
integers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)


@given(
    columns=st.dictionaries(names, st.sampled_from([texts, floats, integers]), max_size=5).flatmap(
        lambda kinds: st.lists(st.fixed_dictionaries(kinds), max_size=6)  # type: ignore[arg-type]
    ),
    packed=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
def test_write_then_read(columns: list[dict[str, list[object]]], packed: bool, shuffle: object) -> None:
    wanted = tuple(columns[0]) if columns else ("a",)
    records = []
    for row in columns:
        order = list(row.items())
        shuffle.shuffle(order)  # type: ignore[attr-defined]
        records.append(example(dict(order), packed=packed))  # type: ignore[arg-type]
    rows = parse(records, *wanted)
    assert not rows.bad
    assert by_row(rows) == columns


def test_bytes_from_the_tensorflow_tutorial() -> None:
    record = (
        b"\nR\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
        b"\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?"
    )
    assert only(record, "feature0", "feature1", "feature2", "feature3", "feature4") == {
        "feature0": [0],
        "feature1": [4],
        "feature2": [b"goat"],
        "feature3": [pytest.approx(0.9876)],
        "feature4": [],
    }


def test_kinds_of_columns() -> None:
    rows = parse([example({"t": [b"x"], "n": [1.5], "i": [-7]})], "t", "n", "i", "none")
    assert isinstance(rows.columns["t"], TextColumn)
    assert isinstance(rows.columns["n"], NumberColumn)
    integers = rows.columns["i"]
    assert isinstance(integers, IntegerColumn)
    assert integers.signed
    assert integers.values_N.tolist() == [2**64 - 7]
    assert isinstance(rows.columns["none"], TextColumn)
    assert all(column.offsets_B1 is None for column in rows.columns.values())


def test_a_column_of_bytes_and_numbers_is_text() -> None:
    records = [{"a": [b"x", b"y"]}, {"a": [-12, 3]}, {"a": [0.5, 7.0, math.nan]}, {}, {"a": [7]}]
    rows = parse([example(r) for r in records], "a")  # type: ignore[arg-type]
    assert isinstance(rows.columns["a"], TextColumn)
    assert [r["a"] for r in by_row(rows)] == [[b"x", b"y"], [b"-12", b"3"], [b"0.5", b"7", None], [], [b"7"]]


@pytest.mark.parametrize("packed", [True, False])
def test_integers_stay_integers_beside_floats(packed: bool) -> None:
    large = 2**53 + 1  # no double is so
    records = [{"a": [large, -1]}, {"a": [0.5, 2.0, -3.0, 1e30, 0.1]}, {}]
    rows = parse([example(r, packed=packed) for r in records], "a")  # type: ignore[arg-type]
    assert isinstance(rows.columns["a"], TextColumn)
    floats = [b"0.5", b"2", b"-3", b"1000000015047466219876688855040", b"0.1"]
    assert [r["a"] for r in by_row(rows)] == [[b"%d" % large, b"-1"], floats, []]


unknown = varint(99 << 3) + varint(5) + field(98, b"abc") + b"\x89\x06" + b"12345678" + b"\x95\x06" + b"1234"


def test_unknown_fields_are_skipped_at_every_level() -> None:
    float_list = field(2, unknown + field(1, struct.pack("<f", 2.5)) + unknown)
    inner = unknown + field(1, b"a") + unknown + field(2, unknown + float_list + unknown)
    record = unknown + field(1, unknown + field(1, inner) + unknown) + unknown
    assert only(record, "a") == {"a": [2.5]}
    assert only(unknown, "a") == {"a": []}
    for other in (field(1, unknown + field(1, b"x")), field(3, unknown + field(1, b"\x01") + b"\x08\x02")):
        found = only(field(1, entry("a", unknown + other)), "a")["a"]
        assert found in ([b"x"], [1, 2])


def test_last_of_duplicate_keys_wins() -> None:
    first, second = entry("a", feature([b"x"])), entry("a", feature([1, 2]))
    assert only(field(1, first + second), "a") == {"a": [1, 2]}
    assert only(field(1, second) + field(1, first), "a") == {"a": [b"x"]}
    assert only(field(1, second + entry("a", b"")), "a") == {"a": []}


def test_lists_of_the_same_kind_are_joined_and_of_another_kind_replace_them() -> None:
    joined = feature([1]) + feature([2, 3])
    assert only(field(1, entry("a", joined)), "a") == {"a": [1, 2, 3]}
    assert only(field(1, entry("a", joined + feature([b"x"]))), "a") == {"a": [b"x"]}
    assert only(field(1, entry("a", feature([b"x"]) + joined)), "a") == {"a": [1, 2, 3]}
    assert only(field(1, entry("a", feature([1.0]) + feature([4]) + feature([2.0]))), "a") == {"a": [2.0]}


def test_many_columns_with_common_prefixes_are_distinguished() -> None:
    names = [f"C{i}" for i in range(1500)] + ["C", "", "é"]
    row = {name: [i] for i, name in enumerate(names)}
    assert only(example(row), *names) == row


def test_a_malformed_record_is_bad_and_its_neighbours_are_not() -> None:
    good = example({"a": [1]})
    malformed = [
        good[:-1],
        b"\x0a",
        b"\x0a\x05abc",
        b"\xff" * 11,
        b"\x00\x00",  # field number 0
        b"\x0b\x08\x01",  # a group that does not end
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of 2**64 - 1
        b"\x0d12",  # a fixed32 that is cut
        b"\x09123",  # a fixed64 that is cut
        field(1, entry("a", field(2, field(1, b"12345")))),  # packed floats of 5 bytes
        field(1, entry("a", field(3, field(1, b"\x80")))),  # a packed varint that is cut
        field(1, entry("a", field(3, field(1, b"\x80" * 10 + b"\x01")))),  # and one that is too long
        field(1, entry("a", b"\x0a\x7f")),
        field(1, field(1, b"\x0a\x7f")),
    ]
    rows = parse([good, *(r for bad in malformed for r in (bad, good))], "a")
    assert rows.rows == len(malformed) + 1
    assert by_row(rows) == [{"a": [1]}] * rows.rows
    assert [row.line for row in rows.bad] == list(range(2, 2 * len(malformed) + 1, 2))
    assert {row.reason for row in rows.bad} == {"bad tf.Example"}
    assert rows.bad[0].detail == "its bytes are not a serialized tf.Example message"


def test_the_first_of_many_bad_records_are_listed_and_the_rest_counted() -> None:
    rows = parse([b"\x0a"] * 3000 + [example({"a": [1]})], "a")
    assert rows.rows == 1
    assert len(rows.bad) == 1001
    assert sum(row.count for row in rows.bad) == 3000


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_a_row_or_bad(records: list[bytes]) -> None:
    rows = parse(records, "a", "b")
    assert rows.rows + len(rows.bad) == len(records)
    assert sorted([*rows.lines_B.tolist(), *(row.line for row in rows.bad)]) == list(
        range(1, len(records) + 1)
    )


def test_every_change_of_a_byte_keeps_spans_inside_the_record() -> None:
    record = bytearray(example({"a": [b"xyz", b"w"], "b": [1.5, 2.5], "c": [300, -1]}))
    for at in range(len(record)):
        for byte in (0, 1, 0x0A, 0x12, 0x7F, 0x80, 0xFF, record[at] ^ 1):
            changed = record[:at] + bytes([byte]) + record[at + 1 :]
            rows = parse([bytes(changed)], "a", "b", "c")
            assert rows.rows + len(rows.bad) == 1
            for column in rows.columns.values():
                if isinstance(column, TextColumn) and rows.rows and column.ends_N.any():
                    assert column.starts_N[column.ends_N > 0].min() >= 2
                    assert column.ends_N.max() <= len(record) + 2


@pytest.mark.slow
def test_no_kernel_reads_outside_its_buffer(tmp_path: Path) -> None:
    """The same fuzz test, compiled with bounds checks."""
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = (
        "from hypothesis import settings\n"
        "settings.register_profile('slow', deadline=None, database=None)\n"
        "settings.load_profile('slow')\n"
        "import test_example_wire as t\n"
        "t.test_any_bytes_are_a_row_or_bad()\n"
        "t.test_every_change_of_a_byte_keeps_spans_inside_the_record()\n"
        "t.test_integers_stay_integers_beside_floats(False)\n"
        "t.fuzz_without_neighbours()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, check=True)


@settings(max_examples=300)
@given(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 255))
def fuzz_without_neighbours(noise: bytes, at: int, byte: int) -> None:
    """A record that ends where the buffer ends."""
    parser = ExampleParser(("a", "b"))
    changed = bytearray(example({"a": [b"xyz", b"w"], "b": [1.5, 2.5]}))
    changed[at % len(changed)] = byte
    for record in (noise, bytes(changed), bytes(changed[:at])):
        data = np.frombuffer(record, np.uint8)
        parser.rows(Block("f", 1, Records(data, np.zeros(1, np.int64), np.array([len(data)])), len(data)))
