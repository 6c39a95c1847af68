"""kill -9 at any moment, run again: the final checkpoint is the same to the bit."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CLICKLINE = str(Path(sys.executable).with_name("clickline"))


def start(project: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [CLICKLINE, "train", "-q", "--set", "train.epochs=2", *more]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def final(project: Path) -> dict[str, str]:
    """The newest checkpoint, file by file."""
    newest = sorted(project.glob(".clickline/runs/*/step-*/manifest.json"))[-1].parent
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(newest.iterdir())} | {
        "step": newest.name
    }


def checkpoints(project: Path) -> int:
    return max(
        (int(path.parent.name[5:]) for path in project.glob(".clickline/runs/*/step-*/manifest.json")),
        default=0,
    )


@pytest.mark.faults  # `make test` has it with every option on: test_trainer_options.py
def test_final_checkpoint_is_bit_identical_after_kills_at_several_moments(
    project, tmp_path_factory, prepared
):
    undisturbed = start(project)
    assert undisturbed.wait() == 0, undisturbed.communicate()[1].decode()
    undisturbed.communicate()
    expected = final(project)
    subprocess.run(["rm", "-rf", str(project / ".clickline/runs")], check=True)
    kills = 0
    for step in (1, 30, 70, 100):
        process = start(project)
        while process.poll() is None and checkpoints(project) < step:
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    assert kills >= 3
    process = start(project)
    assert process.wait() == 0, process.communicate()[1].decode()
    process.communicate()
    assert final(project) == expected


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_training_resumes_later(project):
    process = start(project)
    while process.poll() is None and checkpoints(project) < 5:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait() == 130
    assert time.monotonic() - began < 2
    assert b"Traceback" not in process.communicate()[1]
    again = start(project)
    assert again.wait() == 0
    assert b"resuming from step" in again.communicate()[1]


@pytest.mark.slow
def test_model_below_the_gate_gets_extra_epochs_and_is_then_refused_with_exit_3(project):
    command = [CLICKLINE, "train", "--json", "--set", "gate.auc=0.99", "--set", "gate.extra_epochs=1"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "GateRefused"
    assert "below gate.auc 0.99" in error["message"]
    assert "the gate refused after 1 epoch:" in done.stderr
    assert "the gate refused after 2 epochs" in done.stderr
    (report,) = project.glob(".clickline/runs/*/report.json")
    assert json.loads(report.read_text())["gate"]["passed"] is False
