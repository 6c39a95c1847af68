"""A run that is finished is not done again: the same result at once, and never another's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from training_doubles import Heard

from clickline.artifacts.checkpoint import find_checkpoint
from clickline.artifacts.manifest import as_json
from clickline.config import load_config
from clickline.errors import ArtifactError, GateRefused
from clickline.evaluation.evaluator import Evaluator
from clickline.evaluation.report.report_document import LiveEvaluation
from clickline.models.model import Model
from clickline.pipeline import flow
from clickline.pipeline.flow import TrainResult, train
from clickline.records import SlotIds
from clickline.training import run as training
from clickline.training.run_report import evaluation_from


class Runs:
    """Trains a project, and knows whether a model was built for it."""

    def __init__(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.built = 0
        self.said: list[str] = []
        build = Model.build

        def counted(*args: object) -> object:
            self.built += 1
            return build(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(Model, "build", counted)

    def train(self, *overrides: str) -> TrainResult:
        self.built = 0
        heard = Heard()
        try:
            return train(load_config(self.project / "clickline.yaml", list(overrides)), heard)
        finally:
            self.said = heard.said


@pytest.fixture
def runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(project, monkeypatch)


def test_finished_run_is_reused(runs, monkeypatch):
    first = runs.train("train.order=time")
    assert (first.reused, runs.built) == (False, 1)
    with monkeypatch.context() as patch:
        patch.setattr(training, "tracker_of", lambda *args: pytest.fail("a tracker was opened"))
        again = runs.train("train.order=time")
    assert (again.reused, runs.built) == (True, 0)
    assert (again.checkpoint.folder, again.checkpoint.step) == (
        first.checkpoint.folder,
        first.checkpoint.step,
    )
    assert again.evaluation == first.evaluation
    assert (again.verdict, again.report) == (first.verdict, first.report)
    name = first.checkpoint.folder.parent.name
    assert runs.said == [f"run {name} is up to date: same dataset, same config"]
    assert not runs.train("train.order=time", "train.seed=1").reused


@pytest.mark.slow
def test_evaluation_with_hours_slices_curves_and_custom_metrics_is_read_back():
    random = np.random.default_rng(1)
    scored_B = random.random(1000).astype(np.float32)
    label_B = (random.random(1000) < scored_B).astype(np.float32)
    own = {"mean": lambda labels, probabilities, weights: float(probabilities.mean())}
    evaluator = Evaluator(["s"], custom_metrics=own)
    hours_B = np.repeat(np.arange(490_000, 490_004, dtype=np.int32), 250)
    slot = SlotIds(np.arange(1000, dtype=np.uint64) % 3)
    evaluator.add(label_B, np.ones_like(label_B), scored_B, hours_B, {"s": slot})
    found = evaluator.evaluation()
    assert len(found.hours) == 4 and found.custom and found.curves and found.slices
    report = {"evaluation": found.to_json(), "curves": found.curves}
    assert evaluation_from(json.loads(as_json(report))) == found


@pytest.mark.slow
def test_changed_gate_is_checked_against_the_stored_metrics(runs):
    first = runs.train()
    auc = first.evaluation.total.auc
    lower = runs.train("gate.auc=0.51")
    assert (lower.reused, runs.built) == (True, 0)
    assert "only the gate was changed" in runs.said[0]
    assert json.loads(first.report.read_text())["requested"]["gate"]["auc"] == 0.51
    with pytest.raises(GateRefused, match=f"AUC is {auc:.6g}, below gate.auc 0.99") as refused:
        runs.train("gate.auc=0.99")
    assert (len(refused.value.reasons), refused.value.report) == (1, first.report)
    assert runs.built == 1  # it might have been trained on
    assert not json.loads(first.report.read_text())["gate"]["passed"]
    with pytest.raises(GateRefused):  # a refusal is not taken for a result
        runs.train("gate.auc=0.99")
    back = runs.train()
    assert (back.reused, runs.built) == (True, 0)
    assert json.loads(first.report.read_text())["gate"]["passed"]
    assert back.evaluation == first.evaluation


@pytest.mark.slow
def test_run_that_passed_against_the_current_version_stays_passed(runs, monkeypatch):
    """Once it is published it is the current version itself, over which it has no gain."""
    live: list[LiveEvaluation] = []
    monkeypatch.setattr(flow, "evaluate_live", lambda *args: (live[0] if live else None, "none yet"))
    first = runs.train("gate.vs_current=0.01")
    live.append(LiveEvaluation(1, first.evaluation))
    again = runs.train("gate.vs_current=0.01")
    assert (again.reused, runs.built) == (True, 0)
    with pytest.raises(GateRefused, match=r"gate\.vs_current requires a gain of 0\.02"):
        runs.train("gate.vs_current=0.02")
    assert runs.built == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tables.bin", "dense.npz", "manifest.json"])
def test_damaged_checkpoint_is_not_a_result(runs, name):
    first = runs.train()
    path = first.checkpoint.folder / name
    if name == "manifest.json":
        path.unlink()
        assert not runs.train().reused
        assert path.exists()
        assert runs.train().reused
        return
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(ArtifactError):
        runs.train()
    path.write_bytes(whole)
    assert runs.train().reused


@pytest.mark.slow
def test_more_epochs_or_another_stopping_rule_continue_the_run(runs):
    constant = "train.schedule={kind: constant}", "train.embedding.schedule={kind: constant}"
    first = runs.train(*constant)
    more = runs.train(*constant, "train.epochs=2")
    assert (more.reused, more.checkpoint.folder.parent) == (False, first.checkpoint.folder.parent)
    assert more.checkpoint.step == 2 * first.checkpoint.step
    assert runs.train(*constant, "train.epochs=2").reused
    rule = "train.early_stopping={patience: 1}"
    assert not runs.train(*constant, "train.epochs=2", rule).reused
    assert runs.train(*constant, "train.epochs=2", rule).reused


@pytest.mark.slow
def test_report_of_an_earlier_release_is_not_reused(runs):
    first = runs.train()
    report = json.loads(first.report.read_text())
    del report["requested"]
    first.report.write_text(json.dumps(report))
    assert not runs.train().reused
    assert runs.train().reused


@pytest.mark.slow
def test_reused_run_is_the_one_to_publish(runs):
    first = runs.train()
    second = runs.train("train.seed=1")
    home = str(runs.project / ".clickline")
    for age, result in enumerate((second, first)):  # far apart, whatever the disk's clock can tell apart
        for manifest in result.checkpoint.folder.parent.glob("step-*/manifest.json"):
            os.utime(manifest, (1_000_000 - age, 1_000_000 - age))
    assert find_checkpoint(None, home).folder == second.checkpoint.folder
    assert runs.train().reused
    assert find_checkpoint(None, home).folder == first.checkpoint.folder


@pytest.mark.slow
def test_run_without_eval_rows_is_reused(runs, tmp_path):
    from clickline.data.prepare.run import prepare

    (runs.project / ".clickline" / "datasets").unlink()
    overrides = ("data.eval=null", "gate.auc=null")
    prepare(load_config(runs.project / "clickline.yaml", list(overrides)))
    assert runs.train(*overrides).evaluation is None
    again = runs.train(*overrides)
    assert (again.reused, again.evaluation, runs.built) == (True, None, 0)
