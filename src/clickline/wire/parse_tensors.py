"""Finds and validates the tensors of a request.

It follows protobuf's rules: lists may be packed or not and split up, fields may be in any order, the last of equal map
keys wins, unknown fields are skipped. Every byte that is used later is visited here, and the values are counted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.raw_memory import Int
from clickline.numba_cache import njit
from clickline.protobuf_wire import (
    Bytes,
    count_packed,
    find_name,
    load_u32,
    read_span,
    read_tag,
    read_varint,
    skip_field,
)
from clickline.records import ABSENT
from clickline.wire.tensor_layout import (
    BEGIN,
    BYTES,
    CONTENT_BEGIN,
    CONTENT_END,
    CONTENTS_LIST,
    CONTENTS_WIRE,
    COUNT,
    DATATYPE_CODES,
    DUPLICATE,
    ELEMENT,
    ELEMENT_OF_DTYPE,
    END,
    HEADER_FIELDS,
    INPUT_CONTENTS,
    KIND,
    LIST,
    MALFORMED,
    MAP_VALUE,
    NO_ROWS,
    OK,
    RAGGED,
    RANK,
    RAW_COUNT,
    ROWS,
    SHAPE,
    SIZE,
    TENSOR_LIST,
    TENSOR_WIRE,
    TOO_MANY,
    TYPE,
    U8,
    U32,
    U64,
    UNKNOWN,
    UNSUPPORTED_TYPE,
    WIDTH,
)

Indices = NDArray[np.int64]
Header = NDArray[np.int64]


@njit(cache=True, nogil=True)
def find_fields(data: Bytes, wanted: Int, spans_P3: Indices) -> Int:
    """Find the wanted fields, given as a bit for each number below 63: rows of (tag, start, end), in order.

    For a varint, its value is in place of the start. Returns how many there are, which may be more than fit; -1:
    malformed."""
    pos = 0
    end = data.size
    count = 0
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return -1
        if (key & 7 == 2 or key & 7 == 0) and key >> 3 < 63 and wanted >> (key >> 3) & 1:
            if key & 7 == 2:
                start, pos = read_span(data, pos, end)
            else:
                value, pos = read_varint(data, pos, end)
                start = np.int64(value)
            if count < spans_P3.shape[0]:
                spans_P3[count, 0] = key
                spans_P3[count, 1] = start
                spans_P3[count, 2] = pos
            count += 1
        else:
            pos = skip_field(data, key, pos, end)
        if pos < 0:
            return -1
    return count


@njit(cache=True, nogil=True)
def count_values(data: Bytes, key: Int, pos: Int, end: Int, wire_F: Indices, counts_F: Indices) -> Int:
    """Skip one field of a message with lists of values, and count its values."""
    field = key >> 3
    wire = wire_F[field] if field < wire_F.size else 0
    if wire == 0:
        return skip_field(data, key, pos, end)
    if key & 7 == 2:
        start, stop = read_span(data, pos, end)
        if stop < 0:
            return -1
        if wire == 2:
            counts_F[field] += 1
            return stop
        count = count_packed(data, start, stop, 0 if wire == 1 else wire)
        counts_F[field] += count
        return -1 if count < 0 else stop
    after = skip_field(data, key, pos, end)
    if (key & 7 == 0 and wire == 1) or (key & 7 == 5 and wire == 4) or (key & 7 == 1 and wire == 8):
        counts_F[field] += 1
    return after


@njit(cache=True, nogil=True)
def _parse_shape(data: Bytes, pos: Int, end: Int, header: Header) -> bool:
    """Parse a TensorShapeProto: its rank and first two dimensions. False: malformed."""
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return False
        if key != 0x12:
            pos = skip_field(data, key, pos, end)
            if pos < 0:
                return False
            continue
        pos, stop = read_span(data, pos, end)
        if pos < 0:
            return False
        size = np.int64(0)
        while pos < stop:
            key, pos = read_tag(data, pos, stop)
            if pos < 0:
                return False
            if key == 0x08:
                value, pos = read_varint(data, pos, stop)
                size = np.int64(value)
            else:
                pos = skip_field(data, key, pos, stop)
            if pos < 0:
                return False
        _add_dimension(header, size)
    return True


@njit(cache=True, nogil=True)
def _add_dimension(header: Header, size: Int) -> None:
    if header[RANK] == 0:
        header[ROWS] = size
    elif header[RANK] == 1:
        header[WIDTH] = size
    header[RANK] += 1


@njit(cache=True, nogil=True)
def _reset_header(header: Header, begin: Int, end: Int) -> None:
    header[:] = 0
    header[BEGIN] = begin
    header[END] = end
    header[ROWS] = 1
    header[WIDTH] = 1


@njit(cache=True, nogil=True)
def _parse_tensor(data: Bytes, pos: Int, end: Int, header: Header, counts_F: Indices) -> bool:
    """Parse the header of a TensorProto and count its values. False: malformed."""
    while pos < end:
        # A short text: most of most requests.
        if data[pos] == 0x42 and pos + 1 < end and data[pos + 1] < 0x80:
            pos += 2 + np.int64(data[pos + 1])
            if pos > end:
                return False
            counts_F[8] += 1
            continue
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return False
        if key == 0x08:
            value, pos = read_varint(data, pos, end)
            header[TYPE] = np.int64(np.int32(value))
        elif key == 0x12:
            start, pos = read_span(data, pos, end)
            if pos >= 0 and not _parse_shape(data, start, pos, header):
                return False
        elif key == 0x22:
            header[CONTENT_BEGIN], pos = read_span(data, pos, end)
            header[CONTENT_END] = pos
        else:
            pos = count_values(data, key, pos, end, TENSOR_WIRE, counts_F)
        if pos < 0:
            return False
    return True


@njit(cache=True, nogil=True)
def parse_predict(
    data: Bytes,
    map_tag: Int,
    names: Bytes,
    name_ends_C1: Indices,
    name_slots: Indices,
    ignore_unknown: bool,
    header_CF: Header,
) -> tuple[Int, Int, Int]:
    """Parse the tensor header of each column. Returns a status and the span of the name that it refers to."""
    counts_F = np.zeros(TENSOR_WIRE.size, dtype=np.int64)
    header = np.empty(HEADER_FIELDS, dtype=np.int64)
    pos = 0
    end = data.size
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return MALFORMED, 0, 0
        if key != map_tag:
            pos = skip_field(data, key, pos, end)
            if pos < 0:
                return MALFORMED, 0, 0
            continue
        pos, stop = read_span(data, pos, end)
        if pos < 0:
            return MALFORMED, 0, 0
        _reset_header(header, pos, stop)
        counts_F[:] = 0
        name, name_end = pos, pos
        while pos < stop:
            key, pos = read_tag(data, pos, stop)
            if pos < 0:
                return MALFORMED, name, name_end
            if key == 0x0A:
                start, pos = read_span(data, pos, stop)
                if pos >= 0:
                    name, name_end = start, pos
            elif key == MAP_VALUE:
                start, pos = read_span(data, pos, stop)
                if pos >= 0 and not _parse_tensor(data, start, pos, header, counts_F):
                    return MALFORMED, name, name_end
            else:
                pos = skip_field(data, key, pos, stop)
            if pos < 0:
                return MALFORMED, name, name_end
        c = find_name(data, name, name_end, names, name_ends_C1, name_slots)
        if c < 0:
            if not ignore_unknown:
                return UNKNOWN, name, name_end
            continue
        dtype = header[TYPE]
        element = ELEMENT_OF_DTYPE[dtype] if 0 <= dtype < ELEMENT_OF_DTYPE.size else 0
        header[ELEMENT] = element
        header[LIST] = TENSOR_LIST[element]
        header[COUNT] = counts_F[header[LIST]]
        size = SIZE[element]
        length = header[CONTENT_END] - header[CONTENT_BEGIN]
        if length > 0:  # tensor_content takes precedence over the list, as in TensorFlow
            header[LIST] = 0
            header[COUNT] = length // size if size > 0 and length % size == 0 else -1
        elif header[COUNT] == 1 and header[RANK] >= 1 and header[WIDTH] == 1 and header[ROWS] > 1:
            header[COUNT] = header[ROWS]  # a list with one value fills the tensor
        header_CF[c] = header
    return OK, 0, 0


@njit(cache=True, nogil=True)
def _element_of_name(data: Bytes, start: Int, end: Int) -> Int:
    """The element type with this datatype name, 0 if there is none."""
    size = end - start
    if size < 4 or size > 6:
        return 0
    code = np.uint64(0)
    for at in range(start, end):
        code = code << np.uint64(8) | np.uint64(data[at])
    for n in range(DATATYPE_CODES.size):
        if DATATYPE_CODES[n] == code:
            return n + 1
    return 0


@njit(cache=True, nogil=True)
def _parse_input(data: Bytes, pos: Int, end: Int, header: Header, counts_F: Indices) -> tuple[Int, Int]:
    """Parse the header of an InferInputTensor and count its values. Returns the span of its name; end -1: malformed."""
    name, name_end = pos, pos
    while pos < end:
        key, pos = read_tag(data, pos, end)
        if pos < 0:
            return name, -1
        if key == 0x0A:
            start, pos = read_span(data, pos, end)
            if pos >= 0:
                name, name_end = start, pos
        elif key == 0x12:
            start, pos = read_span(data, pos, end)
            if pos >= 0:
                header[ELEMENT] = _element_of_name(data, start, pos)
                header[TYPE] = start << 32 | pos
        elif key == 0x1A:
            at, pos = read_span(data, pos, end)
            while 0 <= at < pos:
                value, at = read_varint(data, at, pos)
                _add_dimension(header, np.int64(value))
            if at < 0:
                return name, -1
        elif key == 0x18:
            value, pos = read_varint(data, pos, end)
            _add_dimension(header, np.int64(value))
        elif key == INPUT_CONTENTS:
            at, pos = read_span(data, pos, end)
            while 0 <= at < pos:
                key, at = read_tag(data, at, pos)
                if at >= 0:
                    at = count_values(data, key, at, pos, CONTENTS_WIRE, counts_F)
            if at < 0:
                return name, -1
        else:
            pos = skip_field(data, key, pos, end)
        if pos < 0:
            return name, -1
    return name, name_end


@njit(cache=True, nogil=True)
def _count_raw_texts(data: Bytes, pos: Int, end: Int) -> Int:
    """The number of length-prefixed texts; -1: the last one does not end where the bytes do."""
    count = 0
    while pos < end:
        if end - pos < 4:
            return -1
        length = np.int64(load_u32(data, pos))
        pos += 4
        if length > end - pos:
            return -1
        pos += length
        count += 1
    return count


@njit(cache=True, nogil=True)
def parse_infer(
    data: Bytes,
    names: Bytes,
    name_ends_C1: Indices,
    name_slots: Indices,
    ignore_unknown: bool,
    header_CF: Header,
) -> tuple[Int, Int, Int, Int, Int]:
    """Parse the tensor header of each column. Returns a status, the span of the name that it refers to, and the numbers
    of inputs and raw contents."""
    end = data.size
    pos = 0
    inputs = 0
    raws = 0
    while pos < end:  # count the inputs and raw contents
        key, pos = read_tag(data, pos, end)
        if pos >= 0:
            pos = skip_field(data, key, pos, end)
        if pos < 0:
            return MALFORMED, 0, 0, 0, 0
        inputs += key == 0x2A
        raws += key == 0x3A
    raw_begins_R = np.empty(raws, dtype=np.int64)
    raw_ends_R = np.empty(raws, dtype=np.int64)
    pos = 0
    raw = 0
    while raw < raws:
        key, pos = read_tag(data, pos, end)
        if key == 0x3A:
            raw_begins_R[raw], pos = read_span(data, pos, end)
            raw_ends_R[raw] = pos
            raw += 1
        else:
            pos = skip_field(data, key, pos, end)
    counts_F = np.zeros(CONTENTS_WIRE.size, dtype=np.int64)
    header = np.empty(HEADER_FIELDS, dtype=np.int64)
    pos = 0
    n = 0
    while n < inputs:
        key, pos = read_tag(data, pos, end)
        if key != 0x2A:
            pos = skip_field(data, key, pos, end)
            continue
        pos, stop = read_span(data, pos, end)
        _reset_header(header, pos, stop)
        counts_F[:] = 0
        name, name_end = _parse_input(data, pos, stop, header, counts_F)
        if name_end < 0:
            return MALFORMED, 0, 0, inputs, raws
        pos = stop
        c = find_name(data, name, name_end, names, name_ends_C1, name_slots)
        if c < 0:
            if not ignore_unknown:
                return UNKNOWN, name, name_end, inputs, raws
            n += 1
            continue
        if header_CF[c, END] > 0:
            return DUPLICATE, name, name_end, inputs, raws
        element = header[ELEMENT]
        header[LIST] = CONTENTS_LIST[element]
        if raws > 0:
            for field in range(counts_F.size):
                header[RAW_COUNT] += counts_F[field]  # contents and raw contents must not both be used
            header[LIST] = 0
            header[COUNT] = -1
            if n < raws:
                header[CONTENT_BEGIN] = raw_begins_R[n]
                header[CONTENT_END] = raw_ends_R[n]
                length = raw_ends_R[n] - raw_begins_R[n]
                if element == BYTES:
                    header[COUNT] = _count_raw_texts(data, raw_begins_R[n], raw_ends_R[n])
                elif element > 0 and length % SIZE[element] == 0:
                    header[COUNT] = length // SIZE[element]
        else:
            header[COUNT] = counts_F[header[LIST]]
            if U8 <= element < U32:  # the list has 32-bit numbers
                header[ELEMENT] = U32
        header_CF[c] = header
        n += 1
    return OK, 0, 0, inputs, raws


@njit(cache=True, nogil=True)
def validate(header_CF: Header, max_rows: Int, body_size: Int, kind_C: Bytes) -> tuple[Int, Int, Int, Int]:
    """Check that the tensors match their shapes and each other. Returns a status and its column, the number of rows,
    and the number of columns that are multi-valued or unsigned 64-bit."""
    rows = np.int64(-1)
    first = 0
    special = 0
    for c in range(header_CF.shape[0]):
        header = header_CF[c]
        kind_C[c] = ABSENT
        if header[END] == 0:
            continue
        element = header[ELEMENT]
        if element == 0:
            return UNSUPPORTED_TYPE, c, 0, 0
        if header[ROWS] > max_rows and header[RANK] >= 1:
            return TOO_MANY, c, 0, 0
        if header[RANK] > 2 or header[ROWS] < 0 or header[WIDTH] < 0 or header[WIDTH] > body_size:
            return SHAPE, c, 0, 0
        if header[COUNT] != header[ROWS] * header[WIDTH] or header[RAW_COUNT] > 0:
            return SHAPE, c, 0, 0
        if rows < 0:
            rows = header[ROWS]
            first = c
        elif header[ROWS] != rows:
            return RAGGED, c, first, 0
        if header[WIDTH] != 1 or element == U64:
            special += 1
        else:
            kind_C[c] = KIND[element]
    if rows <= 0:
        return NO_ROWS, 0, 0, 0
    return OK, 0, rows, special
