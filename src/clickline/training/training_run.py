"""The loop over the epochs of a run: train, evict, calibrate, checkpoint, evaluate. It resumes exactly.

TrainingRun ── Trainer             where the steps run: LocalTrainer or ClusterTrainer
            ├─ TrainingState       position and counts, as stored in checkpoints
            ├─ CheckpointWriter    when checkpoints are written
            ├─ EpochHistory        metrics of each epoch, early stopping
            └─ EpochEvaluator      evaluation on the eval rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import (
    Checkpoint,
    CheckpointState,
    RunProgress,
    checkpoint_folder,
    latest_checkpoint,
    open_checkpoint_folder,
    prune_checkpoints,
)
from clickline.artifacts.dataset import to_table
from clickline.config.sections import TrainSection
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ArtifactError, ClicklineError
from clickline.evaluation.binary_metrics import MetricCounts
from clickline.evaluation.calibration_fit import fit_calibration
from clickline.models.calibration import Calibration
from clickline.models.from_config import eviction_of
from clickline.models.model import Model
from clickline.records import LabelledRows
from clickline.training.batches import Batches
from clickline.training.checkpoint_writer import CheckpointWriter
from clickline.training.cluster.job import StateLost
from clickline.training.dense_optimizer import Diverged
from clickline.training.epoch_evaluator import EpochEvaluator, ModelEvaluation
from clickline.training.epoch_history import EpochHistory
from clickline.training.learning_curve import CurveColumns
from clickline.training.metrics_reporter import MetricsReporter
from clickline.training.run_spec import RunSpec
from clickline.training.training_state import TrainingState

_WRITER_SHARE = 0.2  # of one core, to write a checkpoint while training continues

WriteCheckpoint = Callable[[Mapping[str, NDArray[Any]], CheckpointState], Checkpoint]
"""Writes a snapshot as a checkpoint, with more arrays and with the entries of its manifest."""

T = TypeVar("T")


class Trainer(Protocol):
    """Holds the model of a run and computes its steps. Any method may raise StateLost if it does so on a cluster."""

    @property
    def model(self) -> Model: ...

    @property
    def step(self) -> int:
        """Number of steps taken."""

    def begin(self, start: Checkpoint | None) -> None:
        """Begin at the first row, with the weights of an earlier model if there is one."""

    def restore(self, checkpoint: Checkpoint, trained_rows: int) -> None:
        """Restore the state of a checkpoint exactly."""

    def roll_back(self, lost: StateLost) -> None:
        """Prepare for `restore` or `begin` after state was lost."""

    def train_epoch(
        self,
        state: TrainingState,
        checkpoint_due: Callable[[int], bool],
        begin_checkpoint: Callable[[], None],
    ) -> None:
        """Train from the position to the end of its epoch, with a checkpoint at each step at which one is due."""

    def begin_snapshot(self, state: TrainingState, share: float) -> WriteCheckpoint:
        """Snapshot the model between two steps and bring `state` up to date. Writing it takes this share of a core."""

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities; trains nothing."""

    def decay(self, rate: float) -> None:
        """Decay every counter of the tables."""

    def evict(self, rule: Eviction, newest_hour: int) -> tuple[SlotReport, ...]:
        """Evict ids by the rule; returns how many."""

    def slots(self) -> tuple[SlotReport, ...]:
        """Sizes of the tables by slot."""

    def unseen_shares(self, rows: LabelledRows) -> Sequence[float] | None:
        """By slot, the share of the rows' values without a vector; None if only the checkpoint can answer."""


