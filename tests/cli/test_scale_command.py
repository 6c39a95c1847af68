"""clickline scale: with a running driver, without one, and with an invalid number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from clickline_process import run

from clickline.training.cluster.job_status import (
    JobStatus,
    WorkerStatus,
    driver_lock,
    requested_workers,
    write_status,
)

CONFIG = "data: {train: data/train.tsv}\nmodel: {name: lr}\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "clickline.yaml").write_text(CONFIG)
    return tmp_path / ".clickline"


@pytest.fixture
def driven(home: Path) -> Iterator[Path]:
    """A run with two workers, which a third one has left; this process is its driver."""
    driven = home / "runs" / "abc"
    with driver_lock(home, driven):
        workers = tuple(
            WorkerStatus(f"worker-{number}", "node-0", state)
            for number, state in enumerate(("learning", "learning", "lost"))
        )
        write_status(driven, JobStatus("running", "sync", workers=workers, most=6))
        yield driven


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (1, "run abc: 2 workers are running; scaling down to 1\n"),
        (2, "run abc: 2 workers are running; nothing to change\n"),
        (
            4,
            "run abc: 2 workers are running; scaling up to 4 as the cluster has room (see `clickline status`)\n",
        ),
    ],
)
def test_driver_gets_the_requested_number(tmp_path: Path, driven: Path, workers: int, said: str) -> None:
    done = run("scale", "--workers", str(workers), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert requested_workers(driven) == workers


def test_as_json(tmp_path: Path, driven: Path) -> None:
    done = run("scale", "--workers", "3", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"run": "abc", "workers": 2, "requested": 3, "most": 6}
    assert requested_workers(driven) == 3


def test_driver_without_workers_yet(tmp_path: Path, home: Path) -> None:
    with driver_lock(home, home / "runs" / "abc"):
        done = run("scale", "--workers", "3", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(
        "run abc: no workers are running yet; scaling up to 3 as the cluster has room"
    )


@pytest.mark.parametrize("workers", ["0", "-1", "two", "4097"])
def test_invalid_number_of_workers_is_rejected(tmp_path: Path, driven: Path, workers: str) -> None:
    done = run("scale", "--workers", workers, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--workers" in done.stderr
    assert requested_workers(driven) is None


def test_missing_number_is_rejected(tmp_path: Path, driven: Path) -> None:
    done = run("scale", cwd=tmp_path)
    assert done.returncode == 2
    assert "--workers" in done.stderr


def test_more_workers_than_the_config_allows_are_rejected(tmp_path: Path, driven: Path) -> None:
    done = run("scale", "--workers", "5", "--set", "train.workers.max=4", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "--workers is 5, above train.workers.max 4. Allowed: 1 to 4.\n",
    )
    assert requested_workers(driven) is None


def test_more_workers_than_the_run_allows_are_rejected(tmp_path: Path, driven: Path) -> None:
    """The config was changed after the run started."""
    done = run("scale", "--workers", "8", "--set", "train.workers.max=9", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "run abc was started with train.workers.max 6, and 8 were requested. Request at most 6, or restart"
    )
    assert requested_workers(driven) is None


def test_scale_without_a_cluster_run_is_an_error(tmp_path: Path, home: Path) -> None:
    done = run("scale", "--workers", "2", "--json", cwd=tmp_path)
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "ClusterError"
    assert error["message"] == (
        f"no cluster training was started in {home}. `clickline train` with train.mode: cluster starts one."
    )


@pytest.mark.parametrize(
    ("state", "words"), [("done", "is done"), ("running", "died without a final status")]
)
def test_scale_after_training_is_an_error(tmp_path: Path, home: Path, state: str, words: str) -> None:
    before = home / "runs" / "abc"
    with driver_lock(home, before):
        write_status(before, JobStatus("done" if state == "done" else "running", "sync"))
    done = run("scale", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"no cluster training is running: run abc {words}. `clickline train` resumes it"
    )
    assert requested_workers(before) is None


def test_scale_with_a_remote_home_is_an_error(tmp_path: Path, driven: Path) -> None:
    done = run("scale", "--workers", "2", "--set", "home=s3://bucket/ads", cwd=tmp_path)
    assert done.returncode == 2
    assert "home" in done.stderr
