"""Reads TFRecord files of tf.Examples, without TensorFlow.

    [u64 length][u32 masked crc32c of the length][data][u32 masked crc32c of the data], little endian

A record whose data has a wrong crc is bad, and the next one is read. If the length has a wrong crc, the start of
the next record is unknown: the rest of the file is skipped and reported as lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.data.readers.byte_source import CRC_MISMATCH, TOO_LARGE, TRUNCATED_FILE, ByteSource
from clickline.data.readers.reader import BLOCK_BYTES, preview
from clickline.data.readers.tf_example import NO_RECORDS, ExampleParser, Records
from clickline.numba_cache import njit
from clickline.records import BadRow, Block, RawRows

MAX_RECORD_BYTES = 64 << 20  # a longer one is treated as damage: no click takes 64 MiB

_FRAME_BYTES = 16  # bytes of a record that are not its data
_COMPLETE, _TRUNCATED, _BAD_LENGTH, _TOO_LARGE = 0, 1, 2, 3  # why `_frames` stopped


class TFRecordReader:
    """Reads the wanted features of tf.Examples; a feature that a record lacks is a missing value."""

    def __init__(self, wanted: tuple[str, ...], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._examples = ExampleParser(wanted)
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        source = ByteSource(file, path)
        rest = b""  # read, but not in a block yet: record `number`, at byte `offset` of the file
        offset, number = 0, 1
        wanted = self._block_bytes
        while True:
            data = np.frombuffer(rest + source.read(wanted - len(rest)), dtype=np.uint8)
            ended = len(data) < wanted
            used, state = 0, _COMPLETE
            while state == _COMPLETE and used < len(data):
                begin = used
                starts_B, ends_B, used, state = _frames(data, used, self._examples.max_records)
                if len(starts_B):
                    yield Block(file, number, Records(data, starts_B, ends_B), used - begin)
                    number += len(starts_B)
            rest = data[used:].tobytes()
            offset += used
            if state in (_BAD_LENGTH, _TOO_LARGE) or (ended and rest) or source.broken:
                yield _error_block(file, number, offset, rest, state, source)
                return
            if ended:
                return
            # A record may be longer than a block. Its length was checked if its crc has been read.
            length = int.from_bytes(rest[:8], "little") if len(rest) >= 12 else 0
            wanted = max(self._block_bytes, _FRAME_BYTES + length)

    def parse(self, block: Block) -> RawRows:
        records: Records = block.payload
        return self._examples.rows(block, _crc_good(records.data, records.starts_B, records.ends_B))


def _error_block(file: str, number: int, offset: int, rest: bytes, state: int, source: ByteSource) -> Block:
    """A block without rows that reports why record `number` and the rest cannot be read."""
    where = f"record {number:,} at byte {offset:,}"
    lost = "it and the rest of the file cannot be read; write the file again"
    if state == _BAD_LENGTH:
        reason, detail = (
            CRC_MISMATCH,
            f"{where}: its length does not match its crc32c, {lost}",
        )
    elif state == _TOO_LARGE:
        length = int.from_bytes(rest[:8], "little")
        detail = f"{where} declares {length:,} bytes, at most {MAX_RECORD_BYTES:,} are allowed, {lost}"
        reason = TOO_LARGE
    elif source.broken:
        reason, detail = source.broken.reason, f"{where}: {source.broken.detail}"
    else:
        detail = f"{where}: the file ends {len(rest):,} bytes into it; copy or write the file again"
        reason = TRUNCATED_FILE
    return Block(file, number, NO_RECORDS, 0, (BadRow(file, number, reason, detail, preview(rest[:1000])),))


def _tables() -> NDArray[np.uint64]:
    """The tables of slicing-by-8: row k holds the effect of a byte on the crc when k more bytes follow it."""
    tables = np.zeros((8, 256), dtype=np.uint64)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = (tables[0] >> 1) ^ np.where(tables[0] & 1, 0x82F63B78, 0).astype(np.uint64)
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> 8) ^ tables[0][tables[k - 1] & 0xFF]
    return tables


_CRC = _tables()


@njit(cache=True, nogil=True)
def _masked_crc32c(data: NDArray[np.uint8], pos: int, end: int) -> np.uint64:
    crc = np.uint64(0xFFFFFFFF)
    eight, low = np.uint64(8), np.uint64(0xFF)
    while pos + 8 <= end:
        crc ^= _u32(data, pos)
        crc = (
            _CRC[7, crc & low]
            ^ _CRC[6, (crc >> eight) & low]
            ^ _CRC[5, (crc >> np.uint64(16)) & low]
            ^ _CRC[4, crc >> np.uint64(24)]
            ^ _CRC[3, data[pos + 4]]
            ^ _CRC[2, data[pos + 5]]
            ^ _CRC[1, data[pos + 6]]
            ^ _CRC[0, data[pos + 7]]
        )
        pos += 8
    while pos < end:
        crc = (crc >> eight) ^ _CRC[0, (crc ^ np.uint64(data[pos])) & low]
        pos += 1
    crc ^= np.uint64(0xFFFFFFFF)
    rotated = (crc >> np.uint64(15)) | (crc << np.uint64(17))
    return (rotated + np.uint64(0xA282EAD8)) & np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True)
def _u32(data: NDArray[np.uint8], pos: int) -> np.uint64:
    return (
        np.uint64(data[pos])
        | np.uint64(data[pos + 1]) << np.uint64(8)
        | np.uint64(data[pos + 2]) << np.uint64(16)
        | np.uint64(data[pos + 3]) << np.uint64(24)
    )


@njit(cache=True, nogil=True)
def _frames(
    data: NDArray[np.uint8], pos: int, limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]:
    """Spans of at most `limit` records from `pos`, the position of the next one, and why the scan stopped."""
    capacity = min(limit, (len(data) - pos) // _FRAME_BYTES)
    starts_B = np.empty(capacity, dtype=np.int64)
    ends_B = np.empty(capacity, dtype=np.int64)
    count, state = 0, _COMPLETE
    while count < limit and pos < len(data):
        if pos + 12 > len(data):
            state = _TRUNCATED
            break
        if _masked_crc32c(data, pos, pos + 8) != _u32(data, pos + 8):
            state = _BAD_LENGTH
            break
        length = _u32(data, pos) | _u32(data, pos + 4) << np.uint64(32)
        if length > np.uint64(MAX_RECORD_BYTES):
            state = _TOO_LARGE
            break
        end = pos + 12 + int(length)
        if end + 4 > len(data):
            state = _TRUNCATED
            break
        starts_B[count], ends_B[count] = pos + 12, end
        count += 1
        pos = end + 4
    return starts_B[:count], ends_B[:count], pos, state


@njit(cache=True, nogil=True)
def _crc_good(
    data: NDArray[np.uint8], starts_B: NDArray[np.int64], ends_B: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether each record's data matches its crc."""
    good_B = np.empty(len(starts_B), dtype=np.bool_)
    for b in range(len(starts_B)):
        good_B[b] = _masked_crc32c(data, starts_B[b], ends_B[b]) == _u32(data, ends_B[b])
    return good_B
