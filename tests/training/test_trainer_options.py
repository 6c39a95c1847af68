"""What the config can ask of training: each option does what it says, and survives being stopped."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from training_doubles import Heard

from clickline.artifacts.checkpoint import latest_checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.config import load_config
from clickline.data.prepare.run import prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.errors import ArtifactError, ClicklineError, ConfigError, GateRefused
from clickline.models.model import open_checkpoint
from clickline.pipeline.flow import TrainResult, train
from clickline.progress import Progress
from clickline.storage.storage import Storage
from clickline.training import local_trainer as module
from clickline.training.batches import Batches
from clickline.training.train_step import TrainStep

CLICKLINE = str(Path(sys.executable).with_name("clickline"))


def run(project: Path, *overrides: str, progress: Progress | None = None) -> TrainResult:
    config = load_config(
        project / "clickline.yaml", ["train.checkpoint_every=1h", "gate.auc=null", *overrides]
    )
    return train(config, progress)


def report(result: TrainResult) -> dict:
    return json.loads(result.report.read_text())


def dataset(project: Path) -> Dataset:
    return Dataset.current(Storage(), str(project / ".clickline"))


def eval_rows(project: Path):
    found = dataset(project)
    shard = found.splits["eval"].shards[0]
    return found.read(Path(found.folder, shard.file), range(len(shard.row_groups)))


def test_restored_checkpoint_scores_like_the_trained_model(project):
    result = run(project)
    model = open_checkpoint(result.checkpoint, threads=1)
    rows = eval_rows(project)
    again = open_checkpoint(latest_checkpoint(result.checkpoint.folder.parent), threads=2)
    assert np.array_equal(model.tables.report(), again.tables.report())
    np.testing.assert_allclose(model.score(rows), again.score(rows), rtol=1e-5)


def test_slots_can_have_their_own_dims_and_poolings(project):
    result = run(project, "model.slots.C1.dim=2", "model.slots.C3.pooling=mean", "model.pooling=max")
    plan = open_checkpoint(result.checkpoint, threads=1).plan
    shapes = {slot.name: (slot.dim, slot.pooling) for slot in plan.slots}
    assert shapes["C1"] == (2, "max")
    assert shapes["C2"] == (4, "max")
    assert shapes["C3"] == (4, "mean")


def test_unknown_slot_is_reported_with_the_known_ones(project):
    with pytest.raises(ConfigError, match=r"model\.slots\.C77 is not a slot .* Its slots are C1, C2"):
        run(project, "model.slots.C77.dim=2")


@pytest.mark.slow
def test_admission_leaves_rare_ids_as_candidates(project):
    slots = report(run(project, "train.admission.min_impressions=3"))["slots"]
    everything = report(run(project))["slots"]
    assert sum(slot["candidates"] for slot in slots) > 0
    assert sum(slot["candidates"] for slot in everything) == 0
    for one, other in zip(slots, everything, strict=True):
        assert one["ids"] + one["candidates"] == other["ids"]


@pytest.mark.slow
def test_evicted_ids_are_counted_in_the_report(project):
    story = report(run(project, "train.eviction.threshold=1.5"))
    gone = {slot["name"]: slot["evicted"] for slot in story["slots"]}
    assert sum(gone.values()) > 1000
    whole = {slot["name"]: slot["ids"] for slot in report(run(project))["slots"]}
    for slot in story["slots"]:
        assert slot["ids"] + gone[slot["name"]] == whole[slot["name"]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["isotonic", "platt"])
def test_calibration_is_fitted_on_held_out_rows_and_stored(project, method):
    result = run(project, f"train.calibration.method={method}", "train.calibration.holdout=0.2")
    assert result.checkpoint.manifest.calibration["kind"] == method
    model = open_checkpoint(result.checkpoint, threads=1)
    rows = eval_rows(project)
    with_it = model.score(rows)
    model.calibration = None
    assert not np.array_equal(with_it, model.score(rows))
    learned = sum(slot["ids"] for slot in report(result)["slots"])
    assert learned < sum(slot["ids"] for slot in report(run(project))["slots"])


@pytest.mark.slow
def test_negative_sampling_trains_fewer_rows_and_stays_calibrated(project):
    whole, sampled = run(project), run(project, "train.negative_sampling=0.3")
    assert sampled.checkpoint.step < whole.checkpoint.step
    planned = sampled.checkpoint.manifest.plan["schedule"]["steps"]  # the rate must end with the rows
    assert planned == pytest.approx(sampled.checkpoint.step, rel=0.05)
    assert sampled.evaluation.total.calibration == pytest.approx(1, abs=0.15)


@pytest.mark.slow
def test_class_weights_stay_calibrated(project):
    weighted = run(project, "train.class_weights.click=4")
    assert weighted.evaluation.total.calibration == pytest.approx(1, abs=0.15)


@pytest.mark.slow
def test_early_stopping_returns_the_best_epoch(project):
    heard = Heard()
    settings = ("train.epochs=9", "train.early_stopping.patience=2", "train.embedding.learning_rate=0.5")
    result = run(project, *settings, progress=heard)
    epochs = report(result)["epochs"]
    losses = [epoch["logloss"] for epoch in epochs]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert len(epochs) == best + 3 < 9
    assert result.checkpoint.step == epochs[best]["step"]
    assert result.evaluation.total.logloss == losses[best]
    assert f"epoch {best + 1} was the best; later epochs did not improve on it" in heard.said
    again = run(project, *settings)
    assert again.checkpoint.folder == result.checkpoint.folder
    assert again.evaluation.total.logloss == losses[best]


@pytest.mark.slow
def test_gate_refusal_after_early_stopping_is_final(project):
    with pytest.raises(GateRefused):
        run(
            project,
            "train.epochs=9",
            "train.early_stopping.patience=1",
            "train.embedding.learning_rate=0.5",
            "gate.auc=0.99",
            "gate.extra_epochs=10",
        )
    epochs = json.loads(next(project.glob(".clickline/runs/*/report.json")).read_text())["epochs"]
    assert len(epochs) < 9


def test_early_stopping_without_eval_rows_is_refused(project):
    with pytest.raises(ConfigError, match=r"data\.eval is not set, but train\.early_stopping needs"):
        run(project, "train.early_stopping.patience=1", "data.eval=null")


@pytest.mark.slow
def test_best_checkpoint_is_never_pruned(project):
    result = run(project, "train.epochs=4", "train.embedding.learning_rate=0.5", "train.keep_checkpoints=1")
    epochs = report(result)["epochs"]
    best = min(epochs, key=lambda epoch: epoch["logloss"])
    kept = {int(path.name[5:]) for path in result.checkpoint.folder.parent.glob("step-*")}
    assert kept == {best["step"], epochs[-1]["step"]}


@pytest.mark.slow
def test_checkpoint_every_n_steps(project, monkeypatch):
    steps: list[int] = []
    write = module.write_checkpoint

    def watch(folder, step, *rest):
        steps.append(step)
        return write(folder, step, *rest)

    monkeypatch.setattr(module, "write_checkpoint", watch)
    result = run(project, "train.checkpoint_steps=20")
    assert steps[0] == 20
    assert all(step % 20 == 0 for step in steps[:-1])
    assert steps[-1] == result.checkpoint.step


@pytest.mark.slow
def test_warm_start_continues_from_the_earlier_model(project):
    heard = Heard()
    first = run(project)
    second = run(project, f"train.warm_start={first.checkpoint.folder}", "train.seed=1", progress=heard)
    assert f"warm start from {first.checkpoint.folder}" in heard.said
    assert second.checkpoint.folder.parent != first.checkpoint.folder.parent
    shows = [open_checkpoint(one.checkpoint, 1).tables.size for one in (first, second)]
    assert shows[0] == shows[1]
    from_run = run(project, f"train.warm_start={first.checkpoint.folder.parent}", "train.seed=1")
    assert from_run.checkpoint.folder == second.checkpoint.folder  # the same beginning: the same run


@pytest.mark.slow
def test_warm_start_from_nothing_or_other_fields_is_refused(project, tmp_path_factory):
    with pytest.raises(ArtifactError, match="neither a checkpoint nor a run with one"):
        run(project, "train.warm_start=nowhere")
    first = run(project)
    manifest = first.checkpoint.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"C7"', '"C77"'))
    with pytest.raises(ArtifactError, match=r"slots that differ from the dataset: removed: C77; added: C7\."):
        run(project, f"train.warm_start={first.checkpoint.folder}", "train.seed=1")


def test_diverged_batch_is_saved_for_inspection(project, monkeypatch):
    read = Batches._window

    def with_an_infinity(self, *which):
        rows = read(self, *which)
        rows.encoded.dense_DB[0, 700] = np.inf
        return rows

    monkeypatch.setattr(Batches, "_window", with_an_infinity)
    with pytest.raises(ClicklineError, match=r"training has diverged.* The batch was saved to .*\.parquet"):
        run(project)
    (kept,) = project.glob(".clickline/runs/*/diverged-step-000000002.parquet")
    table = pq.read_table(kept)
    assert table.num_rows == 256
    assert table.column("I1")[700 - 512].as_py() == np.inf


@pytest.mark.slow
def test_in_time_order_each_row_is_scored_before_it_is_trained_on(tmp_path):
    generate(SampleOptions(format="criteo", rows=8000, out=tmp_path / "data", hours=4), Progress())
    days = sorted(path.name for path in (tmp_path / "data").glob("2*"))
    (tmp_path / "clickline.yaml").write_text(
        "data:\n  train: data/{date}/{hour}/*.tsv\n"
        f"  dates: {{from: {days[0]}/00, to: {days[-1]}/03}}\n"
        "model: {hidden: [8]}\ntracking: {enabled: false}\ntrain: {order: time, batch_size: 100}\n"
    )
    config = load_config(tmp_path / "clickline.yaml")
    prepare(config)
    seen: list[int] = []
    learn = TrainStep.run

    def watch(self, batch):
        seen.extend(batch.rows.event_hour_B.tolist())
        return learn(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "run", watch)
        result = train(config)
    assert seen == sorted(seen)
    hours = report(result)["progressive"]["hours"]
    assert len(hours) == 4
    assert sum(hour["rows"] for hour in hours) == len(seen) == 8000
    assert hours[-1]["auc"] > hours[0]["auc"]  # the first rows were predicted by a model that knew nothing


@pytest.mark.slow
def test_custom_network_is_trained(project):
    (project / "my.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class _Net(nn.Module):\n"
        "    def __init__(self, spec):\n"
        "        super().__init__()\n"
        "        self.deep = nn.Linear(spec.width, 1)\n\n"
        "    def forward(self, inputs, wide):\n"
        "        return wide + self.deep(inputs).squeeze(1)\n\n\n"
        "def forward(spec):\n    return _Net(spec)\n\n\n"
        "def loss(labels, logits):\n"
        "    return nn.functional.binary_cross_entropy_with_logits(logits, labels)\n\n\n"
        "def optimizer(params):\n    return torch.optim.SGD(params, lr=0.05, momentum=0.9)\n\n\n"
        "def metrics():\n"
        "    return {'brier': lambda labels, probabilities, weights: float(((labels - probabilities) ** 2).mean())}\n\n\n"
        "def feed(batch):\n    print('fed')\n    return batch\n"
    )
    command = [CLICKLINE, "train", "--json", "--set", "model.name=null", "--set", "model.file=my.py"]
    told = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout)["gate"]["passed"]
    assert "fed" in told.stderr
    result = run(project, "model.name=null", "model.file=my.py")
    assert result.evaluation.total.auc > 0.55
    assert 0 < report(result)["evaluation"]["own"]["brier"] < 0.3
    with pytest.raises(ArtifactError, match=r"model\.file is not set"):
        open_checkpoint(result.checkpoint, 1)
    again = open_checkpoint(result.checkpoint, 1, project / "my.py")
    assert again.score(eval_rows(project)).shape == (4000,)
    (project / "my.py").write_text((project / "my.py").read_text() + "\n# changed\n")
    with pytest.raises(ArtifactError, match="its checksum differs"):
        open_checkpoint(result.checkpoint, 1, project / "my.py")


@pytest.mark.slow
def test_final_checkpoint_is_bit_identical_after_kills_with_every_option_on(project, tmp_path):
    settings = [
        "train.epochs=3",
        "train.early_stopping.patience=1",
        "train.embedding.learning_rate=0.3",
        "train.calibration.holdout=0.1",
        "train.negative_sampling=0.7",
        "train.admission.min_impressions=2",
        "train.eviction.threshold=0.3",
        "train.schedule.kind=cosine",
        "train.order=time",
        "train.precision=bf16",
        "model.dropout=0.2",
        "train.checkpoint_steps=3",
    ]
    command = [CLICKLINE, "train", "-q", *(part for one in settings for part in ("--set", one))]

    def final() -> dict[str, object]:
        (found,) = project.glob(".clickline/runs/*")
        newest = latest_checkpoint(found)
        files: dict[str, object] = {path.name: path.read_bytes() for path in newest.folder.iterdir()}
        report = json.loads((found / "report.json").read_text())
        del report["run"]["created"], report["learning"]  # they tell the time
        return files | {"report.json": report, "history.json": (found / "history.json").read_bytes()}

    assert subprocess.run(command, cwd=project, check=False).returncode == 0
    expected = final()
    subprocess.run(["rm", "-rf", str(project / ".clickline/runs")], check=True)
    kills = 0
    for wanted in (3, 40, 60, 75, 100):
        process = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE)
        while process.poll() is None:
            steps = [int(p.parent.name[5:]) for p in project.glob(".clickline/runs/*/step-*/manifest.json")]
            if max(steps, default=0) >= wanted:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        process.communicate()
    assert kills >= 3
    assert subprocess.run(command, cwd=project, check=False).returncode == 0
    found = final()
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.slow
def test_changed_plan_is_another_run(project):
    first = run(project)
    for change in (
        "train.embedding.l2=0.01",
        "train.precision=bf16",
        "model.dropout=0.5",
        "train.order=time",
    ):
        assert run(project, change).checkpoint.folder.parent != first.checkpoint.folder.parent
    assert dataclasses.asdict(run(project).verdict) == dataclasses.asdict(first.verdict)


@pytest.mark.slow
def test_lookup_ahead_changes_nothing(project, monkeypatch):
    def tables(result: TrainResult) -> tuple[str, str]:
        return result.checkpoint.manifest.tables_sha256, result.checkpoint.manifest.dense_sha256

    found = []
    for ahead in (False, True):
        monkeypatch.setattr(module, "should_find_ahead", lambda _, ahead=ahead: ahead)
        found.append(tables(run(project, "train.checkpoint_steps=7", "train.admission.min_impressions=2")))
        subprocess.run(["rm", "-rf", str(project / ".clickline/runs")], check=True)
    assert found[0] == found[1]
