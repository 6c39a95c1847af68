"""Reads delimiter-separated rows: Criteo logs and CSV files.

    a block without a quote    64 bytes at a time: every delimiter and line end is a bit of a mask
    a block with quotes (CSV)  byte by byte, the grammar in `_row`

A bad CSV row (wrong column count, bad quotes) costs only the line it begins on: reading continues at the
next line. So a quote that is never closed cannot swallow the rest of the file.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.data.readers.byte_scan import NEWLINE, count_byte, find_byte, first_one, last_byte, match_64
from clickline.data.readers.reader import (
    BAD_UTF8,
    BLOCK_BYTES,
    UNCLOSED_QUOTE,
    WRONG_COLUMN_COUNT,
    missing_column_error,
)
from clickline.data.readers.text_blocks import LineBlocks, bad_rows
from clickline.errors import DataError
from clickline.numba_cache import njit
from clickline.records import CRITEO_FIELDS, Block, RawRows, TextColumn

_QUOTE = np.uint8(ord('"'))
_RETURN = np.uint8(13)
_NUMBER_COLUMNS = 14  # columns of a Criteo row that hold numbers: its label and I1..I13

# Returned by `_row` in place of a column count, and recorded for a bad row.
_OPEN = -1  # the text ends inside quotes
_BROKEN = -2  # something other than a delimiter follows a closing quote
_NOT_UTF8 = -3


@dataclass(frozen=True)
class _Table:
    """The payload of a block: its text, with the delimiter and column names of the file."""

    data: NDArray[np.uint8]
    delimiter: str
    names: tuple[str, ...]


class CriteoReader:
    """Criteo's 40 columns: label, I1..I13, C1..C26; tab or comma, with or without a header line."""

    def __init__(self, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        lines = LineBlocks(file, path, block_bytes=self._block_bytes)
        first = lines.first_line()
        delimiter = max("\t,", key=lambda character: first.count(character.encode()))
        cells = [cell.strip(' "') for cell in first.decode("utf-8", "replace").split(delimiter)]
        names = CRITEO_FIELDS
        if len(cells) == len(CRITEO_FIELDS) and all(map(_is_name, cells[:_NUMBER_COLUMNS])):
            lines.skip_line()
            if set(cells) == set(CRITEO_FIELDS):
                names = tuple(cells)
        yield from _tables(lines, delimiter, names)

    def parse(self, block: Block) -> RawRows:
        table: _Table = block.payload
        return _split(block, table, range(len(table.names)))


def _is_name(cell: str) -> bool:
    """Whether a cell is a name, as in a header. A row may have one by mistake, but not in all number columns."""
    try:
        float(cell)
    except ValueError:
        return cell != ""
    return False


class CsvReader:
    """RFC 4180 CSV: quotes, doubled quotes, delimiters and line ends inside quotes.

    Blanks around a value are kept here: the encoder ignores them in every format.

    Columns are found by name: in each file's first line, or in `columns` if files have no header.
    Only the `wanted` ones are delivered.
    """

    def __init__(
        self,
        *,
        delimiter: str = ",",
        header: bool = True,
        columns: Sequence[str] = (),
        wanted: Sequence[str],
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._delimiter = delimiter
        self._header = header
        self._columns = tuple(columns)
        self._wanted = tuple(dict.fromkeys(wanted))
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        names = self._columns
        delimiter = np.uint8(ord(self._delimiter))

        def row_end(data: NDArray[np.uint8], last: bool) -> int:
            return _last_row_end(data, last, delimiter, len(names))

        lines = LineBlocks(file, path, row_end=row_end, block_bytes=self._block_bytes)
        if self._header:
            first = lines.first_line().decode("utf-8", "backslashreplace")
            if first:
                names = _header_cells(file, first, self._delimiter)
                lines.skip_line()
            else:  # an empty file, or one that is damaged before its first line end
                names = self._wanted
        self._check_columns(file, names)
        yield from _tables(lines, self._delimiter, names)

    def parse(self, block: Block) -> RawRows:
        table: _Table = block.payload
        places_of = {name: place for place, name in enumerate(table.names)}
        places = [places_of[name] for name in self._wanted]
        return _split(block, table, places, is_csv=True)

    def _check_columns(self, file: str, names: tuple[str, ...]) -> None:
        counts = Counter(names)
        for name in self._wanted:
            if counts[name] != 1:
                advice = "If the files have no header line, set data.header: false and data.columns"
                if len(names) == 1 and (
                    other := [character for character in ";\t|," if character in names[0]]
                ):
                    advice = f"If columns are separated by {other[0]!r}, set data.delimiter to it"
                raise missing_column_error(file, name, names, advice if self._header else "")


def _header_cells(file: str, line: str, delimiter: str) -> tuple[str, ...]:
    try:
        (cells,) = csv.reader([line], delimiter=delimiter, skipinitialspace=True)
    except csv.Error as error:  # a lone carriage return, an unclosed quote, a name of megabytes
        raise DataError(
            f"{file}: its first line is not a header: {line[:80]!r} ({error}). "
            "If the files have no header line, set data.header: false; lines must end in LF or CR LF"
        ) from error
    return tuple(cell.strip() for cell in cells)


def _tables(lines: LineBlocks, delimiter: str, names: tuple[str, ...]) -> Iterator[Block]:
    for block in lines:
        yield replace(block, payload=_Table(block.payload, delimiter, names))


def _split(
    block: Block,
    table: _Table,
    places: Sequence[int],
    *,
    is_csv: bool = False,
) -> RawRows:
    """The rows of a table's text; `places` are the indices of the wanted columns."""
    data, columns = table.data, len(table.names)
    delimiter = np.uint8(ord(table.delimiter))
    lines = count_byte(data, NEWLINE) + 1
    output_C = np.full(columns, -1, np.int64)
    output_C[list(places)] = np.arange(len(places))
    # A good row has all its delimiters, so many short lines need no large arrays; one more for an unfinished row.
    most = min(lines, count_byte(data, delimiter) // (columns - 1)) + 1 if columns > 1 else lines
    starts_SR = np.empty((len(places), most), np.int64)
    ends_SR = np.empty((len(places), most), np.int64)
    lines_R = np.empty(most, np.int64)
    bad_L4 = np.empty((lines, 4), np.int64)
    check_utf8 = bool(data.max(initial=0) >= 128)
    quoted = is_csv and find_byte(data, _QUOTE, 0) < len(data)
    kernel = _split_quoted if quoted else _split_plain
    values = data.copy() if quoted else data  # doubled quotes are replaced by single ones in place
    rows, bad = kernel(
        values, delimiter, output_C, check_utf8, block.first_line, starts_SR, ends_SR, lines_R, bad_L4
    )

    def describe(code: int) -> tuple[str, str]:
        if code == _NOT_UTF8:
            return BAD_UTF8, "bytes that are not UTF-8; write the file as UTF-8"
        if code in (_OPEN, _BROKEN):
            return UNCLOSED_QUOTE, f"a quoted value is not closed, or not as one of {columns} columns"
        found = f"more than {columns}" if quoted and code > columns else str(code)
        return WRONG_COLUMN_COUNT, f"{found} columns, {columns} expected"

    return RawRows(
        rows=rows,
        columns={
            table.names[place]: TextColumn(values, starts_SR[i, :rows], ends_SR[i, :rows])
            for i, place in enumerate(places)
        },
        lines_B=lines_R[:rows],
        bad=bad_rows(block, data, bad_L4[:bad], describe),
    )


@njit(cache=True, nogil=True)
def _record_bad(bad_L4: NDArray[np.int64], at: int, line: int, start: int, end: int, code: int) -> None:
    bad_L4[at, 0] = line
    bad_L4[at, 1] = start
    bad_L4[at, 2] = end
    bad_L4[at, 3] = code


@njit(cache=True, nogil=True)
def _is_utf8(data: NDArray[np.uint8], start: int, end: int) -> bool:
    """Well-formed UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing past U+10FFFF."""
    at = start
    while at < end:
        lead = data[at]
        at += 1
        if lead < 0x80:
            continue
        if 0xC2 <= lead <= 0xDF:
            more = 1
        elif 0xE0 <= lead <= 0xEF:
            more = 2
        elif 0xF0 <= lead <= 0xF4:
            more = 3
        else:
            return False
        if at + more > end:
            return False
        second = data[at]
        if (
            (lead == 0xE0 and second < 0xA0)
            or (lead == 0xED and second > 0x9F)
            or (lead == 0xF0 and second < 0x90)
            or (lead == 0xF4 and second > 0x8F)
        ):
            return False
        for i in range(at, at + more):
            if data[i] & 0xC0 != 0x80:
                return False
        at += more
    return True


@njit(cache=True, nogil=True)
def _split_plain(
    data: NDArray[np.uint8],
    delimiter: np.uint8,
    output_C: NDArray[np.int64],
    check_utf8: bool,
    first_line: int,
    starts_SR: NDArray[np.int64],
    ends_SR: NDArray[np.int64],
    lines_R: NDArray[np.int64],
    bad_L4: NDArray[np.int64],
) -> tuple[int, int]:
    """Split at every delimiter and line end. Returns the numbers of good and bad rows."""
    columns = output_C.size
    rows = bad = column = line_start = value_start = 0
    line = first_line
    for at in range(0, data.size + 1, 64):
        line_ends = match_64(data, at, NEWLINE)
        if at + 64 > data.size:  # the end of the text also ends its last line; an empty line has no effect
            line_ends |= np.uint64(1) << np.uint64(data.size - at)
        ends = line_ends | match_64(data, at, delimiter)
        while ends:
            lowest = ends & (~ends + np.uint64(1))
            ends ^= lowest
            end = at + first_one(lowest)
            if column < columns and output_C[column] >= 0:
                starts_SR[output_C[column], rows] = value_start
                ends_SR[output_C[column], rows] = end
            column += 1
            value_start = end + 1
            if lowest & line_ends:
                if end > line_start and data[end - 1] == _RETURN:
                    end -= 1
                if end > line_start:
                    code = column
                    if column == columns and check_utf8 and not _is_utf8(data, line_start, end):
                        code = _NOT_UTF8
                    if code == columns:
                        if output_C[columns - 1] >= 0:
                            ends_SR[output_C[columns - 1], rows] = end
                        lines_R[rows] = line
                        rows += 1
                    else:
                        _record_bad(bad_L4, bad, line, line_start, end, code)
                        bad += 1
                line += 1
                column = 0
                line_start = value_start
    return rows, bad


@njit(cache=True, nogil=True)
def _is_blank(byte: np.uint8, delimiter: np.uint8) -> bool:
    return bool((byte == 32 or byte == 9) and byte != delimiter)


@njit(cache=True, nogil=True)
def _row(
    data: NDArray[np.uint8],
    at: int,
    delimiter: np.uint8,
    starts_C: NDArray[np.int64],
    ends_C: NDArray[np.int64],
    doubled_C: NDArray[np.bool_],
) -> tuple[int, int]:
    """Parse the CSV row at `at`: returns where the next one begins, and the number of columns or an error code.

    A value is quoted if its first character after blanks is a quote; a quote elsewhere is an ordinary character.
    Parsing stops at the first extra column: the end of such a row would be a guess.
    """
    columns = starts_C.size
    column = 0
    while True:
        if column == columns:
            return at, columns + 1
        start = at
        while start < data.size and _is_blank(data[start], delimiter):
            start += 1
        doubled = False
        if start < data.size and data[start] == _QUOTE:
            start += 1
            end = find_byte(data, _QUOTE, start)
            while end + 1 < data.size and data[end + 1] == _QUOTE:
                doubled = True
                end = find_byte(data, _QUOTE, end + 2)
            if end >= data.size:
                return end, _OPEN
            at = end + 1
            while at < data.size and _is_blank(data[at], delimiter):
                at += 1
            if at < data.size and data[at] == _RETURN and (at + 1 == data.size or data[at + 1] == NEWLINE):
                at += 1
            if at < data.size and data[at] != delimiter and data[at] != NEWLINE:
                return at, _BROKEN
        else:
            start = at
            while at < data.size and data[at] != delimiter and data[at] != NEWLINE:
                at += 1
            end = at
            if end > start and data[end - 1] == _RETURN and (at == data.size or data[at] == NEWLINE):
                end -= 1
        starts_C[column] = start
        ends_C[column] = end
        doubled_C[column] = doubled
        column += 1
        if at == data.size:
            return at, column
        at += 1
        if data[at - 1] == NEWLINE:
            return at, column


@njit(cache=True, nogil=True)
def _last_row_end(data: NDArray[np.uint8], last: bool, delimiter: np.uint8, columns: int) -> int:
    """The end of the last row that is certain from this text alone; the end of the text if the file ends here."""
    if last:
        return data.size
    if find_byte(data, _QUOTE, 0) == data.size:
        return last_byte(data, NEWLINE) + 1
    spans_C = np.empty(columns, np.int64)
    doubled_C = np.empty(columns, np.bool_)
    at = 0
    while at < data.size:
        row_end, found = _row(data, at, delimiter, spans_C, spans_C, doubled_C)
        if found == _OPEN or (row_end == data.size and data[row_end - 1] != NEWLINE):
            break  # more text may still complete the row
        if found != columns:
            row_end = find_byte(data, NEWLINE, at) + 1
        if row_end > data.size:
            break
        at = row_end
    return at


@njit(cache=True, nogil=True)
def _split_quoted(
    data: NDArray[np.uint8],
    delimiter: np.uint8,
    output_C: NDArray[np.int64],
    check_utf8: bool,
    first_line: int,
    starts_SR: NDArray[np.int64],
    ends_SR: NDArray[np.int64],
    lines_R: NDArray[np.int64],
    bad_L4: NDArray[np.int64],
) -> tuple[int, int]:
    """Like `_split_plain`, for text with quotes; doubled quotes become single ones in `data`."""
    columns = output_C.size
    starts_C = np.empty(columns, np.int64)
    ends_C = np.empty(columns, np.int64)
    doubled_C = np.empty(columns, np.bool_)
    rows = bad = at = 0
    line = first_line
    while at < data.size:
        row_end, code = _row(data, at, delimiter, starts_C, ends_C, doubled_C)
        line_end = find_byte(data, NEWLINE, at)
        next_line = min(line_end + 1, data.size)
        if line_end > at and data[line_end - 1] == _RETURN:
            line_end -= 1
        if line_end == at:
            at = next_line
            line += 1
            continue
        if code != columns:
            if row_end > next_line:  # any other code depends on lines that may be rows themselves
                code = _OPEN
            _record_bad(bad_L4, bad, line, at, line_end, code)
            bad += 1
            at = next_line
            line += 1
            continue
        row_line = line
        line += count_byte(data[at:row_end], NEWLINE)
        if check_utf8 and not _is_utf8(data, at, row_end):
            _record_bad(bad_L4, bad, row_line, at, line_end, _NOT_UTF8)
            bad += 1
            at = row_end
            continue
        lines_R[rows] = row_line
        for column in range(columns):
            if output_C[column] >= 0:
                if doubled_C[column]:
                    ends_C[column] = _undouble(data, starts_C[column], ends_C[column])
                starts_SR[output_C[column], rows] = starts_C[column]
                ends_SR[output_C[column], rows] = ends_C[column]
        rows += 1
        at = row_end
    return rows, bad


@njit(cache=True, nogil=True)
def _undouble(data: NDArray[np.uint8], start: int, end: int) -> int:
    """Replace each pair of quotes in data[start:end] by one quote; returns the new end."""
    to = start
    at = start
    while at < end:
        data[to] = data[at]
        at += 2 if data[at] == _QUOTE else 1
        to += 1
    return to
