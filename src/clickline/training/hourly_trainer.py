"""Continuous training, hour after hour.

Each hour is scored before it is trained on: an unbiased measure of the model after the previous hour (which was also
trained on its held-out rows and so is not quite the published version). Then the model trains on most rows of the hour,
ids are evicted, the calibration is fitted, and the held-out share of the rows evaluates the result. Exactly this model
can be published now. Last, it trains on the held-out rows. A checkpoint holds the model and its trained hours together,
so no hour is ever trained twice.
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

from clickline.artifacts.arrays import with_prefix
from clickline.artifacts.checkpoint import (
    Checkpoint,
    CheckpointState,
    HourlyProgress,
    Position,
    latest_checkpoint,
    prune_checkpoints,
    write_checkpoint,
)
from clickline.artifacts.dataset import Dataset
from clickline.artifacts.manifest import as_json
from clickline.config import Config
from clickline.embedding import Eviction, begin_snapshot
from clickline.errors import ArtifactError, ConfigError, DataError, Mistake
from clickline.evaluation.binary_metrics import MetricCounts, Metrics
from clickline.evaluation.calibration_fit import fit_calibration
from clickline.evaluation.evaluator import BLOCK_ROWS, Evaluation, evaluate_rows, in_blocks
from clickline.evaluation.importance import ScoreFn
from clickline.features import FeatureSpec
from clickline.machine import memory_limit
from clickline.models.from_config import batch_size_of, eviction_of
from clickline.models.model import Model
from clickline.models.model_plan import ModelPlan
from clickline.progress import Progress, human_size
from clickline.records import LabelledRows
from clickline.storage.log_files import hour_step
from clickline.training.batches import Batches, batch_settings
from clickline.training.held_out import HeldOutMetrics
from clickline.training.hour_set import HourSet
from clickline.training.hourly_plan import check_format, check_shape, hourly_plan
from clickline.training.train_step import build_train_step
from clickline.training.warm_start import open_warm_start

_CALIBRATION_ROWS = 200_000  # that the calibration is fitted on at least, once that many exist
_CALIBRATION_CLICKS = 100  # fewer, and the calibration is not fitted yet
_FULL_SHARE = 0.9  # of the limit for rows; the rest is for the increments in which tables grow
_FREED_SHARE = 0.1  # of the ids, freed when the limit is reached
_REPORT_SECONDS = 2.0
_SAMPLE_ROWS = 4096  # held-out rows that verify a published version


@dataclass(frozen=True)
class HourResult:
    """Metrics of the model on one hour, before and after training on it."""

    rows: int
    progressive: Evaluation  # before training on the hour
    held_out: Metrics | None  # after training on the other rows; None: nothing was held out
    live: Metrics | None  # of the live version on the same rows; None: it did not score all of them
    this_hour: Metrics | None  # like `held_out`, but only for this hour's rows
    live_this_hour: Metrics | None
    # Some held-out rows with their scores.
    sample: tuple[LabelledRows, NDArray[np.float32]] | None


class HourlyTrainer:
    """Trains one hour after the other. It is deterministic: the result follows from its config and the hours."""

    def __init__(
        self,
        config: Config,
        features: FeatureSpec,
        plan: ModelPlan,
        run: Path,
        threads: int,
        progress: Progress,
    ) -> None:
        self._settings = config.train
        self._holdout = config.follow.holdout
        self._train_step = build_train_step(config, features, plan, threads)
        self._run = run
        self._progress = progress
        limit = config.follow.max_table_memory
        self._memory_limit = memory_limit() // 2 if limit == "auto" else limit
        minimum = 5 * self.model.tables.needed_bytes // 4  # mostly fixed costs, needed without any id
        if self._memory_limit < minimum:
            problem = f"is {human_size(self._memory_limit)}, too little for this model."
            remedy = f"Give at least {human_size(minimum)}; `clickline plan` estimates what the data need."
            raise ConfigError([Mistake("clickline.yaml", 0, "follow.max_table_memory", problem, remedy)])
        self._sequence = 0  # of checkpoints
        self._period_hours = hour_step(config.data.train)
        self.newest_hour = -1  # the newest trained hour, by file name; -1: none yet
        self._current_hour = -1  # the last hour of the current period
        self.evicted = 0  # ids evicted in the last hour
        self._reported_at = 0.0
        # Raw scores of older and newer rows before they were trained on, for the calibration.
        self._scores = MetricCounts(), MetricCounts()
        self._held_out = HeldOutMetrics()
        self.trained_hours = HourSet()
        self.record: Mapping[str, Any] = {}  # of the last hour, as stored in its checkpoint

    # ── creating and resuming ──────────────────────────────────────────────────────────────────

    @classmethod
    def resume(cls, config: Config, run: Path, threads: int, progress: Progress) -> HourlyTrainer | None:
        """Resume from the newest checkpoint of `run`; None without one."""
        checkpoint = latest_checkpoint(run)
        if checkpoint is None:
            return None
        check_format(checkpoint, run)
        features, state = checkpoint.features, checkpoint.manifest.hourly
        if state is None:
            raise ArtifactError(
                f"{checkpoint.folder} is not of an hourly model. Choose another home, or remove {run}."
            )
        plan = hourly_plan(config, features)
        check_shape(checkpoint, plan, run)
        trainer = cls(config, features, plan, run, threads, progress)
        train_step = trainer._train_step
        arrays = train_step.model.restore(checkpoint)
        train_step.dense.load_state(arrays, step=state.steps)
        trainer._sequence = checkpoint.step
        older, newer = (with_prefix(f"scores/{n}/", arrays) for n in range(2))
        trainer._scores = MetricCounts.from_arrays(older), MetricCounts.from_arrays(newer)
        trainer._held_out = HeldOutMetrics.from_arrays(with_prefix("held_out/", arrays))
        trainer._set_trained_hours(HourSet.from_json(state.trained_hours))
        trainer.record = state.record
        return trainer

    @classmethod
    def create(
        cls,
        config: Config,
        features: FeatureSpec,
        start: Checkpoint | None,
        trained_hours: Iterable[int],
        run: Path,
        threads: int,
        progress: Progress,
    ) -> HourlyTrainer:
        """A new model, or one that continues from `start`, which was trained on these hours."""
        trainer = cls(config, features, hourly_plan(config, features), run, threads, progress)
        if start is None and config.train.warm_start is not None:
            start = open_warm_start(Path(config.train.warm_start), features, progress)
        if start is not None:
            trainer._train_step.dense.load_moments(trainer.model.restore(start))
            progress.log(f"warm start from {start.folder}")
        trainer._set_trained_hours(HourSet(trained_hours))
        return trainer

    def _set_trained_hours(self, hours: HourSet) -> None:
        """Set the trained hours. The newest hour depends on them alone, never on the times in rows."""
        self.trained_hours = hours
        self.newest_hour = -1 if hours.last is None else self._last_hour_of(hours.last)

    def _last_hour_of(self, hour: int) -> int:
        """The last hour of the period that contains `hour`: itself, or the last hour of its day."""
        return hour // self._period_hours * self._period_hours + self._period_hours - 1

    @property
    def model(self) -> Model:
        return self._train_step.model

    @property
    def steps(self) -> int:
        return self._train_step.step

    def identity(self) -> str:
        """Content hash of the model: training again from the same checkpoint gives the same hash."""
        model = self.model
        document = {
            "plan": model.plan.to_json(),
            "features": model.features.to_json(),
            "calibration": None if model.calibration is None else model.calibration.to_json(),
            "steps": self.steps,
            "newest_hour": self.newest_hour,
            "tables": model.tables.checksums(),
        }
        digest = hashlib.sha256(as_json(document))
        for name, array in sorted(self._train_step.dense.state().items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    # ── an hour ────────────────────────────────────────────────────────────────────────────────

    def train_hour(self, hour: int, dataset: Dataset, live: ScoreFn | None = None) -> HourResult:
        """Score an hour, train on all but the held-out rows, evict, calibrate, and evaluate. `live` scores rows with
        the live version, for comparison. The evaluated model is the current one; call `finish_hour` after publishing
        it.

        Raises Diverged or DataError for a harmful hour: then discard this trainer and resume from the checkpoint."""
        rows = dataset.splits["train"].rows
        progressive = self._score(dataset)
        batches = self._batches(dataset)
        self.evicted = 0
        self._current_hour = self._last_hour_of(hour)
        self.newest_hour = max(self.newest_hour, self._current_hour)
        self._train_batches((batch for batch, _ in batches.epoch(Position(hour))), rows)
        self._apply_eviction()
        self._calibrate()
        if not self._holdout:
            return HourResult(rows, progressive, None, None, None, None, None)
        sample = self._score_held_out(batches, live)
        return HourResult(
            rows, progressive, *self._held_out.metrics(), *self._held_out.hour_metrics(), sample
        )

    def finish_hour(self, hour: int, dataset: Dataset) -> None:
        """Train on the held-out rows, too; fails like `train_hour`. This completes the hour."""
        if self._holdout:
            rows = dataset.splits["train"].rows
            held_out = in_blocks(self._batches(dataset).held_out(), batch_size_of(self._settings, rows))
            self._train_batches(self._sampled(hour, held_out), int(self._holdout * rows))
        self.trained_hours.add(hour)

    def _train_batches(self, batches: Iterable[LabelledRows], expected: int) -> None:
        self._progress.begin("train", total_rows=expected)
        try:
            for batch in batches:
                self._train_batch(batch)
        finally:
            self._progress.end()
        # Infinite values never recover, above all in the optimizer's moments: such a weight never trains again.
        for name, array in self._train_step.dense.state().items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise _extreme_values(f"{name} is no longer finite")

    def _score_held_out(
        self, batches: Batches, live: ScoreFn | None
    ) -> tuple[LabelledRows, NDArray[np.float32]] | None:
        """Score the held-out rows; returns a sample of them with the scores."""
        model_counts, live_counts = self._held_out.begin_hour(live=live is not None)
        sample = None
        for part in in_blocks(batches.held_out(), BLOCK_ROWS):
            score_B = _checked_scores(self.model.score(part))
            model_counts.add(part.label_B, part.weight_B, score_B)
            if live is not None and live_counts is not None:
                live_counts.add(part.label_B, part.weight_B, _checked_scores(live(part)))
            if sample is None:
                sample = part.slice(0, _SAMPLE_ROWS), score_B[:_SAMPLE_ROWS]
        return sample

    def _batches(self, dataset: Dataset) -> Batches:
        rows = dataset.splits["train"].rows
        return Batches(dataset, **batch_settings(self._settings, rows, self._holdout))

    def _score(self, dataset: Dataset) -> Evaluation:
        """Evaluate the model on an hour it was not trained on; the raw scores also feed the calibration."""
        model = self.model
        before, model.calibration = model.calibration, None
        newer = self._scores[1]

        def score(rows: LabelledRows) -> NDArray[np.float32]:
            raw_B = _checked_scores(model.score(rows))
            if self._settings.calibration is not None:
                newer.add(rows.label_B, rows.weight_B, raw_B)
            self._progress.advance(rows=rows.rows)
            return raw_B if before is None else before.apply(raw_B)

        self._progress.begin("score", total_rows=dataset.splits["train"].rows)
        try:
            custom_metrics = None if model.custom is None else model.custom.metrics
            return evaluate_rows(score, dataset.read_split("train"), custom_metrics=custom_metrics)
        finally:
            model.calibration = before
            self._progress.end()

    def _sampled(self, hour: int, batches: Iterable[LabelledRows]) -> Iterator[LabelledRows]:
        """Apply the negative sampling of the other rows to the held-out rows."""
        share = self._settings.negative_sampling
        random = np.random.default_rng([self._settings.seed, hour, 2**32 - 2])
        for rows in batches:
            if share < 1:
                rows = rows.select((rows.click_B > 0) | (random.random(rows.rows) < share))
            yield rows

    def _train_batch(self, rows: LabelledRows) -> None:
        if not rows.rows:
            return
        # The last-seen hour of ids comes from the file: times in rows may be wrong or in another time zone.
        rows = replace(rows, event_hour_B=np.full(rows.rows, self._current_hour, dtype=np.int32))
        self._train_step.run(self._train_step.prepare(rows))
        self._progress.advance(rows=rows.rows)
        tables = self.model.tables
        if tables.needed_bytes > _FULL_SHARE * self._memory_limit:
            self._free_memory()
        now = time.monotonic()
        if now - self._reported_at > _REPORT_SECONDS:
            self._reported_at = now
            self._progress.note(f"{tables.size:,} ids, {human_size(tables.memory_bytes)}")

    # ── eviction and calibration ───────────────────────────────────────────────────────────────

    def _apply_eviction(self) -> None:
        rule = self._settings.eviction
        if rule is None:
            return
        if rule.decay < 1:
            self.model.tables.decay(rule.decay)
        self._evict(eviction_of(rule))

    def _free_memory(self) -> None:
        """The tables have reached their memory limit: evict idle ids, then those with the lowest value."""
        size = self.model.tables.size
        for rule in _eviction_rules():
            self._evict(rule)
            if self.model.tables.size <= (1 - _FREED_SHARE) * size:
                break
        evicted = size - self.model.tables.size
        which = f"idle for {rule.max_idle_hours} hours" if rule.max_idle_hours else "lowest value"
        self._progress.log(
            f"the sparse tables reached follow.max_table_memory, {human_size(self._memory_limit)}: "
            f"evicted {evicted:,} of {size:,} ids ({which})"
        )

    def _evict(self, rule: Eviction) -> None:
        evicted = self.model.tables.evict(rule, self.newest_hour)
        self.evicted += sum(slot.ids + slot.candidates for slot in evicted)

    def _calibrate(self) -> None:
        rule = self._settings.calibration
        if rule is None:
            return
        counts = MetricCounts()
        for scores in self._scores:
            counts.merge(scores)
        measured = counts.metrics()
        if min(measured.clicks, measured.impressions - measured.clicks) >= _CALIBRATION_CLICKS:
            self.model.calibration = fit_calibration(rule.method, counts.bins())
        if self._scores[1].rows >= _CALIBRATION_ROWS:
            self._scores = self._scores[1], MetricCounts()

    # ── snapshots and checkpoints ──────────────────────────────────────────────────────────────

    def snapshot(self, path: Path, since: int | None) -> int:
        """Write the tables, complete or changes since generation `since`; returns the generation of this snapshot."""
        snapshot = begin_snapshot(self.model.tables, since)
        snapshot.write(path)
        return snapshot.generation

    def checkpoint(self, record: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint. The hours trained so far will never be trained again."""
        dense = self._train_step.dense.state()
        for n, counts in enumerate(self._scores):
            dense |= {f"scores/{n}/{name}": array for name, array in counts.to_arrays().items()}
        dense |= {f"held_out/{name}": array for name, array in self._held_out.to_arrays().items()}
        model = self.model
        state = CheckpointState(
            model.features.to_json(),
            model.plan.to_json(),
            None if model.calibration is None else model.calibration.to_json(),
            self.newest_hour,
            hourly=HourlyProgress(self._train_step.step, self.trained_hours.to_json(), dict(record)),
        )
        snapshot = begin_snapshot(model.tables)
        try:
            checkpoint = write_checkpoint(self._run, self._sequence + 1, snapshot.write, dense, state)
        finally:
            snapshot.close()  # if it failed before writing the tables
        self._sequence += 1
        self.record = record
        prune_checkpoints(self._run, self._settings.keep_checkpoints, None)
        return checkpoint


def _checked_scores(score_B: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scores; raises DataError if one is NaN."""
    if np.isnan(score_B).any():
        raise _extreme_values("the score of a row is NaN")
    return score_B


def _extreme_values(problem: str) -> DataError:
    return DataError(
        f"the network cannot compute with values of this hour: {problem}. Check the dense fields for extreme values, "
        "or give them another transform: log1p or bucket."
    )


def _eviction_rules() -> Iterator[Eviction]:
    for hours in (720, 336, 168, 72, 48, 24, 12, 6, 3, 2, 1):
        yield Eviction(max_idle_hours=hours)
    threshold = 0.15
    while True:
        yield Eviction(threshold=threshold)
        threshold *= 2
