"""Who is told what when versions, workers and faults come in any order; following a registry; what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from standin import PointerFile, StandIn, publish

from clickline.config.sections import ServeSection
from clickline.errors import ClicklineError, RequestRefused, StorageError
from clickline.serving import json_log as service_log
from clickline.serving import registry_follower as following
from clickline.serving.auth import Guard, exposure, read_token
from clickline.serving.registry_follower import Follower
from clickline.serving.rollout import Offer, Rollout
from clickline.serving.server_log import Log
from clickline.serving.server_metrics import BUCKETS, KEPT_VERSIONS, Tally, exposition


class Story:
    """A rollout, and what came of it."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, int | None]] = []
        self.current: list[int] = []
        self.refused: list[tuple[int, str, bool]] = []
        self.rollout = Rollout(
            lambda worker, message: self.sent.append((worker, message["do"], message.get("number"))),
            lambda offer: self.current.append(offer.number),
            lambda offer, reason, again: self.refused.append((offer.number, reason, again)),
        )

    def news(self) -> list[tuple[int, str, int | None]]:
        """What was sent since this was last asked."""
        sent, self.sent[:] = list(self.sent), []
        return sent

    def serving(self, number: int, workers: tuple[int, ...] = (0, 1)) -> None:
        for worker in workers:
            self.rollout.worker_up(worker)
        self.rollout.offered(offer(number))
        for worker in workers:
            self.rollout.prepared(worker, number)
        self.news()


def offer(number: int) -> Offer:
    return Offer(number, (f"/versions/{number}",))


@pytest.fixture
def story() -> Story:
    return Story()


class TestRollout:
    def test_all_workers_have_a_version_before_any_answers_with_it(self, story: Story) -> None:
        story.rollout.worker_up(0)
        story.rollout.worker_up(1)
        assert story.news() == [(0, "listen", None), (1, "listen", None)]
        story.rollout.offered(offer(5))
        assert story.news() == [(0, "prepare", 5), (1, "prepare", 5)]
        story.rollout.prepared(1, 5)
        assert story.news() == [] and story.current == []
        story.rollout.prepared(0, 5)
        assert story.news() == [(0, "switch", 5), (1, "switch", 5)]
        assert story.current == [5]

    def test_one_refusal_is_enough_and_the_others_forget_it(self, story: Story) -> None:
        story.serving(5)
        story.rollout.offered(offer(6))
        story.rollout.prepared(0, 6)
        story.news()
        story.rollout.refused(1, 6, "damaged", False)
        assert story.news() == [(0, "drop", 6), (1, "drop", 6)]
        assert story.refused == [(6, "damaged", False)]
        assert story.current == [5]
        story.rollout.prepared(0, 6)  # said before it heard
        assert story.news() == [(0, "drop", 6)]

    def test_a_worker_that_dies_while_loading_refuses_for_now(self, story: Story) -> None:
        story.serving(5)
        story.rollout.offered(offer(6))
        story.rollout.worker_gone(1)
        assert [(number, again) for number, _, again in story.refused] == [(6, True)]
        assert story.news()[-1] == (0, "drop", 6)

    def test_a_new_worker_loads_the_current_version_before_it_listens(self, story: Story) -> None:
        story.serving(5)
        story.rollout.worker_gone(1)
        story.rollout.worker_up(1)
        assert story.news() == [(1, "prepare", 5)]
        story.rollout.prepared(1, 5)
        assert story.news() == [(1, "switch", 5)]
        assert story.current == [5]

    def test_a_new_worker_takes_part_in_a_switch_that_is_under_way(self, story: Story) -> None:
        story.serving(5)
        story.rollout.worker_gone(1)
        story.rollout.offered(offer(6))
        story.rollout.worker_up(1)
        assert story.news() == [(0, "prepare", 6), (1, "prepare", 5), (1, "prepare", 6)]
        story.rollout.prepared(0, 6)
        story.rollout.prepared(1, 5)
        story.rollout.prepared(1, 6)
        assert story.news() == [(1, "switch", 5), (0, "switch", 6), (1, "switch", 6)]

    def test_a_worker_that_cannot_load_the_current_version_is_replaced(self, story: Story) -> None:
        story.serving(5)
        story.rollout.worker_gone(1)
        story.rollout.worker_up(1)
        story.news()
        story.rollout.refused(1, 5, "no memory", True)
        assert story.news() == [(1, "stop", None)]
        assert story.refused == []

    def test_of_offers_that_come_during_a_switch_the_last_one_counts(self, story: Story) -> None:
        story.serving(5)
        for number in (6, 7, 8):
            story.rollout.offered(offer(number))
        assert story.news() == [(0, "prepare", 6), (1, "prepare", 6)]
        story.rollout.prepared(0, 6)
        story.rollout.prepared(1, 6)
        assert story.news()[2:] == [(0, "prepare", 8), (1, "prepare", 8)]

    def test_a_rollback_to_the_current_version_changes_nothing(self, story: Story) -> None:
        story.serving(5)
        story.rollout.offered(offer(5))
        assert story.news() == []

    def test_without_any_version_the_workers_listen_after_a_refusal(self, story: Story) -> None:
        story.rollout.offered(offer(5))
        story.rollout.worker_up(0)
        assert story.news() == [(0, "prepare", 5)]
        story.rollout.refused(0, 5, "damaged", False)
        assert story.news() == [(0, "drop", 5), (0, "listen", None)]


