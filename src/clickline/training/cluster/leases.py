"""Leases of the work units of an epoch: each unit is queued, leased or done, and is finished exactly once.

A lease has a token, and tokens only increase. When a worker is lost, its units return to the queue; when a lease takes
far longer than the others and the queue is empty, an idle worker gets its unit. Either way the next lease of the unit
has a higher token, and the earlier lease can no longer finish it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

PATIENCE_SECONDS = 30.0  # no lease is a straggler earlier
_MEDIAN_FACTOR = 3.0


@dataclass(frozen=True)
class WorkUnit:
    """A window of `Batches`: what one worker leases with `sync: false`."""

    epoch: int
    number: int


@dataclass(frozen=True)
class WorkLease:
    """A unit that is leased to one worker."""

    unit: WorkUnit
    token: int
    start_batch: int  # earlier batches are trained
    worker: str
    since: float
    batches_done: int  # reported by the worker, from the beginning of the unit
    taken_from: str | None = None  # the straggler that had the unit


class Leases:
    """The units of one epoch. `token` is the first to be issued: higher than any issued before in the run."""

    def __init__(self, units: Sequence[WorkUnit], token: int = 1) -> None:
        self._units = {unit.number: unit for unit in units}
        self._todo = sorted((unit.number, 0) for unit in units)  # (unit, next batch), in order
        self._open: dict[int, WorkLease] = {}  # by token
        self._done: set[int] = set()
        self._token = token
        self._seconds: list[float] = []  # durations of complete units

    @property
    def next_token(self) -> int:
        return self._token

    @property
    def todo(self) -> int:
        return len(self._todo)

    @property
    def open(self) -> tuple[WorkLease, ...]:
        return tuple(self._open.values())

    @property
    def done(self) -> int:
        return len(self._done)

    @property
    def all_done(self) -> bool:
        return len(self._done) == len(self._units)

    def grant(self, worker: str, now: float, ready: int | None = None) -> WorkLease | None:
        """A lease for an idle worker: its prefetched unit `ready` if that is still queued, else the first in the queue,
        else the unit of the slowest straggler; None if there is none."""
        if self._todo:
            at = next((at for at, (number, _) in enumerate(self._todo) if number == ready), 0)
            number, batch = self._todo.pop(at)
            return self._lease(self._units[number], worker, batch, now)
        for slow in self.stragglers(now):
            if slow.worker != worker:
                del self._open[slow.token]
                return self._lease(slow.unit, worker, slow.batches_done, now, taken_from=slow.worker)
        return None

    def fence(self) -> int:
        """A new highest token without a lease: holders of earlier tokens are refused."""
        self._token += 1
        return self._token - 1

    def next_unit(self, taken: Set[int]) -> WorkUnit | None:
        """The first queued unit that no other worker prefetches."""
        return next((self._units[number] for number, _ in self._todo if number not in taken), None)

    def progress(self, token: int, batches_done: int) -> bool:
        """Record the progress of a lease; False if it is fenced or finished."""
        lease = self._open.get(token)
        if lease is None:
            return False
        self._open[token] = replace(lease, batches_done=max(lease.batches_done, batches_done))
        return True

    def finish(self, token: int, now: float) -> bool:
        """Mark the unit as done; False if the lease is fenced and another one counts."""
        lease = self._open.pop(token, None)
        if lease is None:
            return False
        self._done.add(lease.unit.number)
        if lease.start_batch == 0:  # the time of a partial unit says nothing about a whole one
            self._seconds.append(now - lease.since)
        return True

    def release(self, worker: str) -> list[WorkUnit]:
        """Return the units of a worker to the queue, to resume at their last reported batch."""
        returned = [lease for lease in self._open.values() if lease.worker == worker]
        for lease in returned:
            del self._open[lease.token]
            insort(self._todo, (lease.unit.number, lease.batches_done))
        return [lease.unit for lease in returned]

    def stragglers(self, now: float) -> list[WorkLease]:
        """Leases that take far longer than finished units did, the slowest first."""
        usual = median(self._seconds) if self._seconds else 0.0
        limit = max(PATIENCE_SECONDS, _MEDIAN_FACTOR * usual)
        slow = [lease for lease in self._open.values() if now - lease.since > limit]
        return sorted(slow, key=lambda lease: (lease.since, lease.token))

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint: the finished units, and the batch at which each started unit resumes."""
        begun = [*self._todo, *((lease.unit.number, lease.batches_done) for lease in self._open.values())]
        return {
            "done": sorted(self._done),
            "begun": {str(number): batch for number, batch in sorted(begun) if batch},
            "next_token": self._token,
        }

    @classmethod
    def from_json(cls, units: Sequence[WorkUnit], document: Mapping[str, Any], token: int = 1) -> Leases:
        """The state at the checkpoint, with no open lease. Issued tokens are at least `token`: leases that were granted
        after the checkpoint must stay fenced."""
        leases = cls(units, max(token, document["next_token"]))
        leases._done = set(document["done"])
        begun = {int(number): batch for number, batch in document["begun"].items()}
        leases._todo = sorted(
            (unit.number, begun.get(unit.number, 0)) for unit in units if unit.number not in leases._done
        )
        return leases

    def _lease(
        self, unit: WorkUnit, worker: str, batch: int, now: float, taken_from: str | None = None
    ) -> WorkLease:
        lease = WorkLease(unit, self._token, batch, worker, now, batch, taken_from)
        self._token += 1
        self._open[lease.token] = lease
        return lease
