"""Reads RecordIO files of tf.Examples, as ElasticDL and PaddlePaddle write them.

A file consists of chunks; a chunk is a header of five u32 (little endian) and a payload. Two orders of the header
are in use, distinguished chunk by chunk: a compressor is 0..2, and no payload is that short.

    [0x01020304][records][crc32][compressor][size]     PaddlePaddle
    [0x01020304][crc32][compressor][size][records]     the Go package that ElasticDL's converters write with

The decompressed payload (0 none, 1 snappy, framed or raw, 2 gzip) is [u32 length][data] per record. The crc is
that of the payload as stored. The records of a chunk with a wrong crc are lost, and the next chunk is read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickline.data.readers.byte_source import CRC_MISMATCH, TOO_LARGE, TRUNCATED_FILE, ByteSource
from clickline.data.readers.reader import BLOCK_BYTES, preview
from clickline.data.readers.tf_example import NO_RECORDS, ExampleParser, Records
from clickline.numba_cache import njit
from clickline.records import BadRow, Block, RawRows

CORRUPT_CHUNK = "corrupt chunk"
MAX_CHUNK_BYTES = 64 << 20  # before and after decompression; writers limit chunks to 32 MiB

_MAGIC = 0x01020304
_HEADER_BYTES = 20
_NONE, _SNAPPY, _GZIP = 0, 1, 2
_SNAPPY_FRAMES = b"\xff\x06\x00\x00sNaPpY"


class _DamagedChunk(Exception):
    """A chunk that cannot be read: the reason and detail for its bad rows."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class _Header:
    records: int
    crc: int
    compressor: int
    size: int


@dataclass(frozen=True)
class _Chunk:
    first: int  # number of its first record
    records: Records
    bad: tuple[BadRow, ...] = ()  # after its records


