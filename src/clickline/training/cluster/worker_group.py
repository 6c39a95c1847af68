"""The workers of a job: starts, calls, loses and replaces them while training runs. The policy decides how many there
should be, and what to do about a loss (recovery.py)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from clickline.errors import ClicklineError, ClusterError
from clickline.progress import Progress
from clickline.training.cluster.cluster_connection import ClusterConnection
from clickline.training.cluster.job import StateLost, TrainingJob
from clickline.training.cluster.monitor import Monitor
from clickline.training.cluster.policy import Decision, LossReason, Resize
from clickline.training.cluster.recovery import Recovery
from clickline.training.cluster.stateful_actors import DIRECT_CALLS, StatefulActors

_START_SECONDS = 180.0  # for a worker to be placed on a node, and as long again to start
_ANSWER_SECONDS = 30.0  # for a call that returns at once
_WAIT_SECONDS = 0.2


class WorkerFailed(Exception):
    """A worker did not answer. If it is lost, it is among the losses."""


@dataclass
class WorkerHandle:
    """The driver's handle of one worker actor."""

    name: str
    actor: Any
    hostname_ref: Any  # resolves once the worker has started
    created_at: float
    host: str = ""
    lease: Any = None  # async: the unit it trains
    ready: int | None = None  # async: the unit it reads ahead

    @property
    def started(self) -> bool:
        return self.host != ""


