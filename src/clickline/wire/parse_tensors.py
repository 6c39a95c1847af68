"""The tensors of a request, found and checked.

Read as protobuf reads it: lists packed or not and in pieces, fields in any order, the last of equal map keys
counts, unknown fields are skipped. Every byte that will ever be used is walked here, and the values counted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.raw_memory import Int
from clickline.numba_cache import njit
from clickline.protobuf_wire import Bytes, load_u32, read_span, read_tag, read_varint, skip_field
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
    ELEMENT,
    ELEMENT_OF_DTYPE,
    END,
    FACTS,
    INPUT_CONTENTS,
    KIND,
    LIST,
    MALFORMED,
    MAP_VALUE,
    NO_ROWS,
    NO_VALUES,
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
    TWICE,
    TYPE,
    U8,
    U32,
    U64,
    UNKNOWN,
    WIDTH,
)

Indices = NDArray[np.int64]
Facts = NDArray[np.int64]


@njit(cache=True, nogil=True)
def _hash(data: Bytes, start: Int, end: Int) -> Int:
    """FNV-1a, only for the table of names."""
    value = np.uint64(0xCBF29CE484222325)
    for i in range(start, end):
        value = (value ^ np.uint64(data[i])) * np.uint64(0x100000001B3)
    return np.int64(value >> np.uint64(20))


@njit(cache=True, nogil=True)
def fill_name_table(table: Indices, names: Bytes, name_ends_C1: Indices) -> None:
    """Enter the names in a hash table; its size is a power of two above their number."""
    for c in range(name_ends_C1.size - 1):
        place = _hash(names, name_ends_C1[c], name_ends_C1[c + 1]) & (table.size - 1)
        while table[place] >= 0:
            place = (place + 1) & (table.size - 1)
        table[place] = c


@njit(cache=True, nogil=True)
def _find(data: Bytes, start: Int, end: Int, names: Bytes, name_ends_C1: Indices, table: Indices) -> Int:
    """Number of the column of this name, or -1."""
    place = _hash(data, start, end) & (table.size - 1)
    while table[place] >= 0:
        c = table[place]
        first = name_ends_C1[c]
        if name_ends_C1[c + 1] - first == end - start:
            same = True
            for i in range(end - start):
                if names[first + i] != data[start + i]:
                    same = False
                    break
            if same:
                return c
        place = (place + 1) & (table.size - 1)
    return -1


@njit(cache=True, nogil=True)
def top_level(data: Bytes, wanted: Int, spans_P3: Indices) -> Int:
    """Where the wanted fields stand, a bit for each number below 63: rows of (tag, start, end), as they come.

    Of a number the value stands in place of the start. Returns how many there are, more than fit if need be;
    -1: malformed."""
    pos = 0
    end = data.size
    found = 0
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
            if found < spans_P3.shape[0]:
                spans_P3[found, 0] = key
                spans_P3[found, 1] = start
                spans_P3[found, 2] = pos
            found += 1
        else:
            pos = skip_field(data, key, pos, end)
        if pos < 0:
            return -1
    return found


@njit(cache=True, nogil=True)
def _value(data: Bytes, key: Int, pos: Int, end: Int, wire_F: Indices, counts_F: Indices) -> Int:
    """Step over one field of a message with lists of values, counting them."""
    field = key >> 3
    how = wire_F[field] if field < wire_F.size else 0
    if how == 0:
        return skip_field(data, key, pos, end)
    if key & 7 == 2:
        start, stop = read_span(data, pos, end)
        if stop < 0:
            return -1
        if how == 2:
            counts_F[field] += 1
        elif how == 1:
            count = 0
            run = 0
            for at in range(start, stop):
                run += 1
                if data[at] < 0x80:
                    count += 1
                    run = 0
                elif run == 10:
                    return -1
            if run > 0:
                return -1
            counts_F[field] += count
        else:
            if (stop - start) % how != 0:
                return -1
            counts_F[field] += (stop - start) // how
        return stop
    after = skip_field(data, key, pos, end)
    if (key & 7 == 0 and how == 1) or (key & 7 == 5 and how == 4) or (key & 7 == 1 and how == 8):
        counts_F[field] += 1
    return after


@njit(cache=True, nogil=True)
def _shape(data: Bytes, pos: Int, end: Int, facts: Facts) -> bool:
    """Read a TensorShapeProto: its rank and first two dimensions. False: malformed."""
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
        _dimension(facts, size)
    return True


@njit(cache=True, nogil=True)
def _dimension(facts: Facts, size: Int) -> None:
    if facts[RANK] == 0:
        facts[ROWS] = size
    elif facts[RANK] == 1:
        facts[WIDTH] = size
    facts[RANK] += 1


@njit(cache=True, nogil=True)
def _no_facts(facts: Facts, begin: Int, end: Int) -> None:
    facts[:] = 0
    facts[BEGIN] = begin
    facts[END] = end
    facts[ROWS] = 1
    facts[WIDTH] = 1


@njit(cache=True, nogil=True)
def _tensor(data: Bytes, pos: Int, end: Int, facts: Facts, counts_F: Indices) -> bool:
    """Note what a TensorProto says of itself. False: malformed."""
    while pos < end:
        if (
            data[pos] == 0x42 and pos + 1 < end and data[pos + 1] < 0x80
        ):  # a short text: most of most requests
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
            facts[TYPE] = np.int64(np.int32(value))
        elif key == 0x12:
            start, pos = read_span(data, pos, end)
            if pos >= 0 and not _shape(data, start, pos, facts):
                return False
        elif key == 0x22:
            facts[CONTENT_BEGIN], pos = read_span(data, pos, end)
            facts[CONTENT_END] = pos
        else:
            pos = _value(data, key, pos, end, TENSOR_WIRE, counts_F)
        if pos < 0:
            return False
    return True


@njit(cache=True, nogil=True)
def locate_predict(
    data: Bytes,
    map_tag: Int,
    names: Bytes,
    name_ends_C1: Indices,
    table: Indices,
    ignore_unknown: bool,
    facts_CF: Facts,
) -> tuple[Int, Int, Int]:
    """Note where the tensor of each column is. Returns what is wrong and the span of the name it is about."""
    counts_F = np.zeros(TENSOR_WIRE.size, dtype=np.int64)
    facts = np.empty(FACTS, dtype=np.int64)
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
        _no_facts(facts, pos, stop)
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
                if pos >= 0 and not _tensor(data, start, pos, facts, counts_F):
                    return MALFORMED, name, name_end
            else:
                pos = skip_field(data, key, pos, stop)
            if pos < 0:
                return MALFORMED, name, name_end
        c = _find(data, name, name_end, names, name_ends_C1, table)
        if c < 0:
            if not ignore_unknown:
                return UNKNOWN, name, name_end
            continue
        dtype = facts[TYPE]
        element = ELEMENT_OF_DTYPE[dtype] if 0 <= dtype < ELEMENT_OF_DTYPE.size else 0
        facts[ELEMENT] = element
        facts[LIST] = TENSOR_LIST[element]
        facts[COUNT] = counts_F[facts[LIST]]
        size = SIZE[element]
        length = facts[CONTENT_END] - facts[CONTENT_BEGIN]
        if length > 0:  # it counts before the list, as in TensorFlow
            facts[LIST] = 0
            facts[COUNT] = length // size if size > 0 and length % size == 0 else -1
        elif facts[COUNT] == 1 and facts[RANK] >= 1 and facts[WIDTH] == 1 and facts[ROWS] > 1:
            facts[COUNT] = facts[ROWS]  # a list of one value stands for a tensor full of it
        facts_CF[c] = facts
    return OK, 0, 0


@njit(cache=True, nogil=True)
def _element_named(data: Bytes, start: Int, end: Int) -> Int:
    """The element of a datatype's name, 0 if there is none."""
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
def _input(data: Bytes, pos: Int, end: Int, facts: Facts, counts_F: Indices) -> tuple[Int, Int]:
    """Note what an InferInputTensor says of itself. Returns the span of its name; -1 for its end: malformed."""
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
                facts[ELEMENT] = _element_named(data, start, pos)
                facts[TYPE] = start << 32 | pos
        elif key == 0x1A:
            at, pos = read_span(data, pos, end)
            while 0 <= at < pos:
                value, at = read_varint(data, at, pos)
                _dimension(facts, np.int64(value))
            if at < 0:
                return name, -1
        elif key == 0x18:
            value, pos = read_varint(data, pos, end)
            _dimension(facts, np.int64(value))
        elif key == INPUT_CONTENTS:
            at, pos = read_span(data, pos, end)
            while 0 <= at < pos:
                key, at = read_tag(data, at, pos)
                if at >= 0:
                    at = _value(data, key, at, pos, CONTENTS_WIRE, counts_F)
            if at < 0:
                return name, -1
        else:
            pos = skip_field(data, key, pos, end)
        if pos < 0:
            return name, -1
    return name, name_end


