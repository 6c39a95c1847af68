"""The versions that a process has open: the current one, and others that are being loaded or retired.

A request leases one version from decoding to encoding. A version that is no longer current is closed when its last
lease is released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clickline.errors import RequestRefused
from clickline.features import FeatureSpec
from clickline.records import EncodedRows, RequestRows
from clickline.scoring.scorer import Scores


class ScorerLike(Protocol):
    """The part of `Scorer` that serving uses."""

    number: int
    features: FeatureSpec
    columns: tuple[str, ...]
    misses_S: NDArray[np.int64]
    lookups_S: NDArray[np.int64]

    def predict(self, rows: RequestRows) -> Scores: ...
    def rank(self, context: RequestRows, candidates: RequestRows) -> Scores: ...
    def encode(self, rows: RequestRows) -> EncodedRows: ...
    def score(self, encoded: EncodedRows) -> Scores: ...
    def close(self) -> None: ...


class OpenVersion:
    """An open version and the number of requests that lease it."""

    __slots__ = ("closed", "retired", "scorer", "users", "was_current")

    def __init__(self, scorer: ScorerLike) -> None:
        self.scorer = scorer
        self.users = 0
        self.was_current = False  # only then may a request name it by number
        self.retired = False
        self.closed = False


class OpenVersions:
    """All open versions of a process, by number. Any thread may lease; one thread adds and drops versions."""

    def __init__(self, names: tuple[str, ...], close: Callable[[ScorerLike], None]) -> None:
        """`names`: the model's name and aliases. `close` is called for each version that is no longer used."""
        self.names = names
        self.current: OpenVersion | None = None
        self._open: dict[int, OpenVersion] = {}
        self._close = close
        self._lock = threading.Lock()

    def add(self, scorer: ScorerLike) -> None:
        """Add a version that can be switched to."""
        with self._lock:
            known = self._open.get(scorer.number)
            self._open[scorer.number] = OpenVersion(scorer)
        if known is not None and known is not self.current:
            self._retire(known)

    def switch(self, number: int) -> OpenVersion:
        """Make a version current. The previous one is closed when its last request is answered."""
        with self._lock:
            before, now = self.current, self._open[number]
            self.current = now
            now.was_current = True
        if before is not None and before is not now:
            self._retire(before)
        return now

    def drop(self, number: int) -> None:
        """Close a version that was added and is not wanted."""
        lease = self._open.get(number)
        if lease is not None and lease is not self.current:
            self._retire(lease)

    def open(self) -> list[OpenVersion]:
        """All open versions, in the order of their numbers."""
        with self._lock:
            return [lease for _, lease in sorted(self._open.items())]

    def check_name(self, name: str) -> None:
        """Refuse an unknown model name; an empty name is allowed."""
        if name and name not in self.names:
            known = ", ".join(f'"{model}"' for model in self.names)
            raise RequestRefused("not_found", f'There is no model "{name[:100]}". Available: {known}.')

    def find(self, name: str, number: int | None) -> OpenVersion:
        """Return the version that a request names."""
        self.check_name(name)
        current = self.current
        if current is None:
            raise RequestRefused("unavailable", "No version of the model is loaded yet. Try again later.")
        version = current if number is None else self._open.get(number)
        if version is None or not version.was_current:
            raise RequestRefused(
                "not_found",
                f"Version {number} is not loaded. Version {current.scorer.number} is; omit the version to use the "
                "current one.",
            )
        return version

    def served(self) -> list[int]:
        """The numbers that a request may name."""
        return [version.scorer.number for version in self.open() if version.was_current]

    def states(self, name: str, number: int | None) -> dict[int, str]:
        """The state of the version that a request names, or of all open ones, newest first."""
        found = self.find(name, number)
        return {
            version.scorer.number: "UNLOADING"
            if version.retired
            else "AVAILABLE"
            if version.was_current
            else "LOADING"
            for version in reversed(self.open())
            if number is None or version is found
        } or {found.scorer.number: "END"}

    def lease(self, name: str, number: int | None) -> OpenVersion:
        """Find a version and lease it until `release`."""
        with self._lock:
            lease = self.find(name, number)
            lease.users += 1
        return lease

    def release(self, lease: OpenVersion) -> None:
        with self._lock:
            lease.users -= 1
            last = lease.retired and not lease.users
        if last:
            self._end(lease)

    def _retire(self, lease: OpenVersion) -> None:
        with self._lock:
            lease.retired = True
            unused = not lease.users
        if unused:
            self._end(lease)

    def _end(self, lease: OpenVersion) -> None:
        with self._lock:
            if lease.closed or lease.users:
                return
            lease.closed = True
            if self._open.get(lease.scorer.number) is lease:
                del self._open[lease.scorer.number]
        self._close(lease.scorer)
