"""Trains epochs on a cluster: the driver runs its processes, this class keeps the state of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import (
    Checkpoint,
    CheckpointState,
    Position,
    begin_checkpoint,
    finish_checkpoint,
)
from clickline.config import Config
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ClicklineError
from clickline.models.calibration import calibration_from_json
from clickline.models.from_config import eviction_of
from clickline.models.model import Model, load_network
from clickline.progress import human_size
from clickline.records import LabelledRows
from clickline.training.cluster.driver import Driver
from clickline.training.cluster.job import StateLost, TrainingJob
from clickline.training.cluster.job_status import JobMetrics, driver_lock
from clickline.training.cluster.policy import PolicyRules
from clickline.training.metrics_reporter import MetricsReporter
from clickline.training.run_spec import RunSpec
from clickline.training.train_step import TrainStep
from clickline.training.training_run import WriteCheckpoint
from clickline.training.training_state import TrainingState

_REPORT_SECONDS = 2.0


@contextmanager
def cluster_trainer(
    config: Config, spec: RunSpec, train_step: TrainStep, reporter: MetricsReporter
) -> Iterator[ClusterTrainer]:
    """A cluster trainer that holds the driver lock of its run; its processes stop with it."""
    with driver_lock(Path(config.home), spec.folder):
        trainer = ClusterTrainer(_job(config, spec, train_step.model), train_step, reporter)
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


def _job(config: Config, spec: RunSpec, model: Model) -> TrainingJob:
    train, cluster = config.train, config.cluster
    worker, shard, rule = cluster.worker, cluster.embedding_server, train.eviction
    memory = "" if worker.memory == "auto" else f" and {human_size(worker.memory)}"
    return TrainingJob(
        home=Path(config.home).absolute(),
        run=spec.folder.absolute(),
        address=cluster.address,
        dataset=str(Path(spec.dataset.folder).absolute()),
        batches=spec.batches,
        plan=spec.plan,
        tables=spec.plan.tables(uses_wide=model.tables.wide_optimizer is not None),
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
        eviction=None if rule is None else eviction_of(rule),
        total_rows=spec.dataset.splits["train"].rows * train.epochs,
    )


class ClusterTrainer:
    """Trains with the processes of a cluster. Its own model has the network's shape; the tables are elsewhere."""

    def __init__(self, job: TrainingJob, train_step: TrainStep, reporter: MetricsReporter) -> None:
        self._run = job.run
        self._train_step = train_step
        self._initial_state = train_step.dense.state()  # the state of a run without a checkpoint
        self._reporter = reporter
        self._driver = Driver(job, reporter.progress, self._report)
        self._reported_at = 0.0
        self._metrics = JobMetrics()  # the newest
        self._progress_rows = 0

    @property
    def model(self) -> Model:
        return self._train_step.model

    @property
    def step(self) -> int:
        return self._driver.step

    def begin(self, start: Checkpoint | None) -> None:
        if start is None:
            self._driver.begin((), self._initial_state, 0, 0)
            return
        arrays = start.dense()
        load_network(self.model.network, arrays)
        self._train_step.dense.load_moments(arrays)
        self._driver.begin(start.tables, self._train_step.dense.state(), 0, 0)

    def restore(self, checkpoint: Checkpoint, trained_rows: int) -> None:
        calibration = checkpoint.manifest.calibration
        self.model.calibration = None if calibration is None else calibration_from_json(calibration)
        self._driver.begin(checkpoint.tables, checkpoint.dense(), checkpoint.step, trained_rows)

    def roll_back(self, lost: StateLost) -> None:
        self._driver.roll_back(lost)

    def close(self, state: Literal["done", "stopped", "failed"], message: str = "") -> None:
        self._driver.close(state, message)

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def train_epoch(
        self,
        state: TrainingState,
        checkpoint_due: Callable[[int], bool],
        begin_checkpoint: Callable[[], None],
    ) -> None:
        epoch = state.position.epoch
        self._progress_rows = state.trained_rows
        for pause in self._driver.train_epoch(state.position, state.units, checkpoint_due):
            if pause.position.epoch > epoch:  # after the last step: the epoch's own checkpoint follows
                continue
            state.position, state.units = pause.position, pause.units
            begin_checkpoint()
        self._reported_at = float("-inf")
        self._driver.report()
        state.position, state.units = Position(epoch + 1), None

    def _report(self, metrics: JobMetrics) -> None:
        self._metrics = metrics
        self._reporter.progress.advance(rows=max(0, metrics.rows - self._progress_rows))
        self._progress_rows = max(self._progress_rows, metrics.rows)
        now = time.monotonic()
        if now - self._reported_at < _REPORT_SECONDS:
            return
        self._reported_at = now
        speed = {"rows_per_second": metrics.rows_per_second}
        self._reporter.report(
            metrics.step, metrics.rows, metrics.loss, metrics.auc, speed, self._driver.monitor.summary()
        )

    # ── while no batch is in flight ────────────────────────────────────────────────────────────

    def begin_snapshot(self, state: TrainingState, share: float) -> WriteCheckpoint:
        """Let every embedding server take a snapshot."""
        began, step, newest = time.monotonic(), self.step, self._metrics
        states = self._driver.shard_states()
        state.newest_hour = max([state.newest_hour, *(server.newest_hour for server in states)])
        state.trained_rows = states[0].rows
        self._reporter.curve.add(step, state.trained_rows, newest.loss, newest.auc, newest.rows_per_second)
        dense = self._driver.dense_state()
        if state.hours is not None:
            for counted in self._driver.hourly_counts():
                state.hours.merge(counted)
        folder = begin_checkpoint(self._run, step)
        parts = self._driver.begin_snapshots(folder, share)
        stalled = time.monotonic() - began

        def write(arrays: Mapping[str, NDArray[Any]], manifest: CheckpointState) -> Checkpoint:
            digests = self._driver.await_snapshots(parts)
            checkpoint = finish_checkpoint(folder, step, digests, {**dense, **arrays}, manifest)
            self._driver.monitor.checkpoint_written(step, time.monotonic() - began, stalled)
            return checkpoint

        return write

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        probability_B = self._driver.score(rows)
        calibration = self.model.calibration
        return probability_B if calibration is None else calibration.apply(probability_B)

    def decay(self, rate: float) -> None:
        self._driver.decay(rate)

    def evict(self, rule: Eviction, newest_hour: int) -> tuple[SlotReport, ...]:
        newest = max(server.newest_hour for server in self._driver.shard_states())
        return self._driver.evict(rule, max(newest, newest_hour))

    def slots(self) -> tuple[SlotReport, ...]:
        return self._driver.slots()

    def unseen_shares(self, rows: LabelledRows) -> None:
        return None  # the tables are in other processes