@njit(cache=True, nogil=True)
def _count_raw_texts(data: Bytes, pos: Int, end: Int) -> Int:
    """How many texts stand here, each after its length; -1: they do not end where the bytes do."""
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
def locate_infer(
    data: Bytes,
    names: Bytes,
    name_ends_C1: Indices,
    table: Indices,
    ignore_unknown: bool,
    facts_CF: Facts,
) -> tuple[Int, Int, Int, Int, Int]:
    """Note where the tensor of each column is. Returns what is wrong, the span of the name it is about, and
    how many inputs and raw contents there are."""
    end = data.size
    pos = 0
    inputs = 0
    raws = 0
    while pos < end:  # how much there is
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
    facts = np.empty(FACTS, dtype=np.int64)
    pos = 0
    n = 0
    while n < inputs:
        key, pos = read_tag(data, pos, end)
        if key != 0x2A:
            pos = skip_field(data, key, pos, end)
            continue
        pos, stop = read_span(data, pos, end)
        _no_facts(facts, pos, stop)
        counts_F[:] = 0
        name, name_end = _input(data, pos, stop, facts, counts_F)
        if name_end < 0:
            return MALFORMED, 0, 0, inputs, raws
        pos = stop
        c = _find(data, name, name_end, names, name_ends_C1, table)
        if c < 0:
            if not ignore_unknown:
                return UNKNOWN, name, name_end, inputs, raws
            n += 1
            continue
        if facts_CF[c, END] > 0:
            return TWICE, name, name_end, inputs, raws
        element = facts[ELEMENT]
        facts[LIST] = CONTENTS_LIST[element]
        if raws > 0:
            for field in range(counts_F.size):
                facts[RAW_COUNT] += counts_F[field]  # contents beside raw contents: not both
            facts[LIST] = 0
            facts[COUNT] = -1
            if n < raws:
                facts[CONTENT_BEGIN] = raw_begins_R[n]
                facts[CONTENT_END] = raw_ends_R[n]
                length = raw_ends_R[n] - raw_begins_R[n]
                if element == BYTES:
                    facts[COUNT] = _count_raw_texts(data, raw_begins_R[n], raw_ends_R[n])
                elif element > 0 and length % SIZE[element] == 0:
                    facts[COUNT] = length // SIZE[element]
        else:
            facts[COUNT] = counts_F[facts[LIST]]
            if U8 <= element < U32:  # the list is of 32-bit numbers
                facts[ELEMENT] = U32
        facts_CF[c] = facts
        n += 1
    return OK, 0, 0, inputs, raws


