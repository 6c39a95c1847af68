"""One way from a request to its answer, under every door: a bounded queue and one scoring step at a time.

    submit ──▶ queue ──step──▶ lease a version, decode, score, encode ──▶ done
      └▶ "overloaded" when the queue is full

Steps run on the event loop itself, one in each turn of the loop: between two of them the loop takes in what has
arrived. So a full queue refuses at once, deadlines are looked at when work would begin, a process loads one core, and
no thread waits for another. Where scoring waits for other machines, steps run in threads instead, several at once.
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
from clickline.scoring.scorer import Answer
from clickline.serving.open_versions import Lease, ScorerLike, Versions
from clickline.serving.server_log import Log


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


Done = Callable[[Outcome | RequestRefused], None]
"""Is told, on the loop, what became of a request."""


class Job:
    """A request on its way."""

    __slots__ = ("arrived", "call", "deadline", "done", "encoded", "gone", "lease", "over", "work")

    def __init__(self, work: Work, deadline: float | None, done: Done) -> None:
        self.work = work
        self.deadline = deadline
        self.done = done
        self.arrived = monotonic()
        self.gone = False  # nobody waits for the answer any more
        self.over = False  # `done` was told
        self.lease: Lease | None = None
        self.call: CallLike | None = None
        self.encoded: EncodedRows | None = None  # where it may be scored together with others


class Dataplane:
    """Answers requests, a bounded number of which may wait."""

    def __init__(
        self,
        versions: Versions,
        log: Log,
        *,
        queue: int,
        batch_rows: int = 0,
        batch_wait: float = 0.0,
        threads: Executor | None = None,
        at_once: int = 1,
    ) -> None:
        """`batch_rows`: rows of small requests that are scored together, after `batch_wait` seconds at most; 0: none.
        `threads`: where steps run, `at_once` of them; None: on the loop."""
        self.versions = versions
        self._log = log
        self._limit = queue
        self._batch_rows = batch_rows
        self._batch_wait = batch_wait
        self._threads = threads
        self._at_once = at_once
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Job] = deque()
        self._rows_waiting = 0  # of requests that may be scored together
        self._running = 0
        self._armed = False  # a step comes in this turn of the loop
        self._timer: asyncio.TimerHandle | None = None  # a step comes when the batch has waited long enough

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(self, work: Work, deadline: float | None, done: Done) -> Job:
        """Take a request in, or raise RequestRefused. `deadline` is a time of `time.monotonic`: the loop's clock has
        whole milliseconds."""
        if len(self._queue) >= self._limit:
            raise RequestRefused(
                "overloaded",
                f"{self._limit} requests are waiting here already. Try again later, or add servers.",
            )
        job = Job(work, deadline, done)
        if self._batch_rows and not self._prepare(job):
            return job
        self._queue.append(job)
        self._arm()
        return job

    async def answer(self, work: Work, deadline: float | None) -> Outcome:
        """The same, for who can wait."""
        future: asyncio.Future[Outcome] = self._loop.create_future()

        def done(outcome: Outcome | RequestRefused) -> None:
            if future.done():
                return
            if isinstance(outcome, Outcome):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

        job = self.submit(work, deadline, done)
        try:
            return await future
        finally:
            if not job.over:
                self.give_up(job)

    def give_up(self, job: Job) -> bool:
        """Nobody waits for the answer any more. True: nothing was computed for it, and nothing will be told; it does
        not take a place in the queue, so calls that are given up keep nobody else out."""
        job.gone = True
        try:
            self._queue.remove(job)
        except ValueError:
            return False
        if job.encoded is not None:
            self._rows_waiting -= job.encoded.rows
        if job.lease is not None:
            self.versions.release(job.lease)
            job.lease = None
        return True

    def bug(self, error: Exception, protocol: str) -> RequestRefused:
        """What a client is told of an error that is ours; the log has the rest."""
        reference = secrets.token_hex(6)
        self._log.unexpected(error, reference, protocol)
        return RequestRefused(
            "internal", f"Internal error {reference}. The server's log says more under this id."
        )

    # ── steps ──────────────────────────────────────────────────────────────────────────────────

    def _arm(self) -> None:
        """See to it that the next step comes."""
        if self._armed or not self._queue or self._running >= self._at_once:
            return
        head = self._queue[0]
        if head.encoded is not None and self._rows_waiting < self._batch_rows:
            wait = head.arrived + self._batch_wait - monotonic()
            if wait > 0:
                if self._timer is None:
                    self._timer = self._loop.call_later(wait, self._step)
                return
        self._armed = True
        self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._armed = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queue or self._running >= self._at_once:
            return
        jobs = self._take()
        ready = [job for job in jobs if self._lease(job)]
        if not ready:
            self._arm()
        elif self._threads is None:
            self._finish(ready, _scored(ready))
            self._arm()
        else:
            self._running += 1
            self._loop.run_in_executor(self._threads, _scored, ready).add_done_callback(
                lambda scored: self._come_back(ready, scored)
            )
            self._arm()

    def _come_back(self, jobs: list[Job], scored: asyncio.Future[list[Outcome | Exception]]) -> None:
        self._running -= 1
        self._finish(jobs, scored.result())
        self._arm()

    def _take(self) -> list[Job]:
        """The next request, with others that may be scored together with it."""
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
        self._rows_waiting -= rows
        return jobs

    def _lease(self, job: Job) -> bool:
        """Give a job its version, unless nobody waits for the answer any more."""
        try:
            if job.gone:
                raise RequestRefused("late", "The client has gone.")
            if job.deadline is not None and monotonic() >= job.deadline:
                raise RequestRefused(
                    "late", "The deadline passed before the request was scored. Nothing was computed for it."
                )
            if job.lease is None:
                target = job.work.target()
                job.lease = self.versions.lease(target.model, target.version)
        except Exception as error:  # noqa: BLE001 - whoever asked gets to know
            self._finish([job], [error])
            return False
        return True

    def _prepare(self, job: Job) -> bool:
        """With batching, requests are decoded when they come: only then is known how many rows wait."""
        if not self._lease(job):
            return False
        assert job.lease is not None
        try:
            job.call = job.work.decode(job.lease.scorer)
            if job.call.context is None and job.call.rows.rows < self._batch_rows:
                job.encoded = job.lease.scorer.encode(job.call.rows)
                self._rows_waiting += job.encoded.rows
        except Exception as error:  # noqa: BLE001 - whoever asked gets to know
            self._finish([job], [error])
            return False
        return True

    def _finish(self, jobs: Sequence[Job], outcomes: Sequence[Outcome | Exception]) -> None:
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.lease is not None:
                self.versions.release(job.lease)
                job.lease = None
            if not isinstance(outcome, Outcome | RequestRefused):
                outcome = self.bug(outcome, job.work.protocol)
            job.over = True
            try:
                job.done(outcome)
            except Exception as error:  # noqa: BLE001 - the others of this step are told all the same
                self._log.unexpected(error, "an answer could not be sent", job.work.protocol)


def _scored(jobs: Sequence[Job]) -> list[Outcome | Exception]:
    """What becomes of jobs that have leased the same version; touches nothing but them."""
    if len(jobs) == 1 and jobs[0].encoded is None:
        return [_tried(lambda: _alone(jobs[0]))]
    lease = jobs[0].lease
    assert lease is not None
    together = [job.encoded for job in jobs if job.encoded is not None]
    try:
        answer = lease.scorer.score(concatenated(together))
    except Exception as error:  # noqa: BLE001 - all of them get to know
        return [error] * len(jobs)
    outcomes, start = [], 0
    for job, encoded in zip(jobs, together, strict=True):
        part = slice(start, start := start + encoded.rows)
        own = Answer(answer.version, answer.logit_B[part], answer.probability_B[part])
        outcomes.append(_tried(lambda job=job, own=own: _worded(job, own)))  # type: ignore[misc]
    return outcomes


def _tried(work: Callable[[], Outcome]) -> Outcome | Exception:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whoever asked gets to know
        return error


def _alone(job: Job) -> Outcome:
    assert job.lease is not None
    scorer = job.lease.scorer
    if job.call is None:
        job.call = job.work.decode(scorer)
    if job.call.context is None:
        return _worded(job, scorer.predict(job.call.rows))
    return _worded(job, scorer.rank(job.call.context, job.call.rows))


def _worded(job: Job, answer: Answer) -> Outcome:
    return Outcome(job.work.encode(job.call, answer), answer)


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
