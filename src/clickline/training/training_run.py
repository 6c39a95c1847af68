"""The story of a run, whoever learns: epochs, what is measured at their end, checkpoints, and going on after a stop."""

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
    checkpoint_folder,
    latest,
    open_checkpoint_folder,
    prune,
)
from clickline.artifacts.dataset import Dataset, to_table
from clickline.artifacts.manifest import as_json
from clickline.config.sections import TrainSection
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ArtifactError
from clickline.evaluation.binary_metrics import Counts
from clickline.evaluation.calibration_fit import fit_isotonic, fit_platt
from clickline.evaluation.evaluator import Evaluation, measure
from clickline.evaluation.importance import FieldImportance
from clickline.evaluation.progressive_validation import Progressive
from clickline.evaluation.report.report_document import importance_on, sample, slots_to_slice, unseen_in_files
from clickline.features import FeatureSpec
from clickline.models.calibration import Calibration
from clickline.models.model import Model
from clickline.progress import Progress
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Batches, Position
from clickline.training.learning_curve import Learning, LearningCurve
from clickline.training.tracking import Tracker


@dataclass(frozen=True)
class Result:
    """What training came to."""

    checkpoint: Checkpoint
    evaluation: Evaluation | None  # None without eval rows
    closer: Closer | None  # None without eval rows
    story: Mapping[str, Any]  # what the report says of the training itself
    learning: Learning


@dataclass(frozen=True)
class Closer:
    """What a sample of the eval rows tells of the fields."""

    importance: tuple[FieldImportance, ...]
    importance_rows: int
    unseen: (
        Sequence[float] | None
    )  # by slot: share of the values without a vector; None: the tables are too large to be read


@dataclass
class _Measured:
    """What a model was worth, and what its tables held."""

    evaluation: Evaluation | None
    slots: list[dict[str, Any]]
    closer: Closer | None = None  # until somebody asked: it takes a while


