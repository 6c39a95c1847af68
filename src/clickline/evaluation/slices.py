"""The same measures for the heaviest values of a slot, found and measured in one pass over the rows.

There may be more values than memory, so only `TRACKED` times as many as asked for are followed. Which ones
is decided by Misra and Gries' counting, which merges: when too many values are known, the weight of the
first one too many is taken off all, and who has none left goes. Whatever weighs more than
1 / (TRACKED * top) of all shows is found. A value that was not followed from its first row on says how much
of its weight may be missing; in logs that are not sorted by value the heavy ones miss nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import Counts, Floats, Metrics
from clickline.models.calibration import Probabilities
from clickline.records import SlotIds

TRACKED = 8
SLICE_LIMIT = 1 << 11
"""Scores a slice tells apart: AUC to about 4e-4, with the error stated."""

_CHUNK = 1 << 16  # rows that are collected before they are grouped by value


@dataclass(frozen=True)
class Slice:
    """The rows that have one value in a slot."""

    id: int
    missed: float  # no more shows than this had the value and are not in the metrics
    metrics: Metrics

    def to_json(self) -> dict[str, Any]:
        return {"id": f"{self.id:016x}", "missed": self.missed, **self.metrics.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Slice:
        return cls(int(document["id"], 16), document["missed"], Metrics.from_json(document))


class SliceCounts:
    """`Counts` for each of the `top` values of one slot that have most shows."""

    def __init__(self, top: int = 20) -> None:
        self.top = top
        self._ids_C = np.empty(0, dtype=np.uint64)  # rising
        self._left_C = np.empty(0, dtype=np.float64)  # weight, less what was taken off
        self._taken = 0.0
        self._counts: dict[int, Counts] = {}
        self._missed: dict[int, float] = {}
        self._chunk: list[tuple[NDArray[np.uint64], Floats, Floats, Probabilities]] = []
        self._waiting = 0

    def add(self, slot: SlotIds, label_B: Floats, weight_B: Floats, probability_B: Probabilities) -> None:
        """Count rows by their values in the slot; a row counts once for each value that it has."""
        ids_N = slot.ids_N
        if slot.offsets_B1 is not None:
            rows_N = np.repeat(np.arange(len(label_B)), np.diff(slot.offsets_B1))
            order_N = np.lexsort((rows_N, ids_N))
            ids_N, rows_N = ids_N[order_N], rows_N[order_N]
            new_N = np.ones(len(ids_N), dtype=np.bool_)
            new_N[1:] = (ids_N[1:] != ids_N[:-1]) | (rows_N[1:] != rows_N[:-1])
            ids_N, rows_N = ids_N[new_N], rows_N[new_N]
            label_B, weight_B, probability_B = label_B[rows_N], weight_B[rows_N], probability_B[rows_N]
        # Copies: the caller may fill the same arrays with the next batch.
        self._chunk.append((ids_N.copy(), label_B.copy(), weight_B.copy(), probability_B.copy()))
        self._waiting += len(ids_N)
        if self._waiting >= _CHUNK:
            self._group()

    def merge(self, other: SliceCounts) -> None:
        """Add what another has counted; it is left as it was, but for rows it had not grouped yet."""
        self._group()
        other._group()
        for id in other._counts.keys() - self._counts.keys():
            self._counts[id], self._missed[id] = Counts(SLICE_LIMIT), self._taken
        for id, counts in self._counts.items():
            if id in other._counts:
                counts.merge(other._counts[id])
                self._missed[id] += other._missed[id]
            else:
                self._missed[id] += other._taken
        self._taken += other._taken
        self._follow(other._ids_C, other._left_C)

    def slices(self) -> tuple[Slice, ...]:
        """The values with most shows, heaviest first."""
        self._group()
        heaviest = sorted(self._counts, key=lambda id: (-self._counts[id].shows, id))[: self.top]
        return tuple(Slice(id, self._missed[id], self._counts[id].metrics()) for id in heaviest)

    def _group(self) -> None:
        if not self._waiting:
            return
        ids_N = np.concatenate([part[0] for part in self._chunk])
        label_N, weight_N, probability_N = (
            np.concatenate([part[column] for part in self._chunk]) for column in (1, 2, 3)
        )
        self._chunk, self._waiting = [], 0
        order_N = np.argsort(ids_N, kind="stable")
        sorted_N = ids_N[order_N]
        starts_U = np.flatnonzero(np.concatenate(([True], sorted_N[1:] != sorted_N[:-1])))
        ends_U = np.append(starts_U[1:], len(ids_N))
        unique_U = sorted_N[starts_U]
        before = self._taken
        self._follow(unique_U, np.add.reduceat(weight_N[order_N].astype(np.float64), starts_U))
        for at in np.flatnonzero(np.isin(unique_U, self._ids_C)):
            id, rows = int(unique_U[at]), order_N[starts_U[at] : ends_U[at]]
            if id not in self._counts:
                self._counts[id], self._missed[id] = Counts(SLICE_LIMIT), before
            self._counts[id].add(label_N[rows], weight_N[rows], probability_N[rows])

    def _follow(self, ids_U: NDArray[np.uint64], weight_U: NDArray[np.float64]) -> None:
        """Add weights to those of the values followed, and let go of the lightest if they are too many."""
        ids_C, place = np.unique(np.concatenate([self._ids_C, ids_U]), return_inverse=True)
        left_C: NDArray[np.float64] = np.zeros(len(ids_C))
        np.add.at(left_C, place, np.concatenate([self._left_C, weight_U]))
        most = TRACKED * self.top
        if len(ids_C) > most:
            off = float(np.partition(left_C, len(ids_C) - most - 1)[len(ids_C) - most - 1])
            self._taken += off
            left_C = left_C - off
            ids_C, left_C = ids_C[left_C > 0], left_C[left_C > 0]
        self._ids_C, self._left_C = ids_C, left_C
        for id in self._counts.keys() - set(ids_C.tolist()):
            del self._counts[id], self._missed[id]
