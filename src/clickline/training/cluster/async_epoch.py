"""An epoch in async mode: units are leased to workers, each learned once, whoever is lost on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from clickline.training.batches import Position
from clickline.training.cluster.job import Lost, Pause
from clickline.training.cluster.job_status import LeaseCounts
from clickline.training.cluster.leases import Lease, Leases
from clickline.training.cluster.policy import Resize
from clickline.training.cluster.work_units import Unit
from clickline.training.cluster.worker_group import WorkerGroup, Failed, WorkerHandle

_TICK_SECONDS = 0.2
_ALONE_STEPS = 30
_ALONE_SECONDS = 30.0


def at_once(step: int, seconds: float) -> int:
    """How many workers may learn at once: one more whenever each of those before has made 30 steps, or 30 seconds
    have passed, since the first may be the slowest.

    Workers that step at once do not see each other's steps. What that costs in AUC was measured to arise mostly in the
    first steps of a model (docs/cluster.md)."""
    workers = 1
    while step >= _ALONE_STEPS * workers * (workers + 1) // 2:
        workers += 1
    return max(workers, 1 + int(seconds / _ALONE_SECONDS))


class Leasing:
    """Deals out the units of one epoch."""

    def __init__(
        self, crew: WorkerGroup, units: Sequence[Unit], known: Mapping[str, Any] | None, token: int
    ) -> None:
        self._crew = crew
        self.leases = Leases(units, token) if known is None else Leases.from_json(units, known, token)
        self._tasks: dict[Any, WorkerHandle] = {}
        self._torn: set[int] = set()  # units left in the middle of a batch, until somebody has finished that
        self._leaving: set[str] = set()
        self._began = self._granted = time.monotonic()
        self._at_once = 1

    def learn(
        self, start: Position, cut_due: Callable[[int], bool], moved: Callable[[int], None], step: int
    ) -> Iterator[Pause]:
        """Every unit that is not done yet; yields where a cut is due."""
        crew, leases = self._crew, self.leases
        pausing: Literal["", "cut", "forget"] = ""
        while not leases.all_done:
            crew.await_workers()
            if not pausing:
                self._grant_all()
            self._take_ended()
            crew.watch.lose_silent(crew, crew.job.group_seconds)
            self._give_up_stuck(bool(pausing))
            self._give_back_lost()
            looked = crew.watch.look(crew, step, LeaseCounts(leases.todo, len(leases.open), leases.done))
            if pausing and not self._tasks:
                if pausing == "forget" and not self._torn:
                    crew.make_room()
                elif not self._torn:
                    [step] = crew.keepers([crew.network.step.remote()])
                    moved(step)
                    yield Pause(start, leases.to_json())
                pausing = ""
                self._tell_all("resume")
            elif not pausing and (crew.watch.crowded is not None or cut_due(crew.watch.step(step))):
                pausing = "cut" if crew.watch.crowded is None else "forget"
                self._tell_all("pause")
            elif looked and not pausing:
                self._resize()
        self._end_late()
        if pausing:  # the last units were done meanwhile
            self._tell_all("resume")
        [step] = crew.keepers([crew.network.step.remote()])
        moved(step)

    def _end_late(self) -> None:
        """Who is at a unit that another one has finished learns that when it sends something. If it does not for long,
        it is let go: it cannot score meanwhile, nor begin with the next epoch."""
        until = time.monotonic() + self._crew.job.group_seconds
        while self._tasks and time.monotonic() < until:
            self._take_ended()
        for member in self._tasks.values():
            self._crew.dismiss(member)

    def _tell_all(self, method: str) -> None:
        for member in self._crew.here():
            getattr(member.actor, method).remote()

    # ── leases ─────────────────────────────────────────────────────────────────────────────────

    def _grant_all(self) -> None:
        crew, now = self._crew, time.monotonic()
        idle = [m for m in crew.here() if m.lease is None and m.name not in self._leaving]
        if idle and self._at_once < len(crew.members):
            [step] = crew.keepers([crew.network.step.remote()])
            self._at_once = at_once(step, now - self._began)
        for member in idle:
            if len(self.leases.open) >= self._at_once:
                return
            torn = self._torn - {lease.unit.number for lease in self.leases.open}
            # A cut waits until those are mended.
            lease = self.leases.grant(member.name, now, min(torn, default=member.ready))
            if lease is not None:
                self._grant(member, lease)

    def _grant(self, member: WorkerHandle, lease: Lease) -> None:
        """Give a unit to a worker; from now on nobody else can speak for it."""
        from clickline.training.cluster.worker import UnitLease

        crew, stream = self._crew, _stream(lease.unit)
        if lease.taken_from is not None:
            crew.watch.say(
                "lease",
                f"unit {lease.unit.number} goes from {lease.taken_from}, which is slow, to {member.name}",
            )
            self._torn.add(lease.unit.number)
        opened = crew.keepers(
            [
                role.open.remote(stream, lease.token, lease.start_batch)
                for role in [*crew.embedding_servers, crew.network]
            ]
        )
        begin = min([*(applied for _, applied in opened[:-1]), opened[-1]])
        member.lease = lease
        granted = UnitLease(stream, lease.token, lease.unit.epoch, lease.unit.number, begin)
        self._tasks[member.actor.unit.remote(granted)] = member
        self._granted = time.monotonic()
        taken = {other.ready for other in crew.here() if other.ready is not None and other is not member}
        coming = self.leases.coming(taken)
        member.ready = None if coming is None else coming.number
        if coming is not None:
            member.actor.read_ahead.remote(coming.epoch, coming.number)

    def _take_ended(self) -> None:
        import ray

        from clickline.training.cluster.worker import Ended

        crew, leases = self._crew, self.leases
        ready, _ = ray.wait(list(self._tasks), timeout=_TICK_SECONDS) if self._tasks else ([], [])
        for task in ready:
            member = self._tasks.pop(task)
            lease, member.lease = member.lease, None
            number = lease.unit.number
            try:
                ended = crew.ask(member, task)
            except Failed as failed:
                if member.name not in crew.members:
                    continue
                ended = Ended("broken", 0, str(failed))
            if ended.why == "broken":
                crew.watch.log.say(f"{member.name} broke off unit {number}: {ended.error}")
                if leases.progress(lease.token, 0):
                    self._torn.add(number)
                self._give_back(member.name)
                crew.look_for_losses()
            elif ended.why == "paused":
                if leases.progress(lease.token, ended.step):
                    self._torn.discard(number)
                    member.ready = number  # it goes on where it was, unless it leaves
                self._give_back(member.name)
            elif leases.finished(lease.token, time.monotonic()):
                self._torn.discard(number)
                stream = _stream(lease.unit)
                crew.keepers([role.close.remote(stream) for role in [*crew.embedding_servers, crew.network]])
            if member.name in self._leaving:
                self._leaving.discard(member.name)
                crew.dismiss(member)

    def _give_up_stuck(self, pausing: bool) -> None:
        """Who answers, but does not come to the end of a batch, would hold up the others for ever: they may not be
        too far ahead of it. Who only reads holds up nobody but a cut."""
        slow = {lease.worker for lease in self.leases.stragglers(time.monotonic())} if pausing else set()
        for member in self._tasks.values():
            doing = self._crew.watch.stuck_at(member.name)
            if doing and (doing != "read" or member.name in slow):
                self._crew.lose(member, "straggling", f"it did nothing but {doing} for too long")
        if self._crew.watch.standstill([member.name for member in self._tasks.values()], self._granted):
            raise Lost(
                "the shards and the network answer, but not to the batches that all workers wait for, so everything "
                "goes back to the last cut"
            )

    def _give_back_lost(self) -> None:
        """Units of workers that are gone are to do again."""
        crew = self._crew
        holders = {lease.worker for lease in self.leases.open}
        for name in holders - set(crew.members):
            self._torn.update(lease.unit.number for lease in self.leases.open if lease.worker == name)
            self._give_back(name)
        self._tasks = {task: member for task, member in self._tasks.items() if member.name in crew.members}
        crew.act_on_losses()

    def _give_back(self, worker: str) -> None:
        """Units that a worker has no more are to do. Nobody speaks for them until they are granted again: else the
        others would wait for their next batch, within the bounds of staleness, and none be free to take them."""
        crew = self._crew
        for unit in self.leases.lost(worker):
            token, keepers = self.leases.fence(), [*crew.embedding_servers, crew.network]
            crew.keepers([role.open.remote(_stream(unit), token, 0) for role in keepers])

    # ── workers ────────────────────────────────────────────────────────────────────────────────

    def _resize(self) -> None:
        crew = self._crew
        self._leaving &= set(crew.members)
        if self._leaving:  # they still count, though they end with their batch
            return
        decision = crew.decide()
        if not isinstance(decision, Resize):
            return
        crew.resize(decision)
        for member in list(crew.members.values())[decision.workers :]:
            if member.lease is None:
                crew.dismiss(member)
            else:
                self._leaving.add(member.name)
                member.actor.pause.remote()


def _stream(unit: Unit) -> int:
    return 1 + unit.epoch * (1 << 32) + unit.number