class WorkerGroup:
    """The workers of a job, beside its stateful actors and the Ray cluster they all run in."""

    def __init__(self, job: TrainingJob, monitor: Monitor, progress: Progress) -> None:
        self.job = job
        self.monitor = monitor
        self.workers: dict[str, WorkerHandle] = {}
        self.connection = ClusterConnection(job, progress)
        self.recovery = Recovery(job, monitor)
        self.actors = StatefulActors(job, monitor, self.connection, self.recovery)
        self._next_worker = 0

    # ── start and stop ─────────────────────────────────────────────────────────────────────────

    def begin(self, restore: Sequence[Path], dense: Mapping[str, NDArray[Any]], step: int, rows: int) -> None:
        """Start the stateful actors from the state of a checkpoint."""
        self.stop_all()
        self.connection.open()
        self.actors.start(restore, dense, step, rows)

    def stop_all(self) -> None:
        """Kill every actor that was started."""
        if self.connection.usable:
            import ray

            for actor in [*(worker.actor for worker in self.workers.values()), *self.actors.all]:
                ray.kill(actor)
        self.actors.forget()
        self.workers, self.recovery.losses = {}, []

    # ── workers ────────────────────────────────────────────────────────────────────────────────

    def started_workers(self) -> list[WorkerHandle]:
        """The workers that can be called."""
        return [worker for worker in self.workers.values() if worker.started]

    def await_workers(self, minimum: int = 1) -> list[WorkerHandle]:
        """Wait for `minimum` workers; more may join while training runs."""
        while True:
            self.admit_workers()
            started = self.started_workers()
            if started and (len(started) >= minimum or len(started) == len(self.workers)):
                return started
            self.connection.check()
            self.handle_losses()
            if not self.workers:
                decision = self.decide()
                if isinstance(decision, Resize):
                    self.resize(decision)
                else:
                    self.monitor.announce_waiting(decision.reason)
            time.sleep(_WAIT_SECONDS)

    def resize(self, decision: Resize) -> None:
        """Start the missing workers. Surplus workers are stopped by the caller, when they can be."""
        self.monitor.announce("resize", decision.reason)
        missing = decision.workers - len(self.workers)
        if missing > 0:
            self._ask_autoscaler(decision.workers)
        for _ in range(missing):
            self._start_worker()

    def _start_worker(self) -> None:
        import ray

        from clickline.training.cluster.async_worker import AsyncWorker
        from clickline.training.cluster.sync_worker import SyncWorker

        job, name = self.job, f"worker-{self._next_worker}"
        self._next_worker += 1
        memory = {} if job.worker_memory is None else {"memory": job.worker_memory}
        worker = ray.remote(SyncWorker if job.sync else AsyncWorker).options(
            **memory,
            num_cpus=job.worker_cpus,
            max_restarts=0,
            max_concurrency=8,
            runtime_env={"env_vars": DIRECT_CALLS},
        )
        dense_server = [] if job.sync else [self.actors.dense_server]
        actor: Any = worker.remote(job, name, self.actors.embedding_servers, *dense_server)
        self.workers[name] = WorkerHandle(name, actor, actor.hostname.remote(), time.monotonic())

    def admit_workers(self) -> None:
        """Admit the workers that have started since the last call."""
        import ray

        for worker in list(self.workers.values()):
            if worker.started:
                continue
            if ray.wait([worker.hostname_ref], timeout=0)[0]:
                with suppress(WorkerFailed):
                    worker.host = self.worker_result(worker, worker.hostname_ref)
                continue
            waited = time.monotonic() - worker.created_at
            if waited > 2 * _START_SECONDS:
                self.lose_worker(worker, "partitioned", f"it did not start within {waited:.0f} s")
            elif waited > _START_SECONDS and not self.connection.session.has_place(worker.actor):
                self.stop_worker(worker)  # the capacity was not there after all

    def stop_worker(self, worker: WorkerHandle) -> None:
        """Stop a worker that has no work."""
        import ray

        ray.kill(worker.actor)
        self.workers.pop(worker.name, None)

    def decide(self) -> Decision:
        """Decide whether to add or remove workers. Raises ClusterError if the job cannot get enough."""
        arriving = any(not worker.started for worker in self.workers.values())
        free_slots = 0 if arriving else self._free_slots()
        return self.recovery.decide(len(self.workers), free_slots, capacity=self.connection.capacity())

    def _free_slots(self) -> int:
        """How many more workers fit on the cluster now."""
        session = self.connection.session
        if self.job.worker_cpus <= 0:  # they reserve nothing: one per core
            return max(0, int(session.cpus()) - len(self.workers))
        return session.room_for(self.job.worker_cpus, self.job.worker_memory)

    def _ask_autoscaler(self, workers: int) -> None:
        """Request nodes for the workers; without an autoscaler this does nothing."""
        if self.job.address is not None:
            from ray.autoscaler.sdk import request_resources

            request_resources(bundles=[{"CPU": self.job.worker_cpus}] * workers)

    # ── results and losses ─────────────────────────────────────────────────────────────────────

    def worker_result(self, worker: WorkerHandle, ref: Any, seconds: float = _ANSWER_SECONDS) -> Any:
        """The result of a call to a worker. Raises WorkerFailed: a worker that died, does not answer or raised an
        unexpected error is lost; one whose call failed because another process is gone is kept."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return self.connection.get(ref, seconds)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RayActorError):
                raise WorkerFailed(f"{worker.name} called a process that is gone: {cause}") from None
            if isinstance(cause, ClicklineError) and not isinstance(cause, ClusterError):
                raise cause from None
            location = next(iter(getattr(cause, "__notes__", ())), "")
            self.lose_worker(worker, "crashed", f"{type(cause).__name__}: {cause}", location)
        except RayActorError as error:
            self.lose_worker(worker, self.connection.loss_reason(error, worker.actor), str(error))
        except GetTimeoutError:
            self.lose_worker(worker, "partitioned", f"it did not answer within {seconds:.0f} s")
        raise WorkerFailed(worker.name)

    def lose_worker(self, worker: WorkerHandle, reason: LossReason, error: str, location: str = "") -> None:
        """Give a worker up and kill it. Whatever it still sends is refused by its token. Its location comes from the
        error or from its last report."""
        if self.workers.pop(worker.name, None) is None:
            return
        import ray

        ray.kill(worker.actor)
        location = location or self.monitor.location_of(worker.name)
        self.recovery.record("worker", worker.name, reason, error, location)

    def find_losses(self) -> None:
        """Find out which processes are gone after a fault, and handle the losses."""
        self.connection.check()
        self.actors.states()
        if self.actors.dense_server is not None:
            self.actors.dense_step()
        for worker in self.started_workers():
            try:
                self.worker_result(worker, worker.actor.step.remote())
            except WorkerFailed:
                continue
        self.handle_losses()

    def handle_losses(self) -> None:
        """Continue with the remaining workers, or raise StateLost or ClusterError, as the policy decides."""
        self.recovery.handle_losses(len(self.workers))

    def count_restart(self, lost: StateLost) -> None:
        """Count a rollback that the policy does not know of yet. Raises ClusterError after too many."""
        if self.connection.is_open:
            try:
                self.find_losses()  # a lost process is a better explanation
            except StateLost as error:
                if error.decided:
                    return
        self.recovery.count_restart(lost)
