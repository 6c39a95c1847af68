"""The driver of a cluster run: trains one epoch at a time, takes checkpoints, and scores and evicts between epochs.

    driver.begin(…)                       embedding servers with the rows of a checkpoint, or empty ones
    for pause in driver.train_epoch(…):   yields when no batch is in flight and a checkpoint is due
        driver.begin_snapshots(…)
    driver.score(…), driver.evict(…)      between epochs

A fault that cannot be repaired in place raises `StateLost`: the caller rolls back to the last checkpoint by calling
`begin` again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Position, part_names
from clickline.artifacts.dataset import Dataset
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ClusterError
from clickline.evaluation.binary_metrics import HourlyCounts
from clickline.progress import Progress
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Batches
from clickline.training.cluster.async_epoch import AsyncEpoch
from clickline.training.cluster.embedding_server import EmbeddingServerState, merge_reports
from clickline.training.cluster.job import PausePoint, StateLost, TrainingJob
from clickline.training.cluster.job_status import JobMetrics
from clickline.training.cluster.leases import WorkUnit
from clickline.training.cluster.monitor import ACTOR_SECONDS, Monitor
from clickline.training.cluster.stateful_actors import WORK_SECONDS
from clickline.training.cluster.sync_epoch import SyncEpoch
from clickline.training.cluster.worker_group import WorkerFailed, WorkerGroup, WorkerHandle

_SCORE_SECONDS = 600.0
_LOOK_SECONDS = 1.0  # between two checks that the embedding servers that write are alive


class Driver:
    """Runs one training job on a cluster. A run has exactly one driver."""

    def __init__(self, job: TrainingJob, progress: Progress, report: Callable[[JobMetrics], None]) -> None:
        self._job = job
        self.monitor = Monitor(job, progress, report)
        self._group = WorkerGroup(job, self.monitor, progress)
        self._sync_epoch = SyncEpoch(self._group)
        self._token = 1
        self._dense: Mapping[str, NDArray[Any]] = {}  # the dense state that the run began with
        self._unloaded = True  # no worker has loaded it yet
        self._scoring_with: tuple[int, tuple[str, ...]] | None = None
        self.step = 0

    def begin(self, restore: Sequence[Path], dense: Mapping[str, NDArray[Any]], step: int, rows: int) -> None:
        """Start the stateful actors from a checkpoint's state; workers start when there is work."""
        self._sync_epoch.begin()
        self._group.begin(restore, dense, step, rows)
        self._dense, self.step, self._unloaded, self._scoring_with = dense, step, True, None

    def roll_back(self, lost: StateLost) -> None:
        """Prepare to restart from the last checkpoint. Raises ClusterError after too many restarts."""
        if not lost.decided:
            self._group.count_restart(lost)
        self.monitor.restarted()

    def close(self, state: Literal["done", "stopped", "failed"], message: str = "") -> None:
        """Stop everything that was started and write the final status."""
        self.monitor.write(state, message=message)
        self.monitor.log.close()
        self._group.stop_all()
        self._group.connection.close()

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def train_epoch(
        self, start: Position, units: Mapping[str, Any] | None, checkpoint_due: Callable[[int], bool]
    ) -> Iterator[PausePoint]:
        """Train to the end of the epoch; yields at each pause for a checkpoint. Raises StateLost."""
        self._group.await_workers(self._job.rules.min)
        if self._job.sync:
            yield from self._sync_epoch.run(
                start, self.step, self._load_initial, checkpoint_due, self._set_step
            )
        else:
            yield from self._train_async(start, units, checkpoint_due)

    def _train_async(
        self, start: Position, units: Mapping[str, Any] | None, checkpoint_due: Callable[[int], bool]
    ) -> Iterator[PausePoint]:
        batches = Batches(Dataset.open(Storage(), self._job.dataset), **self._job.batches)
        windows = range(len(batches.windows(start.epoch)))
        all_units = [WorkUnit(start.epoch, number) for number in windows]
        async_epoch = AsyncEpoch(self._group, all_units, units, self._token)
        try:
            yield from async_epoch.run(start, checkpoint_due, self._set_step, self.step)
        finally:
            self._token = async_epoch.leases.next_token

    def report(self) -> None:
        """Poll all processes now and report the metrics."""
        self.monitor.refresh(self._group, self.step)

    def _set_step(self, step: int) -> None:
        self.step = step

    def _load_initial(self, worker: WorkerHandle) -> None:
        """Load the dense state that the run began with into the first worker of the first group."""
        self._group.worker_result(worker, worker.actor.load_state.remote(self._dense, self.step))
        self._unloaded = False

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def dense_state(self) -> dict[str, NDArray[Any]]:
        """Network and optimizer state, while no batch is in flight."""
        group = self._group
        if not self._job.sync:
            state: dict[str, NDArray[Any]]
            [state] = group.actors.results([group.actors.dense_server.state.remote()])
            return state
        if self._unloaded:
            return dict(self._dense)
        for worker in group.started_workers():
            try:
                step, state = group.worker_result(worker, worker.actor.state.remote())
            except WorkerFailed:
                continue
            if step == self.step:  # not a worker that joined after the epoch ended
                return dict(state)
        group.handle_losses()
        raise StateLost(
            "no worker is left that has the network, so training rolls back to the last checkpoint"
        )

    def hourly_counts(self) -> list[HourlyCounts]:
        """Prediction counts of rows before they were trained on, since the last call; without those of lost workers."""
        counts = []
        for worker in self._group.started_workers():
            try:
                counts.append(self._group.worker_result(worker, worker.actor.take_hourly_counts.remote()))
            except WorkerFailed:
                continue
        return counts

    def begin_snapshots(self, folder: Path, share: float) -> dict[str, Any]:
        """Let every embedding server snapshot its tables now and begin writing; by file name, the ref of its digest."""
        names = part_names(self._job.shards)
        shards = self._group.actors.embedding_servers
        started = self._group.actors.results(
            [
                shard.begin_snapshot.remote(folder / name, share)
                for shard, name in zip(shards, names, strict=True)
            ]
        )
        if not all(started):
            raise ClusterError(
                "a checkpoint was requested while a batch was in flight. Please report this bug."
            )
        return {name: shard.snapshot_digest.remote() for shard, name in zip(shards, names, strict=True)}

    def await_snapshots(self, parts: Mapping[str, Any]) -> dict[str, str]:
        """The digests of the files, once all are on disk. May be called from any thread."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        writing, shards = list(parts.values()), self._group.actors.embedding_servers
        until = time.monotonic() + WORK_SECONDS
        try:
            while ray.wait(writing, num_returns=len(writing), timeout=_LOOK_SECONDS)[1]:
                self._group.connection.check()
                ray.get([shard.state.remote() for shard in shards], timeout=ACTOR_SECONDS)
                if time.monotonic() > until:
                    raise StateLost(
                        f"an embedding server did not write its snapshot within {WORK_SECONDS:,.0f} s"
                    )
            return dict(zip(parts, ray.get(writing), strict=True))
        except RayTaskError as error:  # most likely the disk is full
            raise error.cause from None
        except RayError as error:
            raise StateLost("an embedding server was lost while it wrote its snapshot") from error

    # ── between epochs ─────────────────────────────────────────────────────────────────────────

    def shard_states(self) -> list[EmbeddingServerState]:
        return self._group.actors.states()

    def slots(self) -> tuple[SlotReport, ...]:
        return merge_reports([state.slots for state in self.shard_states()])

    def decay(self, rate: float) -> None:
        self._group.actors.results(
            [shard.decay.remote(rate) for shard in self._group.actors.embedding_servers], WORK_SECONDS
        )

    def evict(self, rule: Eviction, now_hour: int) -> tuple[SlotReport, ...]:
        shards = self._group.actors.embedding_servers
        evicted = self._group.actors.results(
            [shard.evict.remote(rule, now_hour) for shard in shards], WORK_SECONDS
        )
        return merge_reports(evicted)

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities before calibration, computed by all workers in parallel."""
        group = self._group
        while True:
            team = group.await_workers()
            try:
                self._load_current(team)
                bounds = [rows.rows * rank // len(team) for rank in range(len(team) + 1)]
                requests = [
                    (worker, worker.actor.score.remote(rows.slice(first, last)))
                    for worker, first, last in zip(team, bounds, bounds[1:], strict=False)
                ]
                return np.concatenate(
                    [group.worker_result(worker, ref, _SCORE_SECONDS) for worker, ref in requests]
                )
            except WorkerFailed:
                group.find_losses()  # the remaining workers score the rows again

    def _load_current(self, team: Sequence[WorkerHandle]) -> None:
        """Make sure that every worker has the current network."""
        key = self.step, tuple(worker.name for worker in team)
        if key == self._scoring_with:
            return
        state = self.dense_state()
        for worker in team:
            self._group.worker_result(worker, worker.actor.load_state.remote(state, self.step))
        self._unloaded, self._scoring_with = False, key
