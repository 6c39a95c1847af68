"""Who learns which unit of an epoch: each is to do, leased, or done, and is finished exactly once.

A lease has a token, and tokens only rise. When a worker is lost, its units return; when one takes far longer than
the others and nothing else is left to do, an idle worker gets its unit. Either way the unit's next lease has a higher
token, and the one before finishes nothing any more.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from clickline.training.cluster.work_units import Unit

PATIENCE_SECONDS = 30.0  # nobody is a straggler before
_TIMES_MEDIAN = 3.0


@dataclass(frozen=True)
class Lease:
    """A unit in the hands of one worker."""

    unit: Unit
    token: int
    start_batch: int  # the batches before are learned
    worker: str
    since: float
    batches_done: int  # as the worker told, from the unit's beginning
    taken_from: str | None = None  # the worker that was too slow


class Leases:
    """The units of one epoch. `token` is the first that is given out: higher than any before, whoever gave it."""

    def __init__(
        self, units: Sequence[Unit], token: int = 1, *, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._units = {unit.number: unit for unit in units}
        self._todo = sorted((unit.number, 0) for unit in units)  # (unit, next batch), in order
        self._open: dict[int, Lease] = {}  # by token
        self._done: set[int] = set()
        self._token = token
        self._seconds: list[float] = []  # that whole units took
        self._patience = patience_seconds

    @property
    def next_token(self) -> int:
        return self._token

    @property
    def todo(self) -> int:
        return len(self._todo)

    @property
    def open(self) -> tuple[Lease, ...]:
        return tuple(self._open.values())

    @property
    def done(self) -> int:
        return len(self._done)

    @property
    def all_done(self) -> bool:
        return len(self._done) == len(self._units)

    def grant(self, worker: str, now: float, ready: int | None = None) -> Lease | None:
        """Work for an idle worker: the unit it has `ready` if that is still to do, else the first there is, else that
        of the slowest straggler; None if there is none."""
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
        """A token that nobody holds, above all others: whoever has an earlier one is refused."""
        self._token += 1
        return self._token - 1

    def coming(self, taken: Set[int]) -> Unit | None:
        """The first unit to do that is not among those others make ready for."""
        return next((self._units[number] for number, _ in self._todo if number not in taken), None)

    def progress(self, token: int, batches_done: int) -> bool:
        """How far a lease is; False if it is fenced or finished."""
        lease = self._open.get(token)
        if lease is None:
            return False
        self._open[token] = replace(lease, batches_done=max(lease.batches_done, batches_done))
        return True

    def finished(self, token: int, now: float) -> bool:
        """The unit is learned; False if the lease is fenced: then another one counts."""
        lease = self._open.pop(token, None)
        if lease is None:
            return False
        self._done.add(lease.unit.number)
        if lease.start_batch == 0:  # a part of a unit says nothing of how long one takes
            self._seconds.append(now - lease.since)
        return True

    def lost(self, worker: str) -> list[Unit]:
        """The units that a lost worker had; they are to do again, from the batch they were at."""
        returned = [lease for lease in self._open.values() if lease.worker == worker]
        for lease in returned:
            del self._open[lease.token]
            insort(self._todo, (lease.unit.number, lease.batches_done))
        return [lease.unit for lease in returned]

    def stragglers(self, now: float) -> list[Lease]:
        """Leases that take far longer than units did, the slowest first."""
        usual = median(self._seconds) if self._seconds else 0.0
        limit = max(self._patience, _TIMES_MEDIAN * usual)
        slow = [lease for lease in self._open.values() if now - lease.since > limit]
        return sorted(slow, key=lambda lease: (lease.since, lease.token))

    def to_json(self) -> dict[str, Any]:
        """For a cut: what is done, and the batch at which each unit that was begun goes on."""
        begun = [*self._todo, *((lease.unit.number, lease.batches_done) for lease in self._open.values())]
        return {
            "done": sorted(self._done),
            "begun": {str(number): batch for number, batch in sorted(begun) if batch},
            "next_token": self._token,
        }

    @classmethod
    def from_json(
        cls,
        units: Sequence[Unit],
        document: Mapping[str, Any],
        token: int = 1,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> Leases:
        """As they were at the cut, with nobody holding any. What is given out is at least `token`: leases that were
        granted after the cut, and that it does not know, must stay fenced."""
        leases = cls(units, max(token, document["next_token"]), patience_seconds=patience_seconds)
        leases._done = set(document["done"])
        begun = {int(number): batch for number, batch in document["begun"].items()}
        leases._todo = sorted(
            (unit.number, begun.get(unit.number, 0)) for unit in units if unit.number not in leases._done
        )
        return leases

    def _lease(self, unit: Unit, worker: str, batch: int, now: float, taken_from: str | None = None) -> Lease:
        lease = Lease(unit, self._token, batch, worker, now, batch, taken_from)
        self._token += 1
        self._open[lease.token] = lease
        return lease
