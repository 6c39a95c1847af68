"""Queue, deadlines and batching of the dataplane."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from standin import StandIn

from clickline.config.sections import ServeSection
from clickline.errors import RequestRefused
from clickline.records import ABSENT, EncodedRows, NumberColumn, RequestRows, SlotIds
from clickline.scoring.scorer import Scores
from clickline.serving.auth import BearerAuth
from clickline.serving.dataplane import Dataplane, concatenate_rows
from clickline.serving.grpc_server import GrpcServer
from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols import request
from clickline.serving.protocols.request import Call, Limits, Response
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import RequestMetrics


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins write a file to the working directory."""
    monkeypatch.chdir(tmp_path)


class Request(request.Request):
    """A request as an endpoint would decode it: rows with the given I1."""

    protocol = "test"

    def __init__(self, *milliseconds: float, model: str = "ctr", version: int | None = None) -> None:
        super().__init__(b"", Limits(), model, version)
        columns, rows = 3, len(milliseconds)
        several = {"I1": NumberColumn(np.array(milliseconds))}
        spans = np.zeros((columns, rows), dtype=np.int64)
        numbers = np.full((columns, rows), np.nan)
        kinds = np.full(columns, ABSENT, dtype=np.uint8)
        self._rows = RequestRows(
            rows, np.zeros(0, dtype=np.uint8), kinds, spans, spans, numbers, spans, several
        )

    def decode(self, model: object) -> Call:
        return Call(self._rows)

    def encode(self, answer: Scores) -> Response:
        return Response(json.dumps([float(score) * 1024 for score in answer.probability_B]).encode())


