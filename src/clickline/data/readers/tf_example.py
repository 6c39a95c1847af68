"""Parses tf.Example records into raw columns: one kernel reads many records, without an object per value.

    Example { features = 1: Features { feature = 1: map<string, Feature> } }
    Feature { oneof: bytes_list = 1, float_list = 2, int64_list = 3 }, each list { value = 1, repeated }

Messages are read as protobuf reads them: lists packed or not, map entries in any order, the last of equal keys
wins, unknown fields are skipped. A field that ends outside its message makes its record bad, not others.

A column is integers or floats if all records of the block agree, otherwise text, with numbers as canonical text:
so the meaning of a value does not depend on other records. A feature that is absent, or whose list is empty, is a
missing value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.data.readers.byte_source import CRC_MISMATCH
from clickline.data.readers.text_blocks import bad_rows
from clickline.kernel_intrinsics import load_f32
from clickline.numba_cache import njit
from clickline.protobuf_wire import (
    Bytes,
    NameTable,
    count_packed,
    find_name,
    read_span,
    read_tag,
    read_varint,
    skip_field,
)
from clickline.records import (
    FLOAT32,
    PRECISION,
    Block,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    RawRows,
    TextColumn,
    category_text,
)

BAD_EXAMPLE = "bad tf.Example"

BYTES, FLOATS, INTEGERS = 1, 2, 3  # kinds, by the field numbers of Feature; 0 is an absent feature

# Columns x records, and records, of one block: limits memory when records are tiny or columns many.
MAX_CELLS = 1 << 21
MAX_RECORDS = 1 << 17

Indices = NDArray[np.int64]
Wanted = tuple[Bytes, Indices, Indices]  # the arrays of a NameTable
Places = tuple[
    Bytes, Indices, Indices, Indices
]  # of one column: kind, begin, end, number of values per record


@dataclass(frozen=True)
class Records:
    """Serialized records as spans of one buffer: the payload of a `tfrecord` or `recordio` block."""

    data: NDArray[np.uint8]
    starts_B: NDArray[np.int64]
    ends_B: NDArray[np.int64]


NO_RECORDS = Records(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))


class ExampleParser:
    """Parses the wanted features of serialized tf.Examples."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        self.wanted = wanted
        self.max_records = max(1, min(MAX_RECORDS, MAX_CELLS // max(1, len(wanted))))  # per block
        self._names = NameTable.of(wanted)

    def rows(self, block: Block, crc_good_B: NDArray[np.bool_] | None = None) -> RawRows:
        """The records of a block as rows. Records with a wrong crc are bad and not parsed."""
        records: Records = block.payload
        if crc_good_B is None:
            crc_good_B = np.ones(len(records.starts_B), dtype=np.bool_)
        shape = len(self.wanted), len(records.starts_B)
        kinds_CB = np.zeros(shape, dtype=np.uint8)
        begins_CB = np.empty(shape, dtype=np.int64)
        ends_CB = np.empty(shape, dtype=np.int64)
        counts_CB = np.zeros(shape, dtype=np.int64)
        good_B = crc_good_B.copy()
        _locate(
            records.data,
            records.starts_B,
            records.ends_B,
            good_B,
            (self._names.names, self._names.ends_C1, self._names.slots),
            kinds_CB,
            begins_CB,
            ends_CB,
            counts_CB,
        )
        lines_B = np.arange(block.first_line, block.first_line + len(good_B))
        columns: dict[str, RawColumn] = {}
        for c, name in enumerate(self.wanted):
            places = kinds_CB[c][good_B], begins_CB[c][good_B], ends_CB[c][good_B], counts_CB[c][good_B]
            columns[name] = _column(records.data, places)
        bad_B = ~good_B
        bad_L4 = np.column_stack(
            [lines_B[bad_B], records.starts_B[bad_B], records.ends_B[bad_B], crc_good_B[bad_B]]
        )
        bad = bad_rows(block, records.data, bad_L4, _describe)
        return RawRows(int(good_B.sum()), columns, lines_B[good_B], bad)


def _describe(crc_good: int) -> tuple[str, str]:
    if crc_good:
        return BAD_EXAMPLE, "its bytes are not a serialized tf.Example message"
    return CRC_MISMATCH, "its bytes do not match their crc32c"


def _column(data: Bytes, places: Places) -> RawColumn:
    kinds_B, _, _, counts_B = places
    multi = bool((counts_B > 1).any())
    at_B1 = np.arange(len(counts_B) + 1)
    if multi:
        np.cumsum(counts_B, out=at_B1[1:])
    offsets_B1 = at_B1 if multi else None
    size = int(at_B1[-1])
    found = kinds_B[counts_B > 0]
    none_N, no_bits_N, no_numbers_N = np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0)
    if (found == INTEGERS).all() and len(found):
        bits_N = np.zeros(size, dtype=np.uint64)
        _take(data, places, at_B1, INTEGERS, none_N, none_N, bits_N, no_numbers_N)
        missing_N = np.zeros(size, np.bool_) if multi else counts_B == 0
        return IntegerColumn(bits_N, missing_N, signed=True, offsets_B1=offsets_B1)
    if (found == FLOATS).all() and len(found):
        numbers_N = np.full(size, np.nan)
        _take(data, places, at_B1, FLOATS, none_N, none_N, no_bits_N, numbers_N)
        return NumberColumn(numbers_N, offsets_B1, PRECISION[FLOAT32])
    starts_N, ends_N = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    _take(data, places, at_B1, BYTES, starts_N, ends_N, no_bits_N, no_numbers_N)
    if (found != BYTES).any():
        data = _numbers_as_text(data, places, at_B1, starts_N, ends_N)
    return TextColumn(data, starts_N, ends_N, offsets_B1)


def _numbers_as_text(
    data: Bytes, places: Places, at_B1: Indices, starts_N: Indices, ends_N: Indices
) -> Bytes:
    """Append the text of numbers to the buffer and set their spans (rare, so in plain Python)."""
    kinds_B, _, _, counts_B = places
    integers_N, numbers_N = np.zeros(len(starts_N), dtype=np.uint64), np.full(len(starts_N), np.nan)
    for kind in (INTEGERS, FLOATS):
        _take(data, places, at_B1, kind, starts_N, ends_N, integers_N, numbers_N)
    end, pieces = len(data), []
    for b in np.flatnonzero((kinds_B == INTEGERS) | (kinds_B == FLOATS)):
        for n in range(at_B1[b], at_B1[b] + counts_B[b]):
            number = integers_N[n].view(np.int64) if kinds_B[b] == INTEGERS else numbers_N[n]
            pieces.append(category_text(number.item(), PRECISION[FLOAT32]))
            starts_N[n], ends_N[n] = end, end + len(pieces[-1])
            end += len(pieces[-1])
    return np.concatenate([data, np.frombuffer(b"".join(pieces), dtype=np.uint8)])


# ---- kernels: positions are int64, -1 means malformed; nothing is read at or after `end` ----


@njit(cache=True, nogil=True)
def _count(data: Bytes, pos: int, end: int, kind: int) -> int:
    """Number of values in a list message, or -1."""
    count = 0
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return -1
        if key == 0x0A:
            pos, stop = read_span(data, pos, end)
            if pos < 0:
                return -1
            more = 1 if kind == BYTES else count_packed(data, pos, stop, 4 if kind == FLOATS else 0)
            if more < 0:
                return -1
            count += more
            pos = stop
        else:
            if (kind == FLOATS and key == 0x0D) or (kind == INTEGERS and key == 0x08):
                count += 1
            pos = skip_field(data, key, pos, end)
            if pos < 0:
                return -1
    return count


@njit(cache=True, nogil=True)
def _feature(data: Bytes, pos: int, end: int) -> tuple[int, int, int]:
    """Kind of a Feature, where its lists of that kind begin, and their number of values; kind -1: malformed.

    Two lists of one kind are concatenated; of two kinds the later one wins, as protobuf does for a oneof.
    """
    kind, begin, count = 0, pos, 0
    while pos < end:
        here = pos
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return -1, begin, count
        if key == 0x0A or key == 0x12 or key == 0x1A:
            pos, stop = read_span(data, pos, end)
            if pos < 0:
                return -1, begin, count
            field = key >> 3
            if field != kind:
                kind, begin, count = field, here, 0
            more = _count(data, pos, stop, kind)
            if more < 0:
                return -1, begin, count
            count += more
            pos = stop
        else:
            pos = skip_field(data, key, pos, end)
            if pos < 0:
                return -1, begin, count
    return kind, begin, count


@njit(cache=True, nogil=True)
def _features(
    data: Bytes,
    pos: int,
    end: int,
    b: int,
    wanted: Wanted,
    kinds_CB: Bytes,
    begins_CB: Indices,
    ends_CB: Indices,
    counts_CB: Indices,
) -> bool:
    """Record the position of each wanted feature of record `b` in this Features message; False: malformed."""
    names, name_ends_C1, slots = wanted
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return False
        if key != 0x0A:
            pos = skip_field(data, key, pos, end)
            if pos < 0:
                return False
            continue
        pos, entry_end = read_span(data, pos, end)
        if pos < 0:
            return False
        name, name_end, value, value_end = pos, pos, pos, pos
        while pos < entry_end:
            key, pos = read_tag(data, pos, entry_end)
            if pos < 0:
                return False
            if key == 0x0A:
                name, name_end = read_span(data, pos, entry_end)
                pos = name_end
            elif key == 0x12:
                value, value_end = read_span(data, pos, entry_end)
                pos = value_end
            else:
                pos = skip_field(data, key, pos, entry_end)
            if pos < 0:
                return False
        c = find_name(data, name, name_end, names, name_ends_C1, slots)
        if c >= 0:
            kind, begin, count = _feature(data, value, value_end)
            if kind < 0:
                return False
            kinds_CB[c, b] = kind
            begins_CB[c, b] = begin
            ends_CB[c, b] = value_end
            counts_CB[c, b] = count
    return True


@njit(cache=True, nogil=True)
def _locate(
    data: Bytes,
    starts_B: Indices,
    ends_B: Indices,
    good_B: NDArray[np.bool_],
    wanted: Wanted,
    kinds_CB: Bytes,
    begins_CB: Indices,
    ends_CB: Indices,
    counts_CB: Indices,
) -> None:
    """Find every wanted feature of every good record; malformed records are marked as not good."""
    for b in range(len(starts_B)):
        if not good_B[b]:
            continue
        pos, end = starts_B[b], ends_B[b]
        while pos < end:
            key, pos = read_tag(data, pos, end)
            if pos >= 0 and key == 0x0A:
                pos, stop = read_span(data, pos, end)
                if pos >= 0:
                    if _features(data, pos, stop, b, wanted, kinds_CB, begins_CB, ends_CB, counts_CB):
                        pos = stop
                    else:
                        pos = -1
            elif pos >= 0:
                pos = skip_field(data, key, pos, end)
            if pos < 0:
                good_B[b] = False
                break


@njit(cache=True, nogil=True)
def _take(
    data: Bytes,
    places: Places,
    at_B1: Indices,
    wanted: int,
    starts_N: Indices,
    ends_N: Indices,
    integers_N: NDArray[np.uint64],
    numbers_N: NDArray[np.float64],
) -> None:
    """Read the values of the features of one kind, which `_locate` has validated, into the arrays of that kind."""
    kinds_B, begins_B, stops_B, counts_B = places
    single = 0x0D if wanted == FLOATS else 0x08  # tag of a value that is not packed
    for b in range(len(kinds_B)):
        if kinds_B[b] != wanted or counts_B[b] == 0:
            continue
        n, pos, end = at_B1[b], begins_B[b], stops_B[b]
        while pos < end:
            key, pos = read_tag(data, pos, end)
            if key != wanted << 3 | 2:
                pos = skip_field(data, key, pos, end)
                continue
            pos, stop = read_span(data, pos, end)
            while pos < stop:
                key, pos = read_tag(data, pos, stop)
                if key == 0x0A:
                    pos, values_end = read_span(data, pos, stop)
                elif key == single and wanted != BYTES:
                    values_end = pos + 1  # one value is read: it begins before this
                else:
                    pos = skip_field(data, key, pos, stop)
                    continue
                if wanted == BYTES:
                    starts_N[n], ends_N[n] = pos, values_end
                    pos = values_end
                    n += 1
                while pos < values_end:
                    if wanted == FLOATS:
                        numbers_N[n] = load_f32(data, pos)
                        pos += 4
                    else:
                        integers_N[n], pos = read_varint(data, pos, stop)
                    n += 1
