"""Reads lines of `show click feasign:slot feasign:slot …`, the slot data of ElasticCTR and PaddleRec.

The first token may also be the label as `0:1` or `1:1` (PaddleRec's slot_dnn), which stands for one impression.
Lines of several tasks begin with other columns, as integers or as `label:number`: `show click conversion …`.
Feasigns are u64 and come before their slot; a slot may occur several times in a line, or not at all;
feasign 0 is a missing value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.data.readers.byte_scan import NEWLINE, count_byte, find_byte
from clickline.data.readers.reader import BAD_LABEL, BLOCK_BYTES, NOT_A_NUMBER
from clickline.data.readers.text_blocks import LineBlocks, bad_rows
from clickline.errors import ConfigError, Mistake
from clickline.numba_cache import njit
from clickline.records import Block, IntegerColumn, RawRows

COLON = np.uint8(ord(":"))
DEFAULT_COLUMNS = ("show", "click")

_GOOD, _LABEL, _TOKEN = 0, 1, 2
_MAX_LISTED_MISTAKES = 10
_MAX_U64 = np.uint64(2**64 - 1)


class SlotReader:
    """Reads the chosen slots of each line.

    Columns: `columns`, which a line begins with (`show` and `click` if none are given), and one per slot, named after
    its number. Feasigns are reduced by `modulo` first.
    """

    def __init__(
        self,
        *,
        slots: Sequence[int],
        columns: Sequence[str] = (),
        modulo: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._slots = {slot: str(slot) for slot in slots}
        self._columns = columns
        self._modulo = modulo or 0
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        return iter(LineBlocks(file, path, block_bytes=self._block_bytes))

    def parse(self, block: Block) -> RawRows:
        data: NDArray[np.uint8] = block.payload
        tokens = _Tokens(data, block.first_line, len(self._columns), self._modulo)

        def describe(code: int) -> tuple[str, str]:
            if code == _LABEL:
                return BAD_LABEL, f"a line must begin with {_expected(self._columns)}"
            return NOT_A_NUMBER, "a token is not feasign:slot with two integers below 2**64"

        return RawRows(
            rows=tokens.rows,
            columns={
                **{
                    name: unsigned_column(tokens.columns_CR[c, : tokens.rows])
                    for c, name in enumerate(self._columns or DEFAULT_COLUMNS)
                },
                **slot_columns(self._slots, tokens.slots_T, tokens.values_T, tokens.offsets_R1),
            },
            lines_B=tokens.lines_R[: tokens.rows],
            bad=bad_rows(block, data, tokens.bad_L4, describe),
        )


def _expected(columns: Sequence[str]) -> str:
    if columns:
        return f"the integers {', '.join(columns)}, or label:number with such integers"
    return "integers show >= 1 and click <= show, or with 0:1 or 1:1"


def slots_in(payload: NDArray[np.uint8], columns: Sequence[str] = ()) -> tuple[int, ...]:
    """The slots in a block's good rows, sorted."""
    return distinct_slots(_Tokens(payload, 1, len(columns), 0).slots_T)


class _Tokens:
    """The tokens of a block, in arrays trimmed to their length; `columns` is 0 for show and click."""

    def __init__(self, data: NDArray[np.uint8], first_line: int, columns: int, modulo: int) -> None:
        lines = count_byte(data, NEWLINE) + 1
        tokens = count_byte(data, COLON)
        self.columns_CR = np.empty((columns or len(DEFAULT_COLUMNS), lines), np.uint64)
        self.lines_R = np.empty(lines, np.int64)
        slots_T, values_T = np.empty(tokens, np.uint64), np.empty(tokens, np.uint64)
        offsets_R1 = np.zeros(lines + 1, np.int64)
        bad_L4 = np.empty((lines, 4), np.int64)
        self.rows, bad = _read_lines(
            data,
            first_line,
            np.uint64(modulo),
            columns,
            self.columns_CR,
            self.lines_R,
            slots_T,
            values_T,
            offsets_R1,
            bad_L4,
        )
        self.offsets_R1 = offsets_R1[: self.rows + 1]
        self.slots_T, self.values_T = slots_T[: self.offsets_R1[-1]], values_T[: self.offsets_R1[-1]]
        self.bad_L4 = bad_L4[:bad]


