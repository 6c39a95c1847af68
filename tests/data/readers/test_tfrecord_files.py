from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from reading import Rows, numbered, read_all
from record_writers import crc32c, example, masked, tfrecord

from clickline.data.readers.tfrecord import TFRecordReader, _masked_crc32c
from clickline.records import BadRow

WANTED = ("label", "I1", "C1")


def make_rows(count: int, seed: int = 1) -> list[dict[str, list[object]]]:
    rng = random.Random(seed)
    return [
        {
            "label": [float(rng.random() < 0.3)],
            "I1": [rng.randrange(-5, 1000)] if rng.random() < 0.9 else [],
            "C1": [b"%08x" % rng.randrange(1 << 32) for _ in range(rng.randrange(4))],
        }
        for _ in range(count)
    ]


ROWS = make_rows(7)
FILE = tfrecord(example(row) for row in ROWS)  # type: ignore[arg-type]
EXPECTED = numbered(ROWS)  # type: ignore[arg-type]


def read(
    tmp_path: Path, data: bytes, *, name: str = "a.tfrecord", **options: int
) -> tuple[Rows, list[BadRow]]:
    path = tmp_path / name
    path.write_bytes(data)
    return read_all(TFRecordReader(WANTED, **options), path)


def test_crc32c_has_the_published_check_values() -> None:
    def unmask(data: bytes) -> int:
        crc = (int(_masked_crc32c(np.frombuffer(data, np.uint8), 0, len(data))) - 0xA282EAD8) & 0xFFFFFFFF
        return (crc >> 17 | crc << 15) & 0xFFFFFFFF

    assert unmask(b"123456789") == 0xE3069283
    assert unmask(bytes(32)) == 0x8A9136AA
    assert unmask(b"\xff" * 32) == 0x62A8AB43
    assert unmask(bytes(range(32))) == 0x46DD794E
    assert unmask(b"") == 0


@given(st.binary(max_size=200), st.integers(0, 9))
def test_crc32c_of_any_span_matches_the_definition(data: bytes, start: int) -> None:
    start = min(start, len(data))
    crc = crc32c(data[start:])
    expected = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert _masked_crc32c(np.frombuffer(data, np.uint8), start, len(data)) == expected


@pytest.mark.parametrize("block_bytes", [1, 17, 100, 1000, 8 << 20])
def test_rows_are_the_same_at_any_block_size(tmp_path: Path, block_bytes: int) -> None:
    assert read(tmp_path, FILE, block_bytes=block_bytes) == (EXPECTED, [])


def test_small_blocks_end_at_records_and_count_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(FILE)
    blocks = list(TFRecordReader(WANTED, block_bytes=150).blocks("a", path))
    assert len(blocks) > 2
    assert sum(block.size for block in blocks) == len(FILE)


def test_blocks_are_bounded_in_records_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clickline.data.readers.tf_example.MAX_CELLS", 6)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(FILE)
    reader = TFRecordReader(WANTED)
    assert [len(block.payload.starts_B) for block in reader.blocks("a", path)] == [2, 2, 2, 1]
    assert read_all(reader, path) == (EXPECTED, [])


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_files(tmp_path: Path, compress: object) -> None:
    data = compress(FILE)  # type: ignore[operator]
    assert read(tmp_path, data, name="a.tfrecord.gz") == (EXPECTED, [])


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path, b"") == ({}, [])


def test_empty_records_and_records_longer_than_a_block(tmp_path: Path) -> None:
    long = b"x" * 5000
    data = tfrecord([b"", example({"C1": [long]}), b""])
    rows, bad = read(tmp_path, data, block_bytes=64)
    assert not bad
    assert [row["C1"] for row in rows.values()] == [[], [long], []]


