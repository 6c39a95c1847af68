"""The versions that a process has open: one is current, others are on their way in or out.

A request leases one version from decoding to encoding. A version that is no longer current is closed when its last
lease ends.
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
from clickline.scoring.scorer import Answer


class ScorerLike(Protocol):
    """What serving needs of a `Scorer`."""

    number: int
    features: FeatureSpec
    columns: tuple[str, ...]
    misses_S: NDArray[np.int64]
    lookups_S: NDArray[np.int64]

    def predict(self, rows: RequestRows) -> Answer: ...
    def rank(self, context: RequestRows, candidates: RequestRows) -> Answer: ...
    def encode(self, rows: RequestRows) -> EncodedRows: ...
    def score(self, encoded: EncodedRows) -> Answer: ...
    def close(self) -> None: ...


class Lease:
    """An open version and how many requests use it now."""

    __slots__ = ("ended", "retired", "scorer", "served", "users")

    def __init__(self, scorer: ScorerLike) -> None:
        self.scorer = scorer
        self.users = 0
        self.served = False  # has been current: only then may a request ask for it by number
        self.retired = False
        self.ended = False


class Versions:
    """All open versions of a process, by number. Any thread may ask; one brings versions in and out."""

    def __init__(self, names: tuple[str, ...], close: Callable[[ScorerLike], None]) -> None:
        """`names`: of the model, as clients may call it. `close` is given each version that nobody uses any more."""
        self.names = names
        self.current: Lease | None = None
        self._open: dict[int, Lease] = {}
        self._close = close
        self._lock = threading.Lock()

    def add(self, scorer: ScorerLike) -> None:
        """A version that could be switched to."""
        with self._lock:
            known = self._open.get(scorer.number)
            self._open[scorer.number] = Lease(scorer)
        if known is not None and known is not self.current:
            self._retire(known)

    def switch(self, number: int) -> Lease:
        """From now on requests get this one; the one before goes when its last request is answered."""
        with self._lock:
            before, now = self.current, self._open[number]
            self.current = now
            now.served = True
        if before is not None and before is not now:
            self._retire(before)
        return now

    def drop(self, number: int) -> None:
        """Forget a version that was added and is not wanted."""
        lease = self._open.get(number)
        if lease is not None and lease is not self.current:
            self._retire(lease)

    def open(self) -> list[Lease]:
        """All that are here, by number."""
        with self._lock:
            return [lease for _, lease in sorted(self._open.items())]

    def check_name(self, name: str) -> None:
        """Refuse a model that is not here; no name: whatever model there is."""
        if name and name not in self.names:
            known = ", ".join(f'"{one}"' for one in self.names)
            raise RequestRefused("not_found", f'There is no model "{name[:100]}". There is: {known}.')

    def find(self, name: str, number: int | None) -> Lease:
        """The version that a request asks for."""
        self.check_name(name)
        current = self.current
        if current is None:
            raise RequestRefused("unavailable", "No version of the model is loaded yet. Try again later.")
        found = current if number is None else self._open.get(number)
        if found is None or not found.served:
            raise RequestRefused(
                "not_found",
                f"Version {number} is not loaded. Version {current.scorer.number} is; leave the version out to get "
                "the current one.",
            )
        return found

    def lease(self, name: str, number: int | None) -> Lease:
        """The same, held until it is released."""
        with self._lock:
            lease = self.find(name, number)
            lease.users += 1
        return lease

    def release(self, lease: Lease) -> None:
        with self._lock:
            lease.users -= 1
            last = lease.retired and not lease.users
        if last:
            self._end(lease)

    def _retire(self, lease: Lease) -> None:
        with self._lock:
            lease.retired = True
            unused = not lease.users
        if unused:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        with self._lock:
            if lease.ended or lease.users:
                return
            lease.ended = True
            if self._open.get(lease.scorer.number) is lease:
                del self._open[lease.scorer.number]
        self._close(lease.scorer)