def read_slot_conf(file: str, content: bytes) -> tuple[int, ...]:
    """The slots listed in a `slot.conf`: one number per line; empty lines and comments after # are ignored."""
    first_seen: dict[int, int] = {}
    mistakes = []
    text = content.decode("utf-8-sig", "backslashreplace")
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if not (word.isascii() and word.isdigit() and int(word) < 2**64):
            remedy = "write one slot number (0 to 2**64-1) per line"
            mistakes.append(Mistake(file, number, "", f"{word!r} is not a slot number;", remedy))
        elif (slot := int(word)) in first_seen:
            problem = f"slot {slot} is already listed in line {first_seen[slot]};"
            mistakes.append(Mistake(file, number, "", problem, "remove one of the two"))
        else:
            first_seen[slot] = number
    if not first_seen and not mistakes:
        mistakes.append(Mistake(file, 0, "", "no slot is listed;", "write one slot number per line"))
    if len(mistakes) > _MAX_LISTED_MISTAKES:  # it is a different file altogether
        more = f"and {len(mistakes) - _MAX_LISTED_MISTAKES:,} more lines like these;"
        mistakes[_MAX_LISTED_MISTAKES:] = [Mistake(file, 0, "", more, "is it the right file?")]
    if mistakes:
        raise ConfigError(mistakes)
    return tuple(first_seen)


def unsigned_column(values_B: NDArray[np.uint64]) -> IntegerColumn:
    """One unsigned integer per row, none missing."""
    return IntegerColumn(values_B, np.zeros(len(values_B), np.bool_), signed=False)


def slot_columns(
    slots: Mapping[int, str],
    slots_T: NDArray[np.uint64],
    values_T: NDArray[np.uint64],
    offsets_R1: NDArray[np.int64],
) -> dict[str, IntegerColumn]:
    """Distribute tokens in line order to one column per chosen slot, each with its own offsets; 0 is missing.

    `slots` has the name of each slot by its number."""
    chosen_S = np.array(sorted(slots), np.uint64)
    offsets_SR1 = np.zeros((len(chosen_S), len(offsets_R1)), np.int64)
    places_T = np.empty(len(slots_T), np.int64)
    _place(chosen_S, slots_T, offsets_R1, places_T, offsets_SR1)
    ends_S = np.cumsum(offsets_SR1[:, -1])
    starts_S = ends_S - offsets_SR1[:, -1]
    grouped_N = np.empty(int(ends_S[-1]) if len(ends_S) else 0, np.uint64)
    _group(places_T, values_T, starts_S.copy(), grouped_N)
    missing_N = grouped_N == 0
    columns = {}
    for i, slot in enumerate(chosen_S.tolist()):
        own = slice(starts_S[i], ends_S[i])
        columns[slots[slot]] = IntegerColumn(grouped_N[own], missing_N[own], False, offsets_SR1[i])
    return columns


def distinct_slots(slots_T: NDArray[np.uint64]) -> tuple[int, ...]:
    """The distinct slots of these tokens, sorted."""
    return tuple(np.unique(slots_T).tolist())


@njit(cache=True, nogil=True)
def is_blank(byte: np.uint8) -> bool:
    """Whether a byte separates tokens: a space, a tab, a comma, or the \\r of a line end."""
    return bool(byte <= 44 and (byte == 32 or byte == 9 or byte == 44 or byte == 13))  # digits are above


@njit(cache=True, nogil=True)
def read_u64(data: NDArray[np.uint8], at: int, end: int) -> tuple[np.uint64, int]:
    """The unsigned integer at `at` and its end; -1 if there is none or it does not fit into 64 bits."""
    value = np.uint64(0)
    start = at
    while at < end:
        digit = np.uint64(data[at]) - np.uint64(48)
        if digit > np.uint64(9):
            break
        if at - start >= 19 and value > (_MAX_U64 - digit) // np.uint64(10):
            return np.uint64(0), -1
        value = value * np.uint64(10) + digit
        at += 1
    return value, at if at > start else -1


@njit(cache=True, nogil=True)
def _read_lines(
    data: NDArray[np.uint8],
    first_line: int,
    modulo: np.uint64,
    columns: int,
    columns_CR: NDArray[np.uint64],
    lines_R: NDArray[np.int64],
    slots_T: NDArray[np.uint64],
    values_T: NDArray[np.uint64],
    offsets_R1: NDArray[np.int64],
    bad_L4: NDArray[np.int64],
) -> tuple[int, int]:
    """Parse every line to a row of tokens or a bad row. Returns the numbers of both."""
    rows = bad = at = 0
    line = first_line
    while at < data.size:
        end = find_byte(data, NEWLINE, at)
        start = at
        while at < end and is_blank(data[at]):
            at += 1
        if at < end:
            if columns:
                code, at = _read_columns(data, at, end, rows, columns_CR)
            else:
                code, at = _read_label(data, at, end, rows, columns_CR)
            tokens = offsets_R1[rows]
            if code == _GOOD:
                code, tokens = _read_tokens(data, at, end, modulo, slots_T, values_T, tokens)
            if code == _GOOD:
                lines_R[rows] = line
                rows += 1
                offsets_R1[rows] = tokens
            else:
                bad_L4[bad] = (line, start, end, code)
                bad += 1
        line += 1
        at = end + 1
    return rows, bad


