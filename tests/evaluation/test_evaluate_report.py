"""The report of `evaluate` has the format of a training report, for any model on any rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import clickline
from clickline.artifacts.dataset import Dataset
from clickline.config import load_config
from clickline.evaluation.run import evaluate
from clickline.storage.storage import Storage

FIELDS = ("slot_table", "drift")


def report_of(checkpoint: Path) -> dict:
    return json.loads((checkpoint.parent / "report.json").read_text())


def test_evaluate_report_matches_the_training_report(config, checkpoint):
    result = evaluate(config)
    written = json.loads(Path(result.report).read_text())
    assert written == json.loads(json.dumps(result.to_json()))
    trained = report_of(checkpoint)
    only_of_training = {"requested", "checkpoint", "slots", "progressive"}
    assert trained.keys() - written.keys() == only_of_training
    assert written.keys() - trained.keys() == {"model", "data"}
    for key in FIELDS:
        assert written[key] == trained[key], key
    for name in ("id", "train_rows", "eval_rows", "inputs", "files"):
        assert written["lineage"]["dataset"][name] == trained["lineage"]["dataset"][name]
    assert written["lineage"]["checkpoint"] == {
        **trained["lineage"]["checkpoint"],
        "folder": str(checkpoint),
    }
    for name, curve in result.evaluation.curves.items():
        assert written["curves"][name] == curve
        for column, values in curve.items():
            # A score's last bits depend on the threads, so a score may change places with its neighbour.
            assert values == pytest.approx(trained["curves"][name][column], abs=5e-3), (name, column)
    assert result.page == result.report.replace(".json", ".html")
    assert written["run"]["name"] in Path(result.page).read_text()
    assert (written["learning"], written["epochs"]) == (None, [])
    assert written["importance"] is None
    assert any("report of the run" in note for note in written["notes"])
    assert any("--importance" in note for note in written["notes"])


def test_drift_of_raw_logs_is_measured_against_training_data(project, config, checkpoint):
    report = evaluate(config, data=[str(project / "data" / "eval.tsv")], importance=True).to_json()
    trained = report_of(checkpoint)
    assert report["drift"] == trained["drift"]
    assert report["importance_rows"] == 1600
    for found, wanted in zip(report["slot_table"], trained["slot_table"], strict=True):
        assert found == {**wanted, "distinct_eval": None, "missing_eval": None}
    assert any("are not counted for raw logs" in note for note in report["notes"])


def test_model_is_evaluated_without_its_training_dataset(project, config):
    dataset = Dataset.current(Storage(), config.home)
    shutil.rmtree(dataset.folder)
    report = evaluate(config, data=[str(project / "data" / "eval.tsv")]).to_json()
    assert report["evaluation"]["rows"] == 1600
    assert report["drift"] is None
    assert report["lineage"]["dataset"] is None
    assert report["slot_table"][0]["distinct_train"] is None
    assert report["slot_table"][0]["unseen_eval"] is not None
    assert any("is no longer available" in note for note in report["notes"])


@pytest.mark.slow
def test_version_is_evaluated_like_its_checkpoint(project, config, checkpoint):
    number = clickline.publish(config).version.number
    live = evaluate(config, model="current", slices=["C1"]).to_json()
    assert live["lineage"]["version"] == number
    assert live["lineage"]["checkpoint"] is None
    assert live["current"] is None
    assert any("is the current version" in note for note in live["notes"])
    trained = report_of(checkpoint)
    assert live["drift"] == trained["drift"]
    assert [one["unseen_eval"] for one in live["slot_table"]] == pytest.approx(
        [one["unseen_eval"] for one in trained["slot_table"]]
    )
    ours = evaluate(config, slices=["C1"]).to_json()
    assert ours["lineage"]["version"] is None
    current = ours["current"]
    assert current["version"] == number
    assert current["evaluation"] == {name: live["evaluation"][name] for name in current["evaluation"]}
    assert current["curves"] == live["curves"]
    assert current["slices"] == live["evaluation"]["slices"]
    assert not any("No other version" in note for note in ours["notes"])


@pytest.mark.slow
def test_live_version_that_cannot_be_scored_is_only_a_note(project, config):
    clickline.publish(config)
    (network,) = (project / ".clickline").rglob("dense.onnx")
    network.chmod(0o644)
    network.write_bytes(network.read_bytes()[:-1] + b"x")
    report = evaluate(config).to_json()
    assert report["current"] is None
    assert any("the current version, 1, cannot be compared with" in note for note in report["notes"])
    asked = load_config(project / "clickline.yaml", ["gate.vs_current=-0.01"])
    (warning,) = evaluate(asked).verdict.warnings
    assert warning.startswith(
        "gate.vs_current was not checked: the current version, 1, cannot be compared with:"
    )
    assert "dense.onnx is damaged" in warning
