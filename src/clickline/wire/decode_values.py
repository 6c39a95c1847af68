"""Decodes the values of the tensors that `parse_tensors.py` has found into arrays.

The same bytes are visited again. They were validated before; still no more values are stored than fit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.kernel_intrinsics import Int, f32_from_bits, load_f32, load_f64, load_u16, load_u32, load_u64
from clickline.numba_cache import njit
from clickline.protobuf_wire import Bytes, read_span, read_tag, read_varint, skip_field
from clickline.records import ABSENT
from clickline.wire.tensor_layout import (
    BEGIN,
    BF16,
    BOOL,
    BYTES,
    CONTENT_BEGIN,
    COUNT,
    ELEMENT,
    END,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    LIST,
    U8,
    U16,
    U32,
    U64,
)

Indices = NDArray[np.int64]
Header = NDArray[np.int64]


@njit(cache=True, nogil=True)
def _half_to_float(bits: Int) -> Int:
    """The float value of a 16-bit IEEE half."""
    sign = np.uint32(bits >> 15 & 1) << np.uint32(31)
    exponent = np.uint32(bits >> 10 & 31)
    fraction = np.uint32(bits & 1023)
    if exponent == np.uint32(0):  # zero or subnormal
        value = np.float32(fraction) * np.float32(2.0**-24)
        return -value if sign else value
    if exponent == np.uint32(31):
        return f32_from_bits(sign | np.uint32(0x7F800000) | fraction << np.uint32(13))
    return f32_from_bits(sign | (exponent + np.uint32(112)) << np.uint32(23) | fraction << np.uint32(13))


@njit(cache=True, nogil=True)
def _store_varint(
    element: Int, value: np.uint64, n: Int, numbers_N: NDArray[np.float64], integers_N: Indices
) -> None:
    if element == BOOL:
        integers_N[n] = value != np.uint64(0)
    elif element == F16:
        numbers_N[n] = _half_to_float(np.int64(value & np.uint64(0xFFFF)))
    elif element == BF16:
        numbers_N[n] = f32_from_bits(np.uint32(value & np.uint64(0xFFFF)) << np.uint32(16))
    elif element in (I64, U64):
        integers_N[n] = np.int64(value)
    elif element == U32:
        integers_N[n] = np.int64(value & np.uint64(0xFFFFFFFF))
    else:
        integers_N[n] = np.int64(np.int32(value & np.uint64(0xFFFFFFFF)))


@njit(cache=True, nogil=True)
def _decode_raw(
    data: Bytes,
    header: Header,
    starts_N: Indices,
    ends_N: Indices,
    numbers_N: NDArray[np.float64],
    integers_N: Indices,
) -> None:
    """Decode raw little-endian values."""
    pos = header[CONTENT_BEGIN]
    count = header[COUNT]
    element = header[ELEMENT]
    if element == F32:
        for n in range(count):
            numbers_N[n] = load_f32(data, pos + 4 * n)
    elif element == F64:
        for n in range(count):
            numbers_N[n] = load_f64(data, pos + 8 * n)
    elif element in (I64, U64):
        for n in range(count):
            integers_N[n] = np.int64(load_u64(data, pos + 8 * n))
    elif element == I32:
        for n in range(count):
            integers_N[n] = np.int64(np.int32(load_u32(data, pos + 4 * n)))
    elif element == U32:
        for n in range(count):
            integers_N[n] = np.int64(load_u32(data, pos + 4 * n))
    elif element == I16:
        for n in range(count):
            integers_N[n] = np.int64(np.int16(load_u16(data, pos + 2 * n)))
    elif element == U16:
        for n in range(count):
            integers_N[n] = np.int64(load_u16(data, pos + 2 * n))
    elif element == I8:
        for n in range(count):
            integers_N[n] = np.int64(np.int8(data[pos + n]))
    elif element == U8:
        for n in range(count):
            integers_N[n] = np.int64(data[pos + n])
    elif element == BOOL:
        for n in range(count):
            integers_N[n] = np.int64(data[pos + n] != 0)
    elif element == F16:
        for n in range(count):
            numbers_N[n] = _half_to_float(np.int64(load_u16(data, pos + 2 * n)))
    elif element == BF16:
        for n in range(count):
            numbers_N[n] = f32_from_bits(np.uint32(load_u16(data, pos + 2 * n)) << np.uint32(16))
    else:
        for n in range(count):
            length = np.int64(load_u32(data, pos))
            starts_N[n] = pos + 4
            pos += 4 + length
            ends_N[n] = pos


@njit(cache=True, nogil=True)
def _decode_list(
    data: Bytes,
    header: Header,
    pos: Int,
    end: Int,
    n: Int,
    starts_N: Indices,
    ends_N: Indices,
    numbers_N: NDArray[np.float64],
    integers_N: Indices,
) -> Int:
    """Decode values of the list in the header, from one piece of the inner message. Returns the count so far."""
    element = header[ELEMENT]
    packed = header[LIST] << 3 | 2
    wire = 5 if element == F32 else 1 if element == F64 else 0
    single = header[LIST] << 3 | wire
    capacity = numbers_N.size
    while 0 <= pos < end and n < capacity:
        if element == BYTES and data[pos] == packed and data[pos + 1] < 0x80:  # a short text
            starts_N[n] = pos + 2
            pos += 2 + np.int64(data[pos + 1])
            ends_N[n] = pos
            n += 1
            continue
        key, pos = read_tag(data, pos, end)
        if key == packed:
            pos, stop = read_span(data, pos, end)
            if element == BYTES:
                starts_N[n] = pos
                ends_N[n] = stop
                n += 1
            elif element == F32:
                for at in range(pos, min(stop, pos + 4 * (capacity - n)), 4):
                    numbers_N[n] = load_f32(data, at)
                    n += 1
            elif element == F64:
                for at in range(pos, min(stop, pos + 8 * (capacity - n)), 8):
                    numbers_N[n] = load_f64(data, at)
                    n += 1
            else:
                while 0 <= pos < stop and n < capacity:
                    value, pos = read_varint(data, pos, stop)
                    _store_varint(element, value, n, numbers_N, integers_N)
                    n += 1
            pos = stop
        elif key == single and element != BYTES:
            if element == F32:
                numbers_N[n] = load_f32(data, pos)
                pos += 4
            elif element == F64:
                numbers_N[n] = load_f64(data, pos)
                pos += 8
            else:
                value, pos = read_varint(data, pos, end)
                _store_varint(element, value, n, numbers_N, integers_N)
            n += 1
        else:
            pos = skip_field(data, key, pos, end)
    return n


@njit(cache=True, nogil=True)
def decode_column(
    data: Bytes,
    inner_tag: Int,
    header: Header,
    starts_N: Indices,
    ends_N: Indices,
    numbers_N: NDArray[np.float64],
    integers_N: Indices,
) -> bool:
    """Decode all values of one column. Returns whether one of them is infinite."""
    if header[LIST] == 0:
        _decode_raw(data, header, starts_N, ends_N, numbers_N, integers_N)
    else:
        n = 0
        pos = header[BEGIN]
        end = header[END]
        while 0 <= pos < end:
            key, pos = read_tag(data, pos, end)
            if key == inner_tag:
                pos, stop = read_span(data, pos, end)
                n = _decode_list(data, header, pos, stop, n, starts_N, ends_N, numbers_N, integers_N)
                pos = stop
            else:
                pos = skip_field(data, key, pos, end)
        if n == 1:  # one value fills all rows
            for row in range(1, header[COUNT]):
                starts_N[row] = starts_N[0]
                ends_N[row] = ends_N[0]
                numbers_N[row] = numbers_N[0]
                integers_N[row] = integers_N[0]
    infinite = False
    element = header[ELEMENT]
    if F16 <= element <= F64:
        for n in range(header[COUNT]):
            infinite |= abs(numbers_N[n]) == np.inf
    return infinite


@njit(cache=True, nogil=True)
def decode_columns(
    data: Bytes,
    inner_tag: Int,
    header_CF: Header,
    kind_C: Bytes,
    starts_CB: Indices,
    ends_CB: Indices,
    numbers_CB: NDArray[np.float64],
    integers_CB: Indices,
) -> Int:
    """Decode every column with one value per row. Returns a column that contains infinity, or -1."""
    for c in range(kind_C.size):
        if kind_C[c] != ABSENT and decode_column(
            data, inner_tag, header_CF[c], starts_CB[c], ends_CB[c], numbers_CB[c], integers_CB[c]
        ):
            return c
    return -1
