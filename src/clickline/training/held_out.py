"""Metrics on held-out rows of the last hours, for the gate of hourly training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import MetricCounts, Metrics

_MIN_ROWS = 10_000  # for the gate; a smaller hour is evaluated together with earlier ones
_MAX_HOURS = 24
# Bins of the score histogram: they change the AUC by about 1e-4, far below its noise on this many rows.
_BINS = 1 << 12


class HeldOutMetrics:
    """Score histograms of the held-out rows of the newest hours, by the model of each hour and by the live version."""

    def __init__(self) -> None:
        self._hours: list[tuple[MetricCounts, MetricCounts | None]] = []

    def begin_hour(self, *, live: bool) -> tuple[MetricCounts, MetricCounts | None]:
        """Counters for one more hour: the model's, and the live version's if there is one."""
        if live:  # hours that it did not score cannot be compared
            self._hours = [hour for hour in self._hours if hour[1] is not None]
        self._hours.append((MetricCounts(_BINS), MetricCounts(_BINS) if live else None))
        while len(self._hours) > 1 and (
            len(self._hours) > _MAX_HOURS or sum(ours.rows for ours, _ in self._hours[1:]) >= _MIN_ROWS
        ):
            self._hours.pop(0)
        return self._hours[-1]

    def metrics(self) -> tuple[Metrics, Metrics | None]:
        """Metrics of the model, and of the live version on the same rows; None if it did not score all of them.

        Rows of earlier hours were scored by the models of those hours, so they hide a fault of the newest model."""
        recent: list[tuple[MetricCounts, MetricCounts | None]] = []
        for hour in reversed(self._hours):
            recent.append(hour)
            if sum(ours.rows for ours, _ in recent) >= _MIN_ROWS:
                break
        ours, live = MetricCounts(_BINS), MetricCounts(_BINS)
        for ours_hour, live_hour in recent:
            ours.merge(ours_hour)
            if live_hour is not None:
                live.merge(live_hour)
        return ours.metrics(), live.metrics() if live.rows == ours.rows else None

    def hour_metrics(self) -> tuple[Metrics, Metrics | None]:
        """The same for the newest hour alone, all of it scored by the current model."""
        ours, live = self._hours[-1]
        return ours.metrics(), None if live is None else live.metrics()

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The whole state, for a checkpoint."""
        arrays: dict[str, NDArray[Any]] = {}
        for n, hour in enumerate(self._hours):
            for name, counts in zip(("ours", "live"), hour, strict=True):
                if counts is not None:
                    arrays |= {f"{n:02d}/{name}/{key}": array for key, array in counts.to_arrays().items()}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> HeldOutMetrics:
        counts: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}
        for name, array in arrays.items():
            hour, scorer, key = name.split("/")
            counts.setdefault((hour, scorer), {})[key] = array
        held_out = cls()
        for hour in sorted({hour for hour, _ in counts}):
            live = counts.get((hour, "live"))
            held_out._hours.append(
                (
                    MetricCounts.from_arrays(counts[hour, "ours"], _BINS),
                    None if live is None else MetricCounts.from_arrays(live, _BINS),
                )
            )
        return held_out
