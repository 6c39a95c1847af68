"""A run on a cluster is used like any other: evaluated, gated, tracked, monitored, published, interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_home import cluster_options, config_of, prepared, run, sharing
from training_doubles import Heard

import clickline
from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import registry_of
from clickline.distributed.session import RaySession
from clickline.errors import ClusterError, GateRefused
from clickline.models.model import open_checkpoint
from clickline.pipeline.flow import TrainResult
from clickline.processes import descendants, still_alive
from clickline.scoring.open_scorer import open_scorer
from clickline.storage.storage import Storage
from clickline.training import cluster_trainer
from clickline.training.cluster import monitor
from clickline.training.cluster.job_status import logs_folder, read_status, request_workers

pytestmark = pytest.mark.slow

CLICKLINE = Path(sys.executable).with_name("clickline")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("training"))


@pytest.fixture
def project(base: Path, tmp_path: Path) -> Path:
    return sharing(base, tmp_path)


class Finished:
    """A run with 160 steps and cuts, watched closely."""

    def __init__(self, project: Path) -> None:
        self.options = [
            *cluster_options(2, 2),
            "train.batch_size=60",
            "train.checkpoint_steps=40",
            "train.schedule.kind=constant",  # else the planned epochs are part of the run's name
            "train.embedding.schedule.kind=constant",
            "tracking.enabled=true",
            "gate.auc=0.55",
        ]
        self.config = config_of(project, *self.options)
        self.project = project
        self.heard = Heard()
        self.result: TrainResult = clickline.train(self.config, self.heard)


@pytest.fixture(scope="module")
def finished(
    base: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: RaySession
) -> Iterator[Finished]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "_LOOK_SECONDS", 0.05)
        patch.setattr(cluster_trainer, "_REPORT_SECONDS", 0.0)
        yield Finished(sharing(base, tmp_path_factory.mktemp("finished")))


def test_progress_shows_workers_embedding_servers_checkpoints_and_metrics(finished: Finished) -> None:
    notes = finished.heard.notes
    assert notes
    whole = r"step [\d,]+, loss 0\.\d+, AUC 0\.\d+, 2 workers \([\d,]+ \+ [\d,]+ rows/s\), 2 embedding servers \([\d,]+ ids\)"
    assert any(re.fullmatch(whole + r", last checkpoint at step [\d,]+", note) for note in notes), notes
    assert "cluster: the cluster has capacity: starting with 2 workers" in finished.heard.said


def test_status_and_logs_remain_after_the_run(finished: Finished) -> None:
    home = Path(finished.config.home)
    status: dict[str, Any] = read_status(home) or {}
    assert (status["state"], status["alive"], status["mode"]) == ("done", False, "sync")
    assert [one["name"] for one in status["workers"]] == ["worker-0", "worker-1"]
    assert [one["name"] for one in status["shards"]] == ["shard-0", "shard-1"]
    assert status["last_checkpoint"]["step"] == 160
    assert status["last_checkpoint"]["stalled"] < status["last_checkpoint"]["seconds"]
    logs = {path.name: path.read_text() for path in logs_folder(Path(status["folder"])).iterdir()}
    assert set(logs) == {
        *("driver.log", "shard-0.log", "shard-1.log", "worker-0.log", "worker-1.log"),
    }
    assert "checkpoint of step" in logs["driver.log"]
    assert "rank 0 of 2 in generation 1" in logs["worker-0.log"]
    assert "stream 0: token 1, next batch 0" in logs["shard-1.log"]
    with pytest.raises(ClusterError, match=r"no cluster training is running: run .* is done"):
        request_workers(home, 3)


def test_mlflow_gets_the_same_metrics_as_in_local_mode(finished: Finished) -> None:
    with sqlite3.connect(Path(finished.config.home, "mlflow.db")) as store:
        metrics = {key for (key,) in store.execute("select distinct key from metrics")}
        (status,) = store.execute("select status from runs").fetchone()
        params = dict(store.execute("select key, value from params").fetchall())
    store.close()
    assert {"auc", "loss", "rows_per_second", "eval_auc", "eval_logloss", "eval_calibration"} <= metrics
    assert status == "FINISHED"
    assert params["train.mode"] == "cluster"


def test_model_is_published_and_served_like_a_local_one(finished: Finished) -> None:
    config, checkpoint = finished.config, finished.result.checkpoint
    assert len(checkpoint.tables) == 2
    measured = clickline.evaluate(config).evaluation.total
    assert finished.result.evaluation is not None
    assert measured.auc == pytest.approx(finished.result.evaluation.total.auc, abs=1e-6)
    clickline.publish(config)
    registry = registry_of(config)
    dataset = Dataset.current(Storage(), config.home)
    shard = dataset.splits["eval"].shards[0]
    rows = dataset.read(Path(dataset.folder, shard.file), range(len(shard.row_groups)))
    scorer = open_scorer(registry, registry.version(1), Path(config.cache.dir), 1)
    try:
        served_B = scorer.probabilities(rows)
    finally:
        scorer.close()
    np.testing.assert_allclose(served_B, open_checkpoint(checkpoint, threads=1).score(rows), atol=1e-6)


def test_run_is_up_to_date_for_any_number_of_workers(finished: Finished) -> None:
    for workers, shards in ((2, 2), (3, 5)):
        heard = Heard()
        again = run(finished.project, *finished.options, *cluster_options(workers, shards), progress=heard)
        assert again.reused
        assert again.checkpoint.folder == finished.result.checkpoint.folder
        assert any("is up to date: same dataset, same config" in said for said in heard.said)


def test_more_epochs_resume_with_other_numbers_of_workers_and_embedding_servers(finished: Finished) -> None:
    heard = Heard()
    more = run(
        finished.project,
        *[*finished.options, *cluster_options(1, 3), "train.epochs=2", "tracking.enabled=false"],
        progress=heard,
    )
    assert not more.reused
    assert any(said.startswith("resuming from step 160 of run") for said in heard.said)
    assert more.checkpoint.step == 320
    assert len(more.checkpoint.tables) == 3
    assert more.checkpoint.manifest.run.trained_rows == 2 * 9600


def test_gate_refusal_leads_to_extra_epochs(project: Path, ray_session: RaySession) -> None:
    heard = Heard()
    with pytest.raises(GateRefused, match="the gate refused the model"):
        run(project, *cluster_options(2, 1), "gate.auc=0.99", "gate.extra_epochs=1", progress=heard)
    refused = [said for said in heard.said if said.startswith("the gate refused after")]
    assert [said.partition(":")[0] for said in refused] == [
        "the gate refused after 1 epoch",
        "the gate refused after 2 epochs",
    ]
    status = read_status(project / ".clickline") or {}
    assert status["state"] == "failed"
    (report,) = (project / ".clickline" / "runs").glob("*/report.json")
    assert json.loads(report.read_text())["checkpoint"] == "step-000000064"


def test_ctrl_c_stops_soon_and_leaves_no_process(project: Path) -> None:
    """To the whole group of processes, as a terminal does it."""
    options = [*cluster_options(2, 2), "train.epochs=200"]
    process = subprocess.Popen(
        [CLICKLINE, "train", *(part for option in options for part in ("--set", option))],
        cwd=project,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + 240
        # Past the first epoch: in its evaluation PyArrow looks for pandas, and takes a KeyboardInterrupt for "not there".
        while ((read_status(project / ".clickline") or {}).get("metrics") or {}).get("step", 0) < 15:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = list(descendants(process.pid))
        assert len(started) > 5  # Ray's own, and the roles
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        _, stderr = process.communicate(timeout=60)
        seconds = time.monotonic() - began
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    left = still_alive(started)
    while left and time.monotonic() - began < 15:
        time.sleep(0.05)
        left = still_alive(left)
    for one in left:
        one.send_signal(signal.SIGKILL)
    assert left == []
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted; run the same command again to resume"
    assert "Traceback" not in stderr
    assert seconds < 15
    status = read_status(project / ".clickline") or {}
    # Lost: on a busy machine it did not come to say so in the second and a half that Ctrl-C leaves a command.
    assert status["state"] in ("stopped", "lost")


def test_second_driver_of_a_run_is_refused(finished: Finished) -> None:
    from clickline.training.cluster.job_status import driver_lock

    run_folder = finished.result.checkpoint.folder.parent
    with (
        driver_lock(Path(finished.config.home), run_folder),
        pytest.raises(ClusterError, match="is already being trained by pid"),
    ):
        run(finished.project, *finished.options, "train.epochs=3", "tracking.enabled=false")
