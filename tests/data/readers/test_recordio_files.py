from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
import zlib
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import Rows, numbered, read_all
from record_writers import COMPRESS, example, recordio, recordio_chunk

from clickline.data.readers.recordio import MAX_CHUNK_BYTES, RecordIOReader
from clickline.records import BadRow

WANTED = ("label", "C1")
rng = random.Random(2)
ROWS: list[dict[str, list[object]]] = [
    {"label": [float(i % 3 == 0)], "C1": [b"%08x" % rng.randrange(1 << 32) for _ in range(i % 4)]}
    for i in range(8)
]
RECORDS = [example(row) for row in ROWS]  # type: ignore[arg-type]
EXPECTED = numbered(ROWS)  # type: ignore[arg-type]

every_kind = pytest.mark.parametrize("compressor", COMPRESS)
both_headers = pytest.mark.parametrize("count_last", [False, True])


def read(tmp_path: Path, data: bytes, *, name: str = "a.rio", **options: int) -> tuple[Rows, list[BadRow]]:
    path = tmp_path / name
    path.write_bytes(data)
    return read_all(RecordIOReader(WANTED, **options), path)


@every_kind
@both_headers
@pytest.mark.parametrize("block_bytes", [1, 60, 8 << 20])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_rows_are_the_same_at_any_block_and_chunk_size(
    tmp_path: Path, compressor: str, count_last: bool, block_bytes: int, chunk: int
) -> None:
    data = recordio(RECORDS, compressor, chunk=chunk, count_last=count_last)
    assert read(tmp_path, data, block_bytes=block_bytes) == (EXPECTED, [])


def test_snappy_frames_of_more_than_one_kind(tmp_path: Path) -> None:
    long = [example({"C1": [random.Random(i).randbytes(50_000) + b"a" * 20_000]}) for i in range(5)]
    rows, bad = read(tmp_path, recordio(long, "snappy", chunk=5))
    assert not bad
    assert [example({"C1": row["C1"]}) for row in rows.values()] == long


def test_small_chunks_share_a_block_and_large_ones_are_split(tmp_path: Path) -> None:
    path = tmp_path / "a.rio"
    path.write_bytes(recordio(RECORDS, chunk=1))
    assert len(list(RecordIOReader(WANTED).blocks("a", path))) == 1
    path.write_bytes(recordio(RECORDS, "gzip", chunk=100))
    blocks = list(RecordIOReader(WANTED, block_bytes=100).blocks("a", path))
    assert len(blocks) > 3
    assert [block.first_line for block in blocks] == list(
        accumulate((len(block.payload.starts_B) for block in blocks[:-1]), initial=1)
    )


def test_blocks_are_bounded_in_records_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clickline.data.readers.tf_example.MAX_CELLS", 6)
    path = tmp_path / "a.rio"
    path.write_bytes(recordio(RECORDS, chunk=100))
    reader = RecordIOReader(WANTED)
    assert [len(block.payload.starts_B) for block in reader.blocks("a", path)] == [3, 3, 2]
    assert read_all(reader, path) == (EXPECTED, [])


def test_a_gzipped_file(tmp_path: Path) -> None:
    assert read(tmp_path, gzip.compress(recordio(RECORDS, "gzip")), name="a.rio.gz") == (EXPECTED, [])


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path, b"") == ({}, [])


@both_headers
def test_a_bad_crc_loses_one_chunk_and_counts_each_of_its_records(tmp_path: Path, count_last: bool) -> None:
    data = bytearray(recordio(RECORDS, chunk=3, count_last=count_last))
    second = 20 + sum(4 + len(record) for record in RECORDS[:3])
    data[second + 30] ^= 1
    rows, bad = read(tmp_path, bytes(data))
    assert rows == {line: row for line, row in EXPECTED.items() if line not in (4, 5, 6)}
    assert [(row.line, row.reason, row.count) for row in bad] == [(4, "crc mismatch", 3)]
    assert bad[0].detail.startswith(f"chunk at byte {second}: its payload does not have the crc32 0x")
    assert bad[0].detail.endswith("its 3 records are lost")


@every_kind
@both_headers
def test_every_changed_byte_is_noticed(tmp_path: Path, compressor: str, count_last: bool) -> None:
    data = recordio(RECORDS, compressor, count_last=count_last)
    for at in range(len(data)):
        for flip in (1 << at % 8, 0xFF):
            changed = bytearray(data)
            changed[at] ^= flip
            rows, bad = read(tmp_path, bytes(changed))
            assert bad, (at, flip)
            values = list(EXPECTED.values())
            assert all(row in values for row in rows.values()), (at, flip)
            accounted = len(rows) + sum(row.count for row in bad) >= len(ROWS)
            assert accounted or "rest of the file" in bad[-1].detail or bad[-1].reason == "truncated file"


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data = recordio(RECORDS, "gzip")
    ends = set(accumulate(len(recordio_chunk(RECORDS[at : at + 3], "gzip")) for at in (0, 3, 6)))
    for size in range(1, len(data)):
        rows, bad = read(tmp_path, data[:size])
        assert rows == {line: row for line, row in EXPECTED.items() if line <= len(rows)}
        assert len(rows) % 3 == 0
        if size in ends:
            assert not bad
        else:
            assert [row.reason for row in bad] == ["truncated file"]


def test_truncated_gzip_keeps_the_chunks_before_the_end(tmp_path: Path) -> None:
    data = recordio([random.Random(i).randbytes(300) for i in range(90)])
    rows, bad = read(tmp_path, gzip.compress(data, mtime=0)[:-9000])
    assert not rows
    assert {row.reason for row in bad} == {"bad tf.Example", "truncated gzip"}
    assert [row.count for row in bad if row.reason == "truncated gzip"] == [3]


