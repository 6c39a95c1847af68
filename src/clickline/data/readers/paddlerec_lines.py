"""Reads lines of `click:0 dense_feature:0.5 … 1:737395 … 26:306163`, the format of PaddleRec's models.

The slot comes before its feasign; tokens may be in any order. A slot, a label or a weight may have a name instead of a
number (`conversion:1`, `150_14:22`). Columns without a name come first: `8,1,0,210:737395,…` of PaddleRec's multi-task
models. Dense values and the values of such columns stay text here: only the encoder and the targets parse numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
)
from clickline.data.readers.text_blocks import LineBlocks, bad_rows
from clickline.features import slot_number
from clickline.numba_cache import njit
from clickline.protobuf_wire import NameTable, find_name
from clickline.records import Block, RawRows, TextColumn

_DENSE = np.frombuffer(b"dense_feature", np.uint8)
_GOOD, _LABEL, _TOKEN = -1, -2, -3  # codes >= 0 of bad rows are their number of dense values
_IGNORED, _SLOT = -1, -2  # roles of names; roles >= 0 are indices of single values
_LAYOUT_LINES = 100


@dataclass(frozen=True)
class NamedTokens:
    """The tokens of a line that are known by a name, or by their place at its beginning."""

    targets: tuple[str, ...] = ("click",)  # one value in every line: label, weight, time
    dense: tuple[str, ...] = ()  # at most one value in a line
    slots: tuple[str, ...] = ()  # a feasign
    ignored: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # the first values of a line, which are written without a name

    @property
    def single_valued(self) -> tuple[str, ...]:
        return (*self.targets, *self.dense)


CLICK_ONLY = NamedTokens()


class PaddleRecReader:
    """Reads `dense` dense values, the chosen slots and the named tokens of each line.

    Columns: `click` or other targets, `dense_1`, `dense_2`, …, and one per slot, named after its number or name.
    """

    def __init__(
        self,
        *,
        dense: int,
        slots: Sequence[int],
        named: NamedTokens = CLICK_ONLY,
        modulo: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._dense = dense
        self._named = named
        self._slots = {slot: str(slot) for slot in slots} | {slot_number(name): name for name in named.slots}
        self._modulo = modulo or 0
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        return iter(LineBlocks(file, path, block_bytes=self._block_bytes))

    def parse(self, block: Block) -> RawRows:
        data: NDArray[np.uint8] = block.payload
        tokens = _Tokens(data, block.first_line, self._dense, self._named, self._modulo)
        rows, dense = tokens.rows, self._dense

        def describe(code: int) -> tuple[str, str]:
            if code >= 0:
                return WRONG_COLUMN_COUNT, f"{code} dense values, {dense} expected"
            if code == _LABEL:
                return BAD_LABEL, f"a line must have {_expected(self._named)}"
            return (
                NOT_A_NUMBER,
                "a token is not slot:feasign with two integers below 2**64, and its name is not in data.fields (as "
                "label, weight, time, slot, dense or ignore)",
            )

        def text(k: int) -> TextColumn:
            return TextColumn(data, tokens.starts_KR[k, :rows], tokens.ends_KR[k, :rows])

        singles = self._named.single_valued
        return RawRows(
            rows=rows,
            columns={
                **{name: text(k) for k, name in enumerate(singles)},
                **{f"dense_{i + 1}": text(len(singles) + i) for i in range(dense)},
                **slot_columns(self._slots, tokens.slots_T, tokens.values_T, tokens.offsets_R1),
            },
            lines_B=tokens.lines_R[:rows],
            bad=bad_rows(block, data, tokens.bad_L4, describe),
        )


def _expected(named: NamedTokens) -> str:
    """What a line must have: `one click:… and conversion:…, and begin with the columns id, user`."""
    tokens = [f"{name}:…" for name in named.targets if name not in named.columns]
    parts = [f"one {' and '.join(tokens)}"] if tokens else []
    if named.columns:
        parts.append(f"the columns {', '.join(named.columns)} at its beginning")
    return ", and ".join(parts)


def dense_and_slots_in(
    payload: NDArray[np.uint8], named: NamedTokens = CLICK_ONLY
) -> tuple[int, tuple[int, ...]]:
    """The most frequent number of dense values in the first lines of a block, and all numbered slots of the block."""
    counts: Counter[int] = Counter()
    start = 0
    while start < len(payload) and counts.total() < _LAYOUT_LINES:
        end = find_byte(payload, NEWLINE, start)
        if line := payload[start:end].tobytes().strip():
            counts[sum(token.startswith(b"dense_feature:") for token in line.split())] += 1
        start = end + 1
    dense = counts.most_common(1)[0][0] if counts else 0
    tokens = _Tokens(payload, 1, dense, named, 0)
    numbers = set(distinct_slots(tokens.slots_T)) - {slot_number(name) for name in named.slots}
    return dense, tuple(sorted(numbers))


class _Tokens:
    """The tokens of a block, in arrays trimmed to their length."""

    def __init__(
        self, data: NDArray[np.uint8], first_line: int, dense: int, named: NamedTokens, modulo: int
    ) -> None:
        lines = count_byte(data, NEWLINE) + 1
        tokens = count_byte(data, COLON)
        singles = named.single_valued
        by_name = {name: (k, 0) for k, name in enumerate(singles) if name not in named.columns}
        by_name |= {name: (_SLOT, slot_number(name)) for name in named.slots}
        by_name |= {name: (_IGNORED, 0) for name in named.ignored if name not in named.columns}
        self.starts_KR = np.empty((len(singles) + dense, lines), np.int64)
        self.ends_KR = np.empty((len(singles) + dense, lines), np.int64)
        self.lines_R = np.empty(lines, np.int64)
        slots_T, values_T = np.empty(tokens, np.uint64), np.empty(tokens, np.uint64)
        offsets_R1 = np.zeros(lines + 1, np.int64)
        bad_L4 = np.empty((lines, 4), np.int64)
        columns_C = [singles.index(name) if name in singles else _IGNORED for name in named.columns]
        self.rows, bad = _read_lines(
            data,
            first_line,
            np.uint64(modulo),
            *NameTable.of(tuple(by_name)),
            np.array([role for role, _ in by_name.values()], np.int64),
            np.array([slot for _, slot in by_name.values()], np.uint64),
            np.array(columns_C, np.int64),
            len(singles),
            len(named.targets),
            self.starts_KR,
            self.ends_KR,
            self.lines_R,
            slots_T,
            values_T,
            offsets_R1,
            bad_L4,
        )
        self.offsets_R1 = offsets_R1[: self.rows + 1]
        self.slots_T, self.values_T = slots_T[: self.offsets_R1[-1]], values_T[: self.offsets_R1[-1]]
        self.bad_L4 = bad_L4[:bad]


# ---- kernels: `names` to `slots_N` describe the named tokens; K single values, the `singles` named ones first ----


@njit(cache=True, nogil=True)
def _read_lines(
    data: NDArray[np.uint8],
    first_line: int,
    modulo: np.uint64,
    names: NDArray[np.uint8],
    name_ends: NDArray[np.int64],
    name_slots: NDArray[np.int64],
    roles_N: NDArray[np.int64],
    slots_N: NDArray[np.uint64],
    columns_C: NDArray[np.int64],
    singles: int,
    targets: int,
    starts_KR: NDArray[np.int64],
    ends_KR: NDArray[np.int64],
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
                data,
                at,
                end,
                modulo,
                names,
                name_ends,
                name_slots,
                roles_N,
                slots_N,
                columns_C,
                singles,
                targets,
                rows,
                starts_KR,
                ends_KR,
                slots_T,
                values_T,
                offsets_R1[rows],
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
    names: NDArray[np.uint8],
    name_ends: NDArray[np.int64],
    name_slots: NDArray[np.int64],
    roles_N: NDArray[np.int64],
    slots_N: NDArray[np.uint64],
    columns_C: NDArray[np.int64],
    singles: int,
    targets: int,
    row: int,
    starts_KR: NDArray[np.int64],
    ends_KR: NDArray[np.int64],
    slots_T: NDArray[np.uint64],
    values_T: NDArray[np.uint64],
    tokens: int,
) -> tuple[int, int]:
    for k in range(singles):
        starts_KR[k, row] = -1
        ends_KR[k, row] = -1
    for c in range(columns_C.size):
        while at < end and is_blank(data[at]):
            at += 1
        start = at
        at = _value_end(data, at, end)
        if at == start:
            return _LABEL, tokens
        if columns_C[c] >= 0:
            starts_KR[columns_C[c], row] = start
            ends_KR[columns_C[c], row] = at
    dense = singles
    while True:
        while at < end and is_blank(data[at]):
            at += 1
        if at == end:
            break
        start = at
        if np.uint8(48) <= data[at] <= np.uint8(57):
            slot, at = read_u64(data, at, end)
            if 0 <= at < end and data[at] == COLON:
                value, at = read_u64(data, at + 1, end)
                if at < 0 or (at < end and not is_blank(data[at])):
                    return _TOKEN, tokens
                slots_T[tokens] = slot
                values_T[tokens] = value % modulo if modulo else value
                tokens += 1
                continue
        elif _has_key(data, at, end, _DENSE):
            start = at + _DENSE.size + 1
            at = _value_end(data, start, end)
            if dense < starts_KR.shape[0]:
                starts_KR[dense, row] = start
                ends_KR[dense, row] = at
            dense += 1
            continue
        at = start
        while at < end and data[at] != COLON and not is_blank(data[at]):
            at += 1
        name = find_name(data, start, at, names, name_ends, name_slots)
        if at == end or data[at] != COLON or name < 0:
            return _TOKEN, tokens
        role, start = roles_N[name], at + 1
        at = _value_end(data, start, end)
        if role == _SLOT:
            value, value_end = read_u64(data, start, end)
            if value_end != at:
                return _TOKEN, tokens
            slots_T[tokens] = slots_N[name]
            values_T[tokens] = value % modulo if modulo else value
            tokens += 1
        elif role >= 0:
            if starts_KR[role, row] >= 0:
                return _LABEL, tokens
            starts_KR[role, row] = start
            ends_KR[role, row] = at
    for k in range(targets):
        if starts_KR[k, row] < 0:
            return _LABEL, tokens
    for k in range(targets, singles):
        if starts_KR[k, row] < 0:  # a missing value is an empty text
            starts_KR[k, row] = 0
            ends_KR[k, row] = 0
    if dense != starts_KR.shape[0]:
        return dense - singles, tokens
    return _GOOD, tokens


@njit(cache=True, nogil=True)
def _value_end(data: NDArray[np.uint8], at: int, end: int) -> int:
    while at < end and not is_blank(data[at]):
        at += 1
    return at


@njit(cache=True, nogil=True)
def _has_key(data: NDArray[np.uint8], at: int, end: int, key: NDArray[np.uint8]) -> bool:
    """Whether the text at `at` is `key:`."""
    if at + key.size >= end or data[at + key.size] != COLON:
        return False
    same = 0
    while same < key.size and data[at + same] == key[same]:
        same += 1
    return bool(same == key.size)