class Epochs(ABC):
    """Trains to the end of an epoch, measures, goes on. Who learns, and where, is the subclass's."""

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
        self._hours = Progressive() if settings.order == "time" else None  # each row before it was learned
        self._epochs: list[dict[str, Any]] = []  # what was measured at the end of each
        self._measured: dict[int, _Measured] = {}  # by step: the newest and the best
        self._learned = 0  # rows, each once an epoch
        self._curve = LearningCurve(run / "curve.json")
        self._samples: dict[str, LabelledRows | None] = {}
        self.sliced = slots_to_slice(dataset, dataset.features)

    # ── who learns ─────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def step(self) -> int:
        """Steps that were learned."""

    @abstractmethod
    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities, without learning anything."""

    @abstractmethod
    def _learn_epoch(self, pool: ThreadPoolExecutor) -> None:
        """From the position to the end of its epoch."""

    @abstractmethod
    def _restore(self, checkpoint: Checkpoint) -> None:
        """Be where the checkpoint was written."""

    @abstractmethod
    def _warm(self, start: Checkpoint) -> None:
        """Learn on from an earlier model, from the first row on."""

    @abstractmethod
    def _begin_checkpoint(self, pool: ThreadPoolExecutor, *, epoch_end: bool = False) -> Future[Checkpoint]:
        """Cut here and now, between two steps."""

    @abstractmethod
    def _decay(self, rate: float) -> None:
        """Let every counter of the tables fade."""

    @abstractmethod
    def _evict(self, rule: Eviction) -> tuple[SlotReport, ...]:
        """Drop the ids that the rule names; how many went."""

    @abstractmethod
    def _slots(self) -> tuple[SlotReport, ...]:
        """What the tables hold."""

    @abstractmethod
    def _unseen(self, rows: LabelledRows) -> Sequence[float] | None:
        """By slot, which share of the rows' values has no vector; None where only the checkpoint can tell."""

    # ── where it is ────────────────────────────────────────────────────────────────────────────

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def features(self) -> FeatureSpec:
        return self._dataset.features

    @property
    def stopped_early(self) -> bool:
        """Whether the last epochs were no better than one before them."""
        rule = self._settings.early_stop
        best = self._best()
        return rule is not None and best is not None and len(self._epochs) - best["epoch"] >= rule.patience

    @property
    def _at_epoch_end(self) -> bool:
        return self._position.epoch > 0 and self._position == Position(self._position.epoch)

    def resume(self, start: Checkpoint | None) -> None:
        """Go on from the newest checkpoint of this run; without one from `start`, an earlier model."""
        found = latest(self._run)
        if found is None:
            self._curve.go_on_from(0)
            if start is not None:
                self._warm(start)
                self._progress.say(f"learning on from {start.folder}")
            return
        if found.body["identity"] != self._identity:
            raise ArtifactError(f"{found.folder} belongs to another run. Remove {self._run}.")
        self._epochs = [known for known in self._read_history() if known["step"] <= found.step]
        best = self._best()
        if self.stopped_early and best is not None:  # it is over, and its result is the best epoch
            found = self._checkpoint_of(best["step"])
        self._take_story(found)
        self._restore(found)
        self._curve.go_on_from(found.step)
        self._progress.say(f"going on from step {found.step:,} of run {self._run.name}")

    def _take_story(self, checkpoint: Checkpoint) -> None:
        body = checkpoint.body
        self._position = Position(**body["position"])
        self._newest_hour = body["newest_hour"]
        self._evicted = dict(body["evicted"])
        self._learned = body.get("learned_rows", 0)  # which checkpoints of an earlier release do not tell
        if self._hours is not None:
            self._hours = Progressive.from_arrays(
                {
                    name.removeprefix("hours/"): a
                    for name, a in checkpoint.dense().items()
                    if name.startswith("hours/")
                }
            )

    def _story(self, *, epoch_end: bool) -> dict[str, Any]:
        """What a checkpoint says of where the run is."""
        calibration = self._model.calibration
        return {
            "identity": self._identity,
            "dataset": self._dataset.id,
            "features": self._dataset.features.to_json(),
            "plan": self._model.plan.to_json(),
            "calibration": calibration.to_json() if epoch_end and calibration else None,
            "position": asdict(self._position),
            "epoch_end": epoch_end,
            "newest_hour": self._newest_hour,
            "evicted": dict(self._evicted),
            "learned_rows": self._learned,
        }

    def _keep_batch(self, rows: LabelledRows) -> Path:
        """The batch at fault as Parquet, for whoever looks into it."""
        path = self._run / f"diverged-step-{self.step:09d}.parquet"
        pq.write_table(to_table([rows], self._dataset.features), path)
        return path

    def _prune(self) -> None:
        best = self._best()
        prune(self._run, self._settings.keep_checkpoints, None if best is None else best["step"])

    # ── epochs ─────────────────────────────────────────────────────────────────────────────────

    def train_to(self, epochs: int) -> Result:
        """Learn until `epochs` epochs are done or more do not help; the result and what was measured of it."""
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as pool:
            while True:
                if self._at_epoch_end:
                    self._finish_epoch(pool)
                if self._position.epoch >= epochs or self.stopped_early:
                    break
                self._model.calibration = None  # it was that of the epoch before
                self._learn_epoch(pool)
        self._curve.write()
        return self._result()

    def _finish_epoch(self, pool: ThreadPoolExecutor) -> None:
        """Forget, calibrate, keep, measure: each of them only once, however often the run was stopped here."""
        writing = None
        kept = open_checkpoint_folder(checkpoint_folder(self._run, self.step))
        if kept is None or not kept.body["epoch_end"]:
            self._forget()
            self._model.calibration = self._calibration()
            writing = self._begin_checkpoint(pool, epoch_end=True)
        if all(known["epoch"] != self._position.epoch for known in self._epochs):
            self._measure()
        if writing is not None:
            writing.result()
        self._prune()

    def _forget(self) -> None:
        rule = self._settings.eviction
        if rule is None:
            return
        if rule.decay < 1:
            self._decay(rule.decay)
        self._count_evicted(
            self._evict(Eviction(rule.threshold, rule.hours_unseen, rule.click_weight, rule.nonclick_weight))
        )

    def _count_evicted(self, gone: tuple[SlotReport, ...]) -> None:
        for slot in gone:
            self._evicted[slot.name] = self._evicted.get(slot.name, 0) + slot.ids + slot.candidates

    def _calibration(self) -> Calibration | None:
        rule = self._settings.calibration
        self._model.calibration = None
        if rule is None:
            return None
        counts = Counts()
        self._progress.begin("calibrate", total_rows=self._dataset.splits["train"].rows)
        for rows in self._batches.held_out():
            counts.add(rows.label_B, rows.weight_B, self.score(rows))
            self._progress.advance(rows=rows.rows)
        self._progress.end()
        return (fit_isotonic if rule.method == "isotonic" else fit_platt)(counts.bins())

    def _measure(self) -> None:
        """What the model is worth at the end of this epoch; remembered beside the checkpoints."""
        evaluation = self._measurement().evaluation
        entry: dict[str, Any] = {"epoch": self._position.epoch, "step": self.step}
        if evaluation is not None:
            total = evaluation.total
            entry |= {"auc": total.auc, "logloss": total.logloss, "calibration": total.calibration}
            if total.auc is not None and total.logloss is not None:
                self._tracker.metrics(self.step, {"eval_auc": total.auc, "eval_logloss": total.logloss})
                if self._settings.epochs > 1:
                    self._progress.say(
                        f"epoch {self._position.epoch}: AUC {total.auc:.4f}, log loss {total.logloss:.4f}"
                    )
        self._epochs.append(entry)
        Storage().put(str(self._run / "history.json"), as_json(self._epochs, indent=1))

    def _measurement(self) -> _Measured:
        """Every eval row, scored by the model as it is now, and what the model holds."""
        step, model = self.step, self._model
        if step not in self._measured:
            evaluation = None
            if "eval" in self._dataset.splits:
                own = model.custom.metrics if model.custom is not None else None
                evaluation = measure(self.score, self.eval_rows(), slots=self.sliced, own=own)
            slots = [{**asdict(slot), "evicted": self._evicted.get(slot.name, 0)} for slot in self._slots()]
            best = self._best()
            kept = () if best is None else (best["step"],)
            self._measured = {known: self._measured[known] for known in kept if known in self._measured}
            self._measured[step] = _Measured(evaluation, slots)
            if self._settings.early_stop is not None:  # when this turns out to be the best, it is too late
                self._look_closer(self._measured[step])
        return self._measured[step]

    def _look_closer(self, measured: _Measured) -> Closer | None:
        """What the fields are worth to the model as it is now."""
        rows = self.sample("eval")
        if measured.closer is None and measured.evaluation is not None and rows is not None:
            self._progress.begin("importance of fields")
            importance, count = importance_on(self._score_and_tell, rows, self.features)
            self._progress.end()
            measured.closer = Closer(importance, count, self._unseen(rows))
        return measured.closer

    def _score_and_tell(self, rows: LabelledRows) -> NDArray[np.float32]:
        self._progress.advance(rows=rows.rows)
        return self.score(rows)

    def sample(self, split: str) -> LabelledRows | None:
        """Some rows of a part of the dataset; None where it has none."""
        if split not in self._samples:
            self._samples[split] = sample(self._dataset, split, partial(self._read, split))
        return self._samples[split]

    def _read(self, split: str, shard: int, group: int) -> LabelledRows:
        path = Path(self._dataset.folder, self._dataset.splits[split].shards[shard].file)
        return self._dataset.read(path, [group])

    def eval_rows(self) -> Iterator[LabelledRows]:
        """Every row of the dataset's eval part."""
        self._progress.begin("evaluate", total_rows=self._dataset.splits["eval"].rows)
        for shard, group, _ in self._dataset.row_groups("eval"):
            rows = self._read("eval", shard, group)
            yield rows
            self._progress.advance(rows=rows.rows)
        self._progress.end()

    def _best(self) -> dict[str, Any] | None:
        """The epoch that measured best so far."""
        metric = self._settings.early_stop.metric if self._settings.early_stop else "logloss"
        measured = [known for known in self._epochs if known.get(metric) is not None]
        if not measured:
            return None
        return min(measured, key=lambda known: known[metric] if metric == "logloss" else -known[metric])

    def _read_history(self) -> list[dict[str, Any]]:
        path = self._run / "history.json"
        return json.loads(path.read_text()) if path.exists() else []

    def _result(self) -> Result:
        """The newest checkpoint; after an early stop the best epoch's."""
        step, best = self.step, self._best()
        if self.stopped_early and best is not None:
            step = best["step"]
            self._progress.say(f"epoch {best['epoch']} was the best; the later ones did not help")
        measured = self._measurement() if step == self.step else self._measured[step]
        closer = self._look_closer(measured) if step == self.step else measured.closer
        story = {
            "epochs": self._epochs,
            "slots": measured.slots,
            "progressive": None if self._hours is None else self._hours.to_json(),
        }
        checkpoint, rows = self._checkpoint_of(step), self.sample("eval")
        if closer is not None and closer.unseen is None and rows is not None:
            closer = replace(closer, unseen=unseen_in_files(checkpoint.tables, rows))
        return Result(checkpoint, measured.evaluation, closer, story, self._curve.columns())

    def _checkpoint_of(self, step: int) -> Checkpoint:
        found = open_checkpoint_folder(checkpoint_folder(self._run, step))
        if found is None:
            raise ArtifactError(
                f"{checkpoint_folder(self._run, step)} is gone. Remove {self._run} and train again."
            )
        return found