class Following:
    """A follower of a pointer file, looked at by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self.offered: list[int] = []
        self.refused: list[int] = []
        self.source = PointerFile(folder)
        self.follower = Follower(
            self.source,
            1.0,
            Log("test", lambda line: self.lines.append(json.loads(line))),
            lambda offer: self.offered.append(offer.number),
            lambda number, reason: self.refused.append(number),
        )


@pytest.fixture
def follow(tmp_path: Path) -> Following:
    return Following(tmp_path)


class TestFollower:
    def test_each_move_is_offered_once(self, follow: Following) -> None:
        follow.follower.look()
        publish(follow.folder, 3)
        for _ in range(3):
            follow.follower.look()
        publish(follow.folder, 4)
        follow.follower.look()
        assert follow.offered == [3, 4]

    def test_a_store_that_is_away_is_told_once_and_again_when_it_is_back(self, follow: Following) -> None:
        (follow.folder / "unreachable").touch()
        for _ in range(5):
            follow.follower.look()
        assert follow.follower.unreachable
        (follow.folder / "unreachable").unlink()
        publish(follow.folder, 3)
        follow.follower.look()
        assert not follow.follower.unreachable
        assert follow.offered == [3]
        assert [line["event"] for line in follow.lines] == [
            "the registry cannot be reached",
            "the registry answers again",
        ]

    def test_a_version_that_is_not_whole_is_refused_once_until_the_pointer_moves(
        self, follow: Following
    ) -> None:
        publish(follow.folder, 3)
        (follow.folder / "pointer").write_text("2 9")
        for _ in range(3):
            follow.follower.look()
        assert (follow.offered, follow.refused) == ([], [9])
        (follow.folder / "pointer").write_text("3 9")
        follow.follower.look()
        assert follow.refused == [9, 9]

    def test_a_fetch_that_fails_is_tried_again_after_longer_and_longer_pauses(
        self, follow: Following, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, fetches = 1000.0, 0

        def failing(number: int) -> Offer:
            nonlocal fetches
            fetches += 1
            raise StorageError("a timeout")

        monkeypatch.setattr(following.time, "monotonic", lambda: now)
        monkeypatch.setattr(follow.source, "fetch", failing)
        publish(follow.folder, 3)
        times = []
        for _ in range(100):
            before = fetches
            follow.follower.look()
            if fetches > before:
                times.append(now - 1000.0)
            now += 1.0
        assert times == [0, 5, 15, 35, 75]

    def test_a_version_that_workers_could_not_read_is_offered_again_later(
        self, follow: Following, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 1000.0
        monkeypatch.setattr(following.time, "monotonic", lambda: now)
        publish(follow.folder, 3)
        follow.follower.look()
        follow.follower.try_again(3)
        follow.follower.try_again(2)  # of an earlier pointer: nothing to do
        follow.follower.look()
        assert follow.offered == [3]
        now += 6
        follow.follower.look()
        assert follow.offered == [3, 3]


class TestTally:
    def test_counts_of_several_processes_add_up_and_survive_the_wire(self) -> None:
        one, other, total = Tally(), Tally(), Tally()
        one.answered("rest", "200", 7, 100, 0.0003)
        other.answered("rest", "200", 7, 1, 0.004)
        other.answered("rest", "200", 7, 1, 9.0)
        other.refused("grpc", "INVALID_ARGUMENT", "invalid")
        scorer = StandIn(7)
        scorer.lookups_S[:] = [10, 20]
        scorer.misses_S[:] = [1, 2]
        one.lookups(scorer)
        one.lookups(scorer)  # what was taken over is not counted twice
        for tally in (one, other):
            total.add(Tally.from_json(tally.to_json()))
        page = exposition(
            total, {"version": ("The version.", 7)}, {"worker_restarts": ("Restarts.", 2)}
        ).decode()
        for line in (
            'clickline_requests_total{code="200",protocol="rest"} 3.0',
            'clickline_requests_total{code="INVALID_ARGUMENT",protocol="grpc"} 1.0',
            'clickline_refused_total{kind="invalid",protocol="grpc"} 1.0',
            'clickline_rows_total{protocol="rest"} 102.0',
            'clickline_lookups_total{slot="C2"} 20.0',
            'clickline_lookup_misses_total{slot="C1"} 1.0',
            'clickline_request_seconds_bucket{le="0.0002",protocol="rest",version="7"} 0.0',
            'clickline_request_seconds_bucket{le="0.0005",protocol="rest",version="7"} 1.0',
            'clickline_request_seconds_bucket{le="0.005",protocol="rest",version="7"} 2.0',
            'clickline_request_seconds_bucket{le="1.0",protocol="rest",version="7"} 2.0',
            'clickline_request_seconds_bucket{le="+Inf",protocol="rest",version="7"} 3.0',
            'clickline_request_seconds_count{protocol="rest",version="7"} 3.0',
            "clickline_version 7.0",
            "clickline_worker_restarts_total 2.0",
        ):
            assert f"{line}\n" in page

    def test_latencies_are_kept_of_the_last_versions_only_and_of_the_one_asked_for(self) -> None:
        tally = Tally()
        for version in range(1, 1000):
            tally.answered("rest", "200", version, 1, BUCKETS[0])
        assert len(tally.seconds) == KEPT_VERSIONS
        tally.answered("rest", "200", 3, 1, 0.1)  # a rollback
        assert tally.seconds["rest", 3][-1] == 0.1
        assert tally.counts["requests", "rest", "200"] == 1000


class TestLog:
    def test_refused_requests_are_told_sparingly_and_those_left_out_are_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, lines = 5.0, []
        monkeypatch.setattr(service_log.time, "monotonic", lambda: now)
        log = Log("test", lambda line: lines.append(json.loads(line)))
        for _ in range(500):
            log.refused("rest", "invalid", "row 1: I1 is not a number")
        assert 1 < len(lines) < 20
        before = len(lines)
        now += 1
        log.refused("rest", "invalid", "row 1: I1 is not a number")
        assert lines[-1]["suppressed"] == 500 - before
        assert all(line["event"] == "refused" and line["level"] == "warning" for line in lines)


class TestAccess:
    def test_only_the_token_opens(self) -> None:
        guard = Guard("secret")
        guard.check(b"Bearer secret")
        guard.check(b"bearer secret")
        for given in (None, b"", b"secret", b"Bearer secre", b"Bearer secret2", b"Basic secret", b"Bearer "):
            with pytest.raises(RequestRefused) as caught:
                guard.check(given)
            assert caught.value.kind == "unauthenticated"
            assert "secret" not in str(caught.value)
        Guard(None).check(None)

    def test_a_token_file_without_a_token_stops_the_start(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("first line\nsecond\n")
        assert read_token(str(file)) == "first line"
        file.write_text("\n")
        with pytest.raises(ClicklineError, match=r"first line of serve\.token_file"):
            read_token(str(file))
        with pytest.raises(ClicklineError, match="cannot be read"):
            read_token(str(tmp_path / "absent"))

    @pytest.mark.parametrize(
        ("host", "warned"),
        [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("10.0.0.1", True)],
    )
    def test_ports_that_others_can_reach_are_warned_about(self, host: str, warned: bool) -> None:
        words = exposure(ServeSection(host=host, open=True))
        assert (words is not None) == warned
        if words:
            assert "serve.tls and serve.token_file are not set" in words
        token_only = exposure(ServeSection(host=host, open=True, token_file="/token"))
        assert token_only is None or "serve.tls is not set" in token_only
