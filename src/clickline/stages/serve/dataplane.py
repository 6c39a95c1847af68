"""One way from a request to its answer, under every door: admitted or refused at once, then scored in its turn.

    admit ──▶ wait for the turn ──▶ lease a version, decode, score, encode ──▶ leave
      └▶ "overloaded" when too many are inside

A request brings its own thread and keeps it: gRPC's, or one of those that HTTP hands requests to. Only one of them
computes at a time in each process, so a process loads one core, and what an accepted request waits for is bounded by
how many are let in. (An event loop that also scores was measured too: it needs no less processor time, and it cannot
refuse what it has not read yet.) Where scoring waits for other machines, several have their turn at once.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

import numpy as np

from clickline.errors import RequestRefused
from clickline.records import EncodedRows, RequestRows, SlotIds
from clickline.scoring.scorer import Answer
from clickline.stages.serve.logs import Log
from clickline.stages.serve.versions import Lease, ScorerLike, Versions

__all__ = ["CallLike", "Dataplane", "Outcome", "Work", "concatenated"]


class TargetLike(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def version(self) -> int | None: ...


class CallLike(Protocol):
    """A decoded request."""

    @property
    def rows(self) -> RequestRows: ...
    @property
    def context(self) -> RequestRows | None: ...


class Work(Protocol):
    """A request as its door reads it: pure functions of its bytes."""

    @property
    def protocol(self) -> str: ...
    def target(self) -> TargetLike: ...
    def decode(self, scorer: ScorerLike) -> CallLike: ...
    def encode(self, call: Any, answer: Answer) -> Any: ...


class Outcome:
    """What became of a request: what goes back, and what is counted."""

    __slots__ = ("reply", "rows", "version")

    def __init__(self, reply: Any, answer: Answer) -> None:
        self.reply = reply
        self.version = answer.version
        self.rows = answer.probability_B.size


class Dataplane:
    """Answers requests, a bounded number of which may be inside. Any thread may call it."""

    def __init__(
        self,
        versions: Versions,
        log: Log,
        *,
        queue: int,
        at_once: int = 1,
        batch_rows: int = 0,
        batch_wait: float = 0.0,
    ) -> None:
        """`queue` requests may wait while `at_once` are scored. `batch_rows`: rows of small requests that are scored
        together, after `batch_wait` seconds at most; 0: each request is scored alone."""
        self.versions = versions
        self.capacity = queue + max(at_once, batch_rows)
        self._log = log
        self._queue = queue
        self._at_once = at_once
        self._turn = threading.Lock() if at_once == 1 else threading.Semaphore(at_once)
        self._inside = 0
        self._counting = threading.Lock()
        self._batch_rows = batch_rows
        self._batch_wait = batch_wait
        self._batching = threading.Lock()
        self._batch: _Batch | None = None  # takes more requests

    @property
    def waiting(self) -> int:
        return max(0, self._inside - self._at_once)

    def admit(self) -> None:
        """Let a request in, or refuse it. Whoever was let in must be answered: `answer` lets it out again."""
        with self._counting:
            if self._inside < self.capacity:
                self._inside += 1
                return
        raise RequestRefused(
            "overloaded", f"{self._queue} requests are waiting here already. Try again later, or add servers."
        )

    def answer(self, work: Work, deadline: float | None, gone: Callable[[], bool] | None = None) -> Outcome:
        """The answer to a request that was admitted, or RequestRefused. `deadline` is a time of `time.monotonic`;
        `gone` says whether nobody waits for the answer any more."""
        try:
            if self._batch_rows:
                return self._perhaps_together(work, deadline)
            with _Turn(self._turn, deadline):
                if gone is not None and gone():
                    raise RequestRefused("late", "The client has gone.")
                with _Leased(self.versions, work) as lease:
                    return _alone(work, work.decode(lease.scorer), lease.scorer)
        except RequestRefused:
            raise
        except Exception as error:
            reference = secrets.token_hex(6)
            self._log.unexpected(error, reference, work.protocol)
            raise RequestRefused(
                "internal", f"Internal error {reference}. The server's log says more under this id."
            ) from error
        finally:
            with self._counting:
                self._inside -= 1

    # ── several requests in one scoring ────────────────────────────────────────────────────────

    def _perhaps_together(self, work: Work, deadline: float | None) -> Outcome:
        """Requests are decoded when they come: only then is known how many rows there are."""
        _check_deadline(deadline)
        with _Leased(self.versions, work) as lease:
            call = work.decode(lease.scorer)
            if call.context is not None or call.rows.rows >= self._batch_rows:
                with _Turn(self._turn, deadline):
                    return _alone(work, call, lease.scorer)
            encoded = lease.scorer.encode(call.rows)
            batch, first, start = self._join(lease, encoded)
            if first:
                self._lead(batch, lease.scorer)
            elif not batch.done.wait(None if deadline is None else max(0.0, deadline - monotonic())):
                raise _late()
            answer = batch.rows_from(start, encoded.rows)
            return Outcome(work.encode(call, answer), answer)

    def _join(self, lease: Lease, encoded: EncodedRows) -> tuple[_Batch, bool, int]:
        """The batch a request is part of, whether it is the first in it, and where its rows are."""
        with self._batching:
            batch = self._batch
            first = batch is None or batch.lease is not lease
            if batch is None or first:
                batch = self._batch = _Batch(lease)
            start = batch.rows
            batch.parts.append(encoded)
            batch.rows += encoded.rows
            if batch.rows >= self._batch_rows:
                self._batch = None
                batch.full.set()
            return batch, first, start

    def _lead(self, batch: _Batch, scorer: ScorerLike) -> None:
        """The first request of a batch scores for all."""
        batch.full.wait(self._batch_wait)
        with self._turn:
            with self._batching:
                if self._batch is batch:
                    self._batch = None
            try:
                batch.answer = scorer.score(concatenated(batch.parts))
            except Exception as error:  # noqa: BLE001 - all of them get to know
                batch.error = error
        batch.done.set()


class _Batch:
    """Requests that are scored together."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.parts: list[EncodedRows] = []
        self.rows = 0
        self.full = threading.Event()
        self.done = threading.Event()
        self.answer: Answer | None = None
        self.error: Exception | None = None

    def rows_from(self, start: int, rows: int) -> Answer:
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        part = slice(start, start + rows)
        return Answer(self.answer.version, self.answer.logit_B[part], self.answer.probability_B[part])


