"""Finds and decodes the values of Paddle Serving's and ElasticCTR's requests: feasigns and numbers, by variable.

    INSTS    general model before v0.7:  insts = 1: { tensor_array = 1 }, tensors in the order of the client's config
    TENSORS  general model since v0.7:   tensor = 1, with names
    SLOTS    ElasticCTR:                 instances = 1: { slots = 1: { slot_name = 1, feasigns = 2 } }
    IDS      ElasticCTR's first demo:    instances = 1: { sparse_ids = 1, dense_ids = 2 }

In all of them the message with a list of values is in field 1 of its parent. A request has I instances (one if the
batch is in the shapes) and V variables; a variable fills one column, with any number of values per row, or as a vector
several columns. `find_tensors` visits every byte and counts the values, `place_values` stores them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.raw_memory import Int
from clickline.numba_cache import njit
from clickline.protobuf_wire import Bytes, find_name, read_span, read_tag, read_varint, skip_field
from clickline.records import ABSENT, FEATURE_ID, FLOAT64, INTEGER
from clickline.wire.decode_values import decode_column
from clickline.wire.parse_tensors import count_values
from clickline.wire.tensor_layout import (
    BEGIN,
    BF16,
    BOOL,
    CONTENT_BEGIN,
    CONTENT_END,
    COUNT,
    DUPLICATE,
    ELEMENT,
    END,
    F16,
    F32,
    F64,
    HEADER_FIELDS,
    I8,
    I16,
    I32,
    I64,
    LIST,
    MALFORMED,
    OK,
    RAGGED,
    RANK,
    ROWS,
    SHAPE,
    SIZE,
    TYPE,
    U8,
    UNKNOWN,
    UNSUPPORTED_TYPE,
    WIDTH,
)

Indices = NDArray[np.int64]
Headers = NDArray[np.int64]

INSTS, TENSORS, SLOTS, IDS = range(4)
HASHED, FEASIGN, NUMBER, AMBIGUOUS = range(4)
"""Kinds of a variable. HASHED: feasigns are hashes of texts. AMBIGUOUS: text and number, which no feasign can be."""

LODS = HEADER_FIELDS  # a further field of a tensor's header: the number of offsets in its lod
FEED_FIELDS = HEADER_FIELDS + 1

# Further statuses of a kernel.
TENSOR_COUNT, LOD, INFINITE, SEVERAL, NO_NUMBER = range(20, 25)

_LIST_TAG = 0x0A  # of the message with the values, in its parent

# By layout, the fields of a tensor: type, shape, lod, name, alias, raw content; 0: none.
_FIELDS = np.array([[5, 6, 7, 0, 0, 0], [10, 11, 12, 13, 14, 15], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
# By layout, the element type of each elem_type, the field with its list, and how a list is encoded (see tensor_layout).
_ELEMENTS = np.zeros((4, 10), dtype=np.int64)
_ELEMENTS[INSTS, :3] = I64, F32, I32
_ELEMENTS[TENSORS] = I64, F32, I32, F64, I16, F16, BF16, U8, I8, BOOL
_ELEMENTS[SLOTS:, 0] = I64
_LISTS = np.zeros((4, SIZE.size), dtype=np.int64)
_LISTS[INSTS, [I64, F32, I32]] = 3, 4, 2
_LISTS[TENSORS, [I64, F32, I32, F64, I16, U8, I8, BOOL]] = 1, 2, 3, 4, 3, 3, 3, 6
_LISTS[SLOTS, I64] = 2
_WIRES = np.zeros((4, 7), dtype=np.int64)
_WIRES[INSTS, 2:5] = 1, 1, 4
_WIRES[TENSORS, 1:7] = 1, 4, 1, 8, 1, 1
_WIRES[SLOTS, 2] = 1
_WIRES[IDS, 1:3] = 1, 4


@njit(cache=True, nogil=True)
def count_instances(data: Bytes, layout: Int) -> tuple[Int, Int]:
    """The number of messages in field 1 (-1: malformed), and the layout: TENSORS in place of INSTS if the messages are
    tensors."""
    pos = 0
    end = data.size
    count = 0
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return -1, layout
        if key != _LIST_TAG:
            pos = skip_field(data, key, pos, end)
        else:
            at, pos = read_span(data, pos, end)
            count += 1
            while layout == INSTS and 0 <= at < pos:  # an instance has only tensors, in field 1
                key, at = read_tag(data, at, pos)
                if at >= 0 and key != _LIST_TAG:
                    layout = TENSORS
                elif at >= 0:
                    at = skip_field(data, key, at, pos)
        if pos < 0:
            return -1, layout
    return count, layout


@njit(cache=True, nogil=True)
def _add_numbers(data: Bytes, key: Int, pos: Int, end: Int, shape: bool, header: Headers) -> Int:
    """Read dimensions of a shape, or count offsets of a lod; packed or not."""
    if key & 7 != 0 and key & 7 != 2:
        return skip_field(data, key, pos, end)
    stop = end
    at = pos
    if key & 7 == 2:
        at, stop = read_span(data, pos, end)
        if at < 0:
            return -1
        if at == stop:
            return stop
    while True:
        value, at = read_varint(data, at, stop)
        if at < 0:
            return -1
        size = np.int64(np.int32(value & np.uint64(0xFFFFFFFF)))
        if not shape:
            header[LODS] += 1
        elif header[RANK] == 0:
            header[ROWS] = size
            header[RANK] = 1
        else:
            known = size >= 0 and 0 <= header[WIDTH] <= 0x7FFFFFFF
            header[WIDTH] = header[WIDTH] * size if known else -1
            header[RANK] += 1
        if key & 7 == 0 or at >= stop:
            return at


@njit(cache=True, nogil=True)
def _parse_tensor(
    data: Bytes, pos: Int, end: Int, layout: Int, header: Headers, counts_F: Indices
) -> tuple[Int, Int, Int, Int]:
    """Parse the header of a tensor and count its values. Returns the spans of name and alias; -1: malformed."""
    fields = _FIELDS[layout]
    name, name_end, alias, alias_end = pos, pos, pos, pos
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return -1, -1, -1, -1
        field = key >> 3
        if field == fields[0] and key & 7 == 0:
            value, pos = read_varint(data, pos, end)
            header[TYPE] = np.int64(np.int32(value & np.uint64(0xFFFFFFFF)))
        elif field == fields[1] or field == fields[2]:
            pos = _add_numbers(data, key, pos, end, field == fields[1], header)
        elif field == fields[3] and key & 7 == 2:
            name, name_end = read_span(data, pos, end)
            pos = name_end
        elif field == fields[4] and key & 7 == 2:
            alias, alias_end = read_span(data, pos, end)
            pos = alias_end
        elif field == fields[5] and key & 7 == 2:
            header[CONTENT_BEGIN], pos = read_span(data, pos, end)
            header[CONTENT_END] = pos
        else:
            pos = count_values(data, key, pos, end, _WIRES[layout], counts_F)
        if pos < 0:
            return -1, -1, -1, -1
    return name, name_end, alias, alias_end


@njit(cache=True, nogil=True)
def _finish_header(layout: Int, header: Headers, counts_F: Indices) -> Int:
    """Set element type, number of values and number of rows. Returns a status."""
    kind = header[TYPE]
    element = _ELEMENTS[layout, kind] if 0 <= kind < _ELEMENTS.shape[1] else 0
    if element == 0:
        return UNSUPPORTED_TYPE
    header[ELEMENT] = element
    length = header[CONTENT_END] - header[CONTENT_BEGIN]
    if length > 0:
        header[LIST] = 0
        header[COUNT] = length // SIZE[element]
        if length % SIZE[element] != 0:
            return SHAPE
    else:
        header[LIST] = _LISTS[layout, element]
        header[COUNT] = counts_F[header[LIST]]
    if header[LODS] > 0:
        header[ROWS] = header[LODS] - 1
    elif header[RANK] < 2 or header[ROWS] < 0:
        header[ROWS] = 1  # without a batch dimension: all values are those of one row
    elif header[WIDTH] >= 0 and header[COUNT] != header[ROWS] * header[WIDTH]:
        return SHAPE
    elif header[ROWS] == 0 or header[COUNT] % header[ROWS] != 0:
        return SHAPE if header[COUNT] > 0 else OK
    return OK


@njit(cache=True, nogil=True)
def _add_tensor(
    data: Bytes,
    begin: Int,
    start: Int,
    end: Int,
    layout: Int,
    v: Int,
    names: Bytes,
    name_ends_N1: Indices,
    name_slots: Indices,
    variable_N: Indices,
    kind_V: Indices,
    header_VH: Headers,
    header: Headers,
    counts_F: Indices,
) -> tuple[Int, Int, Int]:
    """Parse a tensor of variable `v`, or of the variable it names if that is -1. Returns a status, the variable, and
    the end of an unknown name, whose start is then in place of the variable."""
    header[:] = 0
    header[BEGIN] = begin
    header[END] = end
    header[ROWS] = 1
    header[WIDTH] = 1
    counts_F[:] = 0
    name, name_end, alias, alias_end = _parse_tensor(data, start, end, layout, header, counts_F)
    if name < 0:
        return MALFORMED, 0, 0
    if v < 0:
        n = find_name(data, name, name_end, names, name_ends_N1, name_slots)
        if n < 0 and alias_end > alias:
            n = find_name(data, alias, alias_end, names, name_ends_N1, name_slots)
        if n < 0:
            return UNKNOWN, name, name_end
        v = variable_N[n]
    if kind_V[v] == AMBIGUOUS:
        return NO_NUMBER, v, 0
    if header_VH[v, END] > 0:
        return DUPLICATE, v, 0
    status = _finish_header(layout, header, counts_F)
    header_VH[v] = header
    return status, v, 0


@njit(cache=True, nogil=True)
def _add_ids(data: Bytes, begin: Int, start: Int, end: Int, header_VH: Headers, counts_F: Indices) -> Int:
    """Parse an instance of IDS: its two lists are the last two variables."""
    counts_F[:] = 0
    pos = start
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos >= 0:
            pos = count_values(data, key, pos, end, _WIRES[IDS], counts_F)
        if pos < 0:
            return MALFORMED
    for which in range(2):
        header = header_VH[header_VH.shape[0] - 2 + which]
        header[BEGIN] = begin
        header[END] = end
        header[ELEMENT] = F32 if which else I64
        header[LIST] = 1 + which
        header[COUNT] = counts_F[1 + which]
        header[ROWS] = 1
    return OK


@njit(cache=True, nogil=True)
def find_tensors(
    data: Bytes,
    layout: Int,
    names: Bytes,
    name_ends_N1: Indices,
    name_slots: Indices,
    variable_N: Indices,
    kind_V: Indices,
    compact_F: Indices,
    per_field_F: Indices,
    ignore_unknown: bool,
    header_IVH: Headers,
    rows_I: Indices,
) -> tuple[Int, Int, Int, Int]:
    """Parse the header of each tensor. Returns a status, its instance, and the other values of `_add_tensor`."""
    counts_F = np.zeros(_WIRES.shape[1], dtype=np.int64)
    header = np.zeros(FEED_FIELDS, dtype=np.int64)
    pos = 0
    i = 0
    end = data.size
    while pos < end:
        begin = pos
        key, pos = read_tag(data, pos, end)
        if key != _LIST_TAG:
            pos = skip_field(data, key, pos, end)
            continue
        start, pos = read_span(data, pos, end)
        at, stop = begin, pos
        if layout == IDS:
            status = _add_ids(data, begin, start, pos, header_IVH[i], counts_F)
            if status != OK:
                return status, i, 0, 0
            rows_I[i] = 1
            at = stop
        elif layout != TENSORS:
            at = start
            rows_I[i] = 1 if layout == SLOTS else -1
        tensors = 0
        order_F = compact_F
        if layout == INSTS:
            probe = start
            while 0 <= probe < stop:
                key, probe = read_tag(data, probe, stop)
                if probe >= 0:
                    probe = skip_field(data, key, probe, stop)
                tensors += 1
            if tensors != compact_F.size:
                order_F = per_field_F
            if probe < 0 or tensors != order_F.size:
                return (MALFORMED if probe < 0 else TENSOR_COUNT), i, tensors, 0
        n = 0
        while at < stop:
            begin = at
            key, at = read_tag(data, at, stop)
            if at < 0:
                return MALFORMED, i, 0, 0
            if key != _LIST_TAG:
                at = skip_field(data, key, at, stop)
                if at < 0:
                    return MALFORMED, i, 0, 0
                continue
            first, at = read_span(data, at, stop)
            if at < 0:
                return MALFORMED, i, 0, 0
            status, v, name_end = _add_tensor(
                data,
                begin,
                first,
                at,
                layout,
                order_F[n] if layout == INSTS else -1,
                names,
                name_ends_N1,
                name_slots,
                variable_N,
                kind_V,
                header_IVH[i],
                header,
                counts_F,
            )
            n += 1
            if status == UNKNOWN and ignore_unknown:
                continue
            if status != OK:
                return status, i, v, name_end
            if rows_I[i] < 0:
                rows_I[i] = header_IVH[i, v, ROWS]
            elif rows_I[i] != header_IVH[i, v, ROWS]:
                return RAGGED, i, v, 0
        i += layout != TENSORS
    return OK, 0, 0, 0


@njit(cache=True, nogil=True)
def _row_offsets(data: Bytes, layout: Int, header: Headers, rows: Int, offsets_R1: Indices) -> bool:
    """Set where each row's values begin. False: the lod is not ascending from 0 to the number of values."""
    count = header[COUNT]
    if header[LODS] == 0:
        each = count // rows if rows > 0 else 0
        for row in range(rows + 1):
            offsets_R1[row] = row * each
        return True
    _, pos = read_tag(data, header[BEGIN], header[END])
    pos, end = read_span(data, pos, header[END])
    field = _FIELDS[layout, 2]
    n = 0
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if key >> 3 != field or (key & 7 != 0 and key & 7 != 2):
            pos = skip_field(data, key, pos, end)
            continue
        stop = end
        if key & 7 == 2:
            pos, stop = read_span(data, pos, end)
        while pos < stop:
            value, pos = read_varint(data, pos, stop)
            if n <= rows:
                offsets_R1[n] = np.int64(value)
            n += 1
            if key & 7 == 0:
                break
    ascending: bool = offsets_R1[0] == 0 and offsets_R1[rows] == count
    for row in range(rows):
        ascending &= offsets_R1[row] <= offsets_R1[row + 1]
    return ascending


