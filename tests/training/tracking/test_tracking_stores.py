"""Real stores: SQLite files and `mlflow server`, read back with MLflow's own client. Slow: mlflow takes seconds."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clickline.training.tracking import MlflowTracker, open_tracker

pytestmark = pytest.mark.slow

PATIENCE = 120.0  # a busy machine is no fault; what is tested is never the time


class Said:
    """What the tracker said, in order; it is heard from another thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._queue.put(line)

    def next(self) -> str:
        return self._queue.get(timeout=PATIENCE)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a store that the tracker itself has made, in a path that needs care."""
    folder = tmp_path_factory.mktemp("home") / "点击 line"
    folder.mkdir()
    said = Said()
    tracker = MlflowTracker(
        sqlite(folder), "first", "first", folder=folder / "r", warn=said, patience=PATIENCE
    )
    tracker.close("FINISHED")
    assert said.lines == []
    assert sorted(path.name for path in folder.iterdir()) == ["mlflow.db", "r"]
    return folder


def sqlite(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow.db'}"


@contextmanager
def reading(uri: str) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        yield MlflowClient(tracking_uri=uri)


def the_run(client: Any, experiment: str) -> Any:
    """The only run of an experiment."""
    found = client.get_experiment_by_name(experiment)
    (run,) = client.search_runs([found.experiment_id])
    return run


def history(client: Any, run: Any, metric: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric)]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_parameters_metrics_and_files_reach_the_store(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    report = tmp_path / "report.json"
    report.write_text('{"auc": 0.75}')
    said = Said()
    tracker = open_tracker(None, "whole", "run-7", home=home, folder=tmp_path / "run", warn=said)
    tracker.params({"model": {"name": "dcn_v2", "hidden": [64, 32]}, "note": "x" * 9000})
    for step in range(1500):  # more than one request holds
        tracker.metrics(step, {"loss": 1 / (step + 1), "slot=7/auc": math.nan})
    tracker.artifact(report)
    files = home / "mlflow-artifacts"
    until(lambda: any(path.read_text() for path in files.rglob("report.json")))
    tracker.close("FINISHED")
    assert said.lines == []
    assert capfd.readouterr() == ("", "")
    assert list(elsewhere.iterdir()) == []  # no ./mlruns
    with reading(sqlite(home)) as client:
        run = the_run(client, "whole")
        assert (run.info.run_name, run.info.status) == ("run-7", "FINISHED")
        assert run.data.params["model.name"] == "dcn_v2"
        assert run.data.params["model.hidden"] == "[64, 32]"
        assert len(run.data.params["note"]) == 500
        assert history(client, run, "loss") == [(step, 1 / (step + 1)) for step in range(1500)]
        assert len(history(client, run, "slot_7/auc")) == 1500
        (artifact,) = client.list_artifacts(run.info.run_id)
        assert artifact.path == "report.json"


def test_restarted_run_continues_the_same_mlflow_run(home: Path, tmp_path: Path) -> None:
    def start(steps: range, epochs: int, status: str) -> None:
        said = Said()
        tracker = MlflowTracker(sqlite(home), "again", "run", folder=tmp_path, warn=said, patience=PATIENCE)
        tracker.params({"dim": 9, "epochs": epochs})
        for step in steps:
            tracker.metrics(step, {"loss": float(step)})
        tracker.close(status)  # type: ignore[arg-type]
        assert said.lines == []

    start(range(50), 1, "FAILED")
    start(range(30, 80), 2, "FINISHED")  # from a checkpoint at step 30
    with reading(sqlite(home)) as client:
        run = the_run(client, "again")
        assert history(client, run, "loss") == [(step, float(step)) for step in range(80)]
        assert run.info.status == "FINISHED"
        assert run.data.params == {"dim": "9", "epochs": "1"}  # MLflow changes none
        assert run.data.tags["changed.epochs"] == "2"
        assert "changed.dim" not in run.data.tags


TRAINING = """
import sys, itertools, time
from pathlib import Path
from clickline.training.tracking import MlflowTracker
tracker = MlflowTracker(sys.argv[1], "killed", "run", folder=Path(sys.argv[2]), warn=lambda line: print(line))
for step in itertools.count():
    tracker.metrics(step, {"loss": float(step)})
    time.sleep(0.01)
