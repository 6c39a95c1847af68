"""The report of a training: every part is what a direct count gives, and no picture stops a training."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from training_doubles import Heard

import clickline
from clickline.artifacts.dataset import Dataset, concat_rows
from clickline.config import load_config
from clickline.errors import GateRefused
from clickline.evaluation.binary_metrics import MetricCounts
from clickline.evaluation.curves import curves
from clickline.evaluation.report import report_document as documents
from clickline.models.model import open_checkpoint
from clickline.pipeline.flow import TrainResult, train
from clickline.storage.storage import Storage
from clickline.training import run as training
from clickline.training.local_trainer import LocalTrainer
from clickline.training.tracking import Tracker

KEYS = {
    "format", "run", "config", "lineage", "evaluation", "curves", "learning", "epochs", "importance",
    "importance_rows", "slot_table", "drift", "current", "gate", "notes",
}  # fmt: skip


def trained(project: Path, *overrides: str) -> tuple[TrainResult, dict, list[str]]:
    heard = Heard()
    result = train(load_config(project / "clickline.yaml", list(overrides)), heard)
    return result, json.loads(result.report.read_text()), heard.said


def rows_of(project: Path, split: str):
    dataset = Dataset.current(Storage(), str(project / ".clickline"))
    shards = dataset.splits[split].shards
    return concat_rows(
        [dataset.read(Path(dataset.folder, shards[s].file), [g]) for s, g, _ in dataset.row_groups(split)]
    )


def test_every_section_matches_a_direct_count(project):
    result, report, _ = trained(project)
    assert report.keys() >= KEYS
    dataset = Dataset.current(Storage(), str(project / ".clickline"))
    learned, rows = rows_of(project, "train"), rows_of(project, "eval")
    model = open_checkpoint(result.checkpoint, len(os.sched_getaffinity(0)))
    scores_B = model.score(rows)

    counts = MetricCounts()
    counts.add(rows.label_B, rows.weight_B, scores_B)
    assert report["curves"] == curves(counts.bins())
    assert report["curves"] == result.evaluation.curves
    assert report["evaluation"]["auc"] == counts.metrics().auc

    # Slots with few values, each value measured, by its name.
    sliced = report["evaluation"]["slices"]
    assert 1 <= len(sliced) <= 4
    slots = [slot.name for slot in dataset.features.slots]
    for name, found in sliced.items():
        ids_B = rows.encoded.slots[slots.index(name)].ids_N
        assert 2 <= len(np.unique(ids_B)) <= 64
        for one in found:
            there_B = ids_B == int(one["id"], 16)
            assert one["rows"] == there_B.sum()
            assert one["clicks"] == rows.label_B[there_B].sum()
        assert any(one["value"] for one in found)

    # Every id that was learned has a row, as nothing is admitted later or evicted here.
    table = {one["slot"]: one for one in report["slot_table"]}
    assert list(table) == [*slots, *(field.name for field in dataset.features.dense)]
    for s, name in enumerate(slots):
        known, ids_B = np.unique(learned.encoded.slots[s].ids_N), rows.encoded.slots[s].ids_N
        assert table[name]["kind"] == "slot"
        assert table[name]["ids"] == len(known)
        assert table[name]["unseen_eval"] == pytest.approx((~np.isin(ids_B, known)).mean())
        missing = dataset.features.slots[s].missing_id
        assert table[name]["missing_eval"] == pytest.approx((ids_B == missing).mean())
        assert table[name]["distinct_train"] == pytest.approx(len(known), rel=0.1)
    assert any(one["unseen_eval"] for one in table.values())
    from_files = documents.unseen_shares_in_files(result.checkpoint.tables, rows)  # as a cluster has to
    assert from_files == pytest.approx([table[name]["unseen_eval"] for name in slots])
    assert {table[field.name]["kind"] for field in dataset.features.dense} == {"dense"}

    fields = {field.name for field in dataset.features.fields}
    assert {one["name"] for one in report["importance"]} == fields
    lost = [one["lost"] for one in report["importance"]]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 0.01
    assert report["importance_rows"] == 4000

    drift = report["drift"]
    assert (drift["rows_train"], drift["rows_eval"]) == (16_000, 4000)
    assert {one["name"] for one in drift["fields"]} == fields
    by_psi = [one["psi"] for one in drift["fields"]]
    assert by_psi == sorted(by_psi, reverse=True)

    assert report["lineage"] == {
        "dataset": {
            "id": dataset.id,
            "folder": dataset.folder,
            "train_rows": 16_000,
            "eval_rows": 4000,
            "inputs": report["lineage"]["dataset"]["inputs"],
            "files": 2,
        },
        "checkpoint": {
            "folder": str(result.checkpoint.folder),
            "step": result.checkpoint.step,
            "epoch": 1,
            "trained_rows": 16_000,
        },
        "version": None,
    }
    assert [Path(one).name for one in report["lineage"]["dataset"]["inputs"]] == ["train.tsv", "eval.tsv"]
    assert report["run"]["name"] == result.checkpoint.folder.parent.name
    assert report["config"] == (result.report.parent / "resolved.yaml").read_text()
    assert report["current"] is None
    assert (
        "No other version was evaluated on these rows: there is no current version to compare with."
        in report["notes"]
    )


def test_missing_page_is_rebuilt_from_the_report(project):
    result, report, _ = trained(project)
    page = result.report.with_suffix(".html")
    first = page.read_text()
    assert report["run"]["name"] in first
    page.unlink()
    again, same, said = trained(project)
    assert again.reused
    assert page.read_text() == first
    assert same == report
    assert said == [f"run {result.report.parent.name} is up to date: same dataset, same config"]
    kept = page.stat().st_mtime_ns
    assert trained(project)[0].reused
    assert page.stat().st_mtime_ns == kept
    trained(project, "gate.auc=0.51")  # another gate, another verdict on the page
    assert page.stat().st_mtime_ns > kept


def test_without_plotly_training_continues_and_says_what_to_install(project, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "plotly", None)
        result, report, said = trained(project)
    assert report["gate"]["passed"]
    page = result.report.with_suffix(".html")
    (told,) = [one for one in said if "report.html" in one]
    assert f"{page} was not written: " in told
    assert "pip install 'clickline[report]'" in told
    assert not page.exists()
    assert trained(project)[0].reused
    assert page.exists()


def test_failure_to_write_the_page_does_not_stop_training(project, monkeypatch):
    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(documents, "write_page", broken)
    result, _, said = trained(project)
    page = result.report.with_suffix(".html")
    assert f"{page} was not written: ZeroDivisionError" in said


@pytest.mark.parametrize("auc", [0.55, 0.99])
def test_report_and_page_are_tracked_even_if_the_gate_refuses(project, monkeypatch, auc):
    sent: list[Path] = []

    class Recording(Tracker):
        def artifact(self, path: Path) -> None:
            assert path.exists()
            sent.append(path)

    monkeypatch.setattr(training, "tracker_of", lambda *args: Recording())
    with nullcontext() if auc == 0.55 else pytest.raises(GateRefused):
        trained(project, f"gate.auc={auc}")
    assert [path.name for path in sent] == ["report.json", "report.html"]


def test_report_without_eval_rows_says_what_is_missing(prepared, tmp_path):
    text = (
        (prepared / "clickline.yaml")
        .read_text()
        .replace(", eval: data/eval.tsv", "")
        .replace("auc: 0.55, ", "")
    )
    (tmp_path / "clickline.yaml").write_text(text)
    (tmp_path / "data").symlink_to(prepared / "data")
    clickline.prepare(load_config(tmp_path / "clickline.yaml"))
    _, report, _ = trained(tmp_path)
    assert report.keys() >= KEYS
    assert [report[key] for key in ("evaluation", "curves", "importance", "drift", "current")] == [None] * 5
    assert report["slot_table"][0]["ids"] > 0
    assert report["slot_table"][0]["unseen_eval"] is None
    assert any("data.eval is not set" in note for note in report["notes"])


@pytest.mark.slow
def test_live_version_is_evaluated_on_the_same_rows_or_the_report_says_why_not(project, monkeypatch):
    config = load_config(project / "clickline.yaml")
    first = train(config)
    version = clickline.publish(config).version.number
    _, report, said = trained(project, "train.seed=7")
    current = report["current"]
    assert current["version"] == version
    assert current["evaluation"]["auc"] == pytest.approx(first.evaluation.total.auc, abs=1e-4)
    assert current["evaluation"]["auc"] != report["evaluation"]["auc"]
    assert current["curves"]["roc"]["true_positive_rate"][-1] == 1.0
    assert current["slices"].keys() == report["evaluation"]["slices"].keys()
    for slot, found in current["slices"].items():
        ours = report["evaluation"]["slices"][slot]
        assert [one["id"] for one in found] == [one["id"] for one in ours]
        assert [one["value"] for one in found] == [one["value"] for one in ours]
    assert not any("No other version" in note for note in report["notes"])
    assert not any("version" in one for one in said)

    (network,) = (project / ".clickline").rglob("dense.onnx")
    network.chmod(0o644)
    network.write_bytes(network.read_bytes()[:-1] + b"x")
    _, report, _ = trained(project, "train.seed=8")
    assert report["gate"]["passed"]
    assert report["current"] is None
    assert any(
        note.startswith(
            "No other version was evaluated on these rows: the current version, 1, cannot be compared with"
        )
        for note in report["notes"]
    )
    # A gate that asks for the comparison says why there is none, and judges by what else it asks for.
    _, report, said = trained(project, "train.seed=9", "gate.vs_current=-0.1")
    (warning,) = (one for one in report["gate"]["warnings"] if "vs_current" in one)
    assert warning.startswith(
        "gate.vs_current was not checked: the current version, 1, cannot be compared with: "
    )
    assert "dense.onnx is damaged" in warning
    assert said.count(warning) == 1
    with pytest.raises(GateRefused, match=r"below gate\.auc 0\.99"):
        trained(project, "train.seed=10", "gate={vs_current: -0.1, auc: 0.99, extra_epochs: 0}")


def test_large_tables_are_not_read_for_the_report(project, monkeypatch):
    result, _, _ = trained(project)
    monkeypatch.setattr(documents, "_MAX_READ_BYTES", 1000)
    assert documents.unseen_shares_in_files(result.checkpoint.tables, rows_of(project, "eval")) is None


@pytest.mark.slow
def test_report_after_early_stopping_is_of_the_best_epoch(project):
    options = ["train.epochs=4", "train.early_stopping={patience: 1}", "train.embedding.learning_rate=0.3"]
    result, report, said = trained(project, *options)
    assert any("was the best; later epochs did not improve on it" in one for one in said)
    assert report["lineage"]["checkpoint"]["step"] == result.checkpoint.step < report["learning"]["step"][-1]
    rows = rows_of(project, "eval")
    model = open_checkpoint(result.checkpoint, len(os.sched_getaffinity(0)))
    worth, count = documents.measure_importance(model.score, rows, model.features)
    assert report["importance"] == [one.to_json() for one in worth]
    assert count == report["importance_rows"]
    known = np.unique(rows_of(project, "train").encoded.slots[5].ids_N)
    share = (~np.isin(rows.encoded.slots[5].ids_N, known)).mean()
    assert report["slot_table"][5]["unseen_eval"] == pytest.approx(share)


@pytest.mark.slow
def test_report_is_the_same_if_the_epoch_after_the_best_one_was_interrupted(project, monkeypatch):
    options = ["train.epochs=4", "train.early_stopping={patience: 1}", "train.embedding.learning_rate=0.3"]
    result, expected, _ = trained(project, *options)
    shutil.rmtree(result.report.parent)
    best, train_epoch = expected["lineage"]["checkpoint"]["epoch"], LocalTrainer.train_epoch

    def interrupted(self, state, *rest):
        if state.position.epoch == best:
            raise KeyboardInterrupt
        train_epoch(self, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "train_epoch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(project, *options)
    _, report, _ = trained(project, *options)
    for key in ("lineage", "evaluation", "importance", "slot_table", "slots", "epochs", "gate"):
        assert report[key] == expected[key], key
