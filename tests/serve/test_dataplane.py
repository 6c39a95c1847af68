"""Admission, turns, deadlines, leases and batching, without a server around."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from standin import StandIn

from clickline.errors import RequestRefused
from clickline.records import ABSENT, EncodedRows, NumberColumn, RequestRows, SlotIds
from clickline.scoring.scorer import Answer
from clickline.stages.serve.dataplane import Dataplane, concatenated
from clickline.stages.serve.doors.calls import Call, Target
from clickline.stages.serve.logs import Log
from clickline.stages.serve.versions import Versions


class Request:
    """What a door would make of a request: rows whose I1 is given."""

    protocol = "test"

    def __init__(self, *milliseconds: float, model: str = "ctr", version: int | None = None) -> None:
        self._target = Target(model, version)
        columns, rows = 3, len(milliseconds)
        several = {"I1": NumberColumn(np.array(milliseconds))}
        spans = np.zeros((columns, rows), dtype=np.int64)
        numbers = np.full((columns, rows), np.nan)
        kinds = np.full(columns, ABSENT, dtype=np.uint8)
        self._rows = RequestRows(
            rows, np.zeros(0, dtype=np.uint8), kinds, spans, spans, numbers, spans, several
        )

    def target(self) -> Target:
        return self._target

    def decode(self, scorer: object) -> Call:
        return Call(self._rows)

    def encode(self, call: Call, answer: Answer) -> list[float]:
        return [float(score) * 1024 for score in answer.probability_B]


class Counting(StandIn):
    """Notes how many rows each scoring had."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scored: list[int] = []

    def score(self, encoded: EncodedRows) -> Answer:
        self.scored.append(encoded.rows)
        return super().score(encoded)


