"""What `status` and `logs` show of training on a cluster, as a user types them. The driver's files are real."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from up_home import Home, eventually

from clickline.training.cluster.job_status import (
    CheckpointStatus,
    Event,
    JobMetrics,
    JobStatus,
    LeaseCounts,
    ServerStatus,
    WorkerStatus,
    driver_lock,
    logs_folder,
    request_workers,
    write_status,
)

GIB = 2**30


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def running() -> JobStatus:
    return JobStatus(
        "running",
        "async",
        generation=1,
        workers=(
            WorkerStatus("worker-0", "10.0.0.4", "learning", "unit 12, batch 7", 820_112, 6100.0, GIB),
            WorkerStatus("worker-10", "10.0.0.5", "starting"),
        ),
        shards=(ServerStatus("shard-0", "10.0.0.4", 1_204_332, 2 * GIB, 8 * GIB),),
        network=ServerStatus("network", "10.0.0.4", memory=GIB // 2),
        leases=LeaseCounts(61, 1, 12),
        last_checkpoint=CheckpointStatus(1000, ago(120), 1.25, 0.3),
        metrics=JobMetrics(1204, 2_465_792, 9_863_168, 6100.0, 0.7312, 0.4411),
        events=(
            Event(ago(60), "restart", "shard-0 crashed"),
            Event(ago(60), "resize", "worker-1 left with its node: 1 worker goes on"),
        ),
        most=4,
    )


@pytest.fixture
def run(home: Home) -> Path:
    return home.folder / ".clickline" / "runs" / "abc"


@pytest.fixture
def driven(home: Home, run: Path) -> Iterator[Path]:
    """A run whose driver is this process, started without `up`."""
    with driver_lock(run.parents[1], run):
        write_status(run, running())
        yield run


def test_status_shows_each_process_of_a_cluster_run(home: Home, driven: Path) -> None:
    request_workers(driven.parents[1], 3)
    code, out, err = home.run("status")
    assert (code, err) == (0, "")
    lines = [re.sub(r"\d+\.\d s ago|\d min \d\d s ago", "some time ago", line) for line in out.splitlines()]
    assert lines[0] == f"`clickline train` runs for {driven.parents[1]}, without `clickline up`"
    assert re.fullmatch(
        r"  cluster: running, run abc, async, driver pid \d+ on \S+, restarted from a checkpoint 1 time",
        lines[2],
    )
    assert lines[4:16] == [
        "  worker-0   10.0.0.4  learning  unit 12, batch 7   820,112 rows  6,100 rows/s  1.0 GiB",
        "  worker-10  10.0.0.5  starting",
        "  shard-0    10.0.0.4                              1,204,332 ids                2.0 GiB of 8.0 GiB (25%)",
        "  network    10.0.0.4                                                           512.0 MiB",
        "",
        "  progress   2,465,792 of 9,863,168 rows (25%), step 1,204, 6,100 rows/s, about 20 min 12 s left",
        "  metrics    AUC 0.7312, loss 0.4411",
        "  work units 12 done, 1 leased, 61 to do",
        "  checkpoint step 1,000, some time ago, took 1.2 s, stalled training for 0.3 s",
        "  decision   resize, some time ago: worker-1 left with its node: 1 worker goes on",
        "  requested  3 workers, by `clickline scale`",
        "",
    ]
    assert f"  logs       {driven}/cluster/logs" in lines


def test_cluster_status_as_json_is_the_drivers_document(home: Home, driven: Path) -> None:
    code, out, _ = home.run("status", "--json")
    document = json.loads(out)
    assert (code, document["state"]) == (0, "never")
    cluster = document["cluster"]
    assert (cluster["state"], cluster["alive"], cluster["run"]) == ("running", True, "abc")
    assert [one["name"] for one in cluster["workers"]] == ["worker-0", "worker-10"]
    assert cluster["metrics"]["auc"] == 0.7312


def test_driver_without_status_yet(home: Home, run: Path) -> None:
    with driver_lock(run.parents[1], run):
        code, out, err = home.run("status")
    assert (code, err) == (0, "")
    assert re.search(r"\n\n  cluster: starting, run abc, driver pid \d+ on \S+\n\n", out)


def test_driver_that_waits_for_resources_names_what_is_missing(home: Home, run: Path) -> None:
    with driver_lock(run.parents[1], run):
        write_status(run, JobStatus("waiting", "sync", message="waits for room: 2 workers must fit to begin"))
        out = home.run("status")[1]
    assert "  cluster: waiting, run abc, sync, " in out
    assert "  message    waits for room: 2 workers must fit to begin\n" in out


def test_crashed_driver_is_reported(home: Home, run: Path) -> None:
    with driver_lock(run.parents[1], run):
        write_status(run, running())
    code, out, _ = home.run("status")
    assert code == 1
    assert out.startswith("`clickline train` ran for ")
    assert re.search(
        r"cluster: training of run abc crashed, last update .* UTC \(.* ago\)\. "
        r"Run the same command to resume from its last checkpoint\.\n",
        out,
    )
    assert "worker-0" not in out and "left\n" not in out, "no process is shown"
    assert "  checkpoint step 1,000, " in out


def test_finished_cluster_run_is_not_shown(home: Home, run: Path) -> None:
    with driver_lock(run.parents[1], run):
        write_status(run, JobStatus("done", "sync"))
    code, out, _ = home.run("status", "--json")
    assert (code, json.loads(out)["cluster"]) == (0, None)
    assert home.run("status")[1].startswith("nothing has run in ")


def test_lost_cluster_run_is_hidden_after_a_newer_up(home: Home, run: Path) -> None:
    with driver_lock(run.parents[1], run):
        write_status(run, JobStatus("running", "sync"))
    assert home.run("up", "--no-serve", "-q")[0] == 0
    code, out, _ = home.run("status", "--json")
    document = json.loads(out)
    assert (code, document["state"], document["cluster"]) == (0, "done", None)


# ── logs ───────────────────────────────────────────────────────────────────────────────────────


def write(run: Path, role: str, second: int, text: str) -> None:
    with (logs_folder(run) / f"{role}.log").open("a") as file:
        file.write(f"2030-01-01T00:00:{second:02d}.000000Z {text}\n")


def shown(out: str) -> list[str]:
    return [line.partition(" ")[2] for line in out.splitlines()]


@pytest.mark.slow
def test_logs_of_all_roles_are_ordered_by_time(home: Home, driven: Path) -> None:
    write(driven, "worker-0", 3, "third")
    write(driven, "driver", 1, "first\n  File anywhere.py, line 1\nValueError: of a traceback")
    write(driven, "shard-0", 2, "second")
    write(driven, "worker-10", 4, "fourth")
    code, out, _ = home.run("logs")
    assert code == 0
    assert shown(out) == [
        "driver   first",
        "driver     File anywhere.py, line 1",
        "driver   ValueError: of a traceback",
        "shard-0  second",
        "worker-0 third",
        "worker-10 fourth",
    ]
    assert shown(home.run("logs", "worker")[1]) == ["worker-0 third", "worker-10 fourth"]
    assert shown(home.run("logs", "shard-0")[1]) == ["second"]
    assert shown(home.run("logs", "-n", "1")[1]) == ["worker-10 fourth"]
    assert home.run("logs", "train") == (0, "", "")
    code, _, err = home.run("logs", "shards")
    assert code == 2
    assert err == (
        "STAGE is 'shards'. Available logs: driver, shard-0, worker-0, worker-10. Allowed: up, prepare, train, "
        "evaluate, gate, publish, follow, serve, studio, driver, network, worker, worker-N, shard, shard-N.\n"
    )


def test_logs_of_stages_and_roles_are_merged(home: Home, run: Path) -> None:
    assert home.run("up", "--no-serve", "-q")[0] == 0
    with driver_lock(run.parents[1], run):
        write(run, "worker-0", 1, "later than all")
        out = home.run("logs")[1]
    assert shown(out)[0].startswith("up       ")
    assert shown(out)[-1] == "worker-0 later than all"


def test_log_follow_includes_new_workers_and_ends_with_the_driver(home: Home, run: Path) -> None:
    with driver_lock(run.parents[1], run):
        write(run, "worker-0", 1, "begins")
        following = home.start("logs", "-f", "worker")
        eventually(lambda: "begins" in home.output(following)[0])
        write(run, "worker-1", 2, "joins")
        eventually(lambda: "joins" in home.output(following)[0])
        write(run, "driver", 3, "not asked for")
        write(run, "worker-0", 4, "goes on")
        eventually(lambda: "goes on" in home.output(following)[0])
        assert following.poll() is None
    assert following.wait(10) == 0
    assert shown(home.output(following)[0]) == ["worker-0 begins", "worker-1 joins", "worker-0 goes on"]
