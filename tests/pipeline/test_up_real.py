"""`up` on small logs with the real stages: to a scored request, with kills in between."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from up_home import Home, eventually

import clickline
from clickline.config import load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress
from servers.waiting import free_serve_ports

pytestmark = pytest.mark.slow


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Home]:
    """A home without doubles or logs yet."""
    folder = tmp_path / "ads"
    folder.mkdir()
    made = Home(folder, {})
    made.configure(
        name="ads",
        cache={"dir": "cache"},
        model={"embedding_dim": 4, "hidden": [8]},
        train={"batch_size": 128},
        gate={"auc": 0.55, "extra_epochs": 0},
        tracking={"enabled": False},
        serve={**free_serve_ports(), "processes": 2, "drain_timeout": 3},
    )
    yield made
    assert made.end() == [], "processes were left behind"


def sample(home: Home, layout: str, rows: int) -> None:
    options = SampleOptions(format=layout, rows=rows, out=home.folder / "data", seed=3, cardinality=2000)  # type: ignore[arg-type]
    generate(options, Progress())


def scored(home: Home) -> float:
    """The line that a user would paste."""
    line = eventually(lambda: home.state["stages"]["serve"]["facts"].get("curl"))  # not while it restarts
    done = subprocess.run(
        [*shlex.split(line), "-s", "--max-time", "10"], capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return float(answer["predictions"][0]["logistic"][0])


def test_csv_to_a_scored_request_with_killed_endpoints_and_parents(real: Home) -> None:
    sample(real, "csv", 6000)
    fields = {"click": "label", "I1": "log1p", "I3": "zscore", "C1": "slot", "C2": "slot", "C3": "slot"}
    real.configure(
        data={"format": "csv", "train": "data/train.csv", "eval": "data/eval.csv", "fields": fields},
        gate={"auc": 0.51, "extra_epochs": 0},
    )
    first = real.start("up")
    real.until_up(first)
    score = scored(real)
    assert 0 < score < 1
    out, err = real.output(first)
    assert "publish: done, version 1, base" in err
    assert "try it:\n  curl http://127.0.0.1:" in out

    # The endpoint's supervisor is killed: its workers drain, another takes their ports.
    supervisor = real.pid("serve")
    workers = [one for one in real.note_processes() if one.pid not in (first.pid, supervisor)]
    assert len(workers) == 2
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: real.is_up() and real.pid("serve") != supervisor)
    eventually(lambda: not any(worker.alive for worker in workers))
    assert scored(real) == score

    # The parent is killed: no process is left, and `status` reports it.
    real.note_processes()
    first.kill()
    first.wait()
    assert real.none_left()
    code, out, _ = real.run("status")
    assert (code, "crashed in stage serve (or the machine rebooted)" in out) == (1, True)

    # In the background; all is there already.
    code, out, err = real.run("up", "--detach", "--wait")
    assert code == 0
    assert "train: skipped, up to date: 38 steps" in err
    assert "try it:\n  curl http://127.0.0.1:" in out
    assert scored(real) == score
    code, out, _ = real.run("status")
    assert code == 0
    for stage in ("prepare", "train", "evaluate", "publish"):
        assert re.search(rf"{stage} +skipped +up to date", out), out
    assert "health     ready" in out
    assert re.search(r"versions +current 1; newest 1 \(base, .* ago\); 1 in total", out)
    assert '"event": "the version is current"' in real.run("logs", "serve")[1]
    code, out, _ = real.run("down")
    assert (code, out) == (0, "stopped 4 processes\n")
    assert real.none_left(1)


@pytest.mark.faults  # `make test` kills its parts: test_up_faults.py
def test_training_resumes_after_interrupt_and_kill(real: Home) -> None:
    sample(real, "criteo", 8000)
    real.configure(
        data={"train": "data/train.tsv", "eval": "data/eval.tsv"},
        train={"batch_size": 32, "epochs": 4, "checkpoint_steps": 20},
    )

    def learning() -> bool:
        """It has written a checkpoint and continues."""
        written = list((real.folder / ".clickline" / "runs").glob("*/step-*/manifest.json"))
        return bool(real.stage("train") == "running" and written)

    first = real.start("up")
    eventually(lambda: learning() or first.poll() is not None)
    real.note_processes()
    first.send_signal(signal.SIGINT)
    assert first.wait(10) == 130
    assert real.output(first)[1].endswith("interrupted; run the same command again to resume\n")
    assert real.none_left(1)

    second = real.start("up")
    eventually(lambda: "resuming from step" in real.output(second)[1] and real.state["work"])
    os.kill(real.pid("flow"), signal.SIGKILL)
    assert second.wait(10) == 1
    assert "train ended by signal 9 (SIGKILL), perhaps because memory ran out" in real.output(second)[1]

    code, out, err = real.run("up", "--no-serve", "--json")
    document = json.loads(out)
    assert (code, document["version"], document["skipped"]) == (0, 1, ["prepare"])
    assert "resuming from step" in err
    assert document["metrics"]["auc"] > 0.55

    # The same model before a stricter gate.
    code, _, err = real.run("up", "--set", "gate.auc=0.999")
    assert code == 3
    assert "below gate.auc 0.999" in err
    assert (real.stage("gate"), real.state["state"]) == ("refused", "failed")
    assert real.run("status")[1].startswith("ads: failed in stage gate at ")


def test_up_in_a_program_serves_from_a_thread(real: Home) -> None:
    sample(real, "criteo", 6000)
    real.configure(data={"train": "data/train.tsv", "eval": "data/eval.tsv"})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(clickline.up, load_config(real.file)).result(90)
        real.note_processes()
        with running, clickline.Client(running.endpoint.grpc, model="ads") as client:
            answer = client.predict([{"I1": 1, "C1": "a"}])
            assert 0 < answer.probability[0] < 1
            assert answer.version == running.version == 1
    assert real.none_left(1)