@njit(cache=True, nogil=True)
def _read_label(
    data: NDArray[np.uint8], at: int, end: int, row: int, columns_CR: NDArray[np.uint64]
) -> tuple[int, int]:
    """Read show and click of one line, or a label of one impression."""
    one = np.uint64(1)
    show, at = read_u64(data, at, end)
    if at < 0:
        return _LABEL, at
    if at < end and data[at] == COLON:
        click = show
        show, at = read_u64(data, at + 1, end)
        if show != one:
            return _LABEL, at
    else:
        start = at
        while at < end and is_blank(data[at]):
            at += 1
        if at == start:
            return _LABEL, at
        click, at = read_u64(data, at, end)
    if at < 0 or (at < end and not is_blank(data[at])) or show < one or click > show:
        return _LABEL, at
    columns_CR[0, row] = show
    columns_CR[1, row] = click
    return _GOOD, at


@njit(cache=True, nogil=True)
def _read_columns(
    data: NDArray[np.uint8], at: int, end: int, row: int, columns_CR: NDArray[np.uint64]
) -> tuple[int, int]:
    """Read the columns that one line begins with: integers, or integers with the number of their slot."""
    for c in range(columns_CR.shape[0]):
        while at < end and is_blank(data[at]):
            at += 1
        columns_CR[c, row], at = read_u64(data, at, end)
        if at >= 0 and at < end and data[at] == COLON:
            _, at = read_u64(data, at + 1, end)
        if at < 0 or (at < end and not is_blank(data[at])):
            return _LABEL, at
    return _GOOD, at


@njit(cache=True, nogil=True)
def _read_tokens(
    data: NDArray[np.uint8],
    at: int,
    end: int,
    modulo: np.uint64,
    slots_T: NDArray[np.uint64],
    values_T: NDArray[np.uint64],
    tokens: int,
) -> tuple[int, int]:
    while True:
        while at < end and is_blank(data[at]):
            at += 1
        if at == end:
            return _GOOD, tokens
        value, at = read_u64(data, at, end)
        if at < 0 or at == end or data[at] != COLON:
            return _TOKEN, tokens
        slot, at = read_u64(data, at + 1, end)
        if at < 0 or (at < end and not is_blank(data[at])):
            return _TOKEN, tokens
        slots_T[tokens] = slot
        values_T[tokens] = value % modulo if modulo else value
        tokens += 1


@njit(cache=True, nogil=True)
def _place(
    chosen_S: NDArray[np.uint64],
    slots_T: NDArray[np.uint64],
    offsets_R1: NDArray[np.int64],
    places_T: NDArray[np.int64],
    offsets_SR1: NDArray[np.int64],
) -> None:
    """Each token's index in `chosen_S` (-1: not chosen), and the offsets of each chosen slot's column."""
    if chosen_S.size == 0:
        places_T[:] = -1
        return
    place = 0
    for row in range(offsets_R1.size - 1):
        for token in range(offsets_R1[row], offsets_R1[row + 1]):
            slot = slots_T[token]
            if chosen_S[place] != slot:  # usually the previous slot, or the next one
                place = place + 1 if place + 1 < chosen_S.size else 0
                if chosen_S[place] != slot:
                    place = min(np.searchsorted(chosen_S, slot), chosen_S.size - 1)
            if chosen_S[place] == slot:
                places_T[token] = place
                offsets_SR1[place, row + 1] += 1
            else:
                places_T[token] = -1
    for place in range(chosen_S.size):
        for row in range(offsets_R1.size - 1):
            offsets_SR1[place, row + 1] += offsets_SR1[place, row]


@njit(cache=True, nogil=True)
def _group(
    places_T: NDArray[np.int64],
    values_T: NDArray[np.uint64],
    next_S: NDArray[np.int64],
    grouped_N: NDArray[np.uint64],
) -> None:
    for token in range(places_T.size):
        place = places_T[token]
        if place >= 0:
            grouped_N[next_S[place]] = values_T[token]
            next_S[place] += 1
