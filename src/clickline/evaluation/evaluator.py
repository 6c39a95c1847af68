"""Evaluates rows: in total, by hour, and by the values of chosen slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import concat_rows
from clickline.evaluation.binary_metrics import Floats, HourlyCounts, HourMetrics, MetricCounts, Metrics
from clickline.evaluation.curves import Curves, curves
from clickline.evaluation.importance import ImportanceCounts, ScoreFn
from clickline.evaluation.slices import Slice, SliceCounts
from clickline.models.calibration import Probabilities
from clickline.records import LabelledRows, SlotIds

CustomMetric = Callable[[Floats, Floats, Floats], float]
"""A user-defined metric of the labels, probabilities and weights of all rows."""

BLOCK_ROWS = 1 << 16
"""Rows that are scored together, and shuffled together for the importance."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    total: Metrics
    hours: tuple[HourMetrics, ...]  # in order of time; empty if the rows have no time
    slices: Mapping[str, tuple[Slice, ...]]  # by slot, most impressions first
    custom: Mapping[str, float] = field(default_factory=dict)  # user-defined metrics
    curves: Curves = field(default_factory=dict)  # over all rows

    def to_json(self) -> dict[str, Any]:
        """All but the curves, which the report keeps separately."""
        return {
            **self.total.to_json(),
            "hours": [hour.to_json() for hour in self.hours],
            "slices": {slot: [one.to_json() for one in slices] for slot, slices in self.slices.items()},
            "own": dict(self.custom),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], curves: Curves) -> Evaluation:
        """Read what `to_json` wrote, plus the curves."""
        return cls(
            Metrics.from_json(document),
            tuple(HourMetrics.from_json(hour) for hour in document["hours"]),
            {
                slot: tuple(Slice.from_json(one) for one in slices)
                for slot, slices in document["slices"].items()
            },
            document["own"],
            curves,
        )


class Evaluator:
    """Accumulates scored rows batch by batch; evaluators of different rows can be merged.

    Memory does not grow with the rows, unless there are user-defined metrics: those need all rows at once, which are
    kept at 12 bytes each.
    """

    def __init__(
        self,
        slots: Sequence[str] = (),
        top: int = 20,
        custom_metrics: Mapping[str, CustomMetric] | None = None,
    ) -> None:
        self.total = MetricCounts()
        self._hours = HourlyCounts()
        self._slices = {slot: SliceCounts(top) for slot in slots}
        self._custom_metrics = custom_metrics or {}
        self._scored: list[tuple[Floats, Floats, Floats]] = []

    def add(
        self,
        label_B: Floats,
        weight_B: Floats,
        probability_B: Probabilities,
        hour_B: NDArray[np.int32],
        slots: Mapping[str, SlotIds],
    ) -> None:
        """Add scored rows; `slots` has at least the sliced ones."""
        self.total.add(label_B, weight_B, probability_B)
        self._hours.add(hour_B, label_B, weight_B, probability_B)
        for slot, counts in self._slices.items():
            counts.add(slots[slot], label_B, weight_B, probability_B)
        if self._custom_metrics:
            self._scored.append((label_B.copy(), probability_B.astype(np.float32), weight_B.copy()))

    def merge(self, other: Evaluator) -> None:
        self.total.merge(other.total)
        self._hours.merge(other._hours)
        for slot, counts in self._slices.items():
            counts.merge(other._slices[slot])
        self._scored += other._scored

    def evaluation(self) -> Evaluation:
        slices = {slot: counts.slices() for slot, counts in self._slices.items()}
        custom: dict[str, float] = {}
        if self._scored:
            label_N, probability_N, weight_N = (
                np.concatenate(column) for column in zip(*self._scored, strict=True)
            )
            custom = {
                name: metric(label_N, probability_N, weight_N)
                for name, metric in self._custom_metrics.items()
            }
        return Evaluation(
            self.total.metrics(), self._hours.hours(), slices, custom, curves(self.total.bins())
        )


def evaluate_rows(
    score: ScoreFn,
    rows: Iterable[LabelledRows],
    *,
    slots: Mapping[str, int] | None = None,
    custom_metrics: Mapping[str, CustomMetric] | None = None,
    importance: ImportanceCounts | None = None,
) -> Evaluation:
    """Score and evaluate all rows; `slots` are those to slice by, with their indices in the rows.

    The same rows in the same order give bit-identical results, however they are split: they are scored in blocks of a
    fixed size, because the last bits of a network's output depend on its batch.
    """
    slots = slots or {}
    evaluator = Evaluator(tuple(slots), custom_metrics=custom_metrics)
    for block in in_blocks(rows, BLOCK_ROWS):
        sliced = {slot: block.encoded.slots[index] for slot, index in slots.items()}
        evaluator.add(block.label_B, block.weight_B, score(block), block.event_hour_B, sliced)
        if importance is not None:
            importance.add(score, block)
    return evaluator.evaluation()


def in_blocks(rows: Iterable[LabelledRows], size: int) -> Iterator[LabelledRows]:
    """Regroup rows, in order, into blocks of `size`; only the last block is smaller."""
    pending: list[LabelledRows] = []
    count = 0
    for part in rows:
        pending.append(part)
        count += part.rows
        if count >= size:
            joined = concat_rows(pending)
            for start in range(0, count - size + 1, size):
                yield joined.slice(start, start + size)
            count %= size
            pending = [joined.slice(joined.rows - count, joined.rows)] if count else []
    if count:
        yield concat_rows(pending)