class TrainingRun:
    """Trains a model epoch by epoch, to a checkpoint."""

    def __init__(
        self,
        settings: TrainSection,
        spec: RunSpec,
        trainer: Trainer,
        batches: Batches,
        reporter: MetricsReporter,
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._trainer = trainer
        self._batches = batches
        self._reporter = reporter
        self._progress = reporter.progress
        self._time_ordered = settings.order == "time"
        self._state = TrainingState.begin(time_ordered=self._time_ordered)
        self._checkpoints = CheckpointWriter(settings, self._progress)
        self._history = EpochHistory(spec.folder, settings.early_stopping)
        self.evaluator = EpochEvaluator(spec.dataset, trainer, self._progress)
        self._resumed = False

    @property
    def epoch(self) -> int:
        return self._state.position.epoch

    @property
    def stopped_early(self) -> bool:
        return self._history.stopped_at is not None

    # ── the stages ─────────────────────────────────────────────────────────────────────────────

    def train_to(self, epochs: int) -> Checkpoint:
        """Train until `epochs` epochs are done or early stopping ends the run. Resumes from the newest checkpoint;
        returns the newest one, or that of the best epoch after early stopping."""
        return self._recovering(lambda: self._train_to(epochs))

    def evaluate(self) -> ModelEvaluation:
        """Evaluate the model that `train_to` returned."""
        return self._recovering(self._evaluate)

    @property
    def learning_curve(self) -> CurveColumns:
        return self._reporter.curve.columns()

    def history(self) -> dict[str, Any]:
        """The history of the training, for the report."""
        hours = self._state.hours
        return {
            "epochs": self._history.epochs,
            "progressive": None if hours is None else hours.to_json(),
        }

    def _recovering(self, work: Callable[[], T]) -> T:
        """Do `work`. Whenever a cluster loses state, resume from the last checkpoint and do it again."""
        while True:
            try:
                if not self._resumed:
                    self._resume()
                    self._resumed = True
                return work()
            except StateLost as lost:
                self._trainer.roll_back(lost)
                self._resumed = False

    def _resume(self) -> None:
        """Resume from the newest checkpoint of this run; without one begin, perhaps with an earlier model."""
        run, start = self._spec.folder, self._spec.start
        checkpoint = latest_checkpoint(run)
        self._history.resume_from(0 if checkpoint is None else checkpoint.step)
        self.evaluator.forget()
        if checkpoint is None:
            self._state = TrainingState.begin(time_ordered=self._time_ordered)
            self._reporter.curve.resume_from(0)
            self._trainer.begin(start)
            if start is not None:
                self._progress.log(f"warm start from {start.folder}")
            return
        if checkpoint.identity != self._spec.identity:
            raise ArtifactError(f"{checkpoint.folder} belongs to another run. Remove {run}.")
        best = self._history.stopped_at
        if best is not None:  # the run is over, and its result is the best epoch
            checkpoint = self._checkpoint_of(best["step"])
        self._restore(checkpoint)
        self._checkpoints.resume_from(checkpoint.step)
        self._reporter.curve.resume_from(checkpoint.step)
        self._progress.log(f"resuming from step {checkpoint.step:,} of run {run.name}")

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._state = TrainingState.from_checkpoint(checkpoint, time_ordered=self._time_ordered)
        self._trainer.restore(checkpoint, self._state.trained_rows)

    def _train_to(self, epochs: int) -> Checkpoint:
        with self._checkpoints:
            while True:
                if self._state.at_epoch_end:
                    self._finish_epoch()
                if self.epoch >= epochs or self.stopped_early:
                    break
                self._trainer.model.calibration = None  # it belongs to the previous epoch
                self._train_epoch()
        self._reporter.curve.write()
        best = self._history.stopped_at
        if best is not None:
            self._progress.log(f"epoch {best['epoch']} was the best; later epochs did not improve on it")
        return self._checkpoint_of(self._trainer.step if best is None else best["step"])

    def _evaluate(self) -> ModelEvaluation:
        best = self._history.stopped_at
        step = self._trainer.step if best is None else best["step"]
        if step != self._trainer.step and not self.evaluator.has(step):
            self._restore(self._checkpoint_of(step))  # it was evaluated before the run was interrupted
        return self.evaluator.result(step, self._state.evicted, self._checkpoint_of(step))

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def _train_epoch(self) -> None:
        rows = self._spec.dataset.splits["train"].rows
        self._progress.begin(f"train epoch {self.epoch + 1}", total_rows=rows)
        try:
            self._trainer.train_epoch(self._state, self._checkpoints.due, self._begin_checkpoint)
            self._checkpoints.wait()
        except Diverged as error:
            path = self._spec.folder / f"diverged-step-{self._trainer.step:09d}.parquet"
            pq.write_table(to_table([error.rows], self._spec.dataset.features), path)
            raise ClicklineError(f"{error} The batch was saved to {path}.") from error
        finally:
            self._progress.end()

    def _finish_epoch(self) -> None:
        """Evict, calibrate, checkpoint, evaluate: each only once, however often the run is interrupted here."""
        existing = open_checkpoint_folder(checkpoint_folder(self._spec.folder, self._trainer.step))
        if existing is None or existing.manifest.run is None or not existing.manifest.run.epoch_end:
            self._evict()
            self._trainer.model.calibration = self._calibration()
            self._begin_checkpoint(epoch_end=True)
        if self.epoch not in self._history:
            self._evaluate_epoch()
        self._checkpoints.wait()
        self._prune()

    def _evict(self) -> None:
        rule = self._settings.eviction
        if rule is None:
            return
        if rule.decay < 1:
            self._trainer.decay(rule.decay)
        evicted = self._state.evicted
        for slot in self._trainer.evict(eviction_of(rule), self._state.newest_hour):
            evicted[slot.name] = evicted.get(slot.name, 0) + slot.ids + slot.candidates

    def _calibration(self) -> Calibration | None:
        rule = self._settings.calibration
        self._trainer.model.calibration = None
        if rule is None:
            return None
        counts = MetricCounts()
        self._progress.begin("calibrate", total_rows=self._spec.dataset.splits["train"].rows)
        for rows in self._batches.held_out():
            counts.add(rows.label_B, rows.weight_B, self._trainer.score(rows))
            self._progress.advance(rows=rows.rows)
        self._progress.end()
        return fit_calibration(rule.method, counts.bins())

    def _evaluate_epoch(self) -> None:
        """Evaluate the model at the end of this epoch and add it to the history."""
        step, epoch, best = self._trainer.step, self.epoch, self._history.best
        # After early stopping the best epoch is the result, and its model is gone then.
        evaluation = self.evaluator.evaluate(
            self._state.evicted,
            keep=() if best is None else (best["step"],),
            analyze_fields=self._settings.early_stopping is not None,
        )
        entry: dict[str, Any] = {"epoch": epoch, "step": step}
        if evaluation is not None:
            total = evaluation.total
            metrics = {"auc": total.auc, "logloss": total.logloss, "calibration": total.calibration}
            entry |= metrics
            known = {f"eval_{name}": value for name, value in metrics.items() if value is not None}
            self._reporter.tracker.metrics(step, known)
            if total.auc is not None and total.logloss is not None and self._settings.epochs > 1:
                self._progress.log(f"epoch {epoch}: AUC {total.auc:.4f}, log loss {total.logloss:.4f}")
        self._history.add(entry)

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def _begin_checkpoint(self, *, epoch_end: bool = False) -> None:
        """Snapshot the state between two steps; it is written while training continues."""
        write_snapshot = self._trainer.begin_snapshot(self._state, 1.0 if epoch_end else _WRITER_SHARE)
        model, dataset = self._trainer.model, self._spec.dataset
        arrays = self._state.arrays()
        state = CheckpointState(
            dataset.features.to_json(),
            model.plan.to_json(),
            model.calibration.to_json() if epoch_end and model.calibration else None,
            self._state.newest_hour,
            run=RunProgress(
                dict(self._spec.identity),
                dataset.id,
                self._state.position,
                epoch_end,
                dict(self._state.evicted),
                self._state.trained_rows,
                None if self._state.units is None else dict(self._state.units),
            ),
        )

        def write() -> Checkpoint:
            checkpoint = write_snapshot(arrays, state)
            self._prune()
            return checkpoint

        self._checkpoints.begin(self._trainer.step, write)

    def _prune(self) -> None:
        best = self._history.best
        prune_checkpoints(
            self._spec.folder, self._settings.keep_checkpoints, None if best is None else best["step"]
        )

    def _checkpoint_of(self, step: int) -> Checkpoint:
        folder: Path = checkpoint_folder(self._spec.folder, step)
        checkpoint = open_checkpoint_folder(folder)
        if checkpoint is None:
            raise ArtifactError(f"{folder} is gone. Remove {self._spec.folder} and train again.")
        return checkpoint
