"""One run, twenty deaths."""

from __future__ import annotations

import os
import random
import signal

import pytest
from cluster_run import ClusterRun, all_processes_end, descendants, poll
from prepared_project import copy_project, make_project

KILLS = 20
EPOCHS = 2
SETTINGS = {"train.epochs": EPOCHS, "train.batch_size": 512, "train.checkpoint_steps": 30}


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_twenty_random_kills_in_one_run(tmp_path_factory: pytest.TempPathFactory, mode: str):
    world = make_project(tmp_path_factory.mktemp("world"), 400_000)
    reference = ClusterRun(copy_project(world, tmp_path_factory.mktemp("reference")), mode, **SETTINGS)
    with all_processes_end():
        reference.start()
        reference.assert_exact(epochs=EPOCHS, seconds=600)
    run = ClusterRun(copy_project(world, tmp_path_factory.mktemp("run")), mode, reference, **SETTINGS)
    run.start()
    dice = random.Random(6)
    steps = sorted(dice.sample(range(20, reference.checkpoint.step - 20), KILLS))
    killed: list[str] = []
    for step in steps:
        run.await_step(step)
        whom = dice.choices(["worker", "shard", "driver", "raylet", "gcs_server"], [12, 3, 2, 2, 1])[0]
        if whom == "driver":
            run.kill()
            run.start()
        else:
            pid = run.child(whom) if whom in ("raylet", "gcs_server") else run.role(whom)
            os.kill(pid, signal.SIGKILL)
            poll(f"the end of {whom} {pid}", lambda pid=pid: pid not in descendants(), 10)
        killed.append(f"{whom} at step {step}")
    run.assert_exact(epochs=EPOCHS, seconds=600)
    assert len(killed) == KILLS
