"""An epoch in async mode: work units are leased to workers, and each is trained once even if workers are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from clickline.artifacts.checkpoint import Position
from clickline.training.cluster.job import PausePoint, StateLost
from clickline.training.cluster.job_status import LeaseCounts
from clickline.training.cluster.leases import Leases, WorkLease, WorkUnit
from clickline.training.cluster.policy import Resize
from clickline.training.cluster.worker_group import WorkerFailed, WorkerGroup, WorkerHandle

_TICK_SECONDS = 0.2
_RAMP_STEPS = 30
_RAMP_SECONDS = 30.0


def max_concurrent(step: int, seconds: float) -> int:
    """How many workers may train at the same time: one more whenever each current one has made 30 steps, or after
    30 seconds, because the first one may be the slowest.

    Concurrent workers do not see each other's steps. Measurements show that most of the AUC this costs is lost in the
    first steps of a model (docs/cluster.md)."""
    workers = 1
    while step >= _RAMP_STEPS * workers * (workers + 1) // 2:
        workers += 1
    return max(workers, 1 + int(seconds / _RAMP_SECONDS))


class AsyncEpoch:
    """Leases the work units of one epoch to workers."""

    def __init__(
        self, group: WorkerGroup, units: Sequence[WorkUnit], progress: Mapping[str, Any] | None, token: int
    ) -> None:
        self._group = group
        self.leases = Leases(units, token) if progress is None else Leases.from_json(units, progress, token)
        self._tasks: dict[Any, WorkerHandle] = {}
        self._partial: set[int] = set()  # units interrupted within a batch that is not finished yet
        self._leaving: set[str] = set()
        self._began = self._granted_at = time.monotonic()
        self._max_concurrent = 1

    def run(
        self,
        start: Position,
        checkpoint_due: Callable[[int], bool],
        on_step: Callable[[int], None],
        step: int,
    ) -> Iterator[PausePoint]:
        """Train every unit that is not done yet; yields when a checkpoint is due."""
        group, leases = self._group, self.leases
        pausing: Literal["", "checkpoint", "evict"] = ""
        while not leases.all_done:
            group.await_workers()
            if not pausing:
                self._grant_all()
            self._collect_finished()
            group.monitor.lose_silent_workers(group, group.job.group_seconds)
            self._lose_stuck(bool(pausing))
            self._return_lost_units()
            polled = group.monitor.poll(group, step, LeaseCounts(leases.todo, len(leases.open), leases.done))
            if pausing and not self._tasks:
                if pausing == "evict" and not self._partial:
                    group.actors.evict_crowded()
                elif not self._partial:
                    step = group.actors.dense_step()
                    on_step(step)
                    yield PausePoint(start, leases.to_json())
                pausing = ""
                self._call_all("resume")
            elif not pausing and (
                group.monitor.crowded is not None or checkpoint_due(group.monitor.step(step))
            ):
                pausing = "checkpoint" if group.monitor.crowded is None else "evict"
                self._call_all("pause")
            elif polled and not pausing:
                self._resize()
        self._stop_late()
        if pausing:  # the last units were finished in the meantime
            self._call_all("resume")
        step = group.actors.dense_step()
        on_step(step)

    def _stop_late(self) -> None:
        """A worker on a unit that another one has finished is refused at its next message. One that sends none for too
        long is stopped: meanwhile it could neither score nor begin the next epoch."""
        until = time.monotonic() + self._group.job.group_seconds
        while self._tasks and time.monotonic() < until:
            self._collect_finished()
        for worker in self._tasks.values():
            self._group.stop_worker(worker)

    def _call_all(self, method: str) -> None:
        for worker in self._group.started_workers():
            getattr(worker.actor, method).remote()

    # ── leases ─────────────────────────────────────────────────────────────────────────────────

    def _grant_all(self) -> None:
        group, now = self._group, time.monotonic()
        idle = [
            worker
            for worker in group.started_workers()
            if worker.lease is None and worker.name not in self._leaving
        ]
        if idle and self._max_concurrent < len(group.workers):
            step = group.actors.dense_step()
            self._max_concurrent = max_concurrent(step, now - self._began)
        for worker in idle:
            if len(self.leases.open) >= self._max_concurrent:
                return
            partial = self._partial - {lease.unit.number for lease in self.leases.open}
            # A checkpoint waits until these units are finished.
            lease = self.leases.grant(worker.name, now, min(partial, default=worker.ready))
            if lease is not None:
                self._grant(worker, lease)

    def _grant(self, worker: WorkerHandle, lease: WorkLease) -> None:
        """Lease a unit to a worker; from now on messages from any other worker about it are refused."""
        from clickline.training.cluster.async_worker import LeasedUnit

        group, stream = self._group, _stream(lease.unit)
        if lease.taken_from is not None:
            group.monitor.announce(
                "lease",
                f"reassigned unit {lease.unit.number} from {lease.taken_from}, a straggler, to {worker.name}",
            )
            self._partial.add(lease.unit.number)
        first_batch = group.actors.open_stream(stream, lease.token, lease.start_batch)
        worker.lease = lease
        leased = LeasedUnit(stream, lease.token, lease.unit.epoch, lease.unit.number, first_batch)
        self._tasks[worker.actor.run_unit.remote(leased)] = worker
        self._granted_at = time.monotonic()
        taken = {
            other.ready
            for other in group.started_workers()
            if other.ready is not None and other is not worker
        }
        upcoming = self.leases.next_unit(taken)
        worker.ready = None if upcoming is None else upcoming.number
        if upcoming is not None:
            worker.actor.read_ahead.remote(upcoming.epoch, upcoming.number)

    def _collect_finished(self) -> None:
        import ray

        from clickline.training.cluster.worker import WorkResult

        group, leases = self._group, self.leases
        ready, _ = ray.wait(list(self._tasks), timeout=_TICK_SECONDS) if self._tasks else ([], [])
        for task in ready:
            worker = self._tasks.pop(task)
            lease, worker.lease = worker.lease, None
            number = lease.unit.number
            try:
                result = group.worker_result(worker, task)
            except WorkerFailed as failed:
                if worker.name not in group.workers:
                    continue
                result = WorkResult("broken", 0, str(failed))
            if result.outcome == "broken":
                group.monitor.log.write(f"{worker.name} aborted unit {number}: {result.error}")
                if leases.progress(lease.token, 0):
                    self._partial.add(number)
                self._return_units(worker.name)
                group.find_losses()
            elif result.outcome == "paused":
                if leases.progress(lease.token, result.step):
                    self._partial.discard(number)
                    worker.ready = number  # it resumes this unit, unless it is leaving
                self._return_units(worker.name)
            elif leases.finish(lease.token, time.monotonic()):
                self._partial.discard(number)
                group.actors.close_stream(_stream(lease.unit))
            if worker.name in self._leaving:
                self._leaving.discard(worker.name)
                group.stop_worker(worker)

    def _lose_stuck(self, pausing: bool) -> None:
        """Give up workers that respond but never finish a batch: bounded staleness would block all others. A worker
        that is only reading blocks nothing but a checkpoint."""
        slow = {lease.worker for lease in self.leases.stragglers(time.monotonic())} if pausing else set()
        for worker in self._tasks.values():
            phase = self._group.monitor.stuck_at(worker.name)
            if phase and (phase != "read" or worker.name in slow):
                self._group.lose_worker(worker, "straggling", f"it was stuck in phase {phase}")
        if self._group.monitor.standstill([worker.name for worker in self._tasks.values()], self._granted_at):
            raise StateLost(
                "the embedding servers and the dense parameter server are alive, but do not answer the requests that "
                "all workers wait for, so training rolls back to the last checkpoint"
            )

    def _return_lost_units(self) -> None:
        """Return the units of lost workers to the queue."""
        group = self._group
        lease_owners = {lease.worker for lease in self.leases.open}
        for name in lease_owners - set(group.workers):
            self._partial.update(lease.unit.number for lease in self.leases.open if lease.worker == name)
            self._return_units(name)
        self._tasks = {task: worker for task, worker in self._tasks.items() if worker.name in group.workers}
        group.handle_losses()

    def _return_units(self, worker: str) -> None:
        """Return the units of a worker to the queue. Their streams have no owner until they are leased again: otherwise
        the other workers would wait for their next batch, bounded by staleness, and none would be free to take them."""
        for unit in self.leases.release(worker):
            self._group.actors.open_stream(_stream(unit), self.leases.fence(), 0)

    # ── workers ────────────────────────────────────────────────────────────────────────────────

    def _resize(self) -> None:
        group = self._group
        self._leaving &= set(group.workers)
        if self._leaving:  # they still count, although they stop after their batch
            return
        decision = group.decide()
        if not isinstance(decision, Resize):
            return
        group.resize(decision)
        for worker in list(group.workers.values())[decision.workers :]:
            if worker.lease is None:
                group.stop_worker(worker)
            else:
                self._leaving.add(worker.name)
                worker.actor.pause.remote()


def _stream(unit: WorkUnit) -> int:
    return 1 + unit.epoch * (1 << 32) + unit.number
