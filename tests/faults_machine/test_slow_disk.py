"""A disk that takes its time with every reading, writing and syncing: everything takes longer, and is the same."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from faulty_machine import Machine
from service import command

from clickline.artifacts.checkpoint import latest_checkpoint
from clickline.config import Config, load_config
from clickline.publishing.run import publish
from servers.waiting import eventually

pytestmark = pytest.mark.slow
CLICKLINE = str(Path(sys.executable).with_name("clickline"))


def result(home: Path) -> dict[str, str]:
    """The newest checkpoint, file by file."""
    (run,) = (path for path in (home / "runs").iterdir() if path.is_dir())
    found = latest_checkpoint(run)
    assert found is not None
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(found.folder.iterdir())
    }


def test_training_on_a_slow_disk_gives_the_same_model(
    project: Path, tmp_path: Path, machine: Machine
) -> None:
    home = tmp_path / "slow"
    shutil.copytree(project / ".clickline" / "datasets", home / "datasets")
    machine.slow_down(3_000)
    done = subprocess.run(
        [CLICKLINE, "train", "--set", f"home={home}", "--set", "train.checkpoint_steps=10"],
        cwd=project,
        env={**os.environ, **machine.with_slow(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert result(home) == result(project / ".clickline")


def test_server_answers_while_a_version_loads_from_a_slow_disk(
    project: Path, config: Config, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(config)
    for name, value in machine.with_slow(project / ".clickline" / "registry").items():
        monkeypatch.setenv(name, value)
    with command(project) as service:
        assert service.wait_up()["version"] == 1
        machine.slow_down(100_000)
        publish(load_config(project / "clickline.yaml", ["publish.sample_rows=100"]))
        answered: list[int] = []

        def ask() -> bool:
            reply = httpx.post(service.url("/v1/models/ctr:predict"), json={"instances": [{}]}, timeout=60)
            assert reply.status_code == 200, reply.text
            answered.append(int(reply.headers["clickline-version"]))
            return answered[-1] == 2

        eventually(ask, 120)
        assert answered[0] == 1 and answered == sorted(answered)
        assert not service.log("a version was refused") and not service.log("a worker died")
