"""Decides which version the workers serve: events in, messages to workers out. It does no I/O.

Every worker loads a new version beside the current one. When all have it, all are told to switch; if one refuses it,
none does. So the workers of a server differ for no longer than a message takes.

Messages to a worker: prepare (load a version), switch, drop (unload a prepared version), listen (open the ports), stop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FetchedVersion:
    """A version whose files are local and verified."""

    number: int
    folders: tuple[str, ...]  # of its chain: base first, its own last
    created: float = 0.0  # seconds since 1970
    data_until: float | None = None  # the end of its newest training data, if known; the same unit


Send = Callable[[int, dict[str, Any]], None]


class Rollout:
    """The state of a rollout: the current version, and the one being loaded."""

    def __init__(
        self,
        send: Send,
        committed: Callable[[FetchedVersion], None],
        refused: Callable[[FetchedVersion, str, bool], None],
    ) -> None:
        """`refused` is called with the reason, and whether a retry may succeed."""
        self.current: FetchedVersion | None = None
        self.pending: FetchedVersion | None = None
        self._next: FetchedVersion | None = None
        self._workers: set[int] = set()
        self._loading: set[int] = set()  # workers that are still loading the pending version
        self._send = send
        self._committed = committed
        self._refused = refused

    def propose(self, version: FetchedVersion) -> None:
        if self.pending is not None:
            self._next = version
        elif self.current is None or self.current.number != version.number:
            self._start(version)

    def worker_up(self, worker: int) -> None:
        """A worker has started. It listens at once only if there is no version to load first."""
        self._workers.add(worker)
        if self.current is not None:
            self._prepare(worker, self.current)
        if self.pending is not None:
            self._loading.add(worker)
            self._prepare(worker, self.pending)
        if self.current is None and self.pending is None:
            self._send(worker, {"do": "listen"})

    def worker_gone(self, worker: int) -> None:
        self._workers.discard(worker)
        if worker in self._loading:
            self._loading.discard(worker)
            self._abort("a worker process died while loading it", retry=True)

    def prepared(self, worker: int, number: int) -> None:
        if self.current is not None and number == self.current.number:
            self._send(worker, {"do": "switch", "number": number})
        elif self.pending is not None and number == self.pending.number:
            self._loading.discard(worker)
            if not self._loading:
                self._commit(self.pending)
        else:
            self._send(worker, {"do": "drop", "number": number})

    def refused(self, worker: int, number: int, reason: str, retry: bool) -> None:
        if self.pending is not None and number == self.pending.number:
            self._loading.discard(worker)
            self._abort(reason, retry)
        elif self.current is not None and number == self.current.number:
            # It cannot load what the others serve. A new process tries again.
            self._send(worker, {"do": "stop"})

    def still_loading(self) -> set[int]:
        """Workers that are still loading the pending version."""
        return set(self._loading)

    def _start(self, version: FetchedVersion) -> None:
        self.pending = version
        self._loading = set(self._workers)
        for worker in sorted(self._workers):
            self._prepare(worker, version)

    def _commit(self, version: FetchedVersion) -> None:
        self.current, self.pending = version, None
        for worker in sorted(self._workers):
            self._send(worker, {"do": "switch", "number": version.number})
        self._committed(version)
        self._start_next()

    def _abort(self, reason: str, retry: bool) -> None:
        version, self.pending = self.pending, None
        assert version is not None
        self._loading.clear()
        for worker in sorted(self._workers):
            self._send(worker, {"do": "drop", "number": version.number})
            if self.current is None:
                self._send(worker, {"do": "listen"})
        self._refused(version, reason, retry)
        self._start_next()

    def _start_next(self) -> None:
        version, self._next = self._next, None
        if version is not None:
            self.propose(version)

    def _prepare(self, worker: int, version: FetchedVersion) -> None:
        self._send(worker, {"do": "prepare", "number": version.number, "folders": version.folders})
