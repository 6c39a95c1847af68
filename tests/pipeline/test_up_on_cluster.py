"""`up` with training on a cluster: to a scored request, with its processes in `status`."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from up_home import Home, eventually

from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress
from clickline.training.cluster.job_status import read_status
from servers.waiting import free_serve_ports

# `make test` has a pipeline on Ray to its endpoint in tests/deploy/pods.
pytestmark = pytest.mark.faults


@pytest.fixture
def clustered(tmp_path: Path) -> Iterator[Home]:
    """Enough epochs to look at it while it trains."""
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    folder = tmp_path / "ads"
    folder.mkdir()
    made = Home(folder, {})
    generate(
        SampleOptions(format="criteo", rows=6000, out=folder / "data", seed=3, cardinality=2000), Progress()
    )
    made.configure(
        name="ads",
        data={"train": "data/train.tsv", "eval": "data/eval.tsv"},
        cache={"dir": "cache"},
        model={"embedding_dim": 4, "hidden": [8]},
        train={
            "mode": "cluster",
            "workers": {"min": 2, "max": 2},
            "embedding_servers": 2,
            "batch_size": 64,
            "epochs": 30,
            "checkpoint_steps": 200,
        },
        gate={"extra_epochs": 0},
        tracking={"enabled": False},
        serve={**free_serve_ports(), "processes": 1, "drain_timeout": 3},
    )
    yield made
    assert made.end() == [], "processes were left behind"


def test_up_on_a_cluster_to_a_scored_request_with_processes_in_status(clustered: Home) -> None:
    up = clustered.start("up")

    def learning() -> dict[str, Any] | None:
        assert up.poll() is None, clustered.output(up)
        found = read_status(clustered.folder / ".clickline")
        return found if found and (found.get("metrics") or {}).get("step") else None

    eventually(learning, 240)
    clustered.note_processes()
    code, out, _ = clustered.run("status", "--json")
    assert code == 0
    cluster = json.loads(out)["cluster"]
    assert (cluster["state"], cluster["mode"], cluster["alive"]) == ("running", "sync", True)
    assert {one["name"] for one in cluster["workers"]} == {"worker-0", "worker-1"}
    assert [one["name"] for one in cluster["shards"]] == ["shard-0", "shard-1"]
    assert clustered.stage("train") == "running"
    code, out, _ = clustered.run("logs", "driver")
    assert code == 0 and "generation 1: worker-0, worker-1 from step 0" in out
    eventually(lambda: clustered.is_up() or up.poll() is not None, 240)
    clustered.until_up(up)
    code, out, _ = clustered.run("status", "--json")
    status = json.loads(out)
    assert status["cluster"] is None  # training is over; its result is in the stage
    assert status["stages"]["train"]["state"] == "done"
    line = clustered.state["stages"]["serve"]["facts"]["curl"]
    done = subprocess.run(
        [*shlex.split(line), "-s", "--max-time", "10"], capture_output=True, text=True, check=True
    )
    assert 0 < json.loads(done.stdout)["predictions"][0]["logistic"][0] < 1
    assert clustered.run("down")[0] == 0
    assert up.wait(60) == 0
    assert clustered.none_left()
