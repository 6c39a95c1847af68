"""deploy logs: the last lines of all containers, and new ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ads_objects import ADS, container, job, pod
from api_server import ApiServer, Fault, Log

from clickline.deploy import pod_logs as module
from clickline.deploy.kube_client import Kube
from clickline.deploy.pod_logs import PodLogLine, follow, last_lines, list_pods
from clickline.errors import ClusterError

RUNNING = {"running": {}}


def line(second: int, text: str) -> str:
    return f"2026-11-16T10:00:{second:02d}.5Z {text}"


def running(name: str, *, restarts: int = 0, role: str = "pipeline") -> dict[str, Any]:
    first = container("ready", terminated={"exitCode": 0})
    return pod(
        name, role, "Running", container(role, restarts=restarts, **RUNNING), initContainerStatuses=[first]
    )


def texts(lines: list[PodLogLine]) -> list[tuple[str, str, str]]:
    return [(one.pod, one.container, one.text) for one in lines]


def test_last_lines_of_all_containers_are_merged_by_time(bare: ApiServer, kube: Kube) -> None:
    bare.put(running("a"))
    bare.put(running("b"))
    bare.logs["a", "ready"] = Log([line(1, "checked")])
    bare.logs["a", "pipeline"] = Log([line(2, "one"), line(5, "four")])
    bare.logs["b", "pipeline"] = Log([line(3, "two"), line(4, "three")])
    there = list_pods(kube, ADS, None)
    found = texts(last_lines(kube, there, namespace="shop", lines=10))
    assert found == [
        ("a", "ready", "checked"),
        ("a", "pipeline", "one"),
        ("b", "pipeline", "two"),
        ("b", "pipeline", "three"),
        ("a", "pipeline", "four"),
    ]
    assert [one.text for one in last_lines(kube, there, namespace="shop", lines=2)] == ["three", "four"]
    assert last_lines(kube, there, namespace="shop", lines=0) == []


def test_only_logs_of_the_role_and_deployment_are_read(bare: ApiServer, kube: Kube) -> None:
    bare.put(running("mine"))
    bare.put(running("serves", role="predictor"))
    other = running("theirs")
    other["metadata"]["labels"]["app.kubernetes.io/instance"] = "ads2"
    bare.put(other)
    found = list_pods(kube, ADS, "pipeline")
    assert [one["metadata"]["name"] for one in found] == ["mine"]


def test_previous_shows_the_log_before_a_restart(bare: ApiServer, kube: Kube) -> None:
    bare.put(running("a", restarts=1))
    bare.logs["a", "pipeline"] = Log([line(9, "again")])
    bare.previous_logs["a", "pipeline"] = Log([line(1, "died")])
    there = list_pods(kube, ADS, None)
    assert texts(last_lines(kube, there, namespace="shop", lines=9, previous=True)) == [
        ("a", "pipeline", "died")
    ]


def test_forbidden_log_is_reported(bare: ApiServer, kube: Kube) -> None:
    bare.put(running("a"))
    bare.faults.append(Fault("get", "pods/log"))
    with pytest.raises(ClusterError, match="get pods/log in namespace shop"):
        last_lines(kube, list_pods(kube, ADS, None), namespace="shop", lines=9)


# ── followed ───────────────────────────────────────────────────────────────────────────────────


class Followed:
    def __init__(self) -> None:
        self.lines: list[PodLogLine] = []
        self.ended = threading.Event()

    def wait(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not what():
            assert time.monotonic() < deadline, texts(self.lines)
            time.sleep(0.01)

    def wait_for(self, *wanted: str) -> None:
        self.wait(lambda: [one.text for one in self.lines] == list(wanted))


@pytest.fixture
def following(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)

    @contextmanager
    def start(api: ApiServer, after: list[PodLogLine]) -> Iterator[Followed]:
        """Until the job is over, which the end of the block sees to."""
        followed = Followed()

        def read() -> None:
            for one in follow(kube, ADS, "pipeline", after):
                followed.lines.append(one)
            followed.ended.set()

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield followed
        finally:
            for name, container_name in list(api.logs):
                api.end_log(name, container_name)
                ended = pod(
                    name, "pipeline", "Succeeded", container(container_name, terminated={"exitCode": 0})
                )
                api.put(ended)
            api.put({**job(), "status": {"conditions": [{"type": "Complete", "status": "True"}]}})
            thread.join(timeout=20)
        assert followed.ended.is_set()

    return start


def test_follow_includes_new_pods_and_ends_with_the_job(bare: ApiServer, following: Any) -> None:
    bare.put({**job(), "status": {"active": 1}})
    bare.put(running("a"))
    bare.say("a", "pipeline", line(1, "one"))
    with following(bare, []) as followed:
        followed.wait_for("one")
        bare.say("a", "pipeline", line(2, "two"))
        followed.wait_for("one", "two")
        bare.say("b", "pipeline", line(3, "three"))
        bare.put(running("b"))
        followed.wait_for("one", "two", "three")
        assert not followed.ended.is_set()


def test_follow_does_not_repeat_lines(bare: ApiServer, following: Any) -> None:
    bare.put({**job(), "status": {"active": 1}})
    bare.put(running("a"))
    bare.say("a", "pipeline", line(1, "one"), line(2, "two"))
    shown = [PodLogLine(line(1, "").strip(), "a", "pipeline", "one")]
    with following(bare, shown) as followed:
        followed.wait_for("two")


def test_follow_resumes_after_a_closed_connection(bare: ApiServer, following: Any) -> None:
    bare.put({**job(), "status": {"active": 1}})
    bare.put(running("a"))
    bare.logs["a", "pipeline"] = Log([line(n, str(n)) for n in range(1, 6)], open=True, cut_after=3)
    with following(bare, []) as followed:
        followed.wait_for("1", "2", "3", "4", "5")


def test_follow_continues_after_a_container_restart(bare: ApiServer, following: Any) -> None:
    bare.put({**job(), "status": {"active": 1}})
    bare.put(running("a"))
    bare.say("a", "pipeline", line(1, "before"))
    with following(bare, []) as followed:
        followed.wait_for("before")
        bare.end_log("a", "pipeline")
        bare.logs["a", "pipeline"] = Log([line(5, "after")], open=True)
        bare.put(running("a", restarts=1))
        followed.wait_for("before", "after")
