"""Reads protobuf's wire format in kernels: tags, lengths, numbers and names from a buffer, never past its end.

Positions are int64. A position of -1 means malformed: truncated, a length beyond its message, a varint
that is too long, a group without an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.kernel_intrinsics import Int
from clickline.numba_cache import njit

Bytes = NDArray[np.uint8]


@njit(cache=True, nogil=True)
def read_varint(data: Bytes, pos: Int, end: Int) -> tuple[np.uint64, Int]:
    """A varint of up to 64 bits, and its end."""
    value = np.uint64(0)
    shift = np.uint64(0)
    stop = min(end, pos + 10)
    while pos < stop:
        byte = data[pos]
        pos += 1
        value |= np.uint64(byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos  # bits past the 64th are dropped, as in protobuf
        shift += np.uint64(7)
    return value, -1


@njit(cache=True, nogil=True)
def _read_u32(data: Bytes, pos: Int, end: Int) -> tuple[np.uint64, Int]:
    """A tag or a length: a varint of at most 5 bytes and 32 bits."""
    if pos < end and data[pos] < 0x80:
        return np.uint64(data[pos]), pos + 1
    value, after = read_varint(data, pos, min(end, pos + 5))
    return value, (-1 if value > np.uint64(0xFFFFFFFF) else after)


@njit(cache=True, nogil=True)
def read_tag(data: Bytes, pos: Int, end: Int) -> tuple[Int, Int]:
    """A field's tag (its number times 8, plus its wire type), and the tag's end; 0 and -1 if it is malformed."""
    value, pos = _read_u32(data, pos, end)
    if pos < 0 or value < np.uint64(8):
        return 0, -1
    return np.int64(value), pos


@njit(cache=True, nogil=True)
def read_span(data: Bytes, pos: Int, end: Int) -> tuple[Int, Int]:
    """Start and end of the bytes whose length is at `pos`; both -1 if they go beyond `end`."""
    length, pos = _read_u32(data, pos, end)
    if pos < 0 or length > np.uint64(end - pos):
        return -1, -1
    return pos, pos + np.int64(length)


@njit(cache=True, nogil=True)
def skip_field(data: Bytes, tag: Int, pos: Int, end: Int) -> Int:
    """The end of the field whose tag ends at `pos`; -1 if it is malformed, or the tag was."""
    if pos < 0:
        return -1
    if tag & 7 == 3:
        return _skip_group(data, tag >> 3, pos, end)
    return _skip_plain(data, tag & 7, pos, end)


@njit(cache=True, nogil=True)
def _skip_plain(data: Bytes, wire_type: Int, pos: Int, end: Int) -> Int:
    if wire_type == 0:
        return read_varint(data, pos, end)[1]
    if wire_type == 2:
        return read_span(data, pos, end)[1]
    if wire_type == 1 and pos + 8 <= end:
        return pos + 8
    if wire_type == 5 and pos + 4 <= end:
        return pos + 4
    return -1


@njit(cache=True, nogil=True)
def _skip_group(data: Bytes, number: Int, pos: Int, end: Int) -> Int:
    """The end of a group, with nested groups. Groups are deprecated in protobuf."""
    open_G = np.empty(64, dtype=np.int64)
    open_G[0] = number
    depth = 1
    while depth > 0:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return -1
        if key & 7 == 3:
            if depth == open_G.size:
                return -1
            open_G[depth] = key >> 3
            depth += 1
        elif key & 7 == 4:
            depth -= 1
            if open_G[depth] != key >> 3:
                return -1
        else:
            pos = _skip_plain(data, key & 7, pos, end)
            if pos < 0:
                return -1
    return pos


@njit(cache=True, nogil=True)
def count_packed(data: Bytes, start: Int, end: Int, size: Int) -> Int:
    """The number of values in a packed list; `size`: bytes of each, 0 for varints. -1: malformed."""
    if size > 0:
        return (end - start) // size if (end - start) % size == 0 else -1
    count = 0
    run = 0
    for at in range(start, end):
        run += 1
        if data[at] < 0x80:
            count += 1
            run = 0
        elif run == 10:
            return -1
    return -1 if run > 0 else count


# ── names: which of the wanted columns a map entry is for ──────────────────────────────────────


class NameTable(NamedTuple):
    """A hash table of names. Kernels take it as three arrays: Numba needs long to recognize a tuple."""

    names: Bytes  # one after the other
    ends_C1: NDArray[np.int64]
    slots: NDArray[np.int64]  # index of a name, -1: empty

    @staticmethod
    def of(names: Sequence[str]) -> NameTable:
        encoded = [name.encode() for name in names]
        slots = np.full(1 << (2 * len(encoded) + 1).bit_length(), -1, dtype=np.int64)
        data = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        table = NameTable(data, np.cumsum([0, *map(len, encoded)], dtype=np.int64), slots)
        _fill_slots(*table)
        return table


@njit(cache=True, nogil=True)
def _hash(data: Bytes, start: Int, end: Int) -> Int:
    """FNV-1a."""
    value = np.uint64(0xCBF29CE484222325)
    for i in range(start, end):
        value = (value ^ np.uint64(data[i])) * np.uint64(0x100000001B3)
    return np.int64(value >> np.uint64(20))


@njit(cache=True, nogil=True)
def _fill_slots(names: Bytes, ends_C1: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
    for c in range(ends_C1.size - 1):
        at = _hash(names, ends_C1[c], ends_C1[c + 1]) & (slots.size - 1)
        while slots[at] >= 0:
            at = (at + 1) & (slots.size - 1)
        slots[at] = c


@njit(cache=True, nogil=True)
def find_name(
    data: Bytes, start: Int, end: Int, names: Bytes, ends_C1: NDArray[np.int64], slots: NDArray[np.int64]
) -> Int:
    """The index of the name in data[start:end], or -1."""
    at = _hash(data, start, end) & (slots.size - 1)
    while slots[at] >= 0:
        c = slots[at]
        first = ends_C1[c]
        if ends_C1[c + 1] - first == end - start:
            same = True
            for i in range(end - start):
                if names[first + i] != data[start + i]:
                    same = False
                    break
            if same:
                return c
        at = (at + 1) & (slots.size - 1)
    return -1
