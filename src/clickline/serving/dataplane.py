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

import numpy as np

from clickline.errors import RequestRefused
from clickline.records import EncodedRows, SlotIds
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols.request import Done, Request, Response
from clickline.serving.server_log import ServerLog


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
        self._queue: deque[Request] = deque()
        self._queued_rows = 0  # rows of queued requests that may be batched
        self._running = 0
        self._step_scheduled = False  # a step runs in this iteration of the loop
        self._timer: asyncio.TimerHandle | None = None  # a step runs when the batch has waited long enough

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    def submit(self, request: Request, deadline: float | None, done: Done) -> None:
        """Queue a request, or raise RequestRefused. `deadline` is a time of `time.monotonic`: the loop's clock counts
        only whole milliseconds."""
        if len(self._queue) >= self._max_queued:
            raise RequestRefused(
                "overloaded",
                f"{self._max_queued} requests are waiting already. Try again later, or add servers.",
            )
        request.deadline, request.done = deadline, done
        if self._batch_rows and not self._decode_early(request):
            return
        self._queue.append(request)
        self._schedule_step()

    async def answer(self, request: Request, deadline: float | None) -> Response:
        """Queue a request and wait for its result."""
        future: asyncio.Future[Response] = self._loop.create_future()

        def done(result: Response | RequestRefused) -> None:
            if future.done():
                return
            if isinstance(result, Response):
                future.set_result(result)
            else:
                future.set_exception(result)

        self.submit(request, deadline, done)
        try:
            return await future
        finally:
            if not request.finished:
                self.cancel(request)

    def cancel(self, request: Request) -> bool:
        """Cancel a request whose client no longer waits. True: it was still queued, so nothing was computed and
        `done` will not be called. It leaves the queue at once, so cancelled requests do not keep others out."""
        request.cancelled = True
        try:
            self._queue.remove(request)
        except ValueError:
            return False
        if request.encoded is not None:
            self._queued_rows -= request.encoded.rows
        if request.lease is not None:
            self.versions.release(request.lease)
            request.lease = None
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
        requests = self._next_batch()
        ready = [request for request in requests if self._lease(request)]
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

    def _on_scored(self, requests: list[Request], scored: asyncio.Future[list[Response | Exception]]) -> None:
        self._running -= 1
        self._finish(requests, scored.result())
        self._schedule_step()

    def _next_batch(self) -> list[Request]:
        """Take the next request from the queue, with others that can be batched with it."""
        head = self._queue.popleft()
        if head.encoded is None:
            return [head]
        requests, rows = [head], head.encoded.rows
        while self._queue and rows < self._batch_rows:
            other = self._queue[0]
            if other.encoded is None or other.lease is not head.lease:
                break
            rows += other.encoded.rows
            requests.append(self._queue.popleft())
        self._queued_rows -= rows
        return requests

    def _lease(self, request: Request) -> bool:
        """Lease the version of a request, unless its client no longer waits."""
        try:
            if request.cancelled:
                raise RequestRefused("late", "The client disconnected.")
            if request.deadline is not None and monotonic() >= request.deadline:
                raise RequestRefused(
                    "late", "The deadline passed before the request was scored. Nothing was computed for it."
                )
            if request.lease is None:
                request.read_target()
                request.lease = self.versions.lease(request.model, request.version)
        except Exception as error:  # noqa: BLE001 - reported to the client
            self._finish([request], [error])
            return False
        return True

    def _decode_early(self, request: Request) -> bool:
        """With batching, requests are decoded on arrival: only then is the number of queued rows known."""
        if not self._lease(request):
            return False
        assert request.lease is not None
        try:
            request.call = request.decode(request.lease.scorer)
            if request.call.context is None and request.call.rows.rows < self._batch_rows:
                request.encoded = request.lease.scorer.encode(request.call.rows)
                self._queued_rows += request.encoded.rows
        except Exception as error:  # noqa: BLE001 - reported to the client
            self._finish([request], [error])
            return False
        return True

    def _finish(self, requests: Sequence[Request], results: Sequence[Response | Exception]) -> None:
        for request, result in zip(requests, results, strict=True):
            if request.lease is not None:
                self.versions.release(request.lease)
                request.lease = None
            if not isinstance(result, Response | RequestRefused):
                result = self.internal_error(result, request.protocol)
            request.finished = True
            done = request.done
            del request.done  # it refers to the request, whose rows would wait for the garbage collector
            try:
                done(result)
            except Exception as error:  # noqa: BLE001 - the other requests of this step still get their results
                self._log.unexpected(error, "sending an answer", request.protocol)


def _score_batch(requests: Sequence[Request]) -> list[Response | Exception]:
    """Score requests that have leased the same version. Touches nothing but the requests."""
    if len(requests) == 1 and requests[0].encoded is None:
        return [_catch(lambda: _score_one(requests[0]))]
    lease = requests[0].lease
    assert lease is not None
    encoded_rows = [request.encoded for request in requests if request.encoded is not None]
    try:
        answer = lease.scorer.score(concatenate_rows(encoded_rows))
    except Exception as error:  # noqa: BLE001 - reported to every client of the batch
        return [error] * len(requests)
    results, start = [], 0
    for request, encoded in zip(requests, encoded_rows, strict=True):
        part = slice(start, start := start + encoded.rows)
        rows = Scores(answer.version, answer.logit_B[part], answer.probability_B[part])
        results.append(_catch(lambda request=request, rows=rows: _encode(request, rows)))  # type: ignore[misc]
    return results


def _catch(work: Callable[[], Response]) -> Response | Exception:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - reported to the client
        return error


def _score_one(request: Request) -> Response:
    assert request.lease is not None
    scorer = request.lease.scorer
    if request.call is None:
        request.call = request.decode(scorer)
    if request.call.context is None:
        return _encode(request, scorer.predict(request.call.rows))
    return _encode(request, scorer.rank(request.call.context, request.call.rows))


def _encode(request: Request, answer: Scores) -> Response:
    response = request.encode(answer)
    response.version, response.rows = answer.version, answer.probability_B.size
    return response


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
