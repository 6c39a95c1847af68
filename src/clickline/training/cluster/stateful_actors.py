"""The embedding servers and the dense parameter server of a job. Their state is only in the last checkpoint: when one
is lost, `StateLost` is raised and training rolls back."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from numpy.typing import NDArray

from clickline.errors import ClusterError
from clickline.progress import human_size
from clickline.training.cluster.cluster_connection import ClusterConnection
from clickline.training.cluster.embedding_server import EmbeddingServer, EmbeddingServerState
from clickline.training.cluster.job import StateLost, TrainingJob
from clickline.training.cluster.job_status import logs_folder
from clickline.training.cluster.monitor import ACTOR_SECONDS, Monitor
from clickline.training.cluster.policy import LossReason
from clickline.training.cluster.recovery import Recovery

_RESTORE_SECONDS = 180.0  # for a placed embedding server to start, plus the time to restore its rows:
_RESTORED_BYTES = 2 << 20  # per second
_PLACE_SECONDS = 15.0  # for Ray to place a process on a node
WORK_SECONDS = 3600.0  # for calls that visit all ids of an embedding server
_LOOK_SECONDS = 1.0  # for a last look at answers that are late
# Batch messages of some hundred kB are sent directly between processes. Through the object store, which Ray uses for
# anything above 100 kB, each costs the raylet more than a millisecond: a tenth of all work on two cores.
DIRECT_CALLS = {
    "RAY_max_direct_call_object_size": str(8 << 20),
    "RAY_task_rpc_inlined_bytes_limit": str(32 << 20),
}
# Reserved by each, so that none is placed on a node without memory, such as the driver's.
_MIN_MEMORY = 1 << 20
_SHARD_SHARE = 0.6  # of a node's memory; the rest is for the workers and the object store


class StatefulActors:
    """Starts them from a checkpoint, calls them, and finds out which one is lost."""

    def __init__(
        self, job: TrainingJob, monitor: Monitor, connection: ClusterConnection, recovery: Recovery
    ) -> None:
        self.embedding_servers: list[Any] = []
        self.dense_server: Any = None
        self.memory_limit = 0  # bytes of one embedding server
        self._job = job
        self._monitor = monitor
        self._connection = connection
        self._recovery = recovery

    @property
    def all(self) -> list[Any]:
        return [*self.embedding_servers, *([] if self.dense_server is None else [self.dense_server])]

    # ── start and stop ─────────────────────────────────────────────────────────────────────────

    def start(self, restore: Sequence[Path], dense: Mapping[str, NDArray[Any]], step: int, rows: int) -> None:
        """Start them from the state of a checkpoint, and wait until they have it."""
        import ray  # only after the session has set the variables that Ray reads on import

        job, logs = self._job, logs_folder(self._job.run)
        options: dict[str, Any] = {
            "max_restarts": 0,
            "max_concurrency": 1000,
            "runtime_env": {"env_vars": DIRECT_CALLS},
        }
        memory = _MIN_MEMORY if job.shard_memory is None else job.shard_memory
        self.memory_limit = self._memory_limit()
        shard = ray.remote(EmbeddingServer).options(
            **options, memory=memory, num_cpus=job.shard_cpus, scheduling_strategy="SPREAD"
        )
        threads = max(1, int(job.shard_cpus))
        self.embedding_servers = [
            shard.remote(number, job.shards, job.tables, threads, restore, rows, logs / f"shard-{number}.log")
            for number in range(job.shards)
        ]
        if not job.sync:
            from clickline.training.cluster.dense_parameter_server import DenseParameterServer, restore_dense

            build = partial(restore_dense, job.dataset, job.plan, job.model_file, dense, step)
            server = ray.remote(DenseParameterServer).options(**options, memory=_MIN_MEMORY, num_cpus=0)
            self.dense_server = server.remote(
                build, job.max_staleness, job.scale_lr_by_staleness, logs / "network.log"
            )
        self._await_started(_RESTORE_SECONDS + sum(file.stat().st_size for file in restore) / _RESTORED_BYTES)

    def _await_started(self, seconds: float) -> None:
        """Wait until all have started. Reports those that cannot be placed; a placed one that does not start in time
        is lost."""
        import ray

        waiting = [shard.state.remote() for shard in self.embedding_servers]
        if self.dense_server is not None:
            waiting.append(self.dense_server.step.remote())
        settled = placed = time.monotonic()
        while True:
            ready, missing = ray.wait(waiting, num_returns=len(waiting), timeout=1.0)
            self.results(ready)  # raises at once if one is lost
            if not missing:
                break
            self._connection.check()
            now = time.monotonic()
            if self._report_unplaced(now - settled):
                placed = now
            else:
                settled = now  # a single failed query of the head does not count
                if now - placed > seconds:
                    self.results(missing, 1.0)
        self._monitor.shards = tuple(self.results(waiting)[: self._job.shards])

    def _report_unplaced(self, seconds: float) -> int:
        """The number of embedding servers that are not placed on a node; reported after a while, then an error."""
        session, job = self._connection.session, self._job
        unplaced = sum(not session.has_place(shard) for shard in self.embedding_servers)
        if seconds < _PLACE_SECONDS or not unplaced:
            return unplaced
        memory = "" if job.shard_memory is None else f" and {human_size(job.shard_memory)}"
        problem = (
            f"{unplaced} of {job.shards} embedding servers do not fit: each requests {job.shard_cpus:g} CPUs{memory} "
            f"(cluster.embedding_server). The cluster has {self._connection.capacity()}."
        )
        if seconds > job.rules.room_seconds:
            raise ClusterError(
                f"{problem} Waited {seconds:,.0f} s for capacity. Add nodes, request less, or use fewer "
                "embedding servers (train.embedding_servers); the same command then resumes from the last checkpoint."
            )
        self._monitor.announce_waiting(f"waiting for capacity: {problem}")
        return unplaced

    def _memory_limit(self) -> int:
        job, nodes = self._job, self._connection.session.nodes
        if job.shard_memory is not None:
            return job.shard_memory
        room = [node.memory for node in nodes() if node.alive and node.memory >= _MIN_MEMORY]
        if not room:  # then none can be placed
            return _MIN_MEMORY
        return int(_SHARD_SHARE * min(room) / math.ceil(job.shards / len(room)))

    def forget(self) -> None:
        """Forget them: they were killed, or went with the cluster."""
        self.embedding_servers, self.dense_server = [], None

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    def states(self) -> list[EmbeddingServerState]:
        """The states of the embedding servers."""
        return self.results([shard.state.remote() for shard in self.embedding_servers])

    def dense_step(self) -> int:
        """The step of the dense parameter server."""
        [step] = self.results([self.dense_server.step.remote()])
        return int(step)

    def open_stream(self, stream: int, token: int, start: int) -> int:
        """Fence the previous owner of a stream; how many of its batches are applied everywhere."""
        opened = self.results([actor.open_stream.remote(stream, token, start) for actor in self.all])
        shards = len(self.embedding_servers)
        applied: list[int] = [*(applied for _, applied in opened[:shards]), *opened[shards:]]
        return min(applied)

    def close_stream(self, stream: int) -> None:
        """Close a finished stream: its messages are refused from now on."""
        self.results([actor.close_stream.remote(stream) for actor in self.all])

    def evict_crowded(self) -> None:
        """Let the crowded embedding server evict ids while no batch is in flight."""
        monitor, number = self._monitor, self._monitor.crowded
        assert number is not None
        newest = max(state.newest_hour for state in monitor.shards)
        evict = self.embedding_servers[number].evict
        [evicted] = self.results([evict.remote(self._job.eviction, newest)], WORK_SECONDS)
        monitor.shard_evicted(number, tuple(self.states()))
        ids = sum(slot.ids + slot.candidates for slot in evicted)
        monitor.announce("forget", f"embedding server {number} evicted {ids:,} ids")

    def results(self, refs: Sequence[Any], seconds: float = ACTOR_SECONDS) -> list[Any]:
        """The results of calls. Raises StateLost if one of the actors is gone or does not answer."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        try:
            results: list[Any] = self._connection.get(list(refs), seconds)
        except RayTaskError as error:
            raise error.cause from None
        except GetTimeoutError:
            name, actor = self._find_dead()
            if actor is None:  # all are alive: perhaps this process was suspended
                with suppress(RayError):
                    return list(ray.get(list(refs), timeout=_LOOK_SECONDS))
            self._lose(name, "partitioned", "it did not answer in time")
        except RayActorError as error:
            name, actor = self._find_dead()
            self._lose(name, self._connection.loss_reason(error, actor), str(error))
        return results

    def _lose(self, name: str, reason: LossReason, error: str) -> NoReturn:
        self._recovery.record("network" if name == "network" else "shard", name, reason, error)
        self._recovery.handle_losses(0)  # a rollback, however many workers are left
        raise StateLost(error)

    def _find_dead(self) -> tuple[str, Any]:
        """The name and handle of one that does not answer."""
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