class RecordIOReader:
    """Reads the wanted features of tf.Examples; a feature that a record lacks is a missing value."""

    def __init__(self, wanted: tuple[str, ...], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._examples = ExampleParser(wanted)
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        """Small chunks share a block and large ones are split, so chunks are decompressed here, not in `parse`."""
        pending: list[_Chunk] = []
        size = 0
        for chunk in _chunks(file, ByteSource(file, path)):
            pending.append(chunk)
            size += len(chunk.records.data)
            if chunk.bad or size >= self._block_bytes:
                yield from self._split_chunks(file, pending)
                pending, size = [], 0
        yield from self._split_chunks(file, pending)

    def _split_chunks(self, file: str, chunks: list[_Chunk]) -> Iterator[Block]:
        """Split consecutive chunks into blocks; only the last chunk may have lost records."""
        records = _join([chunk.records for chunk in chunks if len(chunk.records.starts_B)])
        begin, count = 0, len(records.starts_B)
        while begin < count:
            limit = records.starts_B[begin] + self._block_bytes
            end = max(begin + 1, int(np.searchsorted(records.ends_B, limit, side="right")))
            end = min(end, begin + self._examples.max_records, count)
            part = Records(records.data, records.starts_B[begin:end], records.ends_B[begin:end])
            size = int(part.ends_B[-1] - part.starts_B[0]) + 4
            yield Block(file, chunks[0].first + begin, part, size)
            begin = end
        if chunks and chunks[-1].bad:
            yield Block(file, chunks[-1].bad[0].line, NO_RECORDS, 0, chunks[-1].bad)

    def parse(self, block: Block) -> RawRows:
        return self._examples.rows(block)


def _chunks(file: str, source: ByteSource) -> Iterator[_Chunk]:
    number, offset = 1, 0
    while head := source.read(_HEADER_BYTES):
        where = f"chunk at byte {offset:,}"
        try:
            header = _header(head, source)
        except _DamagedChunk as damage:
            detail = f"{where}: {damage.detail}; the rest of the file cannot be read, write the file again"
            yield _Chunk(number, NO_RECORDS, (BadRow(file, number, damage.reason, detail, preview(head)),))
            return
        try:
            records = _records(header, source)
        except _DamagedChunk as damage:
            room = header.size if header.compressor == _NONE else MAX_CHUNK_BYTES
            lost = max(1, min(header.records, room // 4))  # a record takes at least 4 bytes
            detail = f"{where}: {damage.detail}; its {header.records:,} records are lost"
            row = BadRow(file, number, damage.reason, detail, count=lost)
            yield _Chunk(number, NO_RECORDS, (row,))
            number += lost
        else:
            count = len(records.starts_B)
            bad: tuple[BadRow, ...] = ()
            if count != header.records:
                detail = f"{where}: its header declares {header.records:,} records, it has {count:,}, which are used"
                bad = (BadRow(file, number, CORRUPT_CHUNK, detail),)
            yield _Chunk(number, records, bad)
            number += count
        if source.broken:
            return  # reported with the chunk that it truncated
        offset += _HEADER_BYTES + header.size
    if source.broken:
        row = BadRow(file, number, source.broken.reason, source.broken.detail)
        yield _Chunk(number, NO_RECORDS, (row,))


def _header(head: bytes, source: ByteSource) -> _Header:
    if len(head) < _HEADER_BYTES:
        raise _truncated(source, f"the file ends {len(head)} bytes into its header")
    magic, a, b, c, d = struct.unpack("<5I", head)
    if magic != _MAGIC:
        raise _DamagedChunk(CORRUPT_CHUNK, f"begins with {magic:#010x}, not with RecordIO's {_MAGIC:#010x}")
    if c <= _GZIP:
        header = _Header(records=a, crc=b, compressor=c, size=d)
    elif b <= _GZIP:
        header = _Header(records=d, crc=a, compressor=b, size=c)
    else:
        raise _DamagedChunk(CORRUPT_CHUNK, "its header names no known compressor: 0 none, 1 snappy, 2 gzip")
    if header.size > MAX_CHUNK_BYTES:
        raise _DamagedChunk(TOO_LARGE, f"{header.size:,} bytes long, at most {MAX_CHUNK_BYTES:,} are read")
    return header


def _records(header: _Header, source: ByteSource) -> Records:
    payload = source.read(header.size)
    if len(payload) < header.size:
        raise _truncated(source, f"the file ends {len(payload):,} of {header.size:,} bytes into its payload")
    if zlib.crc32(payload) != header.crc:
        raise _DamagedChunk(
            CRC_MISMATCH, f"its payload does not have the crc32 {header.crc:#010x} of its header"
        )
    data = np.frombuffer(_decompress(header.compressor, payload), dtype=np.uint8)
    starts_B, ends_B, end = _spans(data)
    if end != len(data):
        raise _DamagedChunk(
            CORRUPT_CHUNK, f"its payload of {len(data):,} bytes is not a sequence of complete records"
        )
    return Records(data, starts_B, ends_B)


def _truncated(source: ByteSource, detail: str) -> _DamagedChunk:
    if source.broken:
        return _DamagedChunk(source.broken.reason, source.broken.detail)
    return _DamagedChunk(TRUNCATED_FILE, detail)


def _join(parts: list[Records]) -> Records:
    if len(parts) <= 1:
        return parts[0] if parts else NO_RECORDS
    shifts = np.cumsum([0, *(len(part.data) for part in parts)])
    return Records(
        np.concatenate([part.data for part in parts]),
        np.concatenate([part.starts_B + shift for part, shift in zip(parts, shifts, strict=False)]),
        np.concatenate([part.ends_B + shift for part, shift in zip(parts, shifts, strict=False)]),
    )


def _decompress(compressor: int, payload: bytes) -> bytes:
    """The decompressed payload, at most MAX_CHUNK_BYTES of it."""
    if compressor == _NONE:
        return payload
    try:
        if compressor == _SNAPPY:
            return _decompress_snappy(payload)
        inflater = zlib.decompressobj(wbits=31)
        data = inflater.decompress(payload, MAX_CHUNK_BYTES + 1)
    except (zlib.error, OSError) as error:  # Arrow raises OSError for a bad snappy block
        raise _DamagedChunk(CORRUPT_CHUNK, f"its payload cannot be decompressed ({error})") from error
    if len(data) > MAX_CHUNK_BYTES:
        raise _too_large(f"more than {len(data) - 1:,}")
    if not inflater.eof:
        raise _DamagedChunk(CORRUPT_CHUNK, "its payload cannot be decompressed (the gzip data end early)")
    return data


def _too_large(size: str) -> _DamagedChunk:
    return _DamagedChunk(TOO_LARGE, f"{size} bytes when decompressed, at most {MAX_CHUNK_BYTES:,} are read")


def _decompress_snappy(payload: bytes) -> bytes:
    if not payload.startswith(_SNAPPY_FRAMES):
        return _decompress_snappy_block(payload, MAX_CHUNK_BYTES)
    pieces: list[bytes] = []
    pos, room = 0, MAX_CHUNK_BYTES
    while pos < len(payload):
        kind, size = payload[pos], int.from_bytes(payload[pos + 1 : pos + 4], "little")
        frame = payload[pos + 4 : pos + 4 + size]
        pos += 4 + size
        if pos > len(payload) or 0x02 <= kind <= 0x7F:
            raise _DamagedChunk(CORRUPT_CHUNK, "its payload is not a sequence of complete snappy frames")
        if kind == 0x00:  # a crc32c, redundant with the chunk's own crc, and the data
            pieces.append(_decompress_snappy_block(frame[4:], room))
        elif kind == 0x01:
            pieces.append(frame[4:])
        else:
            continue
        room -= len(pieces[-1])
        if room < 0:
            raise _too_large(f"more than {MAX_CHUNK_BYTES:,}")
    return b"".join(pieces)


def _decompress_snappy_block(block: bytes, room: int) -> bytes:
    size = 0
    for i, byte in enumerate(block[:5]):  # begins with the length of the data, a varint
        size |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            break
    if size > room:
        raise _too_large(f"{size:,}")
    data: bytes = pa.Codec("snappy").decompress(block, decompressed_size=size, asbytes=True)
    return data


@njit(cache=True, nogil=True)
def _spans(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Spans of the length-prefixed records, and the end of the last complete one."""
    starts_B = np.empty(len(data) // 4, dtype=np.int64)  # upper bound; unwritten pages cost nothing
    ends_B = np.empty(len(data) // 4, dtype=np.int64)
    count, pos = 0, 0
    while pos + 4 <= len(data):
        start = pos + 4
        end = start
        for i in range(4):
            end += int(data[pos + i]) << (8 * i)
        if end > len(data):
            break
        starts_B[count], ends_B[count] = start, end
        count += 1
        pos = end
    return starts_B[:count].copy(), ends_B[:count].copy(), pos
