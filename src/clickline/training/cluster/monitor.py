"""Polls the processes of a running job and reports to the progress line, `clickline status` and the driver's log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from clickline.errors import ClusterError
from clickline.progress import Progress
from clickline.training.cluster.embedding_server import EmbeddingServerState
from clickline.training.cluster.job import TrainingJob
from clickline.training.cluster.job_status import (
    EVENTS,
    CheckpointStatus,
    Event,
    JobMetrics,
    JobStatus,
    LeaseCounts,
    ServerStatus,
    WorkerStatus,
    logs_folder,
    timestamp,
    write_status,
)
from clickline.training.cluster.policy import Evict, GiveUp, MemoryUse, decide_memory
from clickline.training.cluster.role_log import RoleLog

if TYPE_CHECKING:
    from clickline.training.cluster.worker_group import WorkerGroup, WorkerHandle

_LOOK_SECONDS = 1.0
_LATE_SECONDS = 10.0  # after which a poll ignores the processes that did not answer
_FIRST_SECONDS = 180.0  # for the phases of a worker's first batch: kernels may have to be compiled
READ_SECONDS = 180.0  # for rows that all workers wait for: a store may be slow
STANDSTILL_SECONDS = 180.0  # without progress of any worker: then all of them are considered deadlocked
ACTOR_SECONDS = 60.0  # after which a stateful actor that does not answer is lost


class Monitor:
    """Polls all processes for their metrics once a second without waiting for the answers."""

    def __init__(self, job: TrainingJob, progress: Progress, report: Callable[[JobMetrics], None]) -> None:
        self.log = RoleLog(logs_folder(job.run) / "driver.log")
        self.shards: tuple[EmbeddingServerState, ...] = ()
        self.crowded: int | None = None  # an embedding server that must evict ids
        self._evicted: set[int] = set()
        self._warned_of: set[int] = set()  # embedding servers whose memory use was reported
        self._job = job
        self._progress = progress
        self._report = report
        self._status = JobStatus("starting", "sync" if job.sync else "async", most=job.rules.max)
        self._reports: dict[str, Any] = {}
        self._rates: dict[str, float] = {}
        self._hosts: dict[str, str] = {}
        self._silent_for: dict[str, float] = {}  # seconds for which a worker has not answered polls
        self._actors_silent_for = 0.0
        self._progressed_at: dict[str, float] = {}  # when the report of a worker last changed
        self._pending: tuple[list[str], list[Any]] = ([], [])
        self._polled_at = 0.0

    # ── polling ────────────────────────────────────────────────────────────────────────────────

    @property
    def rows(self) -> int:
        """Trained rows, each counted once."""
        return self.shards[0].rows if self.shards else 0

    @property
    def checkpoint_step(self) -> int:
        return 0 if self._status.last_checkpoint is None else self._status.last_checkpoint.step

    def step(self, known: int) -> int:
        """The highest step reported so far."""
        steps: list[int] = [report.step for report in self._reports.values()]
        return max([known, *steps])

    def location_of(self, worker: str) -> str:
        """The step or batch in a worker's last report."""
        report = self._reports.get(worker)
        return "" if report is None else str(report.location)

    def stuck_at(self, worker: str, reading: float = 0.0) -> str:
        """The phase in which a responsive worker has made no progress for too long; empty: it progresses, or waits for
        others. Reading may take `reading` seconds, if that is more than the usual limit."""
        report, progressed = self._reports.get(worker), self._progressed_at.get(worker)
        if report is None or progressed is None or report.phase in _WAITING:
            return ""
        if self._silent_for.get(worker, 0.0) > 0.0:  # its last report says nothing about now
            return ""
        patience = self._job.group_seconds
        if report.phase == "read":
            patience = max(patience, reading)
        elif not report.rows:
            patience = max(patience, _FIRST_SECONDS)
        return str(report.phase) if time.monotonic() - progressed > patience else ""

    def standstill(self, workers: Sequence[str], since: float) -> dict[str, str]:
        """What each of these workers waits for, if all of them wait and none has progressed for too long; else nothing.
        They started at `since`: earlier reports do not count."""
        reports = [self._reports.get(worker) for worker in workers]
        phases = ["" if report is None else str(report.phase) for report in reports]
        progressed = max([since, *(self._progressed_at.get(worker, since) for worker in workers)])
        patience = max(self._job.group_seconds, STANDSTILL_SECONDS)
        if time.monotonic() - progressed <= patience or not set(phases).issubset(_WAITING):
            return {}
        return dict(zip(workers, phases, strict=True))

    def lose_silent_workers(self, group: WorkerGroup, seconds: float) -> list[WorkerHandle]:
        """Give up the workers that have not answered for that many seconds; returns them."""
        silent = [
            worker for worker in group.started_workers() if self._silent_for.get(worker.name, 0.0) > seconds
        ]
        for worker in silent:
            group.lose_worker(worker, "partitioned", f"it has not answered for more than {seconds:.0f} s")
        return silent

    def poll(self, group: WorkerGroup, step: int, leases: LeaseCounts | None = None) -> bool:
        """Once a second: collect the answers to the last poll, report them, poll again. Whether a second had passed."""
        import ray

        now = time.monotonic()
        if now - self._polled_at < _LOOK_SECONDS:
            return False
        names, refs = self._pending
        if refs:
            ready, missing = ray.wait(refs, num_returns=len(refs), timeout=0)
            if missing and now - self._polled_at < _LATE_SECONDS:
                return False
            self._collect(group, names, refs, set(ready), now - self._polled_at)
        group.connection.check()
        started = group.started_workers()
        self._hosts = {worker.name: worker.host for worker in group.workers.values()}
        self._reports = {name: report for name, report in self._reports.items() if name in group.workers}
        self._pending = (
            [worker.name for worker in started],
            [
                *(worker.actor.report.remote() for worker in started),
                *(shard.state.remote() for shard in group.actors.embedding_servers),
                *([] if self._job.sync else [group.actors.dense_server.host_and_memory.remote()]),
            ],
        )
        self._polled_at = now
        self._check_memory(group.actors.memory_limit)
        self._status = replace(self._status, leases=leases)
        self._report_metrics(group, step)
        return True

    def refresh(self, group: WorkerGroup, step: int) -> None:
        """Poll all processes once more at the end of an epoch and wait, so that the last report is the final state."""
        from clickline.training.cluster.worker_group import WorkerFailed

        self.shards = tuple(group.actors.states())
        for worker in group.started_workers():
            with suppress(WorkerFailed):  # the next caller that needs this worker handles the loss
                self._reports[worker.name] = group.worker_result(worker, worker.actor.report.remote())
        self._report_metrics(group, step)

    def _report_metrics(self, group: WorkerGroup, step: int) -> None:
        reports = list(self._reports.values())
        metrics = JobMetrics(
            step=self.step(step),
            rows=self.rows,
            total_rows=self._job.total_rows,
            rows_per_second=sum(self._rates.get(worker.name, 0.0) for worker in group.started_workers()),
            auc=_mean(report.auc for report in reports),
            loss=_mean(report.loss for report in reports),
        )
        self._status = replace(self._status, metrics=metrics)
        self._report(metrics)
        self.write("running", group.actors.memory_limit)

    def _collect(
        self, group: WorkerGroup, names: list[str], refs: list[Any], ready: set[Any], seconds: float
    ) -> None:
        import ray
        from ray.exceptions import RayError

        for name, ref in zip(names, refs, strict=False):
            self._silent_for[name] = 0.0 if ref in ready else self._silent_for.get(name, 0.0) + seconds
            if name in group.workers and ref in ready:
                try:
                    report = ray.get(ref)
                except RayError:
                    continue  # its own task reports what happened
                before = self._reports.get(name)
                if before is None or (before.location, before.phase, before.rows) != (
                    report.location,
                    report.phase,
                    report.rows,
                ):
                    self._progressed_at[name] = time.monotonic()
                self._rates[name] = (report.rows - (before.rows if before else 0)) / seconds
                self._reports[name] = report
        actors = refs[len(names) :]
        answered = ready.issuperset(actors)
        self._actors_silent_for = 0.0 if answered else self._actors_silent_for + seconds
        if answered or self._actors_silent_for > ACTOR_SECONDS:
            results = group.actors.results(actors, 1.0)
            self.shards = tuple(results[: self._job.shards])
            if not self._job.sync:
                host, memory = results[-1]
                self._status = replace(self._status, network=ServerStatus("network", host, memory=memory))

    def _check_memory(self, limit: int) -> None:
        for number, state in enumerate(self.shards):
            memory = MemoryUse(number, state.memory, limit, number in self._evicted)
            decision = decide_memory(memory, evicts=self._job.eviction is not None)
            if isinstance(decision, GiveUp):
                raise ClusterError(f"{decision.reason}.")
            if isinstance(decision, Evict):
                self.crowded = number
            elif not decision.reason and state.memory < limit / 2:
                self._evicted.discard(number)
                self._warned_of.discard(number)
            if decision.reason and number not in self._warned_of:  # its memory use changes every second
                self._warned_of.add(number)
                self._progress.log(f"cluster: {decision.reason}")
                self._status = replace(self._status, message=decision.reason)

    def shard_evicted(self, number: int, shards: tuple[EmbeddingServerState, ...]) -> None:
        """Record that a crowded embedding server has evicted ids; answers to earlier polls are outdated."""
        self.crowded, self.shards, self._pending = None, shards, ([], [])
        self._evicted.add(number)
        self._status = replace(self._status, message="")

    # ── reporting ──────────────────────────────────────────────────────────────────────────────

    def announce(self, decision: str, reason: str) -> None:
        """Report a decision on the progress line, in the log and in the status."""
        self._progress.log(f"cluster: {reason}")
        self.log.write(f"{decision}: {reason}")
        self._status = replace(
            self._status, events=(*self._status.events, Event(timestamp(), decision, reason))[-EVENTS:]
        )

    def announce_waiting(self, reason: str) -> None:
        """Report what the job waits for."""
        if reason and reason != self._status.message:
            self._progress.log(f"cluster: {reason}")
            self.write("waiting", message=reason)

    def checkpoint_written(self, step: int, seconds: float, stalled: float) -> None:
        written = CheckpointStatus(step, timestamp(), seconds, stalled)
        self._status = replace(self._status, last_checkpoint=written)
        self.log.write(
            f"checkpoint of step {step}: written in {seconds:.2f} s, training stalled for {stalled:.3f} s"
        )

    def summary(self) -> str:
        """All processes in one line."""
        rates = " + ".join(f"{self._rates.get(name, 0):,.0f}" for name in self._hosts)
        ids = sum(state.ids for state in self.shards)
        parts = [
            f"{len(self._hosts)} workers ({rates} rows/s)",
            f"{len(self.shards)} embedding servers ({ids:,} ids)",
        ]
        if self._status.leases is not None:
            parts.append(f"{self._status.leases.open} leases, {self._status.leases.todo} units queued")
        if self._status.last_checkpoint is not None:
            parts.append(f"last checkpoint at step {self._status.last_checkpoint.step:,}")
        return ", ".join(parts)

    def write(
        self,
        state: Literal["starting", "waiting", "running", "done", "stopped", "failed"],
        limit: int | None = None,
        *,
        message: str | None = None,
    ) -> None:
        """Write the status file that `clickline status` reads."""
        if message is None and self._status.state == "waiting" and state != "waiting":
            message = ""  # the wait is over
        self._status = replace(
            self._status,
            state=state,
            workers=tuple(self._worker(name, host) for name, host in self._hosts.items()),
            shards=tuple(
                ServerStatus(f"shard-{number}", shard.node, shard.ids, shard.memory, limit)
                for number, shard in enumerate(self.shards)
            ),
            message=self._status.message if message is None else message,
        )
        write_status(self._job.run, self._status)

    def _worker(self, name: str, host: str) -> WorkerStatus:
        report = self._reports.get(name)
        if report is None:
            return WorkerStatus(name, host, "idle" if host else "starting")
        rate = self._rates.get(name, 0.0)
        return WorkerStatus(name, host, "learning", report.location, report.rows, rate, report.memory)

    def restarted(self) -> None:
        """Reset the polled state: training rolls back to the last checkpoint."""
        self._status = replace(self._status, generation=self._status.generation + 1)
        self._reports, self._pending, self._actors_silent_for = {}, ([], []), 0.0
        self.crowded, self._evicted, self._warned_of = None, set(), set()  # new embedding servers


_WAITING = ("pull", "weights", "ack", "sum", "rows")  # phases in which a worker waits for other processes


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
