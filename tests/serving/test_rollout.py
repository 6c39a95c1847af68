"""The rollout with versions, workers and faults in any order; the registry follower; metrics, log and access."""

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
from clickline.serving.auth import BearerAuth, exposure_warning, read_token
from clickline.serving.registry_follower import RegistryFollower
from clickline.serving.rollout import FetchedVersion, Rollout
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import BUCKETS, KEPT_VERSIONS, RequestMetrics, exposition


class RolloutRecorder:
    """A rollout, and the messages and results it produced."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, int | None]] = []
        self.current: list[int] = []
        self.refused: list[tuple[int, str, bool]] = []
        self.rollout = Rollout(
            lambda worker, message: self.sent.append((worker, message["do"], message.get("number"))),
            lambda version: self.current.append(version.number),
            lambda version, reason, retry: self.refused.append((version.number, reason, retry)),
        )

    def new_messages(self) -> list[tuple[int, str, int | None]]:
        """The messages sent since the last call."""
        sent, self.sent[:] = list(self.sent), []
        return sent

    def serving(self, number: int, workers: tuple[int, ...] = (0, 1)) -> None:
        for worker in workers:
            self.rollout.worker_up(worker)
        self.rollout.propose(version(number))
        for worker in workers:
            self.rollout.prepared(worker, number)
        self.new_messages()


def version(number: int) -> FetchedVersion:
    return FetchedVersion(number, (f"/versions/{number}",))


@pytest.fixture
def recorder() -> RolloutRecorder:
    return RolloutRecorder()


class TestRollout:
    def test_no_worker_switches_before_all_have_loaded(self, recorder: RolloutRecorder) -> None:
        recorder.rollout.worker_up(0)
        recorder.rollout.worker_up(1)
        assert recorder.new_messages() == [(0, "listen", None), (1, "listen", None)]
        recorder.rollout.propose(version(5))
        assert recorder.new_messages() == [(0, "prepare", 5), (1, "prepare", 5)]
        recorder.rollout.prepared(1, 5)
        assert recorder.new_messages() == [] and recorder.current == []
        recorder.rollout.prepared(0, 5)
        assert recorder.new_messages() == [(0, "switch", 5), (1, "switch", 5)]
        assert recorder.current == [5]

    def test_refusal_of_one_worker_drops_the_version_everywhere(self, recorder: RolloutRecorder) -> None:
        recorder.serving(5)
        recorder.rollout.propose(version(6))
        recorder.rollout.prepared(0, 6)
        recorder.new_messages()
        recorder.rollout.refused(1, 6, "damaged", False)
        assert recorder.new_messages() == [(0, "drop", 6), (1, "drop", 6)]
        assert recorder.refused == [(6, "damaged", False)]
        assert recorder.current == [5]
        recorder.rollout.prepared(0, 6)  # sent before it received the drop
        assert recorder.new_messages() == [(0, "drop", 6)]

    def test_worker_that_dies_while_loading_refuses_with_retry(self, recorder: RolloutRecorder) -> None:
        recorder.serving(5)
        recorder.rollout.propose(version(6))
        recorder.rollout.worker_gone(1)
        assert [(number, retry) for number, _, retry in recorder.refused] == [(6, True)]
        assert recorder.new_messages()[-1] == (0, "drop", 6)

    def test_new_worker_loads_the_current_version_before_it_listens(self, recorder: RolloutRecorder) -> None:
        recorder.serving(5)
        recorder.rollout.worker_gone(1)
        recorder.rollout.worker_up(1)
        assert recorder.new_messages() == [(1, "prepare", 5)]
        recorder.rollout.prepared(1, 5)
        assert recorder.new_messages() == [(1, "switch", 5)]
        assert recorder.current == [5]

    def test_new_worker_joins_a_running_rollout(self, recorder: RolloutRecorder) -> None:
        recorder.serving(5)
        recorder.rollout.worker_gone(1)
        recorder.rollout.propose(version(6))
        recorder.rollout.worker_up(1)
        assert recorder.new_messages() == [(0, "prepare", 6), (1, "prepare", 5), (1, "prepare", 6)]
        recorder.rollout.prepared(0, 6)
        recorder.rollout.prepared(1, 5)
        recorder.rollout.prepared(1, 6)
        assert recorder.new_messages() == [(1, "switch", 5), (0, "switch", 6), (1, "switch", 6)]

    def test_worker_that_cannot_load_the_current_version_is_replaced(self, recorder: RolloutRecorder) -> None:
        recorder.serving(5)
        recorder.rollout.worker_gone(1)
        recorder.rollout.worker_up(1)
        recorder.new_messages()
        recorder.rollout.refused(1, 5, "no memory", True)
        assert recorder.new_messages() == [(1, "stop", None)]
        assert recorder.refused == []

    def test_last_version_proposed_during_a_rollout_is_next(self, recorder: RolloutRecorder) -> None:
        recorder.serving(5)
        for number in (6, 7, 8):
            recorder.rollout.propose(version(number))
        assert recorder.new_messages() == [(0, "prepare", 6), (1, "prepare", 6)]
        recorder.rollout.prepared(0, 6)
        recorder.rollout.prepared(1, 6)
        assert recorder.new_messages()[2:] == [(0, "prepare", 8), (1, "prepare", 8)]

    def test_rollback_to_the_current_version_changes_nothing(self, recorder: RolloutRecorder) -> None:
        recorder.serving(5)
        recorder.rollout.propose(version(5))
        assert recorder.new_messages() == []

    def test_workers_listen_if_the_first_version_is_refused(self, recorder: RolloutRecorder) -> None:
        recorder.rollout.propose(version(5))
        recorder.rollout.worker_up(0)
        assert recorder.new_messages() == [(0, "prepare", 5)]
        recorder.rollout.refused(0, 5, "damaged", False)
        assert recorder.new_messages() == [(0, "drop", 5), (0, "listen", None)]


class FollowerRecorder:
    """A follower of a pointer file, polled by the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self.fetched: list[int] = []
        self.refused: list[int] = []
        self.source = PointerFile(folder)
        self.follower = RegistryFollower(
            self.source,
            1.0,
            ServerLog("test", lambda line: self.lines.append(json.loads(line))),
            lambda version: self.fetched.append(version.number),
            lambda number, reason: self.refused.append(number),
        )


