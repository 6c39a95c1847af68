"""The training loop: batches in, checkpoints out, and exactly where it was when it is started again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from clickline.artifacts.checkpoint import (
    Checkpoint,
    checkpoint_folder,
    latest,
    open_checkpoint_folder,
    prune,
    write_checkpoint,
)
from clickline.artifacts.dataset import Dataset, to_table
from clickline.artifacts.manifest import as_json
from clickline.config.sections import TrainSection
from clickline.embedding import Eviction, Snapshot, freeze
from clickline.errors import ArtifactError, ClicklineError
from clickline.features import FeatureSpec
from clickline.learner import Diverged, Learner, Prepared
from clickline.learner.batches import Batches, Position
from clickline.learner.hardware import finds_ahead
from clickline.metrics.binary import Counts
from clickline.metrics.calibrate import fit_isotonic, fit_platt
from clickline.metrics.evaluation import Evaluation, measure
from clickline.metrics.progressive import Progressive
from clickline.metrics.window import Window
from clickline.progress import Progress, human_size
from clickline.records import LabelledRows
from clickline.storage.stores import Storage
from clickline.tracking import Tracker, process_figures

__all__ = ["Result", "Trainer"]

_TOLD_SECONDS = 2.0
_WRITER_SHARE = 0.2  # of one core, for a checkpoint that is written while training goes on


@dataclass(frozen=True)
class Result:
    """What training came to."""

    checkpoint: Checkpoint
    evaluation: Evaluation | None  # None without eval rows
    story: Mapping[str, Any]  # what the report says of the training itself


@dataclass(frozen=True)
class _Measured:
    """What a model was worth, and what its tables held."""

    evaluation: Evaluation | None
    slots: list[dict[str, Any]]


class Trainer:
    """Learns batch by batch and writes checkpoints in the background while it goes on."""

    def __init__(
        self,
        settings: TrainSection,
        dataset: Dataset,
        learner: Learner,
        batches: Batches,
        run: Path,
        identity: Mapping[str, Any],
        tracker: Tracker,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._dataset = dataset
        self._learner = learner
        self._batches = batches
        self._run = run
        self._identity = identity
        self._tracker = tracker
        self._progress = progress
        self._finds_ahead = finds_ahead(identity["threads"])
        self._position = Position()
        self._newest_hour = -1
        self._evicted: dict[str, int] = {}
        self._hours = Progressive() if settings.order == "time" else None  # each row before it was learned
        self._epochs: list[dict[str, Any]] = []  # what was measured at the end of each
        self._measured: dict[int, _Measured] = {}  # by step: the newest and the best
        self._snapshot: Snapshot | None = None  # the one being written
        self._window = Window()
        self._told = self._written = time.monotonic()
        self._rows_told = 0

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

    def resume(self, start: Checkpoint | None) -> None:
        """Go on from the newest checkpoint of this run; without one from `start`, an earlier model."""
        found = latest(self._run)
        if found is None:
            if start is not None:
                self._learner.load_moments(self._learner.model.restore(start))
                self._progress.say(f"learning on from {start.folder}")
            return
        if found.body["identity"] != self._identity:
            raise ArtifactError(f"{found.folder} belongs to another run. Remove {self._run}.")
        self._epochs = [known for known in self._read_history() if known["step"] <= found.step]
        best = self._best()
        if self.stopped_early and best is not None:  # it is over, and its result is the best epoch
            found = self._checkpoint_of(best["step"])
        self._restore(found)
        self._progress.say(f"going on from step {found.step:,} of run {self._run.name}")

    def _restore(self, checkpoint: Checkpoint) -> None:
        arrays = self._learner.model.restore(checkpoint)
        self._learner.load_dense_state(arrays, step=checkpoint.step)
        body = checkpoint.body
        self._position = Position(**body["position"])
        self._newest_hour = body["newest_hour"]
        self._evicted = dict(body["evicted"])
        if self._hours is not None:
            self._hours = Progressive.from_arrays(
                {name.removeprefix("hours/"): a for name, a in arrays.items() if name.startswith("hours/")}
            )

    def train_to(self, epochs: int) -> Result:
        """Learn until `epochs` epochs are done or more do not help; the result and what was measured of it."""
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as pool:
            while True:
                if self._position.epoch and self._position == Position(self._position.epoch):
                    self._finish_epoch(pool)
                if self._position.epoch >= epochs or self.stopped_early:
                    break
                self._learn_epoch(pool)
        return self._result()

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def _learn_epoch(self, pool: ThreadPoolExecutor) -> None:
        """From the position to the end of its epoch."""
        self._learner.model.calibration = None  # it was that of the epoch before
        rows = self._dataset.splits["train"].rows
        self._progress.begin(f"train epoch {self._position.epoch + 1}", total_rows=rows)
        writing: Future[Checkpoint] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="find") as finder:
            coming = self._batches.epoch(self._position)
            current = next(coming, None)
            prepared = self._prepare(current[0]) if current else None
            while current is not None:
                batch, after = current
                following = next(coming, None)
                # A checkpoint must not come between a batch's lookup, which counts it, and its learning.
                cut = following is not None and self._checkpoint_due() and (writing is None or writing.done())
                ahead = None
                if following is not None and not cut and self._finds_ahead:
                    ahead = finder.submit(self._prepare, following[0])
                if prepared is not None:
                    self._learn(prepared)
                self._position = after
                self._progress.advance(rows=batch.rows)
                if cut:
                    if writing is not None:
                        writing.result()
                    writing = self._begin_checkpoint(pool)
                current = following
                if following is not None:
                    prepared = self._prepare(following[0]) if ahead is None else ahead.result()
        if writing is not None:
            if self._snapshot is not None:
                self._snapshot.hurry()  # nothing is learned meanwhile that it could disturb
            writing.result()
        self._progress.end()

    def _prepare(self, rows: LabelledRows) -> Prepared | None:
        return self._learner.prepare(rows) if rows.rows else None

    def _learn(self, prepared: Prepared) -> None:
        rows = prepared.rows
        try:
            step = self._learner.learn(prepared)
        except Diverged as error:
            raise ClicklineError(f"{error} The batch is kept in {self._keep_batch(error.rows)}.") from error
        self._window.add(rows.label_B, rows.weight_B, step.probability_B)
        if self._hours is not None and not self._position.epoch:
            self._hours.add(rows.event_hour_B, rows.label_B, rows.weight_B, step.probability_B)
        self._newest_hour = max(self._newest_hour, int(rows.event_hour_B.max()))
        self._rows_told += rows.rows
        now = time.monotonic()
        if now - self._told > _TOLD_SECONDS:
            self._tell(now)

    def _tell(self, now: float) -> None:
        auc, loss = self._window.measure()
        size, busy = self._learner.model.tables.size, process_figures()
        figures = {"rows_per_second": self._rows_told / (now - self._told), "ids": size, **busy}
        if auc is not None and loss is not None:
            self._progress.note(
                f"step {self._learner.step:,}, loss {loss:.4f}, AUC {auc:.4f}, {size:,} ids, "
                f"{human_size(busy['system/memory_mib'] * 2**20)}"
            )
            figures |= {"loss": loss, "auc": auc}
        self._tracker.metrics(self._learner.step, figures)
        self._told, self._rows_told = now, 0

    def _keep_batch(self, rows: LabelledRows) -> Path:
        """The batch at fault as Parquet, for whoever looks into it."""
        path = self._run / f"diverged-step-{self._learner.step:09d}.parquet"
        pq.write_table(to_table([rows], self._dataset.features), path)
        return path

    # ── the end of an epoch ────────────────────────────────────────────────────────────────────

    def _finish_epoch(self, pool: ThreadPoolExecutor) -> None:
        """Forget, calibrate, keep, measure: each of them only once, however often the run was stopped here."""
        step, writing = self._learner.step, None
        kept = open_checkpoint_folder(checkpoint_folder(self._run, step))
        if kept is None or not kept.body["epoch_end"]:
            self._forget()
            self._calibrate()
            writing = self._begin_checkpoint(pool, epoch_end=True)
        if all(known["epoch"] != self._position.epoch for known in self._epochs):
            self._measure()
        if writing is not None:
            writing.result()
        best = self._best()
        prune(self._run, self._settings.keep_checkpoints, None if best is None else best["step"])

    def _forget(self) -> None:
        rule = self._settings.eviction
        if rule is None:
            return
        tables = self._learner.model.tables
        if rule.decay < 1:
            tables.decay(rule.decay)
        gone = tables.evict(
            Eviction(rule.threshold, rule.hours_unseen, rule.click_weight, rule.nonclick_weight),
            self._newest_hour,
        )
        for slot in gone:
            self._evicted[slot.name] = self._evicted.get(slot.name, 0) + slot.ids + slot.candidates

    def _calibrate(self) -> None:
        rule, model = self._settings.calibration, self._learner.model
        model.calibration = None
        if rule is None:
            return
        counts = Counts()
        self._progress.begin("calibrate", total_rows=self._dataset.splits["train"].rows)
        for rows in self._batches.held_out():
            counts.add(rows.label_B, rows.weight_B, model.score(rows))
            self._progress.advance(rows=rows.rows)
        self._progress.end()
        fit = fit_isotonic if rule.method == "isotonic" else fit_platt
        model.calibration = fit(counts.bins())

    def _measure(self) -> None:
        """What the model is worth at the end of this epoch; remembered beside the checkpoints."""
        evaluation = self._measurement().evaluation
        entry: dict[str, Any] = {"epoch": self._position.epoch, "step": self._learner.step}
        if evaluation is not None:
            total = evaluation.total
            entry |= {"auc": total.auc, "logloss": total.logloss, "calibration": total.calibration}
            if total.auc is not None and total.logloss is not None:
                self._tracker.metrics(
                    self._learner.step, {"eval_auc": total.auc, "eval_logloss": total.logloss}
                )
                if self._settings.epochs > 1:
                    self._progress.say(
                        f"epoch {self._position.epoch}: AUC {total.auc:.4f}, log loss {total.logloss:.4f}"
                    )
        self._epochs.append(entry)
        Storage().put(str(self._run / "history.json"), as_json(self._epochs, indent=1))

    def _measurement(self) -> _Measured:
        """Every eval row, scored by the model as it is now, and what the model holds."""
        step, model = self._learner.step, self._learner.model
        if step not in self._measured:
            evaluation = None
            if "eval" in self._dataset.splits:
                own = model.custom.metrics if model.custom is not None else None
                evaluation = measure(model.score, self.eval_rows(), own=own)
            slots = [
                {**asdict(slot), "evicted": self._evicted.get(slot.name, 0)} for slot in model.tables.report()
            ]
            best = self._best()
            kept = () if best is None else (best["step"],)
            self._measured = {known: self._measured[known] for known in kept if known in self._measured}
            self._measured[step] = _Measured(evaluation, slots)
        return self._measured[step]

    def eval_rows(self) -> Iterator[LabelledRows]:
        """Every row of the dataset's eval part."""
        split = self._dataset.splits["eval"]
        self._progress.begin("evaluate", total_rows=split.rows)
        for shard, group, _ in self._dataset.row_groups("eval"):
            rows = self._dataset.read(Path(self._dataset.folder, split.shards[shard].file), [group])
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

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def _checkpoint_due(self) -> bool:
        """Whether a checkpoint follows the step that comes now."""
        steps = self._settings.checkpoint_steps
        if steps is not None and (self._learner.step + 1) % steps == 0:
            return True
        return time.monotonic() - self._written > self._settings.checkpoint_every

    def _begin_checkpoint(self, pool: ThreadPoolExecutor, *, epoch_end: bool = False) -> Future[Checkpoint]:
        """Cut here and now, between two steps; write while training goes on."""
        self._written = time.monotonic()
        model = self._learner.model
        snapshot = self._snapshot = freeze(model.tables, share=1.0 if epoch_end else _WRITER_SHARE)
        dense = self._learner.dense_state()
        if self._hours is not None:
            dense |= {f"hours/{name}": array for name, array in self._hours.to_arrays().items()}
        body = {
            "identity": self._identity,
            "dataset": self._dataset.id,
            "features": self._dataset.features.to_json(),
            "plan": model.plan.to_json(),
            "calibration": model.calibration.to_json() if epoch_end and model.calibration else None,
            "position": asdict(self._position),
            "epoch_end": epoch_end,
            "newest_hour": self._newest_hour,
            "evicted": dict(self._evicted),
        }
        step, best = self._learner.step, self._best()

        def write() -> Checkpoint:
            made = write_checkpoint(self._run, step, snapshot.write, dense, body)
            prune(self._run, self._settings.keep_checkpoints, None if best is None else best["step"])
            return made

        return pool.submit(write)

    def _result(self) -> Result:
        """The newest checkpoint; after an early stop the best epoch's."""
        step, best = self._learner.step, self._best()
        if self.stopped_early and best is not None:
            step = best["step"]
            self._progress.say(f"epoch {best['epoch']} was the best; the later ones did not help")
        measured = self._measurement() if step == self._learner.step else self._measured[step]
        story = {
            "epochs": self._epochs,
            "slots": measured.slots,
            "progressive": None if self._hours is None else self._hours.to_json(),
        }
        return Result(self._checkpoint_of(step), measured.evaluation, story)

    def _checkpoint_of(self, step: int) -> Checkpoint:
        found = open_checkpoint_folder(checkpoint_folder(self._run, step))
        if found is None:
            raise ArtifactError(
                f"{checkpoint_folder(self._run, step)} is gone. Remove {self._run} and train again."
            )
        return found