class Plane:
    """A dataplane with version 1 current; `closed` and `lines` note what is let go and logged."""

    def __init__(self, **options: Any) -> None:
        self.closed: list[int] = []
        self.lines: list[dict[str, Any]] = []
        self.versions = Versions(("ctr", "alias"), lambda scorer: self.closed.append(scorer.number))
        log = Log("test", lambda line: self.lines.append(json.loads(line)))
        self.plane = Dataplane(self.versions, log, **{"queue": 64, **options})
        self.scorer = self.switch(1)
        self.threads = ThreadPoolExecutor(100)

    def switch(self, number: int) -> Counting:
        scorer = Counting(number)
        self.versions.add(scorer)
        self.versions.switch(number)
        return scorer

    def ask(
        self, request: Request, seconds: float | None = None, gone: Callable[[], bool] | None = None
    ) -> Future[list[float]]:
        """Like a server: admit here, answer in a thread."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self.plane.admit()
        return self.threads.submit(lambda: self.plane.answer(request, deadline, gone).reply)

    def idle(self) -> bool:
        return all(lease.users == 0 for lease in self.versions.open()) and self.plane._inside == 0


def refusal(answer: Future[list[float]]) -> tuple[str, str]:
    with pytest.raises(RequestRefused) as caught:
        answer.result(30)
    return caught.value.kind, str(caught.value)


@pytest.fixture
def make() -> Iterator[Callable[..., Plane]]:
    made: list[Plane] = []

    def plane(**options: Any) -> Plane:
        made.append(Plane(**options))
        return made[-1]

    yield plane
    for one in made:
        one.threads.shutdown()
        assert one.idle()


def test_who_finds_too_many_inside_is_refused_at_once_and_the_others_are_answered(
    make: Callable[..., Plane],
) -> None:
    plane = make(queue=3)
    inside = [plane.ask(Request(200)) for _ in range(4)]  # one has its turn, three wait
    for _ in range(3):
        with pytest.raises(RequestRefused, match="3 requests are waiting") as caught:
            plane.ask(Request(0))
        assert caught.value.kind == "overloaded"
    assert not any(one.done() for one in inside)
    assert [one.result(30) for one in inside] == [[1.0]] * 4
    assert plane.ask(Request(0)).result(30) == [1.0]


def test_one_at_a_time(make: Callable[..., Plane]) -> None:
    plane = make()
    began = time.monotonic()
    for answer in [plane.ask(Request(20)) for _ in range(5)]:
        answer.result(30)
    assert time.monotonic() - began >= 0.1


def test_where_scoring_waits_for_others_several_have_their_turn(make: Callable[..., Plane]) -> None:
    plane = make(at_once=4)
    began = time.monotonic()
    for answer in [plane.ask(Request(300)) for _ in range(4)]:
        answer.result(30)
    assert time.monotonic() - began < 1.0


def test_work_that_has_not_begun_at_its_deadline_is_never_begun(make: Callable[..., Plane]) -> None:
    plane = make()
    slow = plane.ask(Request(300))
    while not plane.scorer.scored:
        time.sleep(0.001)
    late, in_time = plane.ask(Request(0), 0.05), plane.ask(Request(0), 30)
    kind, words = refusal(late)
    assert kind == "late" and "Nothing was computed" in words
    assert not slow.done()  # it was told at its deadline, not later
    assert (slow.result(30), in_time.result(30)) == ([1.0], [1.0])
    assert refusal(plane.ask(Request(0), -1.0))[0] == "late"
    assert plane.scorer.scored == [1, 1]


def test_nobody_computes_for_a_client_that_has_gone(make: Callable[..., Plane]) -> None:
    plane = make()
    assert refusal(plane.ask(Request(0), gone=lambda: True))[0] == "late"
    assert plane.ask(Request(0), gone=lambda: False).result(30) == [1.0]
    assert plane.scorer.scored == [1]


def test_a_bug_gets_an_id_and_its_traceback_stays_in_the_log(make: Callable[..., Plane]) -> None:
    plane = make()
    kind, words = refusal(plane.ask(Request(666)))
    assert kind == "internal"
    assert "ZeroDivision" not in words and "bug" not in words
    refusal(plane.ask(Request(666)))
    first, second = plane.lines
    assert first["id"] in words
    assert "a bug in the scorer" in first["traceback"]
    assert "traceback" not in second  # once a minute
    assert plane.ask(Request(0)).result(30) == [1.0]


def test_names_and_versions_that_are_not_here_are_refused_with_those_that_are(
    make: Callable[..., Plane],
) -> None:
    plane = make()
    assert plane.ask(Request(0, model="alias", version=1)).result(30) == [1.0]
    assert refusal(plane.ask(Request(0, model="other"))) == (
        "not_found",
        'There is no model "other". There is: "ctr", "alias".',
    )
    kind, words = refusal(plane.ask(Request(0, version=7)))
    assert kind == "not_found" and words.startswith("Version 7 is not loaded. Version 1 is")
    plane.versions.add(Counting(7))  # loaded, but not current yet
    assert refusal(plane.ask(Request(0, version=7)))[0] == "not_found"
    plane.versions.drop(7)
    assert plane.closed == [7]


def test_without_a_version_requests_are_refused_as_unavailable() -> None:
    plane = Dataplane(Versions(("ctr",), lambda scorer: None), Log("test", lambda line: None), queue=4)
    plane.admit()
    with pytest.raises(RequestRefused, match="No version") as caught:
        plane.answer(Request(0), None)
    assert caught.value.kind == "unavailable"


def test_an_old_version_answers_what_it_began_and_is_closed_then(make: Callable[..., Plane]) -> None:
    plane = make(at_once=4)
    running = [plane.ask(Request(400, 0, 0)) for _ in range(2)]
    while len(plane.scorer.scored) < 2:
        time.sleep(0.001)
    plane.switch(2)
    assert plane.closed == []
    assert plane.ask(Request(0)).result(30) == [2.0]
    assert plane.ask(Request(0, version=1)).result(30) == [1.0]  # still there
    assert [one.result(30) for one in running] == [[1.0] * 3] * 2
    assert plane.closed == [1]
    assert refusal(plane.ask(Request(0, version=1)))[0] == "not_found"


def test_versions_that_come_and_go_under_many_threads_are_each_closed_once(
    make: Callable[..., Plane],
) -> None:
    plane = make(at_once=8)
    answers: list[Future[list[float]]] = []
    for number in range(2, 60):
        answers += [plane.ask(Request(0, 0, 0)) for _ in range(5)]
        plane.switch(number)
        if len(answers) > 50:  # below what may be inside
            assert all(len(set(one.result(30))) == 1 for one in answers)
            answers.clear()
    assert all(len(set(one.result(30))) == 1 for one in answers)
    plane.threads.shutdown()
    assert sorted(plane.closed) == list(range(1, 59))


class TestBatching:
    def test_requests_that_come_together_are_scored_together_and_each_gets_its_rows(
        self, make: Callable[..., Plane]
    ) -> None:
        plane = make(batch_rows=6, batch_wait=20.0)
        answers = [plane.ask(Request(*[0.0] * rows)) for rows in (1, 2, 3)]
        assert [one.result(30) for one in answers] == [[1.0], [1.0] * 2, [1.0] * 3]
        assert plane.scorer.scored == [6]

    def test_a_lonely_request_waits_no_longer_than_the_bound(self, make: Callable[..., Plane]) -> None:
        plane = make(batch_rows=64, batch_wait=0.03)
        began = time.monotonic()
        plane.ask(Request(0)).result(30)
        assert 0.02 < time.monotonic() - began < 5

    def test_a_bad_request_fails_alone(self, make: Callable[..., Plane]) -> None:
        plane = make(batch_rows=3, batch_wait=20.0)
        good, bad, also_good = (
            plane.ask(Request(0)),
            plane.ask(Request(float("inf"))),
            plane.ask(Request(0, 0)),
        )
        kind, words = refusal(bad)
        assert kind == "invalid" and words.startswith("I1 ")
        assert good.result(30) == [1.0] and also_good.result(30) == [1.0, 1.0]
        assert plane.scorer.scored == [3]

    def test_requests_of_two_versions_are_never_scored_together(self, make: Callable[..., Plane]) -> None:
        plane = make(batch_rows=64, batch_wait=0.2)
        old = plane.ask(Request(0, 0))
        while plane.plane._batch is None:
            time.sleep(0.001)
        scorer = plane.switch(2)
        new = plane.ask(Request(0))
        assert (old.result(30), new.result(30)) == ([1.0, 1.0], [2.0])
        assert (plane.scorer.scored, scorer.scored) == ([2], [1])
        assert plane.closed == [1]

    def test_a_large_request_is_scored_alone(self, make: Callable[..., Plane]) -> None:
        plane = make(batch_rows=4, batch_wait=0.02)
        answers = [plane.ask(Request(*[0.0] * rows)) for rows in (1, 9)]
        assert [len(one.result(30)) for one in answers] == [1, 9]
        assert sorted(plane.scorer.scored) == [1, 9]

    def test_a_request_that_is_late_is_told_so_and_the_others_are_answered(
        self, make: Callable[..., Plane]
    ) -> None:
        plane = make(batch_rows=64, batch_wait=0.3)
        first = plane.ask(Request(0))
        while plane.plane._batch is None:
            time.sleep(0.001)
        late = plane.ask(Request(0, 0), 0.05)
        assert refusal(late)[0] == "late"
        assert first.result(30) == [1.0]

    def test_a_bug_while_scoring_together_is_an_error_for_each(self, make: Callable[..., Plane]) -> None:
        plane = make(batch_rows=2, batch_wait=20.0)
        answers = [plane.ask(Request(666)), plane.ask(Request(0))]
        assert [refusal(one)[0] for one in answers] == ["internal", "internal"]
        assert plane.ask(Request(0, 0)).result(30) == [1.0, 1.0]

    def test_many_at_once_each_get_their_own_rows(self, make: Callable[..., Plane]) -> None:
        plane = make(batch_rows=8, batch_wait=0.001)
        for _ in range(5):
            answers = [plane.ask(Request(*[0.0] * (1 + n % 4))) for n in range(60)]
            assert [len(one.result(30)) for one in answers] == [1 + n % 4 for n in range(60)]
        assert len(plane.scorer.scored) < 300
        assert sum(plane.scorer.scored) == 5 * 15 * (1 + 2 + 3 + 4)


def test_rows_put_together_are_the_rows_one_after_the_other() -> None:
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
    joined = concatenated([one, other])
    assert joined.rows == 3
    assert joined.dense_DB.tolist() == [[1, 2, 3]]
    assert joined.slots[0].ids_N.tolist() == [1, 2, 3] and joined.slots[0].offsets_B1 is None
    assert joined.slots[1].ids_N.tolist() == [5, 6, 7, 8]
    assert joined.slots[1].offsets_B1 is not None and joined.slots[1].offsets_B1.tolist() == [0, 0, 3, 4]
