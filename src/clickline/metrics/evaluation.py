"""One evaluation: all rows together, by hour, and by the values of the slots that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.metrics.binary import Counts, Floats, Hour, HourlyCounts, Metrics, Probabilities
from clickline.metrics.slices import Slice, SliceCounts
from clickline.records import SlotIds

__all__ = ["Evaluation", "Evaluator"]


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured."""

    total: Metrics
    hours: tuple[Hour, ...]  # in order of time; empty where the rows have none
    slices: Mapping[str, tuple[Slice, ...]]  # by slot, heaviest value first

    def to_json(self) -> dict[str, Any]:
        return {
            **self.total.to_json(),
            "hours": [hour.to_json() for hour in self.hours],
            "slices": {slot: [one.to_json() for one in found] for slot, found in self.slices.items()},
        }


class Evaluator:
    """Collects scored rows, batch by batch; several of them, each with a part of the rows, can be merged."""

    def __init__(self, slots: Sequence[str] = (), top: int = 20) -> None:
        self.total = Counts()
        self._hours = HourlyCounts()
        self._slices = {slot: SliceCounts(top) for slot in slots}

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

    def merge(self, other: Evaluator) -> None:
        self.total.merge(other.total)
        self._hours.merge(other._hours)
        for slot, counts in self._slices.items():
            counts.merge(other._slices[slot])

    def evaluation(self) -> Evaluation:
        found = {slot: counts.slices() for slot, counts in self._slices.items()}
        return Evaluation(self.total.metrics(), self._hours.hours(), found)
