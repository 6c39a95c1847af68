"""Progressive validation: metrics of each hour as predicted before it was trained on.

    progressive = ProgressiveValidation()
    for batch in batches:                      # in order of time
        step = learner.learn(batch)            # its predictions before the update
        progressive.add(batch.event_hour_B, batch.label_B, batch.weight_B, step.probability_B)
    checkpoint["progressive"] = progressive.to_arrays()

Only the newest hours accept rows. Older ones are closed: their metrics are kept and their counts dropped, so memory
and checkpoints stay small however many hours are trained. Metrics of at most ten years are kept: beyond that, hours
with the fewest rows are dropped, and their rows count as late.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import MAX_HOURS, Floats, HourlyCounts, HourMetrics
from clickline.models.calibration import Probabilities

OPEN_HOURS = 48
"""Hours that still accept rows: at most 0.7 MB each."""

_MAX_CLOSED = 10 * MAX_HOURS  # hours whose metrics are kept


class ProgressiveValidation:
    """Metrics of every hour. A row that arrives after its hour is closed only counts in `late`."""

    def __init__(self) -> None:
        self._open = HourlyCounts()
        self._closed: dict[int, HourMetrics] = {}
        self.late = 0

    def add(
        self, hour_B: NDArray[np.int32], label_B: Floats, weight_B: Floats, probability_B: Probabilities
    ) -> None:
        """Add rows by their hour, with their predictions before they were trained on."""
        open_B = ~np.isin(hour_B, np.fromiter(self._closed, dtype=np.int32))
        self.late += int((~open_B).sum())
        self._open.add(hour_B[open_B], label_B[open_B], weight_B[open_B], probability_B[open_B])
        self._close()

    def merge(self, other: HourlyCounts) -> None:
        """Add the counts of a worker, which are not changed."""
        self.late += self._open.merge(other, self._closed.keys())
        self._close()

    def hours(self) -> tuple[HourMetrics, ...]:
        """The hours in order; empty if no row has a time."""
        known = {**self._closed, **{hour.hour: hour for hour in self._open.hours()}}
        return tuple(known[hour] for hour in sorted(known))

    def to_json(self) -> dict[str, Any]:
        return {"hours": [hour.to_json() for hour in self.hours()], "late": self.late}

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """The whole state, for a checkpoint: restored counts give bit-identical results."""
        closed = [hour.to_json() for hour in self._closed.values()]
        text = json.dumps({"closed": closed, "late": self.late}).encode()
        return {"closed": np.frombuffer(text, dtype=np.uint8).copy(), **self._open.to_arrays()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> ProgressiveValidation:
        progressive = cls()
        document = json.loads(np.asarray(arrays["closed"], dtype=np.uint8).tobytes())
        progressive._closed = {hour["hour"]: HourMetrics.from_json(hour) for hour in document["closed"]}
        progressive.late = document["late"]
        counts = {name: array for name, array in arrays.items() if name != "closed"}
        progressive._open = HourlyCounts.from_arrays(counts)
        return progressive

    def _close(self) -> None:
        for hour in self._open.close(OPEN_HOURS):
            self._closed[hour.hour] = hour
        if len(self._closed) > _MAX_CLOSED:  # hours of wrong times have fewer rows than real ones
            by_rows = sorted(self._closed.values(), key=lambda hour: (hour.metrics.rows, hour.hour))
            for hour in by_rows[: len(by_rows) - 3 * _MAX_CLOSED // 4]:
                del self._closed[hour.hour]
                self.late += hour.metrics.rows
