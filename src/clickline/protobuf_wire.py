"""Protobuf's wire format for kernels: tags, lengths and numbers out of a buffer, never past its end.

Positions are int64. A position of -1 means malformed: cut short, a length outside of its message, a varint
that is too long, a group that does not end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Octets = NDArray[np.uint8]
Whole = Any  # an integer of any of Numba's kinds


def _load(kind: Any, result: Any) -> Any:
    """An intrinsic `load(data, index)`: a little-endian value from any byte position, unchecked."""

    def load(typing_context: Any, data: Any, index: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.gep(array.data, [args[1]])
            return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)

        return result(data, types.int64), build

    return intrinsic(load)


def _bits_f32() -> Any:
    """An intrinsic `float_of(bits)`: the float32 that these 32 bits are."""

    def float_of(typing_context: Any, bits: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], ir.FloatType())

        return types.float32(types.uint32), build

    return intrinsic(float_of)


load_u16 = _load(ir.IntType(16), types.uint16)
load_u32 = _load(ir.IntType(32), types.uint32)
load_u64 = _load(ir.IntType(64), types.uint64)
load_f32 = _load(ir.FloatType(), types.float32)
load_f64 = _load(ir.DoubleType(), types.float64)
bits_f32 = _bits_f32()


@njit(cache=True, nogil=True)
def varint(data: Octets, pos: Whole, end: Whole) -> tuple[np.uint64, Whole]:
    """A number of up to 64 bits, and where it ends."""
    value = np.uint64(0)
    shift = np.uint64(0)
    stop = min(end, pos + 10)
    while pos < stop:
        byte = data[pos]
        pos += 1
        value |= np.uint64(byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos  # bits past the 64th fall off, as they do in protobuf
        shift += np.uint64(7)
    return value, -1


@njit(cache=True, nogil=True)
def _short(data: Octets, pos: Whole, end: Whole) -> tuple[np.uint64, Whole]:
    """A tag or a length: a varint of at most 5 bytes and 32 bits."""
    if pos < end and data[pos] < 0x80:
        return np.uint64(data[pos]), pos + 1
    value, after = varint(data, pos, min(end, pos + 5))
    return value, (-1 if value > np.uint64(0xFFFFFFFF) else after)


@njit(cache=True, nogil=True)
def tag(data: Octets, pos: Whole, end: Whole) -> tuple[Whole, Whole]:
    """A field's tag (its number times 8, plus how it is written), and where it ends."""
    value, pos = _short(data, pos, end)
    return np.int64(value), (-1 if value < np.uint64(8) else pos)


@njit(cache=True, nogil=True)
def span(data: Octets, pos: Whole, end: Whole) -> tuple[Whole, Whole]:
    """Start and end of the bytes whose length stands at `pos`; both -1 if they do not lie before `end`."""
    length, pos = _short(data, pos, end)
    if pos < 0 or length > np.uint64(end - pos):
        return -1, -1
    return pos, pos + np.int64(length)


@njit(cache=True, nogil=True)
def skip(data: Octets, tag: Whole, pos: Whole, end: Whole) -> Whole:
    """Where the field ends whose tag ended at `pos`."""
    if tag & 7 == 3:
        return _skip_group(data, tag >> 3, pos, end)
    return _skip_plain(data, tag & 7, pos, end)


@njit(cache=True, nogil=True)
def _skip_plain(data: Octets, written: Whole, pos: Whole, end: Whole) -> Whole:
    if written == 0:
        return varint(data, pos, end)[1]
    if written == 2:
        return span(data, pos, end)[1]
    if written == 1 and pos + 8 <= end:
        return pos + 8
    if written == 5 and pos + 4 <= end:
        return pos + 4
    return -1


@njit(cache=True, nogil=True)
def _skip_group(data: Octets, number: Whole, pos: Whole, end: Whole) -> Whole:
    """Where a group ends; the groups inside it end before it does. Nobody makes them any more."""
    open_G = np.empty(64, dtype=np.int64)
    open_G[0] = number
    depth = 1
    while depth > 0:
        key, pos = tag(data, pos, end)
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
