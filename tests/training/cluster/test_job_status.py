"""A driver, and commands that read its status or send it a request: real processes, real files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clickline.errors import ClusterError
from clickline.training.cluster.job_status import (
    Event,
    JobMetrics,
    JobStatus,
    LeaseCounts,
    WorkerStatus,
    driver_lock,
    newest_run,
    read_status,
    request_workers,
    requested_workers,
    write_status,
)

DRIVER = """
import sys
from pathlib import Path
from clickline.training.cluster.job_status import JobStatus, driver_lock, write_status

home, run = map(Path, sys.argv[1:])
with driver_lock(home, run):
    write_status(run, JobStatus("running", "sync"))
    print("drives", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "abc"


@contextmanager
def another_driver(home: Path, run: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver in a process of its own, which drives until a line comes."""
    command = [sys.executable, "-c", DRIVER, str(home), str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "drives\n"
            yield process
        finally:
            process.kill()


def test_home_without_a_run_has_no_status(tmp_path: Path) -> None:
    assert newest_run(tmp_path) is None
    assert read_status(tmp_path) is None
    with pytest.raises(ClusterError, match=r"was started in .*train\.mode: cluster"):
        request_workers(tmp_path, 2)


def test_other_processes_read_what_the_driver_writes(tmp_path: Path, run: Path) -> None:
    with driver_lock(tmp_path, run):
        begun = read_status(tmp_path)
        assert begun is not None
        assert (begun["state"], begun["alive"], begun["pid"]) == ("starting", True, os.getpid())
        events = tuple(Event("", "resize", f"number {n}") for n in range(50))
        status = JobStatus(
            "running",
            "async",
            workers=(WorkerStatus("worker-0", "10.0.0.1", "learning", "unit 3, batch 17"),),
            leases=LeaseCounts(5, 2, 3),
            metrics=JobMetrics(step=120, auc=0.71),
            events=events,
        )
        write_status(run, status)
        found = read_status(tmp_path)
        assert found is not None
        assert (found["state"], found["alive"], found["mode"]) == ("running", True, "async")
        assert (found["run"], found["folder"]) == ("abc", str(run))
        assert (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())
        assert found["workers"][0]["at"] == "unit 3, batch 17"
        assert found["leases"] == {"todo": 5, "open": 2, "done": 3}
        assert [event["reason"] for event in found["events"]] == [f"number {n}" for n in range(30, 50)]
        write_status(run, JobStatus("done", "async"))
    ended = read_status(tmp_path)
    assert ended is not None
    assert (ended["state"], ended["alive"]) == ("done", False)


def test_a_driver_is_killed_and_the_next_one_takes_over(tmp_path: Path, run: Path) -> None:
    with another_driver(tmp_path, run) as driver:
        running = read_status(tmp_path)
        assert running is not None
        assert (running["state"], running["pid"]) == ("running", driver.pid)
        request_workers(tmp_path, 3)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        lost = read_status(tmp_path)
        assert lost is not None
        assert (lost["state"], lost["alive"]) == ("lost", False)
        with pytest.raises(ClusterError, match="run abc died without a final status"):
            request_workers(tmp_path, 4)
    with driver_lock(tmp_path, run):
        assert requested_workers(run) == 3, "a wish outlives a killed driver"
        begun = read_status(tmp_path)
        assert begun is not None
        assert begun["state"] == "starting", "not what the driver before wrote"
    assert requested_workers(run) is None, "and not one that ends by itself"


def test_a_second_driver_is_refused_by_name(tmp_path: Path, run: Path) -> None:
    with another_driver(tmp_path, run) as driver:
        words = f"run abc is already being trained by pid {driver.pid} on {socket.gethostname()}"
        with pytest.raises(ClusterError, match=words), driver_lock(tmp_path, run):
            pass
        found = read_status(tmp_path)
        assert found is not None
        assert (found["state"], found["pid"]) == ("running", driver.pid), "the first one is not disturbed"


def test_looking_does_not_keep_a_driver_from_starting(tmp_path: Path, run: Path) -> None:
    with driver_lock(tmp_path, run):
        pass
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            read_status(tmp_path)

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(20):
            with driver_lock(tmp_path, run):
                pass
    finally:
        stop.set()
        for thread in looking:
            thread.join()


def test_the_last_wish_counts(tmp_path: Path, run: Path) -> None:
    with driver_lock(tmp_path, run):
        assert requested_workers(run) is None
        request_workers(tmp_path, 2)
        request_workers(tmp_path, 5)
        assert requested_workers(run) == 5
        found = read_status(tmp_path)
        assert found is not None
        assert found["requested"] == 5, "also before the driver has seen it"


def test_status_is_of_the_run_started_last(tmp_path: Path, run: Path) -> None:
    with driver_lock(tmp_path, run), driver_lock(tmp_path, tmp_path / "runs" / "later"):
        found = read_status(tmp_path)
        assert found is not None
        assert found["run"] == "later"


def test_home_under_another_path_has_the_same_run(tmp_path: Path) -> None:
    home = tmp_path / "here"
    home.mkdir()
    with driver_lock(home, home / "runs" / "abc"):
        pass
    home.rename(tmp_path / "there")
    assert newest_run(tmp_path / "there") == tmp_path / "there" / "runs" / "abc"


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"workers": "many"}'])
def test_damaged_files_count_as_missing(tmp_path: Path, run: Path, torn: str) -> None:
    with driver_lock(tmp_path, run):
        (run / "cluster" / "scale.json").write_text(torn)
        (run / "cluster" / "status.json").write_text(torn)
        assert requested_workers(run) is None
        found = read_status(tmp_path)
        assert found is not None
        assert (found["state"], found["alive"]) == ("starting", True)
    (tmp_path / "cluster.json").write_text(torn)
    assert read_status(tmp_path) is None


def test_full_disk_costs_a_status_not_the_run(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driver_lock(tmp_path, run):
        write_status(run, JobStatus("running", "sync", metrics=JobMetrics(step=1)))

        def full(*_: object, **__: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            write_status(run, JobStatus("running", "sync", metrics=JobMetrics(step=2)))
        assert json.loads((run / "cluster" / "status.json").read_text())["metrics"]["step"] == 1