class CountingScorer(StandIn):
    """Records the number of rows of each scoring step."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scored: list[int] = []

    def score(self, encoded: EncodedRows) -> Scores:
        self.scored.append(encoded.rows)
        return super().score(encoded)


class Plane:
    """A dataplane whose current version is 1; `closed` and `lines` record closed versions and log lines."""

    def __init__(self, **options: Any) -> None:
        self.closed: list[int] = []
        self.lines: list[dict[str, Any]] = []
        self.versions = OpenVersions(("ctr", "alias"), lambda scorer: self.closed.append(scorer.number))
        log = ServerLog("test", lambda line: self.lines.append(json.loads(line)))
        self.plane = Dataplane(self.versions, log, **{"queue": 64, **options})
        self.scorer = self.switch(1)

    def switch(self, number: int) -> CountingScorer:
        scorer = CountingScorer(number)
        self.versions.add(scorer)
        self.versions.switch(number)
        return scorer

    def ask(self, request: Request, seconds: float | None = None) -> asyncio.Task[Response]:
        deadline = None if seconds is None else time.monotonic() + seconds
        return asyncio.create_task(self.plane.answer(request, deadline))


def scores(response: Response) -> list[float]:
    found: list[float] = json.loads(response.body)
    assert len(found) == response.rows
    return found


async def refused(task: asyncio.Task[Response]) -> tuple[str, str]:
    with pytest.raises(RequestRefused) as caught:
        await task
    return caught.value.kind, str(caught.value)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_full_queue_refuses_at_once_and_answers_accepted_requests() -> None:
    async def test() -> None:
        plane = Plane(queue=3)
        tasks = [plane.ask(Request(5)) for _ in range(10)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = [one.kind if isinstance(one, RequestRefused) else scores(one) for one in done]  # type: ignore[union-attr]
        assert kinds == [[1.0]] * 3 + ["overloaded"] * 7
        assert "3 requests are waiting" in str(done[-1])
        assert scores(await plane.ask(Request(0))) == [1.0]

    run(test())


def test_request_past_its_deadline_is_not_scored() -> None:
    async def test() -> None:
        plane = Plane()
        slow, late, in_time = plane.ask(Request(50)), plane.ask(Request(0), 0.01), plane.ask(Request(0), 30)
        assert scores(await slow) == [1.0]
        kind, message = await refused(late)
        assert kind == "late" and "Nothing was computed" in message
        assert scores(await in_time) == [1.0]
        assert plane.scorer.scored == [1, 1]

    run(test())


def test_request_of_disconnected_client_is_not_scored() -> None:
    async def test() -> None:
        plane = Plane()
        first, cancelled = plane.ask(Request(20)), plane.ask(Request(0))
        await asyncio.sleep(0)
        cancelled.cancel()
        await first
        assert scores(await plane.ask(Request(0))) == [1.0]
        assert plane.scorer.scored == [1, 1]
        assert plane.versions.open()[0].users == 0

    run(test())


@pytest.mark.parametrize("batching", [{}, {"batch_rows": 8, "batch_wait": 20.0}])
def test_cancelled_requests_leave_the_queue(batching: dict[str, Any]) -> None:
    async def test() -> None:
        plane = Plane(queue=3, **batching)
        results: list[object] = []
        jobs = [Request(0) for _ in range(3)]
        for job in jobs:
            plane.plane.submit(job, None, results.append)
        assert [plane.plane.cancel(job) for job in jobs] == [True] * 3
        assert plane.plane.queue_length == 0 and plane.versions.open()[0].users == 0
        rows = Request(*[0.0] * 7)  # one less than a batch: the cancelled rows must not count
        full = [plane.ask(rows), plane.ask(Request(0))]
        assert [len(scores(await task)) for task in full] == [7, 1]
        assert results == []
        assert not plane.plane.cancel(jobs[0])

    run(test())


def test_answer_that_cannot_be_sent_does_not_block_others() -> None:
    async def test() -> None:
        plane = Plane(batch_rows=8, batch_wait=0.02)

        def fails(result: object) -> None:
            raise RuntimeError("the connection is in a strange state")

        plane.plane.submit(Request(0), None, fails)
        assert scores(await plane.ask(Request(0, 0))) == [1.0, 1.0]
        assert plane.lines[0]["message"] == "the connection is in a strange state"
        assert plane.versions.open()[0].users == 0

    run(test())


def test_internal_error_gets_an_id_and_its_traceback_stays_in_the_log() -> None:
    async def test() -> None:
        plane = Plane()
        kind, message = await refused(plane.ask(Request(666)))
        assert kind == "internal"
        assert "ZeroDivision" not in message and "bug" not in message
        await refused(plane.ask(Request(666)))
        first, second = plane.lines
        assert first["id"] in message
        assert "a bug in the scorer" in first["traceback"]
        assert "traceback" not in second  # once a minute
        assert scores(await plane.ask(Request(0))) == [1.0]

    run(test())


def test_unknown_names_and_versions_are_refused_with_the_available_ones() -> None:
    async def test() -> None:
        plane = Plane()
        assert scores(await plane.ask(Request(0, model="alias", version=1))) == [1.0]
        assert (await refused(plane.ask(Request(0, model="other")))) == (
            "not_found",
            'There is no model "other". Available: "ctr", "alias".',
        )
        kind, message = await refused(plane.ask(Request(0, version=7)))
        assert kind == "not_found" and message.startswith("Version 7 is not loaded. Version 1 is")
        plane.versions.add(CountingScorer(7))  # loaded, but not current yet
        assert (await refused(plane.ask(Request(0, version=7))))[0] == "not_found"

    run(test())


def test_without_a_version_requests_are_refused_as_unavailable() -> None:
    async def test() -> None:
        versions = OpenVersions(("ctr",), lambda scorer: None)
        plane = Dataplane(versions, ServerLog("test", lambda line: None), queue=4)
        with pytest.raises(RequestRefused, match="No version") as caught:
            await plane.answer(Request(0), None)
        assert caught.value.kind == "unavailable"

    run(test())


def test_old_version_finishes_its_requests_and_is_then_closed() -> None:
    async def test() -> None:
        with ThreadPoolExecutor(4) as threads:
            plane = Plane(threads=threads, max_concurrent=4)
            running = [plane.ask(Request(80, 0, 0)) for _ in range(2)]
            while not plane.scorer.scored:
                await asyncio.sleep(0.001)
            plane.switch(2)
            assert plane.closed == []
            assert scores(await plane.ask(Request(0))) == [2.0]
            assert scores(await plane.ask(Request(0, version=1))) == [1.0]  # still there
            assert [scores(one) for one in await asyncio.gather(*running)] == [[1.0] * 3] * 2
            assert plane.closed == [1]
            assert (await refused(plane.ask(Request(0, version=1))))[0] == "not_found"

    run(test())


def test_steps_in_threads_run_concurrently() -> None:
    async def test() -> None:
        with ThreadPoolExecutor(4) as threads:
            plane = Plane(threads=threads, max_concurrent=4)
            began = time.monotonic()
            await asyncio.gather(*(plane.ask(Request(200)) for _ in range(4)))
            assert time.monotonic() - began < 0.7

    run(test())


def test_bug_in_an_info_endpoint_ends_only_its_grpc_call() -> None:
    async def test() -> None:
        plane = Plane()
        results: list[tuple[int, str]] = []
        stream = SimpleNamespace(
            path="/x.Y/Z", refuse=lambda status, message: results.append((status, message))
        )

        def endpoint(body: bytes, versions: OpenVersions) -> bytes:
            raise KeyError("a field")

        log = ServerLog("test", lambda line: plane.lines.append(json.loads(line)))
        server = GrpcServer(
            {},
            {"/x.Y/Z": ("x", endpoint)},
            plane.plane,
            BearerAuth(None),
            ServeSection(),
            RequestMetrics(),
            log,
        )
        server.on_message(stream, b"")  # type: ignore[arg-type]
        ((status, message),) = results
        assert status == 13 and plane.lines[0]["id"] in message and "field" not in message

    run(test())


class TestBatching:
    def test_concurrent_requests_are_scored_in_one_batch_and_each_gets_its_rows(self) -> None:
        async def test() -> None:
            plane = Plane(batch_rows=8, batch_wait=0.05)
            tasks = [plane.ask(Request(*[0.0] * rows)) for rows in (1, 2, 3)]
            answers = [scores(await task) for task in tasks]
            assert [len(answer) for answer in answers] == [1, 2, 3]
            assert plane.scorer.scored == [6]
            assert plane.versions.open()[0].users == 0

        run(test())

    def test_full_batch_is_scored_before_the_wait_is_over(self) -> None:
        async def test() -> None:
            plane = Plane(batch_rows=4, batch_wait=20.0)
            await asyncio.gather(*(plane.ask(Request(0, 0)) for _ in range(6)))
            assert plane.scorer.scored == [4, 4, 4]

        run(test())

    def test_single_request_waits_no_longer_than_the_limit(self) -> None:
        async def test() -> None:
            plane = Plane(batch_rows=64, batch_wait=0.03)
            began = time.monotonic()
            await plane.ask(Request(0))
            assert 0.02 < time.monotonic() - began < 5

        run(test())

    def test_bad_request_in_a_batch_fails_alone(self) -> None:
        async def test() -> None:
            plane = Plane(batch_rows=8, batch_wait=0.05)
            good, bad, also_good = (
                plane.ask(Request(0)),
                plane.ask(Request(float("inf"))),
                plane.ask(Request(0, 0)),
            )
            kind, message = await refused(bad)
            assert kind == "invalid" and message.startswith("I1 ")
            assert scores(await good) == [1.0] and scores(await also_good) == [1.0, 1.0]
            assert plane.scorer.scored == [3]

        run(test())

    def test_requests_of_two_versions_are_never_in_one_batch(self) -> None:
        async def test() -> None:
            plane = Plane(batch_rows=8, batch_wait=0.05)
            old = plane.ask(Request(0, 0))
            await asyncio.sleep(0)
            scorer = plane.switch(2)
            new = plane.ask(Request(0))
            assert (scores(await old), scores(await new)) == ([1.0, 1.0], [2.0])
            assert (plane.scorer.scored, scorer.scored, plane.closed) == ([2], [1], [1])

        run(test())

    def test_large_request_is_scored_alone_in_order(self) -> None:
        async def test() -> None:
            plane = Plane(batch_rows=4, batch_wait=0.02)
            tasks = [plane.ask(Request(*[0.0] * rows)) for rows in (1, 9, 1)]
            assert [len(scores(await task)) for task in tasks] == [1, 9, 1]
            assert plane.scorer.scored == [1, 9, 1]

        run(test())

    def test_request_of_disconnected_client_is_left_out_of_the_batch(self) -> None:
        async def test() -> None:
            plane = Plane(batch_rows=8, batch_wait=0.05)
            cancelled, stays = plane.ask(Request(0)), plane.ask(Request(0, 0))
            await asyncio.sleep(0)
            cancelled.cancel()
            assert scores(await stays) == [1.0, 1.0]
            assert plane.scorer.scored == [2]
            assert plane.versions.open()[0].users == 0

        run(test())


def test_concatenated_rows_keep_their_order() -> None:
    one = EncodedRows(
        2,
        np.array([[1, 2]], dtype=np.float32),
        (SlotIds(np.array([1, 2], np.uint64)), SlotIds(np.array([5, 6, 7], np.uint64), np.array([0, 0, 3]))),
    )
    other = EncodedRows(
        1,
        np.array([[3]], dtype=np.float32),
        (SlotIds(np.array([3], np.uint64)), SlotIds(np.array([8], np.uint64))),
    )
    joined = concatenate_rows([one, other])
    assert joined.rows == 3
    assert joined.dense_DB.tolist() == [[1, 2, 3]]
    assert joined.slots[0].ids_N.tolist() == [1, 2, 3] and joined.slots[0].offsets_B1 is None
    assert joined.slots[1].ids_N.tolist() == [5, 6, 7, 8]
    assert joined.slots[1].offsets_B1 is not None and joined.slots[1].offsets_B1.tolist() == [0, 0, 3, 4]