@pytest.fixture
def follow(tmp_path: Path) -> FollowerRecorder:
    return FollowerRecorder(tmp_path)


class TestFollower:
    def test_each_move_is_fetched_once(self, follow: FollowerRecorder) -> None:
        follow.follower.poll_once()
        publish(follow.folder, 3)
        for _ in range(3):
            follow.follower.poll_once()
        publish(follow.folder, 4)
        follow.follower.poll_once()
        assert follow.fetched == [3, 4]

    def test_unreachable_store_and_its_return_are_logged_once(self, follow: FollowerRecorder) -> None:
        (follow.folder / "unreachable").touch()
        for _ in range(5):
            follow.follower.poll_once()
        assert follow.follower.unreachable
        (follow.folder / "unreachable").unlink()
        publish(follow.folder, 3)
        follow.follower.poll_once()
        assert not follow.follower.unreachable
        assert follow.fetched == [3]
        assert [line["event"] for line in follow.lines] == [
            "the registry cannot be reached",
            "the registry answers again",
        ]

    def test_incomplete_version_is_refused_once_until_the_pointer_moves(
        self, follow: FollowerRecorder
    ) -> None:
        publish(follow.folder, 3)
        (follow.folder / "pointer").write_text("2 9")
        for _ in range(3):
            follow.follower.poll_once()
        assert (follow.fetched, follow.refused) == ([], [9])
        (follow.folder / "pointer").write_text("3 9")
        follow.follower.poll_once()
        assert follow.refused == [9, 9]

    def test_failed_fetch_is_retried_with_backoff(
        self, follow: FollowerRecorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, fetches = 1000.0, 0

        def failing(number: int) -> FetchedVersion:
            nonlocal fetches
            fetches += 1
            raise StorageError("a timeout")

        monkeypatch.setattr(following.time, "monotonic", lambda: now)
        monkeypatch.setattr(follow.source, "fetch", failing)
        publish(follow.folder, 3)
        times = []
        for _ in range(100):
            before = fetches
            follow.follower.poll_once()
            if fetches > before:
                times.append(now - 1000.0)
            now += 1.0
        assert times == [0, 5, 15, 35, 75]

    def test_version_that_workers_could_not_read_is_fetched_again_later(
        self, follow: FollowerRecorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 1000.0
        monkeypatch.setattr(following.time, "monotonic", lambda: now)
        publish(follow.folder, 3)
        follow.follower.poll_once()
        follow.follower.retry_later(3)
        follow.follower.retry_later(2)  # not the current pointer: ignored
        follow.follower.poll_once()
        assert follow.fetched == [3]
        now += 6
        follow.follower.poll_once()
        assert follow.fetched == [3, 3]


class TestRequestMetrics:
    def test_metrics_of_several_processes_add_up_after_serialization(self) -> None:
        one, other, total = RequestMetrics(), RequestMetrics(), RequestMetrics()
        one.answered("rest", "200", 7, 100, 0.0003)
        other.answered("rest", "200", 7, 1, 0.004)
        other.answered("rest", "200", 7, 1, 9.0)
        other.refused("grpc", "INVALID_ARGUMENT", "invalid")
        scorer = StandIn(7)
        scorer.lookups_S[:] = [10, 20]
        scorer.misses_S[:] = [1, 2]
        one.lookups(scorer)
        one.lookups(scorer)  # moved counts are not counted twice
        for metrics in (one, other):
            total.add(RequestMetrics.from_json(metrics.to_json()))
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

    def test_latencies_are_kept_only_of_the_last_versions_and_the_served_one(self) -> None:
        metrics = RequestMetrics()
        for version in range(1, 1000):
            metrics.answered("rest", "200", version, 1, BUCKETS[0])
        assert len(metrics.seconds) == KEPT_VERSIONS
        metrics.answered("rest", "200", 3, 1, 0.1)  # a rollback
        assert metrics.seconds["rest", 3][-1] == 0.1
        assert metrics.counts["requests", "rest", "200"] == 1000


class TestLog:
    def test_refused_requests_are_logged_at_a_limited_rate_with_a_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, lines = 5.0, []
        monkeypatch.setattr(service_log.time, "monotonic", lambda: now)
        log = ServerLog("test", lambda line: lines.append(json.loads(line)))
        for _ in range(500):
            log.refused("rest", "invalid", "row 1: I1 is not a number")
        assert 1 < len(lines) < 20
        before = len(lines)
        now += 1
        log.refused("rest", "invalid", "row 1: I1 is not a number")
        assert lines[-1]["suppressed"] == 500 - before
        assert all(line["event"] == "refused" and line["level"] == "warning" for line in lines)


class TestAccess:
    def test_only_the_token_is_accepted(self) -> None:
        auth = BearerAuth("secret")
        auth.check(b"Bearer secret")
        auth.check(b"bearer secret")
        for given in (None, b"", b"secret", b"Bearer secre", b"Bearer secret2", b"Basic secret", b"Bearer "):
            with pytest.raises(RequestRefused) as caught:
                auth.check(given)
            assert caught.value.kind == "unauthenticated"
            assert "secret" not in str(caught.value)
        BearerAuth(None).check(None)

    def test_empty_token_file_prevents_the_start(self, tmp_path: Path) -> None:
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
    def test_warning_if_other_machines_can_reach_the_ports(self, host: str, warned: bool) -> None:
        warning = exposure_warning(ServeSection(host=host, allow_unauthenticated=True))
        assert (warning is not None) == warned
        if warning:
            assert "serve.tls and serve.token_file are not set" in warning
        token_only = exposure_warning(
            ServeSection(host=host, allow_unauthenticated=True, token_file="/token")
        )
        assert token_only is None or "serve.tls is not set" in token_only