class _Turn:
    """Waits for the turn to compute, not beyond the deadline."""

    __slots__ = ("_deadline", "_turn")

    def __init__(self, turn: threading.Lock | threading.Semaphore, deadline: float | None) -> None:
        self._turn = turn
        self._deadline = deadline

    def __enter__(self) -> None:
        if self._deadline is None:
            self._turn.acquire()
        elif not self._turn.acquire(
            timeout=min(max(0.0, self._deadline - monotonic()), threading.TIMEOUT_MAX)
        ):
            raise _late()
        elif monotonic() >= self._deadline:
            self._turn.release()
            raise _late()

    def __exit__(self, *_: object) -> None:
        self._turn.release()


class _Leased:
    """Holds the version that a request is for."""

    __slots__ = ("_lease", "_versions")

    def __init__(self, versions: Versions, work: Work) -> None:
        target = work.target()
        self._versions = versions
        self._lease = versions.lease(target.model, target.version)

    def __enter__(self) -> Lease:
        return self._lease

    def __exit__(self, *_: object) -> None:
        self._versions.release(self._lease)


def _alone(work: Work, call: CallLike, scorer: ScorerLike) -> Outcome:
    if call.context is None:
        answer = scorer.predict(call.rows)
    else:
        answer = scorer.rank(call.context, call.rows)
    return Outcome(work.encode(call, answer), answer)


def _check_deadline(deadline: float | None) -> None:
    if deadline is not None and monotonic() >= deadline:
        raise _late()


def _late() -> RequestRefused:
    return RequestRefused(
        "late", "The deadline passed before the request was scored. Nothing was computed for it."
    )


def concatenated(parts: Sequence[EncodedRows]) -> EncodedRows:
    """Rows of several requests, one after the other."""
    if len(parts) == 1:
        return parts[0]
    slots = tuple(_joined([part.slots[s] for part in parts]) for s in range(len(parts[0].slots)))
    dense_DB = np.concatenate([part.dense_DB for part in parts], axis=1)
    return EncodedRows(sum(part.rows for part in parts), dense_DB, slots)


def _joined(parts: Sequence[SlotIds]) -> SlotIds:
    ids_N = np.concatenate([part.ids_N for part in parts])
    if all(part.offsets_B1 is None for part in parts):
        return SlotIds(ids_N)
    # A slot of several values a row may come without offsets from a request that has one in each row.
    counts_B = np.concatenate(
        [
            np.ones(part.ids_N.size, dtype=np.int64) if part.offsets_B1 is None else np.diff(part.offsets_B1)
            for part in parts
        ]
    )
    offsets_B1 = np.zeros(counts_B.size + 1, dtype=np.int64)
    np.cumsum(counts_B, out=offsets_B1[1:])
    return SlotIds(ids_N, offsets_B1)