@pytest.mark.parametrize("block_bytes", [64, 8 << 20])
def test_every_changed_byte_is_noticed(tmp_path: Path, block_bytes: int) -> None:
    """A changed row is never accepted; the rows before it are kept."""
    spans, pos = [], 0
    for row in ROWS:
        size = 16 + len(example(row))  # type: ignore[arg-type]
        spans.append((pos, pos + size))
        pos += size
    for at in range(len(FILE)):
        for flip in (1 << at % 8, 0xFF):
            changed = bytearray(FILE)
            changed[at] ^= flip
            rows, bad = read(tmp_path, bytes(changed), block_bytes=block_bytes)
            struck = next(i for i, (start, end) in enumerate(spans, 1) if start <= at < end)
            lengths_fault = at - spans[struck - 1][0] < 12
            assert [(row.line, row.reason) for row in bad] == [(struck, "crc mismatch")]
            lost = range(struck, len(ROWS) + 1) if lengths_fault else [struck]
            assert rows == {line: row for line, row in EXPECTED.items() if line not in lost}
            if lengths_fault:
                assert f"record {struck} at byte {spans[struck - 1][0]}:" in bad[0].detail
                assert "the rest of the file cannot be read" in bad[0].detail


@pytest.mark.parametrize("block_bytes", [64, 8 << 20])
def test_every_truncation_is_noticed(tmp_path: Path, block_bytes: int) -> None:
    whole = {0}
    for row in ROWS:
        whole.add(max(whole) + 16 + len(example(row)))  # type: ignore[arg-type]
    for size in range(len(FILE)):
        rows, bad = read(tmp_path, FILE[:size], block_bytes=block_bytes)
        assert rows == {line: row for line, row in EXPECTED.items() if line <= len(rows)}
        if size in whole:
            assert not bad
        else:
            assert [(row.line, row.reason) for row in bad] == [(len(rows) + 1, "truncated file")]


def test_truncated_gzip_keeps_the_records_before_the_end(tmp_path: Path) -> None:
    rows = make_rows(500)
    data = gzip.compress(tfrecord(example(row) for row in rows))  # type: ignore[arg-type]
    found, bad = read(tmp_path, data[: len(data) // 2])
    assert 100 < len(found) < 400
    assert found == {line: row for line, row in numbered(rows).items() if line <= len(found)}  # type: ignore[arg-type]
    assert [(row.line, row.reason) for row in bad] == [(len(found) + 1, "truncated gzip")]


@pytest.mark.parametrize("length", [(64 << 20) + 1, 4 << 30, 2**63, 2**64 - 1])
def test_a_giant_length_allocates_no_memory(tmp_path: Path, length: int) -> None:
    head = struct.pack("<Q", length)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(FILE + head + masked(head) + bytes(1000))
    tracemalloc.start()
    rows, bad = read_all(TFRecordReader(WANTED, block_bytes=100), path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == EXPECTED
    assert [(row.line, row.reason) for row in bad] == [(8, "record too large")]
    assert f"declares {length:,} bytes, at most 67,108,864 are allowed" in bad[0].detail
    assert peak < 4 << 20


def test_a_length_truncated_before_its_crc_is_not_used(tmp_path: Path) -> None:
    rows, bad = read(tmp_path, struct.pack("<Q", 1 << 40) + b"abc", block_bytes=11)
    assert rows == {}
    assert bad[0].reason == "truncated file"
    assert "the file ends 11 bytes into it" in bad[0].detail


@given(st.binary(max_size=300), st.integers(1, 400))
def test_random_bytes_are_reported_as_bad(tmp_path: Path, noise: bytes, block_bytes: int) -> None:
    rows, bad = read(tmp_path, FILE + noise, block_bytes=block_bytes)
    assert rows == EXPECTED
    assert len(bad) == bool(noise)


def test_record_that_is_not_an_example_is_bad_among_good_ones(tmp_path: Path) -> None:
    records = [example({"I1": [1]}), b"\x0a\x7f", example({"I1": [2]})]
    data = bytearray(tfrecord(records))
    data[-1] ^= 1
    rows, bad = read(tmp_path, bytes(data))
    assert rows == {1: {"label": [], "I1": [1], "C1": []}}
    assert [(row.line, row.reason) for row in bad] == [(2, "bad tf.Example"), (3, "crc mismatch")]
    assert "crc32c" in bad[1].detail