"""


def test_killed_training_continues_the_same_mlflow_run(home: Path, tmp_path: Path) -> None:
    with reading(sqlite(home)) as client:
        training = subprocess.Popen(
            [sys.executable, "-c", TRAINING, sqlite(home), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:

            def has_points() -> bool:
                found = client.get_experiment_by_name("killed")
                runs = client.search_runs([found.experiment_id]) if found else []
                return bool(runs and runs[0].data.metrics)

            until(has_points)
        finally:
            training.kill()
            output, _ = training.communicate()
        assert output == b""
        run = the_run(client, "killed")
        assert run.info.status == "RUNNING"
        last = history(client, run, "loss")[-1][0]
        said = Said()
        tracker = MlflowTracker(sqlite(home), "killed", "run", folder=tmp_path, warn=said, patience=PATIENCE)
        for step in range(last + 2000):
            tracker.metrics(step, {"loss": float(step)})
        tracker.close("FINISHED")
        assert said.lines == []
        run = the_run(client, "killed")
        steps = [step for step, _ in history(client, run, "loss")]
        assert steps == sorted(set(steps)) == list(range(last + 2000))


def test_partially_created_store_is_never_used(tmp_path: Path) -> None:
    said = Said()
    tracker = MlflowTracker(sqlite(tmp_path), "half", "run", folder=tmp_path / "r", warn=said, patience=0.0)
    tracker.metrics(1, {"loss": 0.5})
    until(lambda: any(path.stat().st_size for path in tmp_path.glob(".mlflow.db.*")))
    tracker.close("KILLED")  # in the middle of MLflow's migrations
    assert not (tmp_path / "mlflow.db").exists()
    assert (tmp_path / "r" / "tracking-unsent.jsonl").exists()
    tracker = MlflowTracker(
        sqlite(tmp_path), "half", "run", folder=tmp_path / "r", warn=said, patience=PATIENCE
    )
    tracker.close("FINISHED")
    assert len(said.lines) == 1
    with reading(sqlite(tmp_path)) as client:
        assert history(client, the_run(client, "half"), "loss") == [(1, 0.5)]


def test_unreachable_server_costs_nothing_and_loses_nothing(home: Path, tmp_path: Path) -> None:
    port = unused_port()
    said = Said()
    tracker = MlflowTracker(
        f"http://me:hunter22@127.0.0.1:{port}",
        "later",
        "run",
        folder=tmp_path,
        warn=said,
        patience=PATIENCE,
    )
    away = said.next()
    assert away.startswith(f"tracking: http://***@127.0.0.1:{port}: it does not answer. Training continues;")
    for step in range(1000):
        tracker.metrics(step, {"loss": float(step)})
    tracker.params({"dim": 9})
    tracker.close("FINISHED")
    assert len(said.lines) == 2  # however often it was tried
    assert "The metrics of 1,000 steps, 1 parameters and 0 files were not sent" in said.lines[1]
    assert "hunter22" not in "".join(said.lines)
    unsent = tmp_path / "tracking-unsent.jsonl"
    assert len(unsent.read_text().splitlines()) == 1001

    # The next start, with a store that is there, sends both.
    said = Said()
    tracker = MlflowTracker(sqlite(home), "later", "run", folder=tmp_path, warn=said, patience=PATIENCE)
    tracker.metrics(1000, {"loss": 1000.0})
    tracker.close("FINISHED")
    assert said.lines == []
    assert not unsent.exists()
    with reading(sqlite(home)) as client:
        run = the_run(client, "later")
        assert run.data.params == {"dim": "9"}
        assert history(client, run, "loss") == [(step, float(step)) for step in range(1001)]


def test_server_that_accepts_connections_but_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        hole.settimeout(PATIENCE)
        said = Said()
        uri = f"http://127.0.0.1:{hole.getsockname()[1]}"
        tracker = MlflowTracker(uri, "hole", "run", folder=tmp_path, warn=said, patience=0.5)
        caller, _ = hole.accept()  # from here on a request hangs
        with caller:
            for step in range(1000):
                tracker.metrics(step, {"loss": 0.5})
            assert said.lines == []  # all calls came back while it was still hanging
            tracker.close("KILLED")
            assert b"api/2.0/mlflow" in caller.recv(65536)
            caller.settimeout(PATIENCE)
            while caller.recv(65536):
                pass  # the other end is closed: no process of ours is left waiting
    (line,) = said.lines
    assert "it was too slow, and the run is over. The metrics of 1,000 steps" in line


@contextmanager
def server(home: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real tracking server on the loopback address, killed with all its processes at the end."""
    with (home / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--backend-store-uri", sqlite(home), "--artifacts-destination", str(home / "served")),
            ],
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            },
            start_new_session=True,
            cwd=home,
        )
    try:

        def healthy() -> bool:
            assert process.poll() is None, (home / "server.log").read_text()[-2000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        until(healthy)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_restarted_server_gets_everything_once(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = unused_port()
    said = Said()
    with server(home, port):
        tracker = MlflowTracker(
            f"http://me:hunter22@127.0.0.1:{port}",
            "served",
            "run",
            folder=tmp_path / "run",
            warn=said,
            patience=PATIENCE,
        )
        tracker.params({"dim": 9})
        for step in range(100):
            tracker.metrics(step, {"loss": float(step)})

        def arrived() -> bool:
            with reading(sqlite(home)) as client:
                found = client.get_experiment_by_name("served")
                runs = client.search_runs([found.experiment_id]) if found else []
                return bool(runs and runs[0].data.metrics.get("loss") == 99.0)

        until(arrived)
    for step in range(100, 200):
        tracker.metrics(step, {"loss": float(step)})
    assert "it does not answer. Training continues; its metrics are kept and sent later." in said.next()
    with server(home, port):
        assert "is reachable again; the kept metrics are being sent." in said.next()
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"auc": 0.7}))
        tracker.artifact(report)
        tracker.close("FINISHED")
        assert len(said.lines) == 2
        assert "hunter22" not in "".join(said.lines)
        with reading(f"http://127.0.0.1:{port}") as client:
            run = the_run(client, "served")
            assert run.info.status == "FINISHED"
            assert history(client, run, "loss") == [(step, float(step)) for step in range(200)]
            assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["report.json"]
    (stored,) = (home / "served").rglob("report.json")
    assert json.loads(stored.read_text()) == {"auc": 0.7}
    assert not (tmp_path / "run" / "tracking-unsent.jsonl").exists()
    assert capfd.readouterr() == ("", "")
