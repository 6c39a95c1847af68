"""The training loop on a cluster: the driver trains epochs, this records the history and writes checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import (
    Checkpoint,
    Position,
    begin_checkpoint,
    finish_checkpoint,
    latest_checkpoint,
)
from clickline.artifacts.dataset import Dataset
from clickline.config import Config
from clickline.config.sections import TrainSection
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ClicklineError
from clickline.evaluation.progressive_validation import ProgressiveValidation
from clickline.progress import Progress, human_size
from clickline.records import LabelledRows
from clickline.training.batches import Batches
from clickline.training.cluster.driver import Driver
from clickline.training.cluster.job import StateLost, TrainingJob
from clickline.training.cluster.job_status import JobMetrics, driver_lock
from clickline.training.cluster.policy import PolicyRules
from clickline.training.dense_optimizer import Diverged
from clickline.training.tracking import Tracker
from clickline.training.train_step import TrainStep
from clickline.training.training_run import TrainedModel, TrainingRun

_WRITER_SHARE = 0.2  # of one core of each embedding server, to write a checkpoint while training continues
_REPORT_SECONDS = 2.0


@contextmanager
def cluster_trainer(
    config: Config,
    dataset: Dataset,
    train_step: TrainStep,
    batches: Mapping[str, Any],
    run: Path,
    identity: Mapping[str, Any],
    tracker: Tracker,
    progress: Progress,
) -> Iterator[ClusterTrainer]:
    """A cluster trainer that holds the driver lock of its run; its processes stop with it."""
    with driver_lock(Path(config.home), run):
        job = _job(config, dataset, train_step, batches, run)
        trainer = ClusterTrainer(
            config.train,
            dataset,
            train_step,
            Batches(dataset, Path(dataset.folder), **batches),
            run,
            identity,
            tracker,
            progress,
            job,
        )
        state: Literal["done", "stopped", "failed"] = "failed"
        message = ""
        try:
            yield trainer
            state = "done"
        except KeyboardInterrupt:
            state = "stopped"
            raise
        except ClicklineError as error:
            message = str(error)
            raise
        finally:
            trainer.close(state, message)


def _job(
    config: Config, dataset: Dataset, train_step: TrainStep, batches: Mapping[str, Any], run: Path
) -> TrainingJob:
    train, cluster, model = config.train, config.cluster, train_step.model
    worker, shard, rule = cluster.worker, cluster.embedding_server, train.eviction
    memory = "" if worker.memory == "auto" else f" and {human_size(worker.memory)}"
    return TrainingJob(
        home=Path(config.home).absolute(),
        run=run.absolute(),
        address=cluster.address,
        dataset=str(Path(dataset.folder).absolute()),
        batches=batches,
        plan=model.plan,
        tables=model.plan.tables(uses_wide=model.tables.wide_optimizer is not None),
        model_file=None if config.model.file is None else Path(config.model.file).absolute(),
        sync=train.sync,
        max_staleness=train.max_staleness,
        scale_lr_by_staleness=train.scale_lr_by_staleness,
        rules=PolicyRules(
            train.workers.min, train.workers.max, cluster.max_failures, f"{worker.cpus:g} CPUs{memory}"
        ),
        shards=train.embedding_servers,
        worker_cpus=worker.cpus,
        worker_memory=None if worker.memory == "auto" else worker.memory,
        shard_cpus=shard.cpus,
        shard_memory=None if shard.memory == "auto" else shard.memory,
        eviction=None
        if rule is None
        else Eviction(rule.threshold, rule.max_idle_hours, rule.click_weight, rule.nonclick_weight),
        total_rows=dataset.splits["train"].rows * train.epochs,
    )


class ClusterTrainer(TrainingRun):
    """Trains epochs with the processes of a cluster. Lost state is trained again from the last checkpoint."""

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
        job: TrainingJob,
    ) -> None:
        super().__init__(settings, dataset, train_step.model, batches, run, identity, tracker, progress)
        self._train_step = train_step
        self._initial_state = train_step.dense_state()  # the state of a run without a checkpoint
        self._driver = Driver(job, progress, self._report)
        self._start: Checkpoint | None = None
        self._units: Mapping[str, Any] | None = None  # async: progress of the leases
        self._checkpoint_at = time.monotonic()
        self._checkpoint_step = 0
        self._writing: Future[Checkpoint] | None = None
        self._reported_at = 0.0
        self._job_metrics = JobMetrics()  # the newest
        self._progress_rows = 0

    @property
    def step(self) -> int:
        return self._driver.step

    # ── resuming ───────────────────────────────────────────────────────────────────────────────

    def resume(self, start: Checkpoint | None) -> None:
        self._start = start
        while True:
            try:
                if latest_checkpoint(self._run) is None and start is None:
                    self._driver.begin((), self._initial_state, 0, 0)
                super().resume(start)
                return
            except StateLost as lost:  # another loss during the start
                self._roll_back(lost)

    def _warm_start(self, start: Checkpoint) -> None:
        arrays = start.dense()
        self._model.load_weights(arrays)
        self._train_step.load_moments(arrays)
        self._driver.begin(start.tables, self._train_step.dense_state(), 0, 0)

    def _restore(self, checkpoint: Checkpoint) -> None:
        from clickline.models.calibration import calibration_from_json

        self._units = None if checkpoint.manifest.run is None else checkpoint.manifest.run.units
        self._checkpoint_step = checkpoint.step
        calibration = checkpoint.manifest.calibration
        self._model.calibration = None if calibration is None else calibration_from_json(calibration)
        self._driver.begin(checkpoint.tables, checkpoint.dense(), checkpoint.step, self._trained_rows)

    def train_to(self, epochs: int) -> TrainedModel:
        while True:
            try:
                return super().train_to(epochs)
            except StateLost as lost:
                self._roll_back(lost)
                self.resume(self._start)

    def _roll_back(self, lost: StateLost) -> None:
        """Forget everything that is not in the last checkpoint."""
        self._driver.roll_back(lost)
        self._position, self._units, self._trained_rows, self._newest_hour = Position(), None, 0, -1
        self._evicted, self._history, self._evaluations = {}, [], {}
        self._hours = None if self._hours is None else ProgressiveValidation()
        self._writing = None

    def close(self, state: Literal["done", "stopped", "failed"], message: str = "") -> None:
        self._driver.close(state, message)

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    @property
    def _at_epoch_end(self) -> bool:
        return super()._at_epoch_end and self._units is None

    def _train_epoch(self, pool: ThreadPoolExecutor) -> None:
        rows, epoch = self._dataset.splits["train"].rows, self._position.epoch
        self._progress.begin(f"train epoch {epoch + 1}", total_rows=rows)
        self._progress_rows = self._trained_rows
        try:
            for pause in self._driver.train_epoch(self._position, self._units, self._checkpoint_due):
                if pause.position.epoch > epoch:  # after the last step: the epoch's own checkpoint follows
                    continue
                self._position, self._units = pause.position, pause.units
                self._writing = self._begin_checkpoint(pool)
            self._reported_at = float("-inf")
            self._driver.report()
        except Diverged as error:
            raise ClicklineError(f"{error} The batch was saved to {self._save_batch(error.rows)}.") from error
        finally:
            self._progress.end()
        self._position, self._units = Position(epoch + 1), None
        if self._writing is not None:
            self._writing.result()

    def _checkpoint_due(self, step: int) -> bool:
        if self._writing is not None:
            if not self._writing.done():
                return False
            error = self._writing.exception()
            if error is not None and not isinstance(
                error, StateLost
            ):  # a lost embedding server is reported elsewhere
                raise error
            if error is not None:
                self._progress.log(
                    f"the checkpoint of step {self._checkpoint_step:,} was not written: {error}. Training "
                    "continues, and the next one is written on schedule; if an embedding server is lost, training "
                    "rolls back to the previous checkpoint"
                )
                # Not at once: an embedding server that still writes would be considered lost while it finishes.
                self._writing, self._checkpoint_at, self._checkpoint_step = None, time.monotonic(), step
        steps = self._settings.checkpoint_steps
        if steps is not None and step - self._checkpoint_step >= steps:
            return True
        return time.monotonic() - self._checkpoint_at > self._settings.checkpoint_every

    def _report(self, job_metrics: JobMetrics) -> None:
        """Update the progress line, the tracker and the learning curve."""
        self._job_metrics = job_metrics
        self._progress.advance(rows=max(0, job_metrics.rows - self._progress_rows))
        self._progress_rows = max(self._progress_rows, job_metrics.rows)
        now = time.monotonic()
        if now - self._reported_at < _REPORT_SECONDS:
            return
        self._reported_at = now
        metrics = {"rows_per_second": job_metrics.rows_per_second}
        parts = [f"step {job_metrics.step:,}"]
        if job_metrics.auc is not None and job_metrics.loss is not None:
            metrics |= {"auc": job_metrics.auc, "loss": job_metrics.loss}
            parts.append(f"loss {job_metrics.loss:.4f}, AUC {job_metrics.auc:.4f}")
        parts.append(self._driver.summary())
        self._progress.note(", ".join(parts))
        self._tracker.metrics(job_metrics.step, metrics)
        self._add_to_curve(job_metrics.step, job_metrics.rows)

    def _add_to_curve(self, step: int, rows: int) -> None:
        newest = self._job_metrics
        self._curve.add(step, rows, newest.loss, newest.auc, newest.rows_per_second)

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def _begin_checkpoint(self, pool: ThreadPoolExecutor, *, epoch_end: bool = False) -> Future[Checkpoint]:
        """With no batch in flight, let every embedding server take a snapshot, written while training continues."""
        began = time.monotonic()
        states = self._driver.shard_states()
        self._newest_hour = max([self._newest_hour, *(state.newest_hour for state in states)])
        self._trained_rows = states[0].rows
        step = self.step
        self._add_to_curve(step, self._trained_rows)
        self._checkpoint_at, self._checkpoint_step = began, step
        dense = self._driver.dense_state()
        if self._hours is not None:
            for counted in self._driver.hourly_counts():
                self._hours.merge(counted)
            dense |= {f"hours/{name}": array for name, array in self._hours.to_arrays().items()}
        folder = begin_checkpoint(self._run, step)
        parts = self._driver.begin_snapshots(folder, 1.0 if epoch_end else _WRITER_SHARE)
        stalled = time.monotonic() - began
        state = self._state(epoch_end=epoch_end, units=None if epoch_end else self._units)

        def write() -> Checkpoint:
            checkpoint = finish_checkpoint(folder, step, self._driver.await_snapshots(parts), dense, state)
            self._driver.checkpoint_written(step, time.monotonic() - began, stalled)
            self._prune()
            return checkpoint

        self._writing = pool.submit(write)
        return self._writing

    # ── between epochs ─────────────────────────────────────────────────────────────────────────

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        probability_B = self._driver.score(rows)
        calibration = self._model.calibration
        return probability_B if calibration is None else calibration.apply(probability_B)

    def _decay(self, rate: float) -> None:
        self._driver.decay(rate)

    def _evict(self, rule: Eviction) -> tuple[SlotReport, ...]:
        newest = max(state.newest_hour for state in self._driver.shard_states())
        return self._driver.evict(rule, max(newest, self._newest_hour))

    def _slots(self) -> tuple[SlotReport, ...]:
        return self._driver.slots()

    def _unseen_shares(self, rows: LabelledRows) -> None:
        return None  # the tables are in other processes
