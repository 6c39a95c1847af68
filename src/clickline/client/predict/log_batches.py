"""Logs become batches of raw rows with their labels: what a client sends, and what the answers are measured by.

A row that training would have left out (no label, a number that is none) is left out here too: the server would refuse
the whole request that it is in, and `clickline evaluate` does not measure it either.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from clickline.data.input_blocks import Inputs
from clickline.data.targets import FileTimes, TargetFields, targets
from clickline.errors import DataError, TooManyBadRows
from clickline.features import Encoder, FeatureSpec
from clickline.features.raw_columns import as_text
from clickline.progress import Progress
from clickline.records import Block, IntegerColumn, NumberColumn, RawColumn, SourceFile, TextColumn
from clickline.storage.redaction import shown

_SHOWN_BAD = 3  # bad rows that a message shows


@dataclass(frozen=True)
class Batch:
    """Rows of one request."""

    columns: Mapping[str, RawColumn]
    label_B: NDArray[np.float32]
    weight_B: NDArray[np.float32]

    @property
    def rows(self) -> int:
        return self.label_B.size


@dataclass
class Logs:
    """The rows of some files that can be sent; what was wrong with the others."""

    inputs: Inputs
    features: FeatureSpec  # without statistics: it only tells which values can be encoded
    fields: TargetFields
    max_bad: float
    clock: float = field(default_factory=time.time)  # rows that happened long after it have a wrong time
    rows: int = 0  # usable ones, in one pass over the files
    bad: Counter[str] = field(default_factory=Counter)
    _places: list[str] = field(default_factory=list)

    def batches(self, size: int, *, endless: bool, progress: Progress) -> Iterator[Batch]:
        """All rows in order, `size` at a time. `endless`: over and over, batches reach from the end into the beginning;
        else only the last one may be smaller."""
        waiting: list[Batch] = []
        count = 0
        for piece in self._pieces(endless, progress):
            waiting.append(piece)
            count += piece.rows
            start = 0
            while count >= size:
                stop = waiting[-1].rows - (count - size)
                yield _joined([*waiting[:-1], _part(waiting[-1], start, stop)])
                waiting, start, count = [waiting[-1]], stop, count - size
            if start:
                waiting = [_part(waiting[-1], start, waiting[-1].rows)] if count else []
        if count:
            yield _joined(waiting)

    def _pieces(self, endless: bool, progress: Progress) -> Iterator[Batch]:
        yield from self._pass(progress)
        self._judge()
        while endless:
            yield from replace(self, bad=Counter(), _places=[])._pass(progress)

    def _pass(self, progress: Progress) -> Iterator[Batch]:
        for number, block, _ in self.inputs.blocks(progress):
            progress.advance(size=block.size)
            for row in block.faults:
                self.bad[row.reason] += row.count
                self._places.append(f"{row.file}:{row.line}: {row.detail}")
            if block.payload is not None:
                yield self._usable(self.inputs.files[number], block)

    def _usable(self, source: SourceFile, block: Block) -> Batch:
        raw = self.inputs.reader.parse(block)
        _, faults = Encoder(self.features).encode(raw)
        happened, more = targets(
            raw, self.fields, self.features.missing, FileTimes.of(source, block, self.clock)
        )
        for row in raw.bad:
            self.bad[row.reason] += row.count
            self._places.append(f"{row.file}:{row.line}: {row.detail}")
        keep_B = np.ones(raw.rows, dtype=np.bool_)
        for group in (*more, *faults):  # a row is left out once, for the first thing found wrong with it
            new_F = group.rows_F[keep_B[group.rows_F]]
            keep_B[new_F] = False
            if new_F.size:
                self.bad[group.reason] += new_F.size
                line = raw.lines_B[new_F[0]]
                self._places.append(f"{shown(source.uri)}:{line}: {group.describe(int(new_F[0]))}")
        del self._places[_SHOWN_BAD:]
        columns = {name: raw.columns[name] for name in self.features.columns}
        self.rows += int(keep_B.sum())
        batch = Batch(columns, happened.label_B, happened.weight_B)
        return batch if keep_B.all() else _take(batch, np.flatnonzero(keep_B))

    def _judge(self) -> None:
        """After a pass: whether the rows are worth measuring by, as every stage that reads logs has it."""
        bad = self.bad.total()
        first = shown(self.inputs.files[0].uri) + (" and others" if len(self.inputs.files) > 1 else "")
        if not self.rows and not bad:
            raise DataError(f"{first} holds no rows. Name the files that hold the logs.")
        seen = self.rows + bad
        if not self.rows or bad > self.max_bad * seen:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())
            raise TooManyBadRows(
                f"{bad:,} of {seen:,} rows of {first} are bad ({bad / seen:.2%}; data.max_bad allows "
                f"{self.max_bad:.2%}): {reasons}. The first: {'; '.join(self._places)}. "
                "Mend the data, check data.format, or raise data.max_bad."
            )


# ── pieces of batches ──────────────────────────────────────────────────────────────────────────


def _part(batch: Batch, start: int, stop: int) -> Batch:
    if (start, stop) == (0, batch.rows):
        return batch
    columns = {name: _column_part(column, start, stop) for name, column in batch.columns.items()}
    return Batch(columns, batch.label_B[start:stop], batch.weight_B[start:stop])


def _column_part(column: RawColumn, start: int, stop: int) -> RawColumn:
    """Rows of a column, as views of it."""
    offsets_B1 = column.offsets_B1
    if offsets_B1 is not None:
        start, stop, offsets_B1 = (
            int(offsets_B1[start]),
            int(offsets_B1[stop]),
            offsets_B1[start : stop + 1] - offsets_B1[start],
        )
    return _values(column, slice(start, stop), offsets_B1)


def _take(batch: Batch, rows_K: NDArray[np.int64]) -> Batch:
    def taken(column: RawColumn) -> RawColumn:
        offsets_B1 = column.offsets_B1
        if offsets_B1 is None:
            return _values(column, rows_K, None)
        counts_K = np.diff(offsets_B1)[rows_K]
        offsets_K1 = np.append(0, np.cumsum(counts_K))
        places_N = np.arange(offsets_K1[-1]) + np.repeat(offsets_B1[rows_K] - offsets_K1[:-1], counts_K)
        return _values(column, places_N, offsets_K1)

    columns = {name: taken(column) for name, column in batch.columns.items()}
    return Batch(columns, batch.label_B[rows_K], batch.weight_B[rows_K])


def _values(
    column: RawColumn, places: slice | NDArray[np.int64], offsets_B1: NDArray[np.int64] | None
) -> RawColumn:
    if isinstance(column, TextColumn):
        return TextColumn(column.data, column.starts_N[places], column.ends_N[places], offsets_B1)
    if isinstance(column, IntegerColumn):
        return IntegerColumn(column.values_N[places], column.missing_N[places], column.signed, offsets_B1)
    return NumberColumn(column.values_N[places], offsets_B1, column.precision)


def _joined(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    parts = _in_one_buffer([piece.columns for piece in pieces])
    columns = {name: _joined_column([part[name] for part in parts]) for name in parts[0]}
    label_B = np.concatenate([piece.label_B for piece in pieces])
    return Batch(columns, label_B, np.concatenate([piece.weight_B for piece in pieces]))


def _in_one_buffer(pieces: Sequence[Mapping[str, RawColumn]]) -> list[dict[str, RawColumn]]:
    """The same columns, the texts of all of them in one buffer.

    What lies between the first and the last text of a buffer is copied as it is: in logs made of lines, the rows'
    lines, once for all columns."""
    copies: list[NDArray[np.uint8]] = []
    shifts: list[dict[int, int]] = []  # of each piece: by which buffer, how far its texts move
    size = 0
    for piece in pieces:
        bounds: dict[int, tuple[int, int, NDArray[np.uint8]]] = {}
        for column in piece.values():
            if isinstance(column, TextColumn) and column.starts_N.size:
                first, last = int(column.starts_N.min()), int(column.ends_N.max())
                known = bounds.get(id(column.data), (first, last, column.data))
                bounds[id(column.data)] = min(first, known[0]), max(last, known[1]), column.data
        shifts.append({})
        for buffer, (first, last, data) in bounds.items():
            copies.append(data[first:last])
            shifts[-1][buffer] = size - first
            size += last - first
    together = np.concatenate(copies) if copies else np.empty(0, dtype=np.uint8)

    def moved(column: RawColumn, by: Mapping[int, int]) -> RawColumn:
        if not isinstance(column, TextColumn):
            return column
        shift = by.get(id(column.data), 0)
        return TextColumn(together, column.starts_N + shift, column.ends_N + shift, column.offsets_B1)

    return [
        {name: moved(column, by) for name, column in piece.items()}
        for piece, by in zip(pieces, shifts, strict=True)
    ]


def _joined_column(parts: Sequence[RawColumn]) -> RawColumn:
    offsets_B1 = None
    if any(part.offsets_B1 is not None for part in parts):
        counts = [
            np.ones(_size(part), dtype=np.int64) if part.offsets_B1 is None else np.diff(part.offsets_B1)
            for part in parts
        ]
        offsets_B1 = np.append(0, np.cumsum(np.concatenate(counts)))
    integers = [part for part in parts if isinstance(part, IntegerColumn)]
    if len(integers) == len(parts) and len({part.signed for part in integers}) == 1:
        return IntegerColumn(
            np.concatenate([part.values_N for part in integers]),
            np.concatenate([part.missing_N for part in integers]),
            integers[0].signed,
            offsets_B1,
        )
    numbers = [part for part in parts if isinstance(part, NumberColumn)]
    if len(numbers) == len(parts) and len({part.precision for part in numbers}) == 1:
        values_N = np.concatenate([part.values_N for part in numbers])
        return NumberColumn(values_N, offsets_B1, numbers[0].precision)
    texts = [part for part in parts if isinstance(part, TextColumn)]
    if len(texts) < len(parts):  # columns of several kinds agree in their text
        made = _in_one_buffer([{"": as_text(part)} for part in parts])
        texts = [as_text(part[""]) for part in made]
    starts_N = np.concatenate([text.starts_N for text in texts])
    return TextColumn(texts[0].data, starts_N, np.concatenate([text.ends_N for text in texts]), offsets_B1)


def _size(column: RawColumn) -> int:
    return column.starts_N.size if isinstance(column, TextColumn) else column.values_N.size
