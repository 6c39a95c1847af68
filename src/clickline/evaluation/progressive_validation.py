"""Progressive validation: how well each hour was predicted before it was learned.

    progressive = Progressive()
    for batch in batches:                      # in the order of time
        step = learner.learn(batch)            # what it predicted before it learned
        progressive.add(batch.event_hour_B, batch.label_B, batch.weight_B, step.probability_B)
    checkpoint["progressive"] = progressive.to_arrays()

Only the newest hours take rows. An older one is closed: its figures stay, its counts go, so memory and
checkpoints stay small however many hours are learned. The figures of at most ten years' hours stay: past that,
those with the fewest rows go, and their rows count as late.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import MOST_HOURS, Floats, Hour, HourlyCounts
from clickline.models.calibration import Probabilities

OPEN_HOURS = 48
"""Hours that still take rows: at most 0.7 MB each."""

_MOST_CLOSED = 10 * MOST_HOURS  # hours whose figures stay


class Progressive:
    """The figures of every hour. A row that comes when its hour is closed is not in them, but in `late`."""

    def __init__(self) -> None:
        self._open = HourlyCounts()
        self._closed: dict[int, Hour] = {}
        self.late = 0

    def add(
        self, hour_B: NDArray[np.int32], label_B: Floats, weight_B: Floats, probability_B: Probabilities
    ) -> None:
        """Count rows by their hour, with what was predicted before they were learned."""
        taken_B = ~np.isin(hour_B, np.fromiter(self._closed, dtype=np.int32))
        self.late += int((~taken_B).sum())
        self._open.add(hour_B[taken_B], label_B[taken_B], weight_B[taken_B], probability_B[taken_B])
        self._close()

    def merge(self, other: HourlyCounts) -> None:
        """Add what a worker has counted; it is left as it was."""
        self.late += self._open.merge(other, self._closed.keys())
        self._close()

    def hours(self) -> tuple[Hour, ...]:
        """The hours in order; none if no row had a time."""
        known = {**self._closed, **{hour.hour: hour for hour in self._open.hours()}}
        return tuple(known[hour] for hour in sorted(known))

    def to_json(self) -> dict[str, Any]:
        return {"hours": [hour.to_json() for hour in self.hours()], "late": self.late}

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """The whole state, for a checkpoint: restored from it, all goes on to the same result, to the bit."""
        closed = [hour.to_json() for hour in self._closed.values()]
        text = json.dumps({"closed": closed, "late": self.late}).encode()
        return {"closed": np.frombuffer(text, dtype=np.uint8).copy(), **self._open.to_arrays()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Progressive:
        progressive = cls()
        document = json.loads(np.asarray(arrays["closed"], dtype=np.uint8).tobytes())
        progressive._closed = {hour["hour"]: Hour.from_json(hour) for hour in document["closed"]}
        progressive.late = document["late"]
        counts = {name: array for name, array in arrays.items() if name != "closed"}
        progressive._open = HourlyCounts.from_arrays(counts)
        return progressive

    def _close(self) -> None:
        for hour in self._open.close(OPEN_HOURS):
            self._closed[hour.hour] = hour
        if len(self._closed) > _MOST_CLOSED:  # rows with wrong times: real hours have more of them
            by_rows = sorted(self._closed.values(), key=lambda hour: (hour.metrics.rows, hour.hour))
            for hour in by_rows[: len(by_rows) - 3 * _MOST_CLOSED // 4]:
                del self._closed[hour.hour]
                self.late += hour.metrics.rows
