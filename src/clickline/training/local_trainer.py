"""Trains epochs on one machine: batches in, checkpoints out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint, CheckpointState, write_checkpoint
from clickline.embedding import Eviction, SlotReport, Snapshot, begin_snapshot
from clickline.evaluation.report.report_document import unseen_shares
from clickline.evaluation.rolling_metrics import RollingMetrics
from clickline.models.model import Model
from clickline.models.torch_runtime import should_find_ahead
from clickline.progress import human_size
from clickline.records import LabelledRows
from clickline.training.batches import Batches
from clickline.training.metrics_reporter import MetricsReporter
from clickline.training.tracking import resource_usage
from clickline.training.train_step import PreparedBatch, TrainStep
from clickline.training.training_run import WriteCheckpoint
from clickline.training.training_state import TrainingState

_REPORT_SECONDS = (0.5, 2.0)  # shortest and longest interval: often at first, when much changes
_REPORT_ROWS = 1 << 15  # the newest rows, whose AUC and loss are reported


class LocalTrainer:
    """Trains batch by batch in this process."""

    def __init__(
        self,
        build_step: Callable[[], TrainStep],
        batches: Batches,
        run: Path,
        threads: int,
        reporter: MetricsReporter,
    ) -> None:
        self._build_step = build_step
        self._train_step = build_step()
        self._batches = batches
        self._run = run
        self._finds_ahead = should_find_ahead(threads)
        self._reporter = reporter
        self._snapshot: Snapshot | None = None  # the last one
        self._window = RollingMetrics(_REPORT_ROWS)
        self._started_at = self._reported_at = time.monotonic()
        self._unreported_rows = 0

    @property
    def model(self) -> Model:
        return self._train_step.model

    @property
    def step(self) -> int:
        return self._train_step.step

    def begin(self, start: Checkpoint | None) -> None:
        if start is not None:
            self._train_step.dense.load_moments(self.model.restore(start))

    def restore(self, checkpoint: Checkpoint, trained_rows: int) -> None:
        if self.step:  # tables are restored only when they are empty
            self._train_step = self._build_step()
        self._train_step.dense.load_state(self.model.restore(checkpoint), step=checkpoint.step)

    def roll_back(self, lost: Exception) -> None:
        raise lost  # this process has all state

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def train_epoch(
        self,
        state: TrainingState,
        checkpoint_due: Callable[[int], bool],
        begin_checkpoint: Callable[[], None],
    ) -> None:
        self._reported_at = time.monotonic()
        with ThreadPoolExecutor(1, thread_name_prefix="find") as finder:
            batches = self._batches.epoch(state.position)
            current = next(batches, None)
            prepared = self._prepare(current[0]) if current else None
            while current is not None:
                batch, after = current
                following = next(batches, None)
                # No checkpoint between a batch's lookup, which counts it, and its update.
                checkpointing = following is not None and checkpoint_due(self.step + 1)
                ahead = None
                if following is not None and not checkpointing and self._finds_ahead:
                    ahead = finder.submit(self._prepare, following[0])
                if prepared is not None:
                    self._train_batch(prepared, state)
                state.position = after
                self._reporter.progress.advance(rows=batch.rows)
                if checkpointing:
                    begin_checkpoint()
                current = following
                if following is not None:
                    prepared = self._prepare(following[0]) if ahead is None else ahead.result()
        if self._unreported_rows:
            self._report(state.trained_rows, time.monotonic())
        if self._snapshot is not None:
            self._snapshot.unthrottle()  # no training step runs that it could slow down

    def _prepare(self, rows: LabelledRows) -> PreparedBatch | None:
        return self._train_step.prepare(rows) if rows.rows else None

    def _train_batch(self, prepared: PreparedBatch, state: TrainingState) -> None:
        rows = prepared.rows
        result = self._train_step.run(prepared)
        self._window.add(rows.label_B, rows.weight_B, result.probability_B)
        if state.hours is not None and not state.position.epoch:
            state.hours.add(rows.event_hour_B, rows.label_B, rows.weight_B, result.probability_B)
        state.newest_hour = max(state.newest_hour, int(rows.event_hour_B.max()))
        state.trained_rows += rows.rows
        self._unreported_rows += rows.rows
        now = time.monotonic()
        shortest, longest = _REPORT_SECONDS
        if now - self._reported_at > min(max(shortest, (now - self._started_at) / 20), longest):
            self._report(state.trained_rows, now)

    def _report(self, trained_rows: int, now: float) -> None:
        auc, loss = self._window.measure()
        ids, usage = self.model.tables.size, resource_usage()
        speed = self._unreported_rows / max(now - self._reported_at, 1e-9)
        metrics = {"rows_per_second": speed, "ids": ids, **usage}
        status = f"{ids:,} ids, {human_size(usage['system/memory_mib'] * 2**20)}"
        self._reporter.report(self.step, trained_rows, loss, auc, metrics, status)
        self._reported_at, self._unreported_rows = now, 0

    # ── between two steps ──────────────────────────────────────────────────────────────────────

    def begin_snapshot(self, state: TrainingState, share: float) -> WriteCheckpoint:
        snapshot = self._snapshot = begin_snapshot(self.model.tables, share=share)
        dense, step = self._train_step.dense.state(), self.step

        def write(arrays: Mapping[str, NDArray[Any]], manifest: CheckpointState) -> Checkpoint:
            return write_checkpoint(self._run, step, snapshot.write, {**dense, **arrays}, manifest)

        return write

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        return self.model.score(rows)

    def decay(self, rate: float) -> None:
        self.model.tables.decay(rate)

    def evict(self, rule: Eviction, newest_hour: int) -> tuple[SlotReport, ...]:
        return self.model.tables.evict(rule, newest_hour)

    def slots(self) -> tuple[SlotReport, ...]:
        return self.model.tables.report()

    def unseen_shares(self, rows: LabelledRows) -> Sequence[float]:
        return unseen_shares(self.model.tables, rows)
