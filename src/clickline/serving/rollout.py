"""Which version the workers answer with: events in, messages to workers out. Does nothing itself.

A new version is loaded by every worker beside the current one. When all of them have it, all are told to switch; if
one refuses it, none does. So the processes of a server differ for no longer than a message takes.

Messages to a worker: prepare (load beside), switch, drop (forget what was prepared), listen (open the ports), stop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Offer:
    """A version whose files are here and whole."""

    number: int
    folders: tuple[str, ...]  # of its chain, base first, its own last
    created: float = 0.0  # seconds since 1970
    data_until: float | None = (
        None  # the same: the end of the newest data it has learned, where that is known
    )


Send = Callable[[int, dict[str, Any]], None]


class Rollout:
    """The current version, and one on its way."""

    def __init__(
        self, send: Send, committed: Callable[[Offer], None], refused: Callable[[Offer, str, bool], None]
    ) -> None:
        """`refused` is told why, and whether it is worth to try again later."""
        self.current: Offer | None = None
        self.pending: Offer | None = None
        self._later: Offer | None = None
        self._up: set[int] = set()
        self._waiting: set[int] = set()  # workers that have not answered about the pending version
        self._send = send
        self._committed = committed
        self._refused = refused

    def offered(self, offer: Offer) -> None:
        if self.pending is not None:
            self._later = offer
        elif self.current is None or self.current.number != offer.number:
            self._begin(offer)

    def worker_up(self, worker: int) -> None:
        """A worker can take messages. It listens at once only while there is nothing to load first."""
        self._up.add(worker)
        if self.current is not None:
            self._prepare(worker, self.current)
        if self.pending is not None:
            self._waiting.add(worker)
            self._prepare(worker, self.pending)
        if self.current is None and self.pending is None:
            self._send(worker, {"do": "listen"})

    def worker_gone(self, worker: int) -> None:
        self._up.discard(worker)
        if worker in self._waiting:
            self._waiting.discard(worker)
            self._give_up("a worker process died while it loaded the version", again=True)

    def prepared(self, worker: int, number: int) -> None:
        if self.current is not None and number == self.current.number:
            self._send(worker, {"do": "switch", "number": number})
        elif self.pending is not None and number == self.pending.number:
            self._waiting.discard(worker)
            if not self._waiting:
                self._commit(self.pending)
        else:
            self._send(worker, {"do": "drop", "number": number})

    def refused(self, worker: int, number: int, reason: str, again: bool) -> None:
        if self.pending is not None and number == self.pending.number:
            self._waiting.discard(worker)
            self._give_up(reason, again)
        elif self.current is not None and number == self.current.number:
            # It cannot load what the others answer with. A new process tries again.
            self._send(worker, {"do": "stop"})

    def late(self) -> set[int]:
        """Workers that still load the pending version."""
        return set(self._waiting)

    def _begin(self, offer: Offer) -> None:
        self.pending = offer
        self._waiting = set(self._up)
        for worker in sorted(self._up):
            self._prepare(worker, offer)

    def _commit(self, offer: Offer) -> None:
        self.current, self.pending = offer, None
        for worker in sorted(self._up):
            self._send(worker, {"do": "switch", "number": offer.number})
        self._committed(offer)
        self._go_on()

    def _give_up(self, reason: str, again: bool) -> None:
        offer, self.pending = self.pending, None
        assert offer is not None
        self._waiting.clear()
        for worker in sorted(self._up):
            self._send(worker, {"do": "drop", "number": offer.number})
            if self.current is None:
                self._send(worker, {"do": "listen"})
        self._refused(offer, reason, again)
        self._go_on()

    def _go_on(self) -> None:
        offer, self._later = self._later, None
        if offer is not None:
            self.offered(offer)

    def _prepare(self, worker: int, offer: Offer) -> None:
        self._send(worker, {"do": "prepare", "number": offer.number, "folders": offer.folders})
