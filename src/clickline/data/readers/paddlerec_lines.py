"""Reads lines of `click:0 dense_feature:0.5 … 1:737395 … 26:306163`, the format of PaddleRec's models.

The slot comes before its feasign; tokens may be in any order. Dense values stay text here: only the encoder
parses numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.data.readers.byte_scan import NEWLINE, count_byte, find_byte
from clickline.data.readers.reader import BAD_LABEL, BLOCK_BYTES, NOT_A_NUMBER, WRONG_COLUMN_COUNT
from clickline.data.readers.slot_lines import (
    COLON,
    distinct_slots,
    is_blank,
    read_u64,
    slot_columns,
    unsigned_column,
)
from clickline.data.readers.text_blocks import LineBlocks, bad_rows
from clickline.numba_cache import njit
from clickline.records import Block, RawRows, TextColumn

_CLICK = np.frombuffer(b"click", np.uint8)
_DENSE = np.frombuffer(b"dense_feature", np.uint8)
_GOOD, _LABEL, _TOKEN = -1, -2, -3  # codes >= 0 of bad rows are their number of dense values
_LAYOUT_LINES = 100


class PaddleRecReader:
    """Reads `dense` dense values and the chosen slots of each line.

    Columns: `click`, `dense_1`, `dense_2`, …, and one per slot, named after its number.
    """

    def __init__(
        self,
        *,
        dense: int,
        slots: Sequence[int],
        modulo: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._dense = dense
        self._slots = slots
        self._modulo = modulo or 0
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        return iter(LineBlocks(file, path, block_bytes=self._block_bytes))

    def parse(self, block: Block) -> RawRows:
        data: NDArray[np.uint8] = block.payload
        tokens = _Tokens(data, block.first_line, self._dense, self._modulo)
        rows, dense = tokens.rows, self._dense

        def describe(code: int) -> tuple[str, str]:
            if code >= 0:
                return WRONG_COLUMN_COUNT, f"{code} dense values, {dense} expected"
            if code == _LABEL:
                return BAD_LABEL, "a line must have one click:0 or click:1"
            return NOT_A_NUMBER, "a token is not slot:feasign with two integers below 2**64"

        return RawRows(
            rows=rows,
            columns={
                "click": unsigned_column(tokens.clicks_R[:rows]),
                **{
                    f"dense_{i + 1}": TextColumn(data, tokens.starts_DR[i, :rows], tokens.ends_DR[i, :rows])
                    for i in range(dense)
                },
                **slot_columns(self._slots, tokens.slots_T, tokens.values_T, tokens.offsets_R1),
            },
            lines_B=tokens.lines_R[:rows],
            bad=bad_rows(block, data, tokens.bad_L4, describe),
        )


def dense_and_slots_in(payload: NDArray[np.uint8]) -> tuple[int, tuple[int, ...]]:
    """The most frequent number of dense values in the first lines of a block, and all slots of the block."""
    counts: Counter[int] = Counter()
    start = 0
    while start < len(payload) and counts.total() < _LAYOUT_LINES:
        end = find_byte(payload, NEWLINE, start)
        if line := payload[start:end].tobytes().strip():
            counts[sum(token.startswith(b"dense_feature:") for token in line.split())] += 1
        start = end + 1
    dense = counts.most_common(1)[0][0] if counts else 0
    tokens = _Tokens(payload, 1, dense, 0)
    return dense, distinct_slots(tokens.slots_T)


class _Tokens:
    """The tokens of a block, in arrays trimmed to their length."""

    def __init__(self, data: NDArray[np.uint8], first_line: int, dense: int, modulo: int) -> None:
        lines = count_byte(data, NEWLINE) + 1
        tokens = count_byte(data, COLON)
        self.clicks_R = np.empty(lines, np.uint64)
        self.starts_DR = np.empty((dense, lines), np.int64)
        self.ends_DR = np.empty((dense, lines), np.int64)
        self.lines_R = np.empty(lines, np.int64)
        slots_T, values_T = np.empty(tokens, np.uint64), np.empty(tokens, np.uint64)
        offsets_R1 = np.zeros(lines + 1, np.int64)
        bad_L4 = np.empty((lines, 4), np.int64)
        self.rows, bad = _read_lines(
            data,
            first_line,
            np.uint64(modulo),
            self.clicks_R,
            self.starts_DR,
            self.ends_DR,
            self.lines_R,
            slots_T,
            values_T,
            offsets_R1,
            bad_L4,
        )
        self.offsets_R1 = offsets_R1[: self.rows + 1]
        self.slots_T, self.values_T = slots_T[: self.offsets_R1[-1]], values_T[: self.offsets_R1[-1]]
        self.bad_L4 = bad_L4[:bad]


@njit(cache=True, nogil=True)
def _read_lines(
    data: NDArray[np.uint8],
    first_line: int,
    modulo: np.uint64,
    clicks_R: NDArray[np.uint64],
    starts_DR: NDArray[np.int64],
    ends_DR: NDArray[np.int64],
    lines_R: NDArray[np.int64],
    slots_T: NDArray[np.uint64],
    values_T: NDArray[np.uint64],
    offsets_R1: NDArray[np.int64],
    bad_L4: NDArray[np.int64],
) -> tuple[int, int]:
    """Parse every line to a row or a bad row. Returns the numbers of both."""
    rows = bad = at = 0
    line = first_line
    while at < data.size:
        end = find_byte(data, NEWLINE, at)
        start = at
        while at < end and is_blank(data[at]):
            at += 1
        if at < end:
            code, tokens = _read_line(
                data, at, end, modulo, rows, clicks_R, starts_DR, ends_DR, slots_T, values_T, offsets_R1[rows]
            )
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
def _read_line(
    data: NDArray[np.uint8],
    at: int,
    end: int,
    modulo: np.uint64,
    row: int,
    clicks_R: NDArray[np.uint64],
    starts_DR: NDArray[np.int64],
    ends_DR: NDArray[np.int64],
    slots_T: NDArray[np.uint64],
    values_T: NDArray[np.uint64],
    tokens: int,
) -> tuple[int, int]:
    dense = clicks = 0
    while True:
        while at < end and is_blank(data[at]):
            at += 1
        if at == end:
            break
        if np.uint8(48) <= data[at] <= np.uint8(57):
            slot, at = read_u64(data, at, end)
            if at < 0 or at == end or data[at] != COLON:
                return _TOKEN, tokens
            value, at = read_u64(data, at + 1, end)
            if at < 0 or (at < end and not is_blank(data[at])):
                return _TOKEN, tokens
            slots_T[tokens] = slot
            values_T[tokens] = value % modulo if modulo else value
            tokens += 1
        elif _has_key(data, at, end, _DENSE):
            at += _DENSE.size + 1
            start = at
            while at < end and not is_blank(data[at]):
                at += 1
            if dense < starts_DR.shape[0]:
                starts_DR[dense, row] = start
                ends_DR[dense, row] = at
            dense += 1
        elif _has_key(data, at, end, _CLICK):
            click, at = read_u64(data, at + _CLICK.size + 1, end)
            if at < 0 or (at < end and not is_blank(data[at])) or click > np.uint64(1):
                return _LABEL, tokens
            clicks_R[row] = click
            clicks += 1
        else:
            return _TOKEN, tokens
    if clicks != 1:
        return _LABEL, tokens
    if dense != starts_DR.shape[0]:
        return dense, tokens
    return _GOOD, tokens


@njit(cache=True, nogil=True)
def _has_key(data: NDArray[np.uint8], at: int, end: int, key: NDArray[np.uint8]) -> bool:
    """Whether the text at `at` is `key:`."""
    if at + key.size >= end or data[at + key.size] != COLON:
        return False
    same = 0
    while same < key.size and data[at + same] == key[same]:
        same += 1
    return bool(same == key.size)
