"""The path from a request to its answer, shared by all protocols: a bounded queue and one scoring step at a time.

    submit ──▶ queue ──step──▶ lease a version, decode, score, encode ──▶ done
      └▶ "overloaded" when the queue is full

Steps run on the event loop itself, one per iteration: between two steps the loop reads newly arrived requests. So a
full queue refuses at once, deadlines are checked just before scoring, a process uses one core, and no thread waits for
another. Where scoring waits for lookup servers, steps run in threads instead, several at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from time import monotonic
from typing import Any, Protocol

import numpy as np

from clickline.errors import RequestRefused
from clickline.records import EncodedRows, RequestRows, SlotIds
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import OpenVersion, OpenVersions, ScorerLike
from clickline.serving.server_log import ServerLog


class TargetLike(Protocol):
    """The model and version that a request names."""

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


class PredictionRequest(Protocol):
    """A prediction request as its endpoint reads it: pure functions of its bytes."""

    @property
    def protocol(self) -> str: ...
    def target(self) -> TargetLike: ...
    def decode(self, scorer: ScorerLike) -> CallLike: ...
    def encode(self, call: Any, answer: Scores) -> Any: ...


class RequestResult:
    """A scored request: the encoded reply, and what the metrics count."""

    __slots__ = ("reply", "rows", "version")

    def __init__(self, reply: Any, answer: Scores) -> None:
        self.reply = reply
        self.version = answer.version
        self.rows = answer.probability_B.size


Done = Callable[[RequestResult | RequestRefused], None]
"""Called on the event loop with the result of a request."""


class QueuedRequest:
    """A request that is queued or being scored."""

    __slots__ = (
        "arrived",
        "call",
        "cancelled",
        "deadline",
        "done",
        "encoded",
        "finished",
        "lease",
        "request",
    )

    def __init__(self, request: PredictionRequest, deadline: float | None, done: Done) -> None:
        self.request = request
        self.deadline = deadline
        self.done = done
        self.arrived = monotonic()
        self.cancelled = False  # the client no longer waits for the answer
        self.finished = False  # `done` was called
        self.lease: OpenVersion | None = None
        self.call: CallLike | None = None
        self.encoded: EncodedRows | None = None  # if it may be batched with others


class Dataplane:
    """Answers requests from a bounded queue."""

    def __init__(
        self,
        versions: OpenVersions,
        log: ServerLog,
        *,
        queue: int,
        batch_rows: int = 0,
        batch_wait: float = 0.0,
        threads: Executor | None = None,
        max_concurrent: int = 1,
    ) -> None:
        """`batch_rows`: rows of small requests that are scored in one batch, after at most `batch_wait` seconds; 0
        disables batching. `threads`: executor for up to `max_concurrent` steps; None runs them on the event loop."""
        self.versions = versions
        self._log = log
        self._max_queued = queue
        self._batch_rows = batch_rows
        self._batch_wait = batch_wait
        self._threads = threads
        self._max_concurrent = max_concurrent
        self._loop = asyncio.get_running_loop()
        self._queue: deque[QueuedRequest] = deque()
        self._queued_rows = 0  # rows of queued requests that may be batched
        self._running = 0
        self._step_scheduled = False  # a step runs in this iteration of the loop
        self._timer: asyncio.TimerHandle | None = None  # a step runs when the batch has waited long enough

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    def submit(self, request: PredictionRequest, deadline: float | None, done: Done) -> QueuedRequest:
        """Queue a request, or raise RequestRefused. `deadline` is a time of `time.monotonic`: the loop's clock counts
        only whole milliseconds."""
        if len(self._queue) >= self._max_queued:
            raise RequestRefused(
                "overloaded",
                f"{self._max_queued} requests are waiting already. Try again later, or add servers.",
            )
        job = QueuedRequest(request, deadline, done)
        if self._batch_rows and not self._decode_early(job):
            return job
        self._queue.append(job)
        self._schedule_step()
        return job

    async def answer(self, request: PredictionRequest, deadline: float | None) -> RequestResult:
        """Queue a request and wait for its result."""
        future: asyncio.Future[RequestResult] = self._loop.create_future()

        def done(result: RequestResult | RequestRefused) -> None:
            if future.done():
                return
            if isinstance(result, RequestResult):
                future.set_result(result)
            else:
                future.set_exception(result)

        job = self.submit(request, deadline, done)
        try:
            return await future
        finally:
            if not job.finished:
                self.cancel(job)

    def cancel(self, job: QueuedRequest) -> bool:
        """Cancel a request whose client no longer waits. True: it was still queued, so nothing was computed and
        `done` will not be called. It leaves the queue at once, so cancelled requests do not keep others out."""
        job.cancelled = True
        try:
            self._queue.remove(job)
        except ValueError:
            return False
        if job.encoded is not None:
            self._queued_rows -= job.encoded.rows
        if job.lease is not None:
            self.versions.release(job.lease)
            job.lease = None
        return True

    def internal_error(self, error: Exception, protocol: str) -> RequestRefused:
        """Log a bug and return the error for the client, which names only the log entry."""
        reference = secrets.token_hex(6)
        self._log.unexpected(error, reference, protocol)
        return RequestRefused(
            "internal", f"Internal error {reference}. The server's log has details under this id."
        )

    # ── steps ──────────────────────────────────────────────────────────────────────────────────

    def _schedule_step(self) -> None:
        """Schedule the next step unless one is scheduled or enough are running."""
        if self._step_scheduled or not self._queue or self._running >= self._max_concurrent:
            return
        head = self._queue[0]
        if head.encoded is not None and self._queued_rows < self._batch_rows:
            wait = head.arrived + self._batch_wait - monotonic()
            if wait > 0:
                if self._timer is None:
                    self._timer = self._loop.call_later(wait, self._step)
                return
        self._step_scheduled = True
        self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._step_scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queue or self._running >= self._max_concurrent:
            return
        jobs = self._next_batch()
        ready = [job for job in jobs if self._lease(job)]
        if not ready:
            self._schedule_step()
        elif self._threads is None:
            self._finish(ready, _score_batch(ready))
            self._schedule_step()
        else:
            self._running += 1
            self._loop.run_in_executor(self._threads, _score_batch, ready).add_done_callback(
                lambda scored: self._on_scored(ready, scored)
            )
            self._schedule_step()

    def _on_scored(
        self, jobs: list[QueuedRequest], scored: asyncio.Future[list[RequestResult | Exception]]
    ) -> None:
        self._running -= 1
        self._finish(jobs, scored.result())
        self._schedule_step()

    def _next_batch(self) -> list[QueuedRequest]:
        """Take the next request from the queue, with others that can be batched with it."""
        head = self._queue.popleft()
        if head.encoded is None:
            return [head]
        jobs, rows = [head], head.encoded.rows
        while self._queue and rows < self._batch_rows:
            other = self._queue[0]
            if other.encoded is None or other.lease is not head.lease:
                break
            rows += other.encoded.rows
            jobs.append(self._queue.popleft())
        self._queued_rows -= rows
        return jobs

    def _lease(self, job: QueuedRequest) -> bool:
        """Lease the version of a job, unless its client no longer waits."""
        try:
            if job.cancelled:
                raise RequestRefused("late", "The client disconnected.")
            if job.deadline is not None and monotonic() >= job.deadline:
                raise RequestRefused(
                    "late", "The deadline passed before the request was scored. Nothing was computed for it."
                )
            if job.lease is None:
                target = job.request.target()
                job.lease = self.versions.lease(target.model, target.version)
        except Exception as error:  # noqa: BLE001 - reported to the client
            self._finish([job], [error])
            return False
        return True

    def _decode_early(self, job: QueuedRequest) -> bool:
        """With batching, requests are decoded on arrival: only then is the number of queued rows known."""
        if not self._lease(job):
            return False
        assert job.lease is not None
        try:
            job.call = job.request.decode(job.lease.scorer)
            if job.call.context is None and job.call.rows.rows < self._batch_rows:
                job.encoded = job.lease.scorer.encode(job.call.rows)
                self._queued_rows += job.encoded.rows
        except Exception as error:  # noqa: BLE001 - reported to the client
            self._finish([job], [error])
            return False
        return True

    def _finish(self, jobs: Sequence[QueuedRequest], results: Sequence[RequestResult | Exception]) -> None:
        for job, result in zip(jobs, results, strict=True):
            if job.lease is not None:
                self.versions.release(job.lease)
                job.lease = None
            if not isinstance(result, RequestResult | RequestRefused):
                result = self.internal_error(result, job.request.protocol)
            job.finished = True
            try:
                job.done(result)
            except Exception as error:  # noqa: BLE001 - the other requests of this step still get their results
                self._log.unexpected(error, "sending an answer", job.request.protocol)


def _score_batch(jobs: Sequence[QueuedRequest]) -> list[RequestResult | Exception]:
    """Score jobs that have leased the same version. Touches nothing but the jobs."""
    if len(jobs) == 1 and jobs[0].encoded is None:
        return [_catch(lambda: _score_one(jobs[0]))]
    lease = jobs[0].lease
    assert lease is not None
    encoded_rows = [job.encoded for job in jobs if job.encoded is not None]
    try:
        answer = lease.scorer.score(concatenate_rows(encoded_rows))
    except Exception as error:  # noqa: BLE001 - reported to every client of the batch
        return [error] * len(jobs)
    results, start = [], 0
    for job, encoded in zip(jobs, encoded_rows, strict=True):
        part = slice(start, start := start + encoded.rows)
        rows = Scores(answer.version, answer.logit_B[part], answer.probability_B[part])
        results.append(_catch(lambda job=job, rows=rows: _encode(job, rows)))  # type: ignore[misc]
    return results


def _catch(work: Callable[[], RequestResult]) -> RequestResult | Exception:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - reported to the client
        return error


def _score_one(job: QueuedRequest) -> RequestResult:
    assert job.lease is not None
    scorer = job.lease.scorer
    if job.call is None:
        job.call = job.request.decode(scorer)
    if job.call.context is None:
        return _encode(job, scorer.predict(job.call.rows))
    return _encode(job, scorer.rank(job.call.context, job.call.rows))


def _encode(job: QueuedRequest, answer: Scores) -> RequestResult:
    return RequestResult(job.request.encode(job.call, answer), answer)


def concatenate_rows(parts: Sequence[EncodedRows]) -> EncodedRows:
    """Concatenate the rows of several requests."""
    if len(parts) == 1:
        return parts[0]
    slots = tuple(_concatenate_slot([part.slots[s] for part in parts]) for s in range(len(parts[0].slots)))
    dense_DB = np.concatenate([part.dense_DB for part in parts], axis=1)
    return EncodedRows(sum(part.rows for part in parts), dense_DB, slots)


def _concatenate_slot(parts: Sequence[SlotIds]) -> SlotIds:
    ids_N = np.concatenate([part.ids_N for part in parts])
    if all(part.offsets_B1 is None for part in parts):
        return SlotIds(ids_N)
    # A multi-value slot has no offsets in a request with exactly one value per row.
    counts_B = np.concatenate(
        [
            np.ones(part.ids_N.size, dtype=np.int64) if part.offsets_B1 is None else np.diff(part.offsets_B1)
            for part in parts
        ]
    )
    offsets_B1 = np.zeros(counts_B.size + 1, dtype=np.int64)
    np.cumsum(counts_B, out=offsets_B1[1:])
    return SlotIds(ids_N, offsets_B1)
