"""One evaluation: all rows together, by hour, and by the values of the slots that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import concat
from clickline.evaluation.binary_metrics import Counts, Floats, Hour, HourlyCounts, Metrics
from clickline.evaluation.curves import Curves, curves
from clickline.evaluation.importance import ImportanceCounts, Score
from clickline.evaluation.slices import Slice, SliceCounts
from clickline.models.calibration import Probabilities
from clickline.records import LabelledRows, SlotIds

OwnMetric = Callable[[Floats, Floats, Floats], float]
"""A measure of the user's: labels, probabilities, weights of all rows."""

BLOCK_ROWS = 1 << 16
"""Rows that are scored, and shuffled for their importance, together."""


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured."""

    total: Metrics
    hours: tuple[Hour, ...]  # in order of time; empty where the rows have none
    slices: Mapping[str, tuple[Slice, ...]]  # by slot, heaviest value first
    own: Mapping[str, float] = field(default_factory=dict)  # the user's measures
    curves: Curves = field(default_factory=dict)  # of all rows together

    def to_json(self) -> dict[str, Any]:
        """All but the curves, which a report keeps beside it."""
        return {
            **self.total.to_json(),
            "hours": [hour.to_json() for hour in self.hours],
            "slices": {slot: [one.to_json() for one in found] for slot, found in self.slices.items()},
            "own": dict(self.own),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], curves: Curves) -> Evaluation:
        """What `to_json` wrote, and the curves that were kept beside it."""
        return cls(
            Metrics.from_json(document),
            tuple(Hour.from_json(hour) for hour in document["hours"]),
            {
                slot: tuple(Slice.from_json(one) for one in found)
                for slot, found in document["slices"].items()
            },
            document["own"],
            curves,
        )


class Evaluator:
    """Collects scored rows, batch by batch; several of them, each with a part of the rows, can be merged.

    Memory does not grow with the rows, unless there are measures of the user's: they see all rows at once,
    which are kept for them at 12 bytes each.
    """

    def __init__(
        self, slots: Sequence[str] = (), top: int = 20, own: Mapping[str, OwnMetric] | None = None
    ) -> None:
        self.total = Counts()
        self._hours = HourlyCounts()
        self._slices = {slot: SliceCounts(top) for slot in slots}
        self._own = own or {}
        self._kept: list[tuple[Floats, Floats, Floats]] = []

    def add(
        self,
        label_B: Floats,
        weight_B: Floats,
        probability_B: Probabilities,
        hour_B: NDArray[np.int32],
        slots: Mapping[str, SlotIds],
    ) -> None:
        """Count scored rows; `slots` holds at least those that are to be sliced."""
        self.total.add(label_B, weight_B, probability_B)
        self._hours.add(hour_B, label_B, weight_B, probability_B)
        for slot, counts in self._slices.items():
            counts.add(slots[slot], label_B, weight_B, probability_B)
        if self._own:
            self._kept.append((label_B.copy(), probability_B.astype(np.float32), weight_B.copy()))

    def merge(self, other: Evaluator) -> None:
        self.total.merge(other.total)
        self._hours.merge(other._hours)
        for slot, counts in self._slices.items():
            counts.merge(other._slices[slot])
        self._kept += other._kept

    def evaluation(self) -> Evaluation:
        found = {slot: counts.slices() for slot, counts in self._slices.items()}
        own: dict[str, float] = {}
        if self._kept:
            label_N, probability_N, weight_N = (
                np.concatenate(column) for column in zip(*self._kept, strict=True)
            )
            own = {name: metric(label_N, probability_N, weight_N) for name, metric in self._own.items()}
        return Evaluation(self.total.metrics(), self._hours.hours(), found, own, curves(self.total.bins()))


def measure(
    score: Score,
    rows: Iterable[LabelledRows],
    *,
    slots: Mapping[str, int] | None = None,
    own: Mapping[str, OwnMetric] | None = None,
    importance: ImportanceCounts | None = None,
) -> Evaluation:
    """Score all rows and measure them; `slots` are those to slice by, with their places in the rows.

    The same rows in the same order give the same figures to the bit, however they come in pieces: they are
    scored in blocks of their own, because the last bits of a network's output depend on its batch.
    """
    slots = slots or {}
    evaluator = Evaluator(tuple(slots), own=own)
    for block in in_blocks(rows, BLOCK_ROWS):
        sliced = {slot: block.encoded.slots[place] for slot, place in slots.items()}
        evaluator.add(block.label_B, block.weight_B, score(block), block.event_hour_B, sliced)
        if importance is not None:
            importance.add(score, block)
    return evaluator.evaluation()


def in_blocks(rows: Iterable[LabelledRows], size: int) -> Iterator[LabelledRows]:
    """The same rows in the same order, `size` at a time; only the last block is smaller."""
    waiting: list[LabelledRows] = []
    count = 0
    for part in rows:
        waiting.append(part)
        count += part.rows
        if count >= size:
            whole = concat(waiting)
            for start in range(0, count - size + 1, size):
                yield whole.part(start, start + size)
            count %= size
            waiting = [whole.part(whole.rows - count, whole.rows)] if count else []
    if count:
        yield concat(waiting)
