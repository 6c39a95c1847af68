"""`clickline.up` in a user's program: in a thread, in a notebook. Stages are test doubles."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from up_home import DOUBLES, Home, eventually

import clickline
from clickline.config import Config, load_config
from clickline.errors import ConfigError, GateRefused
from clickline.progress import Progress


@pytest.fixture
def program(home: Home, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The config for a run within this process, whose children get the doubles."""
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES))
    monkeypatch.setenv("CLICKLINE_DOUBLES", str(home.folder))
    return load_config(home.file)


def test_up_returns_results_and_a_running_endpoint(home: Home, program: Config) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with clickline.up(program) as running:
        home.note_processes()
        assert isinstance(running, clickline.RunHandle)
        assert (running.name, running.version, running.dataset) == ("ads", 7, "d")
        assert running.metrics == {"auc": 0.7, "logloss": 0.5, "calibration": 1.0}
        assert running.gate["passed"] is True
        assert running.skipped == ("prepare",)
        assert running.endpoint is not None
        assert running.endpoint.grpc == f"127.0.0.1:{program.serve.grpc_port}"
        assert running.status()["stages"]["serve"]["state"] == "running"
        assert running.wait(0.01) is False
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        with pytest.raises(clickline.ClicklineError, match="is running for"):
            clickline.up(program)
    assert home.none_left(1)
    assert running.wait() is True
    running.stop()  # stopping twice is harmless
    with clickline.up(program, serve=False) as again:  # this process does not count as left over
        assert (again.endpoint, again.version) == (None, 7)


def test_up_raises_the_errors_of_the_run(home: Home, program: Config) -> None:
    (home.folder / "fault-train").write_text("GateRefused AUC is 0.5")
    with pytest.raises(GateRefused, match=r"AUC is 0\.5"):
        clickline.up(program)
    with pytest.raises(ConfigError, match="--backfill is 'x'"):
        clickline.up(program, follow=True, backfill="x")
    with pytest.raises(ConfigError, match="without --follow"):
        clickline.up(program, backfill="20260101..20260102")
    assert home.none_left(1)


def test_up_in_a_thread_with_progress(home: Home, program: Config) -> None:
    class Watcher(Progress):
        def __init__(self) -> None:
            self.said: list[str] = []
            self.stages: list[tuple[str, str]] = []

        def log(self, message: str) -> None:
            self.said.append(message)

        def stage(self, name, state, facts=None) -> None:
            self.stages.append((name, state))

    watcher = Watcher()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            clickline.up, program, follow=True, backfill="20260101/00..20260101/05", progress=watcher
        ).result(30)
        eventually(lambda: "hour 2" in watcher.said)
        assert watcher.said[0] == "backfill of 6 hours"
        home.note_processes()
        pool.submit(running.stop).result(30)
    assert ("serve", "running") in watcher.stages and ("follow", "running") in watcher.stages
    assert home.none_left(1)


def test_progress_object_that_raises_ends_the_run(home: Home, program: Config) -> None:
    class Broken(Progress):
        def stage(self, name, state, facts=None) -> None:
            if name == "train":
                home.note_processes()
                raise ValueError("no such cell")

    with pytest.raises(ValueError, match="no such cell"):
        clickline.up(program, progress=Broken())
    assert home.none_left(1)
    assert home.state["state"] == "failed"


def test_down_stops_the_run_but_not_the_program(home: Home, program: Config) -> None:
    running = clickline.up(program)
    home.note_processes()
    code, out, _ = home.run("down", "--json")
    assert (code, json.loads(out)["killed"]) == (0, [])
    assert running.wait(5) is True
    assert home.state["state"] == "stopped"
    assert os.getpid() not in {one["pid"] for one in json.loads(out)["ended"]}


def test_down_before_it_is_up_raises_in_the_call(home: Home, program: Config) -> None:
    (home.folder / "hold-train").touch()
    failed = []

    def call() -> None:
        try:
            clickline.up(program)
        except clickline.ClicklineError as error:
            failed.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: home.stage("train") == "running")
    home.note_processes()
    assert home.run("down")[0] == 0
    thread.join(10)
    assert failed == ["`clickline down` stopped the run before it was up. Run it again to resume."]
