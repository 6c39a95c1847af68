"""Starts, calls, loses and replaces the processes of a job. The policy decides what to do about a loss.

Workers can be replaced while training runs. The embedding servers and the dense parameter server are stateful actors:
when one is lost, `StateLost` is raised and training rolls back to the last checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from numpy.typing import NDArray

from clickline.distributed.session import RaySession, open_session
from clickline.errors import ClicklineError, ClusterError
from clickline.machine import cores
from clickline.progress import Progress, human_size
from clickline.training.cluster.embedding_server import EmbeddingServer, EmbeddingServerSpec
from clickline.training.cluster.job import StateLost, TrainingJob
from clickline.training.cluster.job_status import logs_folder, requested_workers
from clickline.training.cluster.monitor import ACTOR_SECONDS, Monitor
from clickline.training.cluster.policy import (
    Decision,
    GiveUp,
    LossReason,
    LostProcess,
    Observation,
    PolicyState,
    Resize,
    Restart,
    decide,
)

_START_SECONDS = 180.0  # for a worker to be placed on a node, and as long again to start
_RESTORE_SECONDS = 180.0  # for a placed embedding server to start, plus the time to restore its rows:
_RESTORED_BYTES = 2 << 20  # per second
_ANSWER_SECONDS = 30.0  # for a call that returns at once
_PLACE_SECONDS = 15.0  # for Ray to place a process on a node
WORK_SECONDS = 3600.0  # for calls that visit all ids of an embedding server
_WAIT_SECONDS = 0.2
_LOOK_SECONDS = 1.0  # between two checks that the cluster is alive
# Batch messages of some hundred kB are sent directly between processes. Through the object store, which Ray uses for
# anything above 100 kB, each costs the raylet more than a millisecond: a tenth of all work on two cores.
_DIRECT_CALLS = {
    "RAY_max_direct_call_object_size": str(8 << 20),
    "RAY_task_rpc_inlined_bytes_limit": str(32 << 20),
}
_GUESSES = " Some common causes include"  # Ray adds this to every process that ends, and lists memory first
_MIN_MEMORY = (
    1 << 20
)  # reserved by stateful actors, so that none is placed on a node without memory, such as the driver's
_SHARD_SHARE = 0.6  # of a node's memory; the rest is for the workers and the object store


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
    """The workers and stateful actors of a job, and the Ray session they run in."""

    def __init__(self, job: TrainingJob, monitor: Monitor, progress: Progress) -> None:
        self.job = job
        self.monitor = monitor
        self.embedding_servers: list[Any] = []
        self.dense_server: Any = None
        self.workers: dict[str, WorkerHandle] = {}
        self.losses: list[LostProcess] = []
        self.shard_limit = 0  # bytes
        self._progress = progress
        self._stack = ExitStack()
        self._session: RaySession | None = None
        self._next_worker = 0
        self._policy_state = PolicyState()

    # ── start and stop ─────────────────────────────────────────────────────────────────────────

    def begin(self, restore: Sequence[Path], dense: Mapping[str, NDArray[Any]], step: int, rows: int) -> None:
        """Start the stateful actors from the state of a checkpoint."""
        self.stop_all()
        if self._session is not None and self._session.lost():
            self.close()
        if self._session is None:
            self._session = self._stack.enter_context(
                open_session(
                    self.job.address, cpus=self._logical_cpus(), home=self.job.home, progress=self._progress
                )
            )
        import ray  # only after the session has set the variables that Ray reads on import

        job, logs = self.job, logs_folder(self.job.run)
        options: dict[str, Any] = {
            "max_restarts": 0,
            "max_concurrency": 1000,
            "runtime_env": {"env_vars": _DIRECT_CALLS},
        }
        memory = _MIN_MEMORY if job.shard_memory is None else job.shard_memory
        self.shard_limit = self._shard_memory_limit()
        shard = ray.remote(EmbeddingServer).options(
            **options, memory=memory, num_cpus=job.shard_cpus, scheduling_strategy="SPREAD"
        )
        threads = max(1, int(job.shard_cpus))
        self.embedding_servers = [
            shard.remote(
                EmbeddingServerSpec(
                    number,
                    job.shards,
                    job.tables,
                    threads,
                    tuple(restore),
                    rows,
                    logs / f"shard-{number}.log",
                )
            )
            for number in range(job.shards)
        ]
        if not job.sync:
            from clickline.training.cluster.dense_parameter_server import DenseParameterServer, restore_dense

            build = partial(restore_dense, job.dataset, job.plan, job.model_file, dense, step)
            server = ray.remote(DenseParameterServer).options(**options, memory=_MIN_MEMORY, num_cpus=0)
            self.dense_server = server.remote(
                build, job.max_staleness, job.scale_lr_by_staleness, logs / "network.log"
            )
        self._await_actors(_RESTORE_SECONDS + sum(file.stat().st_size for file in restore) / _RESTORED_BYTES)

    def _await_actors(self, seconds: float) -> None:
        """Wait until all stateful actors have started. Reports those that cannot be placed; a placed one that does not
        start in time is lost."""
        import ray

        waiting = [shard.state.remote() for shard in self.embedding_servers]
        if self.dense_server is not None:
            waiting.append(self.dense_server.step.remote())
        settled = placed = time.monotonic()
        while True:
            ready, missing = ray.wait(waiting, num_returns=len(waiting), timeout=1.0)
            self.actor_results(ready)  # raises at once if one is lost
            if not missing:
                break
            self.check_cluster()
            now = time.monotonic()
            if self._report_unplaced(now - settled):
                placed = now
            else:
                settled = now  # a single failed query of the head does not count
                if now - placed > seconds:
                    self.actor_results(missing, 1.0)
        self.monitor.shards = tuple(self.actor_results(waiting)[: self.job.shards])

    def _report_unplaced(self, seconds: float) -> int:
        """The number of embedding servers that are not placed on a node; reported after a while, then an error."""
        assert self._session is not None
        unplaced = sum(not self._session.has_place(shard) for shard in self.embedding_servers)
        if seconds < _PLACE_SECONDS or not unplaced:
            return unplaced
        job = self.job
        memory = "" if job.shard_memory is None else f" and {human_size(job.shard_memory)}"
        problem = (
            f"{unplaced} of {job.shards} embedding servers do not fit: each requests {job.shard_cpus:g} CPUs{memory} "
            f"(cluster.embedding_server). The cluster has {self.capacity()}."
        )
        if seconds > job.rules.room_seconds:
            raise ClusterError(
                f"{problem} Waited {seconds:,.0f} s for capacity. Add nodes, request less, or use fewer "
                "embedding servers (train.embedding_servers); the same command then resumes from the last checkpoint."
            )
        self.monitor.announce_waiting(f"waiting for capacity: {problem}")
        return unplaced

    def stop_all(self) -> None:
        """Kill every actor that was started."""
        if self._session is not None and not self._session.lost():
            import ray

            actors = [
                *self.embedding_servers,
                *([self.dense_server] if self.dense_server is not None else []),
            ]
            for actor in [*(worker.actor for worker in self.workers.values()), *actors]:
                ray.kill(actor)
        self.embedding_servers, self.dense_server, self.workers, self.losses = [], None, {}, []

    def close(self) -> None:
        """Disconnect from the cluster; an embedded one is shut down."""
        self._stack.close()
        self._session = None

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
            self.check_cluster()
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
        from clickline.training.cluster.worker import WorkerSpec

        job, name = self.job, f"worker-{self._next_worker}"
        self._next_worker += 1
        memory = {} if job.worker_memory is None else {"memory": job.worker_memory}
        spec = WorkerSpec(
            name,
            job.dataset,
            job.batches,
            job.plan,
            job.model_file,
            job.threads,
            job.group_seconds,
            logs_folder(job.run) / f"{name}.log",
        )
        worker = ray.remote(SyncWorker if job.sync else AsyncWorker).options(
            **memory,
            num_cpus=job.worker_cpus,
            max_restarts=0,
            max_concurrency=8,
            runtime_env={"env_vars": _DIRECT_CALLS},
        )
        actor: Any = worker.remote(spec, self.embedding_servers, *([] if job.sync else [self.dense_server]))
        self.workers[name] = WorkerHandle(name, actor, actor.hostname.remote(), time.monotonic())

    def admit_workers(self) -> None:
        """Admit the workers that have started since the last call."""
        import ray

        assert self._session is not None
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
            elif waited > _START_SECONDS and not self._session.has_place(worker.actor):
                self.stop_worker(worker)  # the capacity was not there after all

    def stop_worker(self, worker: WorkerHandle) -> None:
        """Stop a worker that has no work."""
        import ray

        ray.kill(worker.actor)
        self.workers.pop(worker.name, None)

    def decide(self) -> Decision:
        """Decide whether to add or remove workers. Raises ClusterError if the job cannot get enough."""
        arriving = any(not worker.started for worker in self.workers.values())
        observed = Observation(
            workers=len(self.workers),
            free_slots=0 if arriving else self._free_slots(),
            requested=requested_workers(self.job.run),
            trained_rows=self.monitor.rows,
            capacity=self.capacity(),
        )
        decision, self._policy_state = decide(self.job.rules, self._policy_state, observed, time.monotonic())
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        return decision

    def _free_slots(self) -> int:
        """How many more workers fit on the cluster now."""
        assert self._session is not None
        if self.job.worker_cpus <= 0:  # they reserve nothing: one per core
            return max(0, int(self._session.cpus()) - len(self.workers))
        return self._session.room_for(self.job.worker_cpus, self.job.worker_memory)

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
            return self._get(ref, seconds)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RayActorError):
                raise WorkerFailed(f"{worker.name} called a process that is gone: {cause}") from None
            if isinstance(cause, ClicklineError) and not isinstance(cause, ClusterError):
                raise cause from None
            location = next(iter(getattr(cause, "__notes__", ())), "")
            self.lose_worker(worker, "crashed", f"{type(cause).__name__}: {cause}", location)
        except RayActorError as error:
            self.lose_worker(worker, self._loss_reason(error, worker.actor), str(error))
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
        loss = LostProcess("worker", worker.name, reason, location, _loss_message(reason, error))
        self.monitor.log.write(f"lost: {loss}\n{error}")
        self.losses.append(loss)

    def actor_results(self, refs: Sequence[Any], seconds: float = ACTOR_SECONDS) -> list[Any]:
        """The results of calls to stateful actors. Raises StateLost if one of them is gone or does not answer."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        try:
            results: list[Any] = self._get(list(refs), seconds)
        except RayTaskError as error:
            raise error.cause from None
        except GetTimeoutError:
            name, actor = self._find_dead_actor()
            if actor is None:  # all are alive: perhaps this process was suspended
                with suppress(RayError):
                    return list(ray.get(list(refs), timeout=_LOOK_SECONDS))
            self._lose_actor(name, "partitioned", "it did not answer in time")
        except RayActorError as error:
            name, actor = self._find_dead_actor()
            self._lose_actor(
                name, _classify(error) if actor is None else self._loss_reason(error, actor), str(error)
            )
        return results

    def _get(self, refs: Any, seconds: float) -> Any:
        """Like `ray.get`, but raises StateLost if the cluster goes away: Ray would end this process after a minute."""
        import ray
        from ray.exceptions import GetTimeoutError

        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            try:
                return ray.get(refs, timeout=min(left, _LOOK_SECONDS))
            except GetTimeoutError:
                self.check_cluster()
                if left <= _LOOK_SECONDS:
                    raise

    def _lose_actor(self, name: str, reason: LossReason, error: str) -> NoReturn:
        role: Literal["network", "shard"] = "network" if name == "network" else "shard"
        loss = LostProcess(role, name, reason, "", _loss_message(reason, error))
        self.monitor.log.write(f"lost: {loss}\n{error}")
        self.losses.append(loss)
        self.handle_losses()
        raise StateLost(str(loss))

    def _find_dead_actor(self) -> tuple[str, Any]:
        import ray
        from ray.exceptions import RayError

        calls = {
            f"shard-{number}": (shard, shard.state) for number, shard in enumerate(self.embedding_servers)
        }
        if self.dense_server is not None:
            calls["network"] = self.dense_server, self.dense_server.step
        for name, (actor, call) in calls.items():
            try:
                ray.get(call.remote(), timeout=5)
            except RayError:
                return name, actor
        return "shard", None

    def _loss_reason(self, error: Any, actor: Any) -> LossReason:
        reason = _classify(error)
        if reason == "crashed" and self._session is not None and self._session.has_left(actor):
            return "preempted"
        return reason

    def find_losses(self) -> None:
        """Find out which processes are gone after a fault, and handle the losses."""
        self.check_cluster()
        self.actor_results([shard.state.remote() for shard in self.embedding_servers])
        if self.dense_server is not None:
            self.actor_results([self.dense_server.step.remote()])
        for worker in self.started_workers():
            try:
                self.worker_result(worker, worker.actor.step.remote())
            except WorkerFailed:
                continue
        self.handle_losses()

    def handle_losses(self) -> None:
        """Continue with the remaining workers, or raise StateLost or ClusterError, as the policy decides."""
        if not self.losses:
            return
        lost, self.losses = tuple(self.losses), []
        observed = Observation(
            workers=len(self.workers),  # including those that are starting
            free_slots=0,
            lost=lost,
            requested=requested_workers(self.job.run),
            trained_rows=self.monitor.rows,
            checkpoint_step=self.monitor.checkpoint_step,
        )
        decision, self._policy_state = decide(self.job.rules, self._policy_state, observed, time.monotonic())
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        if isinstance(decision, Restart):
            self.monitor.announce("restart", decision.reason)
            raise StateLost(decision.reason, decided=True)
        self.monitor.announce("resize", decision.reason)

    def count_restart(self, lost: StateLost) -> None:
        """Count a rollback that the policy does not know of yet. Raises ClusterError after too many."""
        if self._session is not None:
            try:
                self.find_losses()  # a lost process is a better explanation
            except StateLost as error:
                if error.decided:
                    return
        observed = Observation(
            workers=0,
            free_slots=0,
            restart=str(lost),
            trained_rows=self.monitor.rows,
            checkpoint_step=self.monitor.checkpoint_step,
        )
        decision, self._policy_state = decide(self.job.rules, self._policy_state, observed, time.monotonic())
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        self.monitor.announce("restart", decision.reason)

    def check_cluster(self) -> None:
        """Raises StateLost if the cluster itself is gone."""
        if self._session is not None and self._session.lost():
            raise StateLost(
                "the cluster's head or this machine's node is gone, so training rolls back to the last checkpoint"
            )

    # ── resources ──────────────────────────────────────────────────────────────────────────────

    def evict_crowded(self) -> None:
        """Let the crowded embedding server evict ids while no batch is in flight."""
        number = self.monitor.crowded
        assert number is not None
        newest = max(state.newest_hour for state in self.monitor.shards)
        [evicted] = self.actor_results(
            [self.embedding_servers[number].evict.remote(self.job.eviction, newest)], WORK_SECONDS
        )
        states = self.actor_results([shard.state.remote() for shard in self.embedding_servers])
        self.monitor.shard_evicted(number, tuple(states))
        self.monitor.announce(
            "forget", f"embedding server {number} evicted {sum(s.ids + s.candidates for s in evicted):,} ids"
        )

    def capacity(self) -> str:
        """The cluster's CPUs as a message."""
        assert self._session is not None
        free = self._session.free_cpus()
        return f"{self._session.cpus():g} CPUs, {free:g} of them free"

    def _logical_cpus(self) -> int:
        """CPUs that an embedded cluster declares: enough for all workers that may start, and at least all cores."""
        rules = self.job.rules
        max_workers = max(rules.min, rules.max or 0)
        needed = max_workers * self.job.worker_cpus + self.job.shards * self.job.shard_cpus
        return max(cores(), math.ceil(needed))

    def _shard_memory_limit(self) -> int:
        if self.job.shard_memory is not None:
            return self.job.shard_memory
        assert self._session is not None
        room = [node.memory for node in self._session.nodes() if node.alive and node.memory >= _MIN_MEMORY]
        if not room:  # then none can be placed
            return _MIN_MEMORY
        return int(_SHARD_SHARE * min(room) / math.ceil(self.job.shards / len(room)))


def _loss_message(reason: LossReason, error: str) -> str:
    """The reported part of an error; nothing for a node that left."""
    return "" if reason == "preempted" else error.partition(_GUESSES)[0]


def _classify(error: Any) -> LossReason:
    """Why an actor ended, from Ray's error."""
    message = str(error).partition(_GUESSES)[0].lower()
    if getattr(error, "preempted", False) or "node was terminated" in message or "node died" in message:
        return "preempted"
    if any(sign in message for sign in ("out of memory", "low on memory", "memory pressure")):
        return "out_of_memory"
    return "crashed"