@njit(cache=True, nogil=True)
def place_values(
    data: Bytes,
    layout: Int,
    header_IVH: Headers,
    rows_I: Indices,
    kind_V: Indices,
    columns_K: Indices,
    first_V: Indices,
    width_V: Indices,
    kind_C: Bytes,
    numbers_CB: NDArray[np.float64],
    integers_CB: Indices,
    several_V: NDArray[np.bool_],
) -> tuple[Int, Int, Int]:
    """Decode every variable into its columns: `columns_K` from `first_V`, one or for a vector `width_V` of them.

    Categories with several values in a row are only marked in `several_V`. Returns a status with its instance and
    variable."""
    nothing = np.empty(0, dtype=np.int64)
    for v in range(kind_V.size):
        largest = np.int64(-1)
        longest = np.int64(0)
        for i in range(rows_I.size):
            if header_IVH[i, v, END] > 0:
                largest = max(largest, header_IVH[i, v, COUNT])
                longest = max(longest, rows_I[i])
        if largest < 0:
            continue
        is_number = kind_V[v] == NUMBER
        width = width_V[v]
        columns_W = columns_K[first_V[v] : first_V[v] + max(width, 1)]
        for c in columns_W:
            if kind_C[c] != ABSENT:
                return DUPLICATE, 0, v
            kind_C[c] = FLOAT64 if is_number else FEATURE_ID if kind_V[v] == HASHED else INTEGER
            if is_number:
                numbers_CB[c, :] = np.nan
            else:
                integers_CB[c, :] = 0
        numbers_N = np.empty(largest, dtype=np.float64)
        integers_N = np.empty(largest, dtype=np.int64)
        offsets_R1 = np.empty(longest + 1, dtype=np.int64)
        row = 0
        for i in range(rows_I.size):
            header = header_IVH[i, v]
            rows = rows_I[i]
            if header[END] == 0:
                row += rows
                continue
            count = header[COUNT]
            is_float = F16 <= header[ELEMENT] <= F64
            if is_float and not is_number:
                return UNSUPPORTED_TYPE, i, v
            if width > 0 and count != rows * width:
                return SHAPE, i, v
            if not _row_offsets(data, layout, header, rows, offsets_R1):
                return LOD, i, v
            if decode_column(
                data, _LIST_TAG, header, nothing, nothing, numbers_N[:count], integers_N[:count]
            ):
                return INFINITE, i, v
            for r in range(rows):
                for n in range(offsets_R1[r], offsets_R1[r + 1]):
                    k = n - offsets_R1[r]
                    if k >= columns_W.size:
                        if is_number or width > 0:
                            return SEVERAL, i, v
                        several_V[v] = True
                    elif is_number:
                        numbers_CB[columns_W[k], row + r] = (
                            numbers_N[n] if is_float else np.float64(integers_N[n])
                        )
                    else:
                        integers_CB[columns_W[k], row + r] = integers_N[n]
            row += rows
    return OK, 0, 0


@njit(cache=True, nogil=True)
def collect_values(
    data: Bytes,
    layout: Int,
    header_IVH: Headers,
    rows_I: Indices,
    v: Int,
    offsets_B1: Indices,
    integers_N: Indices,
) -> None:
    """Decode all values of one variable, after `place_values` has checked them."""
    nothing = np.empty(0, dtype=np.int64)
    no_numbers_N = np.empty(integers_N.size, dtype=np.float64)
    row = 0
    n = 0
    offsets_B1[0] = 0
    for i in range(rows_I.size):
        header = header_IVH[i, v]
        rows = rows_I[i]
        offsets_R1 = np.zeros(rows + 1, dtype=np.int64)
        if header[END] > 0:
            _row_offsets(data, layout, header, rows, offsets_R1)
            stop = n + header[COUNT]
            decode_column(data, _LIST_TAG, header, nothing, nothing, no_numbers_N[n:stop], integers_N[n:stop])
        for r in range(rows):
            offsets_B1[row + r + 1] = n + offsets_R1[r + 1]
        row += rows
        n += header[COUNT]
