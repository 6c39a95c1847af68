"""Reads logs as batches of raw rows with their labels: what a client sends, and what its answers are compared with.

A row that training would skip (no label, an invalid number) is skipped here too: the server would refuse its whole
request, and `clickline evaluate` skips it as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clickline.data.labelled_reader import LabelledLogs
from clickline.features.raw_columns import as_text, select_values
from clickline.progress import Progress
from clickline.records import IntegerColumn, NumberColumn, RawColumn, TextColumn


@dataclass(frozen=True)
class Batch:
    """The rows of one request."""

    columns: Mapping[str, RawColumn]
    label_B: NDArray[np.float32]
    weight_B: NDArray[np.float32]

    @property
    def rows(self) -> int:
        return self.label_B.size


def read_batches(logs: LabelledLogs, size: int, *, endless: bool, progress: Progress) -> Iterator[Batch]:
    """All rows in order, `size` at a time; the last batch may be smaller. `endless`: repeat the files forever, with
    batches that span the end and the beginning."""
    pending: list[Batch] = []
    count = 0
    for piece in _read(logs, endless, progress):
        pending.append(piece)
        count += piece.rows
        start = 0
        while count >= size:
            stop = pending[-1].rows - (count - size)
            yield _concat([*pending[:-1], _slice(pending[-1], start, stop)])
            pending, start, count = [pending[-1]], stop, count - size
        if start:
            pending = [_slice(pending[-1], start, pending[-1].rows)] if count else []
    if count:
        yield _concat(pending)


def _read(logs: LabelledLogs, endless: bool, progress: Progress) -> Iterator[Batch]:
    names = logs.reader.features.columns
    while True:
        for labelled in logs.read(1, progress):
            progress.advance(size=labelled.size)
            if labelled.raw is not None and labelled.rows is not None:
                columns = {name: labelled.raw.columns[name] for name in names}
                if labelled.usable_B is not None:
                    columns = _take(columns, np.flatnonzero(labelled.usable_B))
                yield Batch(columns, labelled.rows.label_B, labelled.rows.weight_B)
        if not endless:
            return
        logs = replace(logs, rows=0, bad=Counter(), examples=[])  # bad rows are counted in the first pass


# ── pieces of batches ──────────────────────────────────────────────────────────────────────────


def _slice(batch: Batch, start: int, stop: int) -> Batch:
    if (start, stop) == (0, batch.rows):
        return batch
    columns = {name: _slice_column(column, start, stop) for name, column in batch.columns.items()}
    return Batch(columns, batch.label_B[start:stop], batch.weight_B[start:stop])


def _slice_column(column: RawColumn, start: int, stop: int) -> RawColumn:
    """Rows of a column, as views."""
    offsets_B1 = column.offsets_B1
    if offsets_B1 is not None:
        start, stop, offsets_B1 = (
            int(offsets_B1[start]),
            int(offsets_B1[stop]),
            offsets_B1[start : stop + 1] - offsets_B1[start],
        )
    return select_values(column, slice(start, stop), offsets_B1)


def _take(columns: Mapping[str, RawColumn], rows_K: NDArray[np.int64]) -> dict[str, RawColumn]:
    def take(column: RawColumn) -> RawColumn:
        offsets_B1 = column.offsets_B1
        if offsets_B1 is None:
            return select_values(column, rows_K, None)
        counts_K = np.diff(offsets_B1)[rows_K]
        offsets_K1 = np.append(0, np.cumsum(counts_K))
        places_N = np.arange(offsets_K1[-1]) + np.repeat(offsets_B1[rows_K] - offsets_K1[:-1], counts_K)
        return select_values(column, places_N, offsets_K1)

    return {name: take(column) for name, column in columns.items()}


def _concat(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    parts = _in_one_buffer([piece.columns for piece in pieces])
    columns = {name: _concat_column([part[name] for part in parts]) for name in parts[0]}
    label_B = np.concatenate([piece.label_B for piece in pieces])
    return Batch(columns, label_B, np.concatenate([piece.weight_B for piece in pieces]))


def _in_one_buffer(pieces: Sequence[Mapping[str, RawColumn]]) -> list[dict[str, RawColumn]]:
    """The same columns, with all texts in one buffer.

    Everything between the first and the last text of a buffer is copied unchanged: in text logs the rows' lines, once
    for all columns."""
    copies: list[NDArray[np.uint8]] = []
    shifts: list[dict[int, int]] = []  # for each piece: how far the texts of each buffer move
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
    combined = np.concatenate(copies) if copies else np.empty(0, dtype=np.uint8)

    def moved(column: RawColumn, by: Mapping[int, int]) -> RawColumn:
        if not isinstance(column, TextColumn):
            return column
        shift = by.get(id(column.data), 0)
        return TextColumn(combined, column.starts_N + shift, column.ends_N + shift, column.offsets_B1)

    return [
        {name: moved(column, by) for name, column in piece.items()}
        for piece, by in zip(pieces, shifts, strict=True)
    ]


def _concat_column(parts: Sequence[RawColumn]) -> RawColumn:
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
    if len(texts) < len(parts):  # columns of different types are combined as text
        columns = _in_one_buffer([{"": as_text(part)} for part in parts])
        texts = [as_text(part[""]) for part in columns]
    starts_N = np.concatenate([text.starts_N for text in texts])
    return TextColumn(texts[0].data, starts_N, np.concatenate([text.ends_N for text in texts]), offsets_B1)


def _size(column: RawColumn) -> int:
    return column.starts_N.size if isinstance(column, TextColumn) else column.values_N.size
