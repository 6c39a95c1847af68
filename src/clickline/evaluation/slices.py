"""Metrics for the most frequent values of a slot, found and measured in one pass over the rows.

There may be more values than fit in memory, so only `TRACKED` times the requested number are tracked. They are chosen
by Misra-Gries counting, which can be merged: when there are too many values, the weight of the first one in excess is
subtracted from all, and those with no weight left are dropped. Every value with more than 1 / (TRACKED * top) of all
impressions is found. A value that was not tracked from its first row on has a bound on its missing weight; unless the
logs are sorted by value, frequent values miss nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import Floats, MetricCounts, Metrics
from clickline.models.calibration import Probabilities
from clickline.records import SlotIds

TRACKED = 8
SLICE_LIMIT = 1 << 11
"""Distinct scores kept per slice: AUC to about 4e-4, with a bound of the error."""

_CHUNK = 1 << 16  # rows that are collected before they are grouped by value


@dataclass(frozen=True)
class Slice:
    """Metrics of the rows with one value in a slot."""

    id: int
    missed: float  # bound on the impressions with this value that are not in the metrics
    metrics: Metrics

    def to_json(self) -> dict[str, Any]:
        return {"id": f"{self.id:016x}", "missed": self.missed, **self.metrics.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Slice:
        return cls(int(document["id"], 16), document["missed"], Metrics.from_json(document))


class SliceCounts:
    """`MetricCounts` for each of the `top` values of one slot with the most impressions."""

    def __init__(self, top: int = 20) -> None:
        self.top = top
        self._ids_C = np.empty(0, dtype=np.uint64)  # sorted
        self._weight_C = np.empty(0, dtype=np.float64)  # minus what was subtracted
        self._subtracted = 0.0
        self._counts: dict[int, MetricCounts] = {}
        self._missed: dict[int, float] = {}
        self._chunk: list[tuple[NDArray[np.uint64], Floats, Floats, Probabilities]] = []
        self._pending = 0

    def add(self, slot: SlotIds, label_B: Floats, weight_B: Floats, probability_B: Probabilities) -> None:
        """Add rows by their values in the slot; a row counts once for each distinct value."""
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
        self._pending += len(ids_N)
        if self._pending >= _CHUNK:
            self._group()

    def merge(self, other: SliceCounts) -> None:
        """Add the counts of another object, which is not changed except that its pending rows are grouped."""
        self._group()
        other._group()
        for id in other._counts.keys() - self._counts.keys():
            self._counts[id], self._missed[id] = MetricCounts(SLICE_LIMIT), self._subtracted
        for id, counts in self._counts.items():
            if id in other._counts:
                counts.merge(other._counts[id])
                self._missed[id] += other._missed[id]
            else:
                self._missed[id] += other._subtracted
        self._subtracted += other._subtracted
        self._track(other._ids_C, other._weight_C)

    def slices(self) -> tuple[Slice, ...]:
        """The values with the most impressions, in descending order."""
        self._group()
        top = sorted(self._counts, key=lambda id: (-self._counts[id].impressions, id))[: self.top]
        return tuple(Slice(id, self._missed[id], self._counts[id].metrics()) for id in top)

    def _group(self) -> None:
        if not self._pending:
            return
        ids_N = np.concatenate([part[0] for part in self._chunk])
        label_N, weight_N, probability_N = (
            np.concatenate([part[column] for part in self._chunk]) for column in (1, 2, 3)
        )
        self._chunk, self._pending = [], 0
        order_N = np.argsort(ids_N, kind="stable")
        sorted_N = ids_N[order_N]
        starts_U = np.flatnonzero(np.concatenate(([True], sorted_N[1:] != sorted_N[:-1])))
        ends_U = np.append(starts_U[1:], len(ids_N))
        unique_U = sorted_N[starts_U]
        before = self._subtracted
        self._track(unique_U, np.add.reduceat(weight_N[order_N].astype(np.float64), starts_U))
        for at in np.flatnonzero(np.isin(unique_U, self._ids_C)):
            id, rows = int(unique_U[at]), order_N[starts_U[at] : ends_U[at]]
            if id not in self._counts:
                self._counts[id], self._missed[id] = MetricCounts(SLICE_LIMIT), before
            self._counts[id].add(label_N[rows], weight_N[rows], probability_N[rows])

    def _track(self, ids_U: NDArray[np.uint64], weight_U: NDArray[np.float64]) -> None:
        """Add weights to the tracked values and drop the lightest if there are too many."""
        ids_C, index = np.unique(np.concatenate([self._ids_C, ids_U]), return_inverse=True)
        weight_C: NDArray[np.float64] = np.zeros(len(ids_C))
        np.add.at(weight_C, index, np.concatenate([self._weight_C, weight_U]))
        limit = TRACKED * self.top
        if len(ids_C) > limit:
            excess = float(np.partition(weight_C, len(ids_C) - limit - 1)[len(ids_C) - limit - 1])
            self._subtracted += excess
            weight_C = weight_C - excess
            ids_C, weight_C = ids_C[weight_C > 0], weight_C[weight_C > 0]
        self._ids_C, self._weight_C = ids_C, weight_C
        for id in self._counts.keys() - set(ids_C.tolist()):
            del self._counts[id], self._missed[id]