@njit(cache=True, nogil=True)
def check(facts_CF: Facts, max_rows: Int, bytes_there: Int, kind_C: Bytes) -> tuple[Int, Int, Int, Int]:
    """Whether the tensors fit their shapes and each other. Returns what is wrong, with which column, the number
    of rows, and how many columns do not have one value a row or need 64 bits without a sign."""
    rows = np.int64(-1)
    first = 0
    special = 0
    for c in range(facts_CF.shape[0]):
        facts = facts_CF[c]
        kind_C[c] = ABSENT
        if facts[END] == 0:
            continue
        element = facts[ELEMENT]
        if element == 0:
            return NO_VALUES, c, 0, 0
        if facts[ROWS] > max_rows and facts[RANK] >= 1:
            return TOO_MANY, c, 0, 0
        if facts[RANK] > 2 or facts[ROWS] < 0 or facts[WIDTH] < 0 or facts[WIDTH] > bytes_there:
            return SHAPE, c, 0, 0
        if facts[COUNT] != facts[ROWS] * facts[WIDTH] or facts[RAW_COUNT] > 0:
            return SHAPE, c, 0, 0
        if rows < 0:
            rows = facts[ROWS]
            first = c
        elif facts[ROWS] != rows:
            return RAGGED, c, first, 0
        if facts[WIDTH] != 1 or element == U64:
            special += 1
        else:
            kind_C[c] = KIND[element]
    if rows <= 0:
        return NO_ROWS, 0, 0, 0
    return OK, 0, rows, special