@both_headers
def test_a_wrong_record_count_is_reported_and_the_records_are_used(tmp_path: Path, count_last: bool) -> None:
    data = bytearray(recordio(RECORDS, count_last=count_last))
    data[16 if count_last else 4] = 200
    rows, bad = read(tmp_path, bytes(data))
    assert rows == EXPECTED
    assert [(row.line, row.reason) for row in bad] == [(1, "corrupt chunk")]
    assert "its header declares 200 records, it has 3, which are used" in bad[0].detail


def test_the_lost_records_that_a_header_declares_are_bounded(tmp_path: Path) -> None:
    header = struct.pack("<5I", 0x01020304, 2**32 - 1, 1, 0, 8)
    rows, bad = read(tmp_path, header + bytes(8) + recordio(RECORDS))
    assert [row.count for row in bad] == [2]  # what has room in 8 bytes
    assert "its 4,294,967,295 records are lost" in bad[0].detail
    assert list(rows.values()) == list(EXPECTED.values())


@pytest.mark.parametrize(
    ("header", "reason", "words"),
    [
        ((0x01020305, 1, 0, 0, 9), "corrupt chunk", "begins with 0x01020305, not with RecordIO's 0x01020304"),
        ((0x01020304, 1, 9, 9, 9), "corrupt chunk", "no known compressor: 0 none, 1 snappy, 2 gzip"),
        (
            (0x01020304, 1, 9, 0, 2**32 - 1),
            "record too large",
            "4,294,967,295 bytes long, at most 67,108,864",
        ),
        ((0x01020304, 9, 0, 2**31, 1), "record too large", "2,147,483,648 bytes long, at most 67,108,864"),
    ],
)
def test_an_invalid_header_is_an_error(
    tmp_path: Path, header: tuple[int, ...], reason: str, words: str
) -> None:
    rows, bad = read(tmp_path, recordio(RECORDS) + struct.pack("<5I", *header) + bytes(100))
    assert rows == EXPECTED
    assert [(row.line, row.reason) for row in bad] == [(9, reason)]
    assert words in bad[0].detail
    assert "the rest of the file cannot be read" in bad[0].detail


def chunk_of(compressor: int, payload: bytes, records: int = 2) -> bytes:
    header = struct.pack("<5I", 0x01020304, records, zlib.crc32(payload), compressor, len(payload))
    return header + payload


def test_decompression_bombs_are_bounded(tmp_path: Path) -> None:
    deflate = zlib.compressobj(9, wbits=31)
    gzip_bomb = b"".join([deflate.compress(bytes(1 << 20)) for _ in range(256)]) + deflate.flush()
    zeros = pa.Codec("snappy").compress(bytes(1 << 20), asbytes=True)
    piece = b"\x00" + (4 + len(zeros)).to_bytes(3, "little") + bytes(4) + zeros
    for bomb in (
        chunk_of(2, gzip_bomb),
        chunk_of(1, b"\xff\xff\xff\xff\x0f" + bytes(9)),  # raw snappy that says 4 GiB
        chunk_of(1, b"\xff\x06\x00\x00sNaPpY" + piece * 99),
    ):
        path = tmp_path / "bomb.rio"
        path.write_bytes(bomb + recordio(RECORDS))
        tracemalloc.start()
        rows, bad = read_all(RecordIOReader(WANTED), path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert list(rows.values()) == list(EXPECTED.values())
        assert [(row.reason, row.count) for row in bad] == [("record too large", 2)]
        assert "when decompressed, at most 67,108,864 are read" in bad[0].detail
        assert peak < 2.2 * MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    ("compressor", "payload", "words"),
    [
        (0, b"\x05\x00\x00\x00abc", "is not a sequence of complete records"),
        (0, b"\x00\x00\x00", "is not a sequence of complete records"),
        (1, b"", "cannot be decompressed"),
        (1, b"\x05abcdefgh", "cannot be decompressed"),
        (1, b"\xff\x06\x00\x00sNaPpY\x02\x01\x00\x00a", "is not a sequence of complete snappy frames"),
        (1, b"\xff\x06\x00\x00sNaPpY\x01\xff\x00\x00a", "is not a sequence of complete snappy frames"),
        (2, b"notgzip", "cannot be decompressed"),
        (2, gzip.compress(b"\x01\x00\x00\x00a", mtime=0)[:-3], "the gzip data end early"),
    ],
)
def test_invalid_payloads_are_reported(tmp_path: Path, compressor: int, payload: bytes, words: str) -> None:
    rows, bad = read(tmp_path, chunk_of(compressor, payload) + recordio(RECORDS))
    assert [(row.line, row.reason) for row in bad] == [(1, "corrupt chunk")]
    assert words in bad[0].detail
    assert list(rows.values()) == list(EXPECTED.values())


@given(st.binary(max_size=200), st.sampled_from([0, 1, 2]), st.booleans())
def test_any_payload_and_any_tail(tmp_path: Path, noise: bytes, compressor: int, in_a_chunk: bool) -> None:
    tail = chunk_of(compressor, noise) if in_a_chunk else noise
    rows, bad = read(tmp_path, recordio(RECORDS) + tail)
    assert {line: row for line, row in rows.items() if line <= len(ROWS)} == EXPECTED
    assert bad or len(rows) == len(ROWS) + 2 or not tail
