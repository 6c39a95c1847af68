"""A model that learns hour after hour, without end.

An hour is scored before anything of it is learned: that is the honest measure of the model as the hour before left it,
which has learned the held-out rows too and so is not quite the version that was published. Then most of its rows are
learned, ids are evicted, the calibration is fitted; the share that was held out judges what came of it. That very model
can be published now. The held-out rows are learned last. The checkpoint holds the model and the hours it has learned in
one cut, so no hour is ever learned twice.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint, latest, prune, write_checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.artifacts.manifest import as_json
from clickline.config import Config
from clickline.config.sections import ScheduleSection
from clickline.embedding import Eviction, freeze
from clickline.errors import ArtifactError, ConfigError, DataError, Mistake
from clickline.evaluation.binary_metrics import Counts, Metrics
from clickline.evaluation.calibration_fit import fit_isotonic, fit_platt
from clickline.evaluation.evaluator import BLOCK_ROWS, Evaluation, in_blocks, measure
from clickline.evaluation.importance import Score
from clickline.features import ENCODER_FORMAT, FeatureSpec
from clickline.machine import memory_limit
from clickline.models.from_config import batch_size_of, plan_of
from clickline.models.model import Model
from clickline.models.model_plan import ModelPlan
from clickline.models.onnx_export import check_export
from clickline.progress import Progress, human_size
from clickline.records import LabelledRows
from clickline.storage.log_files import hour_step
from clickline.training.batches import Batches, Position
from clickline.training.held_out import HeldOut
from clickline.training.hour_set import HourSet
from clickline.training.train_step import Learner
from clickline.training.warm_start import earlier

_SHAPE = (
    "network",
    "network_sha256",
    "slots",
    "hidden",
    "batch_norm",
    "embedding_optimizer",
    "wide_optimizer",
)
_CALIBRATION_ROWS = 200_000  # that a calibration is fitted on at least, once there were so many
_CALIBRATION_CLICKS = 100  # without so many it is not fitted yet
_FULL = 0.9  # of the bound: what the rows need; the rest is for the steps in which memory grows
_FREED = 0.1  # of the ids, when the bound is reached
_TOLD_SECONDS = 2.0
_SAMPLE_ROWS = 4096  # of the judged rows, that a version is proved with


@dataclass(frozen=True)
class LearnedHour:
    """What an hour said about the model before and after it."""

    rows: int
    progressive: Evaluation  # of the model that had seen nothing of the hour
    held_out: Metrics | None  # of the model that has learned the other rows; None: nothing was held out
    live: Metrics | None  # of the live version on the same rows; None: it was not asked, or not for all
    this_hour: (
        Metrics | None
    )  # as `held_out`, but of this hour's own rows, where that has those of others too
    live_this_hour: Metrics | None
    sample: (
        tuple[LabelledRows, NDArray[np.float32]] | None
    )  # some held-out rows with the scores they were judged by


class HourlyTrainer:
    """Learns one hour after the other. Everything it does follows from its config and the hours."""

    def __init__(self, config: Config, learner: Learner, run: Path, progress: Progress) -> None:
        self._settings = config.train
        self._holdout = config.follow.holdout
        self._learner = learner
        self._run = run
        self._progress = progress
        bound = config.follow.memory
        self._bound = memory_limit() // 2 if bound == "auto" else bound
        self._sequence = 0  # of checkpoints
        self._span = hour_step(config.data.train)
        self._newest_hour = -1  # of all that were learned
        self._now = -1  # the last hour of what is being learned
        self._evicted = 0  # ids of this hour
        self._told = 0.0
        self._scores = (Counts(), Counts())  # of older and of newer rows, before they were learned
        self._held_out = HeldOut()
        self.learned = HourSet()
        self.record: Mapping[str, Any] = {}  # of the hour learned last, as its checkpoint keeps it

    # ── where it comes from ────────────────────────────────────────────────────────────────────

    @classmethod
    def resumed(cls, config: Config, run: Path, threads: int, progress: Progress) -> HourlyTrainer | None:
        """Where the newest checkpoint of `run` left off; None without one."""
        found = latest(run)
        if found is None:
            return None
        _check_format(found, run)
        features = FeatureSpec.from_json(found.body["features"])
        plan = _plan(config, features)
        _check_shape(found, plan, run)
        trainer = cls._new(config, features, plan, run, threads, progress)
        learner, body = trainer._learner, found.body
        arrays = learner.model.restore(found)
        learner.load_dense_state(arrays, step=body["steps"])
        trainer._sequence = found.step
        older, newer = (_under(f"scores/{n}/", arrays) for n in range(2))
        trainer._scores = Counts.from_arrays(older), Counts.from_arrays(newer)
        trainer._held_out = HeldOut.from_arrays(_under("held_out/", arrays))
        trainer._has_learned(HourSet.from_json(body["learned"]))
        trainer.record = body["record"]
        return trainer

    @classmethod
    def begun(
        cls,
        config: Config,
        features: FeatureSpec,
        start: Checkpoint | None,
        learned: Iterable[int],
        run: Path,
        threads: int,
        progress: Progress,
    ) -> HourlyTrainer:
        """A new model, or one that goes on from `start`, which has learned the hours `learned`."""
        trainer = cls._new(config, features, _plan(config, features), run, threads, progress)
        if start is None and config.train.warm_start is not None:
            start = earlier(Path(config.train.warm_start), features, progress)
        if start is not None:
            trainer._learner.load_moments(trainer._learner.model.restore(start))
            progress.say(f"learning on from {start.folder}")
        trainer._has_learned(HourSet(learned))
        return trainer

    def _has_learned(self, hours: HourSet) -> None:
        """The newest hour follows from the hours alone, never from what rows say."""
        self.learned = hours
        self._newest_hour = -1 if hours.last is None else self._last_hour_of(hours.last)

    def _last_hour_of(self, hour: int) -> int:
        """Of the period that begins at `hour`, or that it lies in: itself, or its day's last."""
        return hour // self._span * self._span + self._span - 1

    @classmethod
    def _new(
        cls,
        config: Config,
        features: FeatureSpec,
        plan: ModelPlan,
        run: Path,
        threads: int,
        progress: Progress,
    ) -> HourlyTrainer:
        file = None if config.model.file is None else Path(config.model.file)
        learner = Learner(Model.build(features, plan, threads, file))
        check_export(learner.model.network, learner.model.spec)
        trainer = cls(config, learner, run, progress)
        least = 5 * learner.model.tables.needed_bytes // 4  # most of it before there is any id
        if trainer._bound < least:
            problem = f"is {human_size(trainer._bound)}, too little for any ids of this model."
            remedy = f"Give at least {human_size(least)}; `clickline plan` says what the data need."
            raise ConfigError([Mistake("clickline.yaml", 0, "follow.memory", problem, remedy)])
        return trainer

    @property
    def model(self) -> Model:
        return self._learner.model

    @property
    def steps(self) -> int:
        return self._learner.step

    @property
    def newest_hour(self) -> int:
        """The newest that was learned, by the names of the files; -1: none yet."""
        return self._newest_hour

    @property
    def evicted(self) -> int:
        """Ids that went in the hour learned last."""
        return self._evicted

    def identity(self) -> str:
        """What tells this model from any other, by content: learned again from the same checkpoint, it is the same."""
        model = self.model
        document = {
            "plan": model.plan.to_json(),
            "features": model.features.to_json(),
            "calibration": None if model.calibration is None else model.calibration.to_json(),
            "steps": self.steps,
            "newest_hour": self._newest_hour,
            "tables": model.tables.checksums(),
        }
        found = hashlib.sha256(as_json(document))
        for name, array in sorted(self._learner.dense_state().items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    # ── an hour ────────────────────────────────────────────────────────────────────────────────

    def learn(self, hour: int, dataset: Dataset, live: Score | None = None) -> LearnedHour:
        """Score an hour, learn all but what is held out, forget what is not worth its memory, judge. `live` is how the
        live version scores rows, to be compared with. What was judged is the model as it is now; `finish` comes after
        it was published.

        Diverged or DataError for an hour that harms: the model is not to be used any more, but opened again."""
        rows = dataset.splits["train"].rows
        progressive = self._score(dataset)
        batches = self._batches(dataset)
        self._evicted = 0
        self._now = self._last_hour_of(hour)
        self._newest_hour = max(self._newest_hour, self._now)
        self._learn_all((batch for batch, _ in batches.epoch(Position(hour))), rows)
        self._forget()
        self._calibrate()
        if not self._holdout:
            return LearnedHour(rows, progressive, None, None, None, None, None)
        sample = self._judge(batches, live)
        return LearnedHour(
            rows, progressive, *self._held_out.measured(), *self._held_out.measured_hour(), sample
        )

    def finish(self, hour: int, dataset: Dataset) -> None:
        """Learn what was held out, too; fails as `learn` does. With this the hour is learned."""
        if self._holdout:
            rows = dataset.splits["train"].rows
            held_out = in_blocks(self._batches(dataset).held_out(), self._batch_size(rows))
            self._learn_all(self._sampled(hour, held_out), int(self._holdout * rows))
        self.learned.add(hour)

    def _learn_all(self, batches: Iterable[LabelledRows], expected: int) -> None:
        self._progress.begin("learn", total_rows=expected)
        try:
            for batch in batches:
                self._learn(batch)
        finally:
            self._progress.end()
        # What has once become infinite, an optimizer's moments above all, stays so: that weight never learns again.
        for name, array in self._learner.dense_state().items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise _extreme(f"{name} is not finite any more")

    def _judge(self, batches: Batches, live: Score | None) -> tuple[LabelledRows, NDArray[np.float32]] | None:
        """Score what was held out; some of it with its scores."""
        ours, theirs = self._held_out.begin_hour(live=live is not None)
        sample = None
        for part in in_blocks(batches.held_out(), BLOCK_ROWS):
            score_B = _numbers(self.model.score(part))
            ours.add(part.label_B, part.weight_B, score_B)
            if live is not None and theirs is not None:
                theirs.add(part.label_B, part.weight_B, _numbers(live(part)))
            if sample is None:
                sample = part.part(0, _SAMPLE_ROWS), score_B[:_SAMPLE_ROWS]
        return sample

    def _batches(self, dataset: Dataset) -> Batches:
        train = self._settings
        return Batches(
            dataset,
            Path(dataset.folder),
            self._batch_size(dataset.splits["train"].rows),
            train.seed,
            in_time=train.order == "time",
            held_out=self._holdout,
            negative_sampling=train.negative_sampling,
        )

    def _batch_size(self, rows: int) -> int:
        return batch_size_of(self._settings, rows)

    def _score(self, dataset: Dataset) -> Evaluation:
        """What the model before this hour is worth on it; its raw scores are what calibration is fitted on."""
        model = self.model
        before, model.calibration = model.calibration, None
        newer = self._scores[1]

        def score(rows: LabelledRows) -> NDArray[np.float32]:
            raw_B = _numbers(model.score(rows))
            if self._settings.calibration is not None:
                newer.add(rows.label_B, rows.weight_B, raw_B)
            self._progress.advance(rows=rows.rows)
            return raw_B if before is None else before.apply(raw_B)

        self._progress.begin("score", total_rows=dataset.splits["train"].rows)
        try:
            return measure(score, self._rows(dataset), own=self._own)
        finally:
            model.calibration = before
            self._progress.end()

    def _rows(self, dataset: Dataset) -> Iterator[LabelledRows]:
        for shard, group, _ in dataset.row_groups("train"):
            yield dataset.read(Path(dataset.folder, dataset.splits["train"].shards[shard].file), [group])

    @property
    def _own(self) -> Mapping[str, Any] | None:
        return None if self.model.custom is None else self.model.custom.metrics

    def _sampled(self, hour: int, batches: Iterable[LabelledRows]) -> Iterator[LabelledRows]:
        """Rows without a click are as rare among the last rows of an hour as among the others."""
        share = self._settings.negative_sampling
        random = np.random.default_rng([self._settings.seed, hour, 2**32 - 2])
        for rows in batches:
            if share < 1:
                rows = rows.select((rows.click_B > 0) | (random.random(rows.rows) < share))
            yield rows

    def _learn(self, rows: LabelledRows) -> None:
        if not rows.rows:
            return
        # Ids were seen when their file was learned: what single rows say may be wrong, or of another time zone.
        rows = replace(rows, event_hour_B=np.full(rows.rows, self._now, dtype=np.int32))
        self._learner.learn(self._learner.prepare(rows))
        self._progress.advance(rows=rows.rows)
        tables = self.model.tables
        if tables.needed_bytes > _FULL * self._bound:
            self._make_room()
        now = time.monotonic()
        if now - self._told > _TOLD_SECONDS:
            self._told = now
            self._progress.note(f"{tables.size:,} ids, {human_size(tables.memory_bytes)}")

    # ── forgetting ─────────────────────────────────────────────────────────────────────────────

    def _forget(self) -> None:
        rule = self._settings.eviction
        if rule is None:
            return
        if rule.decay < 1:
            self.model.tables.decay(rule.decay)
        self._evict(Eviction(rule.threshold, rule.hours_unseen, rule.click_weight, rule.nonclick_weight))

    def _make_room(self) -> None:
        """The tables have reached their bound: ids go that were not seen for long, then those worth least."""
        size = self.model.tables.size
        for rule in _harder_and_harder():
            self._evict(rule)
            if self.model.tables.size <= (1 - _FREED) * size:
                break
        gone = size - self.model.tables.size
        self._progress.say(
            f"the sparse tables reached follow.memory, {human_size(self._bound)}: {gone:,} of {size:,} ids went "
            f"({'not seen for ' + str(rule.hours_unseen) + ' hours' if rule.hours_unseen else 'worth least'})"
        )

    def _evict(self, rule: Eviction) -> None:
        gone = self.model.tables.evict(rule, self._newest_hour)
        self._evicted += sum(slot.ids + slot.candidates for slot in gone)

    def _calibrate(self) -> None:
        rule = self._settings.calibration
        if rule is None:
            return
        together = Counts()
        for counts in self._scores:
            together.merge(counts)
        measured = together.metrics()
        if min(measured.clicks, measured.shows - measured.clicks) >= _CALIBRATION_CLICKS:
            fit = fit_isotonic if rule.method == "isotonic" else fit_platt
            self.model.calibration = fit(together.bins())
        if self._scores[1].rows >= _CALIBRATION_ROWS:
            self._scores = self._scores[1], Counts()

    # ── what is kept ───────────────────────────────────────────────────────────────────────────

    def snapshot(self, path: Path, since: int | None) -> int:
        """Write the tables as they are now, whole or what changed since the mark of another; the mark of this one."""
        snapshot = freeze(self.model.tables, since)
        snapshot.write(path)
        return snapshot.mark

    def checkpoint(self, record: Mapping[str, Any]) -> Checkpoint:
        """Write everything as it is now. From here on the hours learned so far are never learned again."""
        dense = self._learner.dense_state()
        for n, counts in enumerate(self._scores):
            dense |= {f"scores/{n}/{name}": array for name, array in counts.to_arrays().items()}
        dense |= {f"held_out/{name}": array for name, array in self._held_out.to_arrays().items()}
        model = self.model
        body = {
            "dataset": None,
            "features": model.features.to_json(),
            "plan": model.plan.to_json(),
            "calibration": None if model.calibration is None else model.calibration.to_json(),
            "steps": self._learner.step,
            "newest_hour": self._newest_hour,
            "learned": self.learned.to_json(),
            "record": dict(record),
        }
        snapshot = freeze(model.tables)
        try:
            made = write_checkpoint(self._run, self._sequence + 1, snapshot.write, dense, body)
        finally:
            snapshot.close()  # where it failed before it came to the tables
        self._sequence += 1
        self.record = record
        prune(self._run, self._settings.keep_checkpoints, None)
        return made


def _plan(config: Config, features: FeatureSpec) -> ModelPlan:
    """The plan of a run without end: steps of the same size for ever."""
    train, rate = config.train, config.follow.rate
    endless = train.model_copy(
        update={
            "learning_rate": train.learning_rate * rate,
            "schedule": ScheduleSection(kind="constant", warmup=train.schedule.warmup),
            "embedding": train.embedding.model_copy(
                update={
                    "learning_rate": train.embedding.learning_rate * rate,
                    "schedule": ScheduleSection(kind="constant", warmup=train.embedding.schedule.warmup),
                }
            ),
            "wide": train.wide.model_copy(update={"learning_rate": train.wide.learning_rate * rate}),
        }
    )
    return plan_of(config.model_copy(update={"train": endless}), features, 1)


def _check_format(found: Checkpoint, run: Path) -> None:
    """What a model has learned of ids of another format is worth nothing."""
    before = found.body["features"].get("encoder_format")
    if before != ENCODER_FORMAT:
        raise ArtifactError(
            f"the model that follows the hours, in {run}, has features of format {before!r}; this release of Clickline "
            f"encodes in format {ENCODER_FORMAT}, where some values have other ids. Use the release that made it, or "
            f"begin anew: choose another home, or remove {run}."
        )


def _check_shape(found: Checkpoint, plan: ModelPlan, run: Path) -> None:
    """Step sizes may change from one start to the next; what the rows and weights are may not."""
    before, now = found.body["plan"], plan.to_json()

    def kind(value: Any) -> Any:
        return value["kind"] if isinstance(value, Mapping) else value

    changed = [
        f"{key} was {kind(before[key])}, now {kind(now[key])}"
        for key in _SHAPE
        if kind(before[key]) != kind(now[key])
    ]
    if changed:
        raise ArtifactError(
            f"the model that follows the hours, in {run}, has another shape than the config asks for: "
            f"{'; '.join(changed)}. Change the config back, or begin anew: choose another home, or remove {run}."
        )


def _numbers(score_B: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scores, none of which is NaN."""
    if np.isnan(score_B).any():
        raise _extreme("the score of a row is not a number")
    return score_B


def _extreme(found: str) -> DataError:
    return DataError(
        f"the network cannot compute with values of this hour: {found}. Look for extreme values in the dense fields, "
        "or give these another transform: log1p, or bucket."
    )


def _harder_and_harder() -> Iterator[Eviction]:
    for hours in (720, 336, 168, 72, 48, 24, 12, 6, 3, 2, 1):
        yield Eviction(hours_unseen=hours)
    worth = 0.15
    while True:
        yield Eviction(threshold=worth)
        worth *= 2


def _under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
