"""The training loop on one machine: batches in, checkpoints out; it resumes exactly where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint, write_checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.config.sections import TrainSection
from clickline.embedding import Eviction, SlotReport, Snapshot, begin_snapshot
from clickline.errors import ClicklineError
from clickline.evaluation.report.report_document import unseen_shares
from clickline.evaluation.rolling_metrics import RollingMetrics
from clickline.models.torch_runtime import should_find_ahead
from clickline.progress import Progress, human_size
from clickline.records import LabelledRows
from clickline.training.batches import Batches
from clickline.training.dense_optimizer import Diverged
from clickline.training.tracking import Tracker, resource_usage
from clickline.training.train_step import PreparedBatch, TrainStep
from clickline.training.training_run import TrainingRun

_REPORT_SECONDS = (0.5, 2.0)  # shortest and longest interval: often at first, when much changes
_REPORT_ROWS = 1 << 15  # the newest rows, whose AUC and loss are reported
_WRITER_SHARE = 0.2  # of one core, to write a checkpoint while training continues


class Trainer(TrainingRun):
    """Trains batch by batch on one machine and writes checkpoints in the background."""

    def __init__(
        self,
        settings: TrainSection,
        dataset: Dataset,
        train_step: TrainStep,
        batches: Batches,
        run: Path,
        identity: Mapping[str, Any],
        tracker: Tracker,
        progress: Progress,
    ) -> None:
        super().__init__(settings, dataset, train_step.model, batches, run, identity, tracker, progress)
        self._train_step = train_step
        self._finds_ahead = should_find_ahead(identity["threads"])
        self._snapshot: Snapshot | None = None  # the one being written
        self._window = RollingMetrics(_REPORT_ROWS)
        self._started_at = self._reported_at = self._checkpoint_at = time.monotonic()
        self._unreported_rows = 0

    @property
    def step(self) -> int:
        return self._train_step.step

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        return self._model.score(rows)

    def _warm_start(self, start: Checkpoint) -> None:
        self._train_step.load_moments(self._model.restore(start))

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._train_step.load_dense_state(self._model.restore(checkpoint), step=checkpoint.step)

    def _decay(self, rate: float) -> None:
        self._model.tables.decay(rate)

    def _evict(self, rule: Eviction) -> tuple[SlotReport, ...]:
        return self._model.tables.evict(rule, self._newest_hour)

    def _slots(self) -> tuple[SlotReport, ...]:
        return self._model.tables.report()

    def _unseen_shares(self, rows: LabelledRows) -> Sequence[float]:
        return unseen_shares(self._model.tables, rows)

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def _train_epoch(self, pool: ThreadPoolExecutor) -> None:
        """Train from the position to the end of its epoch."""
        rows = self._dataset.splits["train"].rows
        self._progress.begin(f"train epoch {self._position.epoch + 1}", total_rows=rows)
        self._reported_at = time.monotonic()
        writing: Future[Checkpoint] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="find") as finder:
            batches = self._batches.epoch(self._position)
            current = next(batches, None)
            prepared = self._prepare(current[0]) if current else None
            while current is not None:
                batch, after = current
                following = next(batches, None)
                # No checkpoint between a batch's lookup, which counts it, and its update.
                checkpointing = (
                    following is not None and self._checkpoint_due() and (writing is None or writing.done())
                )
                ahead = None
                if following is not None and not checkpointing and self._finds_ahead:
                    ahead = finder.submit(self._prepare, following[0])
                if prepared is not None:
                    self._train_batch(prepared)
                self._position = after
                self._progress.advance(rows=batch.rows)
                if checkpointing:
                    if writing is not None:
                        writing.result()
                    writing = self._begin_checkpoint(pool)
                current = following
                if following is not None:
                    prepared = self._prepare(following[0]) if ahead is None else ahead.result()
        if self._unreported_rows:
            self._report(time.monotonic())
        if writing is not None:
            if self._snapshot is not None:
                self._snapshot.unthrottle()  # no training step runs that it could slow down
            writing.result()
        self._progress.end()

    def _prepare(self, rows: LabelledRows) -> PreparedBatch | None:
        return self._train_step.prepare(rows) if rows.rows else None

    def _train_batch(self, prepared: PreparedBatch) -> None:
        rows = prepared.rows
        try:
            step = self._train_step.run(prepared)
        except Diverged as error:
            raise ClicklineError(f"{error} The batch was saved to {self._save_batch(error.rows)}.") from error
        self._window.add(rows.label_B, rows.weight_B, step.probability_B)
        if self._hours is not None and not self._position.epoch:
            self._hours.add(rows.event_hour_B, rows.label_B, rows.weight_B, step.probability_B)
        self._newest_hour = max(self._newest_hour, int(rows.event_hour_B.max()))
        self._unreported_rows += rows.rows
        self._trained_rows += rows.rows
        now = time.monotonic()
        shortest, longest = _REPORT_SECONDS
        if now - self._reported_at > min(max(shortest, (now - self._started_at) / 20), longest):
            self._report(now)

    def _report(self, now: float) -> None:
        auc, loss = self._window.measure()
        size, usage = self._model.tables.size, resource_usage()
        speed = self._unreported_rows / max(now - self._reported_at, 1e-9)
        metrics = {"rows_per_second": speed, "ids": size, **usage}
        if auc is not None and loss is not None:
            self._progress.note(
                f"step {self._train_step.step:,}, loss {loss:.4f}, AUC {auc:.4f}, {size:,} ids, "
                f"{human_size(usage['system/memory_mib'] * 2**20)}"
            )
            metrics |= {"loss": loss, "auc": auc}
        self._tracker.metrics(self._train_step.step, metrics)
        self._curve.add(self._train_step.step, self._trained_rows, loss, auc, speed)
        self._reported_at, self._unreported_rows = now, 0

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def _checkpoint_due(self) -> bool:
        """Whether to write a checkpoint after the next step."""
        steps = self._settings.checkpoint_steps
        if steps is not None and (self._train_step.step + 1) % steps == 0:
            return True
        return time.monotonic() - self._checkpoint_at > self._settings.checkpoint_every

    def _begin_checkpoint(self, pool: ThreadPoolExecutor, *, epoch_end: bool = False) -> Future[Checkpoint]:
        """Snapshot the state between two steps; write it while training continues."""
        self._checkpoint_at = time.monotonic()
        snapshot = self._snapshot = begin_snapshot(
            self._model.tables, share=1.0 if epoch_end else _WRITER_SHARE
        )
        dense = self._train_step.dense_state()
        if self._hours is not None:
            dense |= {f"hours/{name}": array for name, array in self._hours.to_arrays().items()}
        state = self._state(epoch_end=epoch_end)
        step = self._train_step.step

        def write() -> Checkpoint:
            checkpoint = write_checkpoint(self._run, step, snapshot.write, dense, state)
            self._prune()
            return checkpoint

        return pool.submit(write)
