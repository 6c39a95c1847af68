"""What a worker measures while it trains: where it is, the time of each phase, and how well it predicted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import HourlyCounts
from clickline.evaluation.rolling_metrics import RollingMetrics
from clickline.machine import resident_bytes
from clickline.records import LabelledRows


class WorkerReport(NamedTuple):
    """State of one worker, as polled by the monitor."""

    location: str
    step: int  # of the network
    rows: int  # computed since it started
    memory: int
    auc: float | None
    loss: float | None
    phase: str  # the current phase, as passed to `timed`
    seconds: dict[str, float]  # spent in each phase


class WorkerMetrics:
    """Written by the thread that trains, read by the thread that reports. `by_hour`: also count predictions by hour."""

    def __init__(self, *, by_hour: bool) -> None:
        self.location = "start"
        self._window = RollingMetrics()
        self._by_hour = by_hour
        self._hours = HourlyCounts()  # of the first epoch, until they are taken
        self._rows = 0
        self._phase = ""
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Report this phase as the current one, and add its duration."""
        began = time.perf_counter()
        self._phase = phase
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def record(self, rows: LabelledRows, probability_B: NDArray[np.float32], epoch: int) -> None:
        """Record the predictions of a batch before it was trained on."""
        self._window.add(rows.label_B, rows.weight_B, probability_B)
        if self._by_hour and epoch == 0:
            self._hours.add(rows.event_hour_B, rows.label_B, rows.weight_B, probability_B)
        self._rows += rows.rows

    def take_hourly_counts(self) -> HourlyCounts:
        counted, self._hours = self._hours, HourlyCounts()
        return counted

    def report(self, step: int) -> WorkerReport:
        auc, loss = self._window.measure()
        seconds = dict(self._seconds)
        return WorkerReport(
            self.location, step, self._rows, resident_bytes(), auc, loss, self._phase, seconds
        )
