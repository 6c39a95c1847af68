"""The logic of a training run, local or on a cluster: epochs, their evaluation, checkpoints, and resuming."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import (
    Checkpoint,
    Position,
    RunState,
    TrainingState,
    checkpoint_folder,
    latest_checkpoint,
    open_checkpoint_folder,
    prune_checkpoints,
)
from clickline.artifacts.dataset import Dataset, to_table
from clickline.artifacts.manifest import as_json
from clickline.config.sections import TrainSection
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ArtifactError
from clickline.evaluation.binary_metrics import MetricCounts
from clickline.evaluation.calibration_fit import fit_isotonic, fit_platt
from clickline.evaluation.evaluator import Evaluation, evaluate_rows
from clickline.evaluation.importance import FieldImportance
from clickline.evaluation.progressive_validation import ProgressiveValidation
from clickline.evaluation.report.report_document import (
    measure_importance,
    sample,
    slots_to_slice,
    unseen_shares_in_files,
)
from clickline.features import FeatureSpec
from clickline.models.calibration import Calibration
from clickline.models.model import Model
from clickline.progress import Progress
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Batches
from clickline.training.learning_curve import CurveColumns, LearningCurve
from clickline.training.tracking import Tracker


@dataclass(frozen=True)
class TrainedModel:
    """The result of training."""

    checkpoint: Checkpoint
    evaluation: Evaluation | None  # None without eval rows
    field_analysis: FieldAnalysis | None  # None without eval rows
    history: Mapping[str, Any]  # of the training, for the report
    curve: CurveColumns


@dataclass(frozen=True)
class FieldAnalysis:
    """Importance and coverage of the fields, measured on a sample of the eval rows."""

    importance: tuple[FieldImportance, ...]
    importance_rows: int
    # By slot: share of the values without a vector; None: the tables are too large to be read.
    unseen: Sequence[float] | None


@dataclass
class _EpochEvaluation:
    """Evaluation of the model at one step, and the sizes of its tables."""

    evaluation: Evaluation | None
    slots: list[dict[str, Any]]
    field_analysis: FieldAnalysis | None = None  # computed on demand: it takes a while


class TrainingRun(ABC):
    """Trains epoch by epoch with evaluation and checkpoints. The subclass decides where the steps run."""

    def __init__(
        self,
        settings: TrainSection,
        dataset: Dataset,
        model: Model,
        batches: Batches,
        run: Path,
        identity: Mapping[str, Any],
        tracker: Tracker,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._dataset = dataset
        self._model = model
        self._batches = batches
        self._run = run
        self._identity = identity
        self._tracker = tracker
        self._progress = progress
        self._position = Position()
        self._newest_hour = -1
        self._evicted: dict[str, int] = {}
        # Predictions of each row before it was trained on.
        self._hours = ProgressiveValidation() if settings.order == "time" else None
        self._history: list[dict[str, Any]] = []  # evaluation at the end of each epoch
        self._evaluations: dict[int, _EpochEvaluation] = {}  # by step: the newest and the best
        self._trained_rows = 0  # each row once per epoch
        self._curve = LearningCurve(run / "curve.json")
        self._samples: dict[str, LabelledRows | None] = {}
        self.sliced_slots = slots_to_slice(dataset, dataset.features)

    # ── steps of the subclass ──────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of steps taken."""

    @abstractmethod
    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities; trains nothing."""

    @abstractmethod
    def _train_epoch(self, pool: ThreadPoolExecutor) -> None:
        """Train from the position to the end of its epoch."""

    @abstractmethod
    def _restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state of a checkpoint exactly."""

    @abstractmethod
    def _warm_start(self, start: Checkpoint) -> None:
        """Start from the weights of an earlier model, at the first row."""

    @abstractmethod
    def _begin_checkpoint(self, pool: ThreadPoolExecutor, *, epoch_end: bool = False) -> Future[Checkpoint]:
        """Snapshot the state between two steps and begin to write it."""

    @abstractmethod
    def _decay(self, rate: float) -> None:
        """Decay every counter of the tables."""

    @abstractmethod
    def _evict(self, rule: Eviction) -> tuple[SlotReport, ...]:
        """Evict ids by the rule; returns how many."""

    @abstractmethod
    def _slots(self) -> tuple[SlotReport, ...]:
        """Sizes of the tables by slot."""

    @abstractmethod
    def _unseen_shares(self, rows: LabelledRows) -> Sequence[float] | None:
        """By slot, the share of the rows' values without a vector; None if only the checkpoint can answer."""

    # ── progress ───────────────────────────────────────────────────────────────────────────────

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def features(self) -> FeatureSpec:
        return self._dataset.features

    @property
    def stopped_early(self) -> bool:
        """Whether the last epochs were no better than an earlier one."""
        rule = self._settings.early_stopping
        best = self._best()
        return rule is not None and best is not None and len(self._history) - best["epoch"] >= rule.patience

    @property
    def _at_epoch_end(self) -> bool:
        return self._position.epoch > 0 and self._position == Position(self._position.epoch)

    def resume(self, start: Checkpoint | None) -> None:
        """Resume from the newest checkpoint of this run; without one start from `start`, an earlier model."""
        checkpoint = latest_checkpoint(self._run)
        if checkpoint is None:
            self._curve.resume_from(0)
            if start is not None:
                self._warm_start(start)
                self._progress.log(f"warm start from {start.folder}")
            return
        if checkpoint.manifest.run is None or checkpoint.manifest.run.identity != self._identity:
            raise ArtifactError(f"{checkpoint.folder} belongs to another run. Remove {self._run}.")
        self._history = [entry for entry in self._read_history() if entry["step"] <= checkpoint.step]
        best = self._best()
        if self.stopped_early and best is not None:  # the run is over, and its result is the best epoch
            checkpoint = self._checkpoint_of(best["step"])
        self._restore_progress(checkpoint)
        self._restore(checkpoint)
        self._curve.resume_from(checkpoint.step)
        self._progress.log(f"resuming from step {checkpoint.step:,} of run {self._run.name}")

    def _restore_progress(self, checkpoint: Checkpoint) -> None:
        self._newest_hour = checkpoint.manifest.newest_hour
        state = checkpoint.manifest.run
        assert state is not None  # checked by `resume`
        self._position = state.position
        self._evicted = dict(state.evicted)
        self._trained_rows = state.trained_rows
        if self._hours is not None:
            self._hours = ProgressiveValidation.from_arrays(
                {
                    name.removeprefix("hours/"): a
                    for name, a in checkpoint.dense().items()
                    if name.startswith("hours/")
                }
            )

    def _state(self, *, epoch_end: bool, units: Mapping[str, Any] | None = None) -> TrainingState:
        """The state of the run for a checkpoint's manifest."""
        calibration = self._model.calibration
        return TrainingState(
            self._dataset.features.to_json(),
            self._model.plan.to_json(),
            calibration.to_json() if epoch_end and calibration else None,
            self._newest_hour,
            run=RunState(
                dict(self._identity),
                self._dataset.id,
                self._position,
                epoch_end,
                dict(self._evicted),
                self._trained_rows,
                None if units is None else dict(units),
            ),
        )

    def _save_batch(self, rows: LabelledRows) -> Path:
        """Save the batch that diverged as Parquet, for debugging."""
        path = self._run / f"diverged-step-{self.step:09d}.parquet"
        pq.write_table(to_table([rows], self._dataset.features), path)
        return path

    def _prune(self) -> None:
        best = self._best()
        prune_checkpoints(self._run, self._settings.keep_checkpoints, None if best is None else best["step"])

    # ── epochs ─────────────────────────────────────────────────────────────────────────────────

    def train_to(self, epochs: int) -> TrainedModel:
        """Train until `epochs` epochs are done or early stopping ends the run."""
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as pool:
            while True:
                if self._at_epoch_end:
                    self._finish_epoch(pool)
                if self._position.epoch >= epochs or self.stopped_early:
                    break
                self._model.calibration = None  # it belongs to the previous epoch
                self._train_epoch(pool)
        self._curve.write()
        return self._result()

    def _finish_epoch(self, pool: ThreadPoolExecutor) -> None:
        """Evict, calibrate, checkpoint, evaluate: each only once, however often the run is interrupted here."""
        writing = None
        existing = open_checkpoint_folder(checkpoint_folder(self._run, self.step))
        if existing is None or existing.manifest.run is None or not existing.manifest.run.epoch_end:
            self._apply_eviction()
            self._model.calibration = self._calibration()
            writing = self._begin_checkpoint(pool, epoch_end=True)
        if all(entry["epoch"] != self._position.epoch for entry in self._history):
            self._evaluate_epoch()
        if writing is not None:
            writing.result()
        self._prune()

    def _apply_eviction(self) -> None:
        rule = self._settings.eviction
        if rule is None:
            return
        if rule.decay < 1:
            self._decay(rule.decay)
        self._count_evicted(
            self._evict(
                Eviction(rule.threshold, rule.max_idle_hours, rule.click_weight, rule.nonclick_weight)
            )
        )

    def _count_evicted(self, evicted: tuple[SlotReport, ...]) -> None:
        for slot in evicted:
            self._evicted[slot.name] = self._evicted.get(slot.name, 0) + slot.ids + slot.candidates

    def _calibration(self) -> Calibration | None:
        rule = self._settings.calibration
        self._model.calibration = None
        if rule is None:
            return None
        counts = MetricCounts()
        self._progress.begin("calibrate", total_rows=self._dataset.splits["train"].rows)
        for rows in self._batches.held_out():
            counts.add(rows.label_B, rows.weight_B, self.score(rows))
            self._progress.advance(rows=rows.rows)
        self._progress.end()
        return (fit_isotonic if rule.method == "isotonic" else fit_platt)(counts.bins())

    def _evaluate_epoch(self) -> None:
        """Evaluate the model at the end of this epoch and add it to the history file."""
        evaluation = self._evaluate().evaluation
        entry: dict[str, Any] = {"epoch": self._position.epoch, "step": self.step}
        if evaluation is not None:
            total = evaluation.total
            entry |= {"auc": total.auc, "logloss": total.logloss, "calibration": total.calibration}
            if total.auc is not None and total.logloss is not None:
                self._tracker.metrics(self.step, {"eval_auc": total.auc, "eval_logloss": total.logloss})
                if self._settings.epochs > 1:
                    self._progress.log(
                        f"epoch {self._position.epoch}: AUC {total.auc:.4f}, log loss {total.logloss:.4f}"
                    )
        self._history.append(entry)
        Storage().put(str(self._run / "history.json"), as_json(self._history, indent=1))

    def _evaluate(self) -> _EpochEvaluation:
        """Evaluate the current model on all eval rows, once per step."""
        step, model = self.step, self._model
        if step not in self._evaluations:
            evaluation = None
            if "eval" in self._dataset.splits:
                custom_metrics = model.custom.metrics if model.custom is not None else None
                evaluation = evaluate_rows(
                    self.score, self.eval_rows(), slots=self.sliced_slots, custom_metrics=custom_metrics
                )
            slots = [{**asdict(slot), "evicted": self._evicted.get(slot.name, 0)} for slot in self._slots()]
            best = self._best()
            best_steps = () if best is None else (best["step"],)
            self._evaluations = {
                known: self._evaluations[known] for known in best_steps if known in self._evaluations
            }
            self._evaluations[step] = _EpochEvaluation(evaluation, slots)
            if self._settings.early_stopping is not None:  # once it turns out to be the best, it is too late
                self._analyze_fields(self._evaluations[step])
        return self._evaluations[step]

    def _analyze_fields(self, evaluated: _EpochEvaluation) -> FieldAnalysis | None:
        """Measure the importance of the fields to the current model, once."""
        rows = self.sample("eval")
        if evaluated.field_analysis is None and evaluated.evaluation is not None and rows is not None:
            self._progress.begin("field importance")
            importance, count = measure_importance(self._score_with_progress, rows, self.features)
            self._progress.end()
            evaluated.field_analysis = FieldAnalysis(importance, count, self._unseen_shares(rows))
        return evaluated.field_analysis

    def _score_with_progress(self, rows: LabelledRows) -> NDArray[np.float32]:
        self._progress.advance(rows=rows.rows)
        return self.score(rows)

    def sample(self, split: str) -> LabelledRows | None:
        """A sample of a split's rows; None if it has none."""
        if split not in self._samples:
            self._samples[split] = sample(self._dataset, split, partial(self._read, split))
        return self._samples[split]

    def _read(self, split: str, shard: int, group: int) -> LabelledRows:
        path = Path(self._dataset.folder, self._dataset.splits[split].shards[shard].file)
        return self._dataset.read(path, [group])

    def eval_rows(self) -> Iterator[LabelledRows]:
        """All rows of the eval split."""
        self._progress.begin("evaluate", total_rows=self._dataset.splits["eval"].rows)
        for shard, group, _ in self._dataset.row_groups("eval"):
            rows = self._read("eval", shard, group)
            yield rows
            self._progress.advance(rows=rows.rows)
        self._progress.end()

    def _best(self) -> dict[str, Any] | None:
        """The history entry of the best epoch so far."""
        metric = self._settings.early_stopping.metric if self._settings.early_stopping else "logloss"
        evaluated = [entry for entry in self._history if entry.get(metric) is not None]
        if not evaluated:
            return None
        return min(evaluated, key=lambda entry: entry[metric] if metric == "logloss" else -entry[metric])

    def _read_history(self) -> list[dict[str, Any]]:
        path = self._run / "history.json"
        return json.loads(path.read_text()) if path.exists() else []

    def _result(self) -> TrainedModel:
        """The newest checkpoint, or that of the best epoch after early stopping."""
        step, best = self.step, self._best()
        if self.stopped_early and best is not None:
            step = best["step"]
            self._progress.log(f"epoch {best['epoch']} was the best; later epochs did not improve on it")
        evaluated = self._evaluate() if step == self.step else self._evaluations[step]
        field_analysis = self._analyze_fields(evaluated) if step == self.step else evaluated.field_analysis
        history = {
            "epochs": self._history,
            "slots": evaluated.slots,
            "progressive": None if self._hours is None else self._hours.to_json(),
        }
        checkpoint, rows = self._checkpoint_of(step), self.sample("eval")
        if field_analysis is not None and field_analysis.unseen is None and rows is not None:
            field_analysis = replace(field_analysis, unseen=unseen_shares_in_files(checkpoint.tables, rows))
        return TrainedModel(checkpoint, evaluated.evaluation, field_analysis, history, self._curve.columns())

    def _checkpoint_of(self, step: int) -> Checkpoint:
        checkpoint = open_checkpoint_folder(checkpoint_folder(self._run, step))
        if checkpoint is None:
            raise ArtifactError(
                f"{checkpoint_folder(self._run, step)} is gone. Remove {self._run} and train again."
            )
        return checkpoint
