"""Files as lines: decompression, blocks, and truncated files."""

from __future__ import annotations

import gc
import gzip
import tracemalloc
import weakref
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from clickline.data.readers.byte_source import ByteSource
from clickline.data.readers.text_blocks import BrokenStream, LineBlocks, open_decompressed
from clickline.records import Block

LINES = [f"line {i} {'x' * (i * 7919 % 301)}\n".encode() for i in range(3000)]
TEXT = b"".join(LINES)


def zstd(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(text)


PACKED = {"gzip": gzip.compress(TEXT, mtime=0), "zstd": zstd(TEXT)}
SUFFIX = {"gzip": ".gz", "zstd": ".zst"}


def blocks_of(path: Path, **sizes: int) -> list[Block]:
    return list(LineBlocks(path.name, path, **sizes))


def text_of(blocks: list[Block]) -> bytes:
    return b"".join(block.payload.tobytes() for block in blocks)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.txt", TEXT),
        ("one.gz", PACKED["gzip"]),
        ("members.gz", b"".join(gzip.compress(TEXT[i : i + 70_001]) for i in range(0, len(TEXT), 70_001))),
        ("padded.gz", gzip.compress(TEXT[:999]) + bytes(700) + gzip.compress(TEXT[999:]) + bytes(512)),
        ("one.zst", PACKED["zstd"]),
        ("frames.zst", zstd(TEXT[:5000]) + b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstd(TEXT[5000:])),
        ("skippable_first.zst", b"\x5f\x2a\x4d\x18\x00\0\0\0" + zstd(TEXT)),
        ("plain_called.gz", TEXT),
        ("plain_called.zst", TEXT),
        ("gzip_called.txt", PACKED["gzip"]),
        ("gzip_called.zst", PACKED["gzip"]),
        ("zstd_called.gz", PACKED["zstd"]),
    ],
)
def test_content_decides_how_a_file_is_decompressed(tmp_path: Path, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    assert b"".join(open_decompressed(path.name, path)) == TEXT
    blocks = blocks_of(path, block_bytes=10_000)
    assert text_of(blocks) == TEXT
    assert not any(block.bad for block in blocks)


@pytest.mark.parametrize("name", ["a.txt", "b.gz", "c.zst"])
@pytest.mark.parametrize("block_bytes", [1, 17, 1000, 4096, 65_536, 8 << 20])
def test_blocks_end_at_line_ends_and_depend_on_the_content_alone(tmp_path: Path, name: str, block_bytes: int):
    path = tmp_path / name
    path.write_bytes({"a.txt": TEXT, "b.gz": PACKED["gzip"], "c.zst": PACKED["zstd"]}[name])
    blocks = blocks_of(path, block_bytes=block_bytes)
    expected, at = [], 0
    while at < len(TEXT):
        size = block_bytes
        while not (end := TEXT.rfind(b"\n", at, at + size) + 1):
            size *= 2  # no line end in it
        expected.append((TEXT.count(b"\n", 0, at) + 1, TEXT[at:end]))
        at = end
    assert [(b.first_line, b.payload.tobytes()) for b in blocks] == expected
    assert [b.size for b in blocks] == [len(text) for _, text in expected]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_a_file_without_lines_has_no_blocks(tmp_path: Path, content: bytes):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    assert blocks_of(path) == []


def test_a_byte_order_mark_is_skipped_and_only_at_the_start(tmp_path: Path):
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n")
    assert text_of(blocks_of(path, block_bytes=1)) == b"a\n\xef\xbb\xbfb\n"


def test_the_last_line_needs_no_line_end(tmp_path: Path):
    path = tmp_path / "open.txt"
    path.write_bytes(b"a\nbc")
    assert [(b.first_line, b.payload.tobytes()) for b in blocks_of(path, block_bytes=2)] == [
        (1, b"a\n"),
        (2, b"bc"),
    ]


def test_first_line_skips_empty_ones_and_leaves_the_rest(tmp_path: Path):
    path = tmp_path / "header.csv"
    path.write_bytes(b"\n\r\nname,age\r\nann,3\n")
    lines = LineBlocks("log", path, block_bytes=1)
    assert lines.first_line() == b"name,age"
    assert lines.first_line() == b"name,age"
    lines.skip_line()
    (block,) = lines
    assert (block.first_line, block.payload.tobytes()) == (4, b"ann,3\n")


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@given(data=st.data())
def test_a_truncated_file_delivers_its_complete_lines(tmp_path: Path, kind: str, data: st.DataObject):
    packed = PACKED[kind]
    cut = data.draw(st.integers(0, len(packed) - 1))
    path = tmp_path / f"log{SUFFIX[kind]}"
    path.write_bytes(packed[:cut])
    blocks = blocks_of(path, block_bytes=20_000)
    text = text_of(blocks)
    assert TEXT.startswith(text)
    assert text == b"" or text.endswith(b"\n")
    ((*others, fault),) = [b.bad for b in blocks if b.bad]
    assert others == []
    assert fault.reason == f"truncated {kind}"
    assert fault.line == text.count(b"\n") + 1
    assert f"ends at byte {cut:,}" in fault.detail
    assert "copy or write the file again" in fault.detail
    rest = TEXT[len(text) :].partition(b"\n")[0]
    assert rest[:200].decode().startswith(fault.text)


def test_all_rows_of_a_truncated_gzip_file_are_delivered(tmp_path: Path):
    path = tmp_path / "stored.gz"
    stored = gzip.compress(TEXT, 0, mtime=0)  # not compressed, so the cut falls at a known byte of the text
    at = stored.index(b"line 1000 ") + 9
    path.write_bytes(stored[:at])
    blocks = blocks_of(path)
    assert text_of(blocks) == b"".join(LINES[:1000])
    assert blocks[-1].bad[0].line == 1001
    assert blocks[-1].bad[0].text == "line 1000"


def test_a_truncated_zstd_file_delivers_all_blocks_before_the_end(tmp_path: Path):
    path = tmp_path / "frames.zst"
    frames = [zstd(line) for line in LINES[:500]]
    path.write_bytes(b"".join(frames[:499]) + frames[499][:7])
    blocks = blocks_of(path)
    assert text_of(blocks) == b"".join(LINES[:499])
    assert blocks[-1].bad[0].reason == "truncated zstd"
    assert blocks[-1].bad[0].line == 500


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@given(data=st.data())
def test_a_damaged_file_never_raises_and_delivers_whole_lines(tmp_path: Path, kind: str, data: st.DataObject):
    packed = bytearray(PACKED[kind])
    packed[data.draw(st.integers(10, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / f"log{SUFFIX[kind]}"
    path.write_bytes(packed)
    blocks = blocks_of(path)
    faults = [fault for block in blocks for fault in block.bad]
    text = text_of(blocks)
    assert text == TEXT or [f.reason for f in faults] in ([f"corrupt {kind}"], [f"truncated {kind}"])
    assert text == b"" or text.endswith(b"\n")
    assert all(f.line == text.count(b"\n") + 1 for f in faults)


def test_a_wrong_checksum_is_reported_after_all_lines(tmp_path: Path):
    path = tmp_path / "log.gz"
    path.write_bytes(PACKED["gzip"][:-8] + bytes(8))
    blocks = blocks_of(path)
    assert text_of(blocks) == TEXT
    (fault,) = blocks[-1].bad
    assert (fault.reason, fault.line, fault.text) == ("corrupt gzip", len(LINES) + 1, "")
    assert "damaged at byte" in fault.detail


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_bytes_after_the_compressed_data_are_an_error(tmp_path: Path, kind: str):
    path = tmp_path / f"log{SUFFIX[kind]}"
    path.write_bytes(PACKED[kind] + b"and some more")
    blocks = blocks_of(path)
    assert blocks[-1].bad[0].reason == f"corrupt {kind}"
    assert TEXT.startswith(text_of(blocks))


@pytest.mark.parametrize(
    ("name", "reason"), [("empty.gz", "truncated gzip"), ("empty.zst", "truncated zstd")]
)
def test_an_empty_compressed_file_is_a_failed_copy(tmp_path: Path, name: str, reason: str):
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(BrokenStream, match="ends at byte 0") as broken:
        list(open_decompressed(path.name, path))
    assert broken.value.reason == reason
    (block,) = blocks_of(path)
    assert (block.size, [f.reason for f in block.bad]) == (0, [reason])


@pytest.mark.parametrize("uri", ["s3://logs/day.tsv.gz", "https://host/day.tsv.gz?***", "data/day.tsv.gz"])
def test_the_format_of_an_empty_copy_follows_from_the_name_of_its_source(tmp_path: Path, uri: str):
    copy = tmp_path / "data"
    copy.write_bytes(b"")
    (block,) = LineBlocks(uri, copy)
    (fault,) = block.bad
    assert (fault.file, fault.reason) == (uri, "truncated gzip")
    source = ByteSource(uri, copy)
    assert source.read(1) == b""
    assert source.broken is not None
    assert source.broken.reason == "truncated gzip"
    assert list(LineBlocks("s3://logs/day.tsv", copy)) == []


@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    block_bytes=st.integers(1, 50),
    final=st.booleans(),
)
def test_line_above_the_limit_is_bad_at_any_block_size(
    tmp_path: Path, lengths: list[int], block_bytes: int, final: bool
):
    lines = [bytes([97 + i]) * length for i, length in enumerate(lengths)]
    path = tmp_path / "log.txt"
    path.write_bytes(b"\n".join(lines) + (b"\n" if final and lines else b""))
    blocks = blocks_of(path, block_bytes=block_bytes, max_line_bytes=20)
    found = {}
    for block in blocks:
        for number, line in enumerate(block.payload.tobytes().split(b"\n"), start=block.first_line):
            if line:
                found[number] = line
    assert found == {i: line for i, line in enumerate(lines, start=1) if 0 < len(line) <= 20}
    faults = [fault for block in blocks for fault in block.bad]
    assert [(f.line, f.reason) for f in faults] == [
        (i, "line too long") for i, line in enumerate(lines, start=1) if len(line) > 20
    ]
    for fault in faults:
        length = len(lines[fault.line - 1])
        assert fault.detail == f"{length} bytes without a line end, at most 20 are read"
        assert lines[fault.line - 1].decode().startswith(fault.text)
        assert fault.text


def test_memory_is_bounded_for_a_small_file_that_decompresses_to_one_huge_line(tmp_path: Path):
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as out:
        for _ in range(120):
            out.write(b"a" * (1 << 20))
        out.write(b"\nshort\n")
    tracemalloc.start()
    blocks = blocks_of(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 << 20
    (fault,) = (fault for block in blocks for fault in block.bad)
    assert (fault.line, fault.reason) == (1, "line too long")
    assert f"{120 << 20:,} bytes" in fault.detail
    assert text_of(blocks) == b"short\n"
    assert blocks[0].first_line == 2


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("damage", ["cut off", "damaged"])
def test_buffers_of_a_broken_file_are_freed_at_once(tmp_path: Path, pack, damage: str):
    """Waiting for the garbage collector would keep the memory of many such files."""
    packed = bytearray(pack(b"1\tab\n" * 50_000))
    if damage == "damaged":
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "a.tsv"
    path.write_bytes(packed[:-9] if damage == "cut off" else packed)
    gc.collect()
    gc.disable()
    try:
        blocks, source = LineBlocks("a", path), ByteSource("a", path)
        assert any(block.bad for block in blocks)
        source.read(1 << 30)
        assert source.broken
        kept = [weakref.ref(one) for one in (blocks, source)]
        del blocks, source
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_an_invalid_zstd_file_leaks_no_memory(tmp_path: Path):
    path = tmp_path / "a.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    tracemalloc.start()
    try:
        for read in range(21):
            assert list(LineBlocks("a", path))
            if not read:
                before, _ = tracemalloc.get_traced_memory()
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 18
    finally:
        tracemalloc.stop()
