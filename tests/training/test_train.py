"""Training learns what can be learned, and says what it cannot do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clickline.artifacts.checkpoint import Position, latest_checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.config import load_config
from clickline.data.prepare.run import prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.errors import ArtifactError, ClicklineError, ConfigError, DataError, GateRefused
from clickline.pipeline.flow import run_flow, train
from clickline.progress import Progress
from clickline.storage.storage import Storage
from id_counters import counters_in, direct_count


def test_training_without_a_dataset_says_what_to_do(tmp_path):
    (tmp_path / "clickline.yaml").write_text("data: {train: a.tsv}\n")
    with pytest.raises(ArtifactError, match="Run `clickline prepare` first"):
        train(load_config(tmp_path / "clickline.yaml"))


@pytest.mark.parametrize("mode", ["local", "cluster"])
def test_unsupported_settings_are_refused(project, mode):
    with pytest.raises(ConfigError, match="training needs a home on local disk"):
        train(load_config(project / "clickline.yaml", [f"train.mode={mode}", "home=memory://x"]))


def test_final_checkpoint_is_at_the_end_of_the_last_epoch(project):
    result = train(load_config(project / "clickline.yaml"))
    assert result.verdict.passed
    assert result.evaluation is not None
    assert result.evaluation.total.rows == 4000
    found = latest_checkpoint(result.checkpoint.folder.parent)
    assert found is not None
    assert found.manifest.run.position == Position(1)


@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_ids_counters_equal_a_direct_count_over_the_data(project, epochs):
    """Promise 2: nothing lost, nothing twice."""
    result = train(load_config(project / "clickline.yaml", [f"train.epochs={epochs}"]))
    dataset = Dataset.current(Storage(), str(project / ".clickline"))
    assert counters_in(result.checkpoint) == direct_count(dataset, epochs=epochs)


def test_gate_thresholds_without_eval_rows_are_refused_before_training(tmp_path):
    generate(SampleOptions(format="criteo", rows=2000, out=tmp_path / "data"), Progress())
    text = "data: {train: data/train.tsv%s}\ngate: {auc: 0.6}\nmodel: {hidden: [4]}\ntracking: {enabled: false}\n"
    (tmp_path / "clickline.yaml").write_text(text % "")
    config = load_config(tmp_path / "clickline.yaml")
    with pytest.raises(ConfigError, match=r"data\.eval is not set, but gate\.auc needs metrics"):
        run_flow(config, Progress())
    assert not (tmp_path / ".clickline").exists()  # not even prepared
    prepare(config)
    with pytest.raises(ConfigError, match=r"data\.eval is not set, but gate\.auc needs metrics"):
        train(config)
    (tmp_path / "clickline.yaml").write_text(text % ", eval: data/eval.tsv")
    with pytest.raises(DataError, match=r"has no eval rows, although data\.eval is set\. Run `clickline pre"):
        train(load_config(tmp_path / "clickline.yaml"))  # not prepared again since
    assert not (tmp_path / ".clickline" / "runs").exists()


def test_file_in_both_train_and_eval_is_reported_before_training_and_in_the_report(tmp_path):
    generate(SampleOptions(format="criteo", rows=2000, out=tmp_path / "data"), Progress())
    (tmp_path / "clickline.yaml").write_text(
        "data: {train: 'data/*.tsv', eval: data/eval.tsv}\nmodel: {hidden: [4]}\ntracking: {enabled: false}\n"
    )
    config = load_config(tmp_path / "clickline.yaml")
    prepare(config)
    said: list[str] = []

    class Heard(Progress):
        def log(self, message: str) -> None:
            said.append(message)

        def begin(self, *args, **values) -> None:
            said.append("begins")

    result = train(config, Heard())
    leak = f"data.eval: its only file is also in data.train ({tmp_path}/data/eval.tsv). The model is evaluated on its own"
    assert said[0].startswith(f"warning: {leak}") and "begins" in said[1:]
    assert json.loads(result.report.read_text())["notes"][0].startswith(leak)


def test_data_without_clicks_are_refused(tmp_path):
    clicked = "".join(f"{i % 2},{'ab'[i % 2]}\n" for i in range(600))
    (tmp_path / "clicked.csv").write_text("y,u\n" + clicked)
    (tmp_path / "shown.csv").write_text("y,u\n" + clicked.replace("1,", "0,"))
    text = "data: {{format: csv, train: {0}.csv, eval: {1}.csv, fields: {{y: label, u: slot}}}}\n"
    text += "gate: {{auc: 0.6, extra_epochs: 3}}\nmodel: {{hidden: [4]}}\ntracking: {{enabled: false}}\n"
    (tmp_path / "clickline.yaml").write_text(text.format("clicked", "shown"))
    config = load_config(tmp_path / "clickline.yaml")
    prepare(config)
    with pytest.raises(GateRefused, match="AUC could not be measured") as refused:
        train(config)
    assert len(refused.value.reasons) == 1
    assert len(json.loads(refused.value.report.read_text())["epochs"]) == 1
    (tmp_path / "clickline.yaml").write_text(text.format("shown", "clicked"))
    config = load_config(tmp_path / "clickline.yaml")
    prepare(config)
    with pytest.raises(DataError, match=r"none of the 600 training rows .* was clicked"):
        train(config)


@pytest.mark.slow
def test_most_of_the_reachable_auc_is_reached(tmp_path: Path):
    """With few ids a slot, there are enough rows to learn each; drift and new ids stay out of reach."""
    options = SampleOptions(
        format="csv", rows=200_000, out=tmp_path / "data", slots=8, dense=4, cardinality=50
    )
    best = generate(options, Progress()).best_auc
    fields = ", ".join(
        ["click: label", *(f"I{i}: log1p" for i in range(1, 5)), *(f"C{i}: slot" for i in range(1, 9))]
    )
    (tmp_path / "clickline.yaml").write_text(
        f"data: {{format: csv, train: data/train.csv, eval: data/eval.csv, fields: {{{fields}}}}}\n"
        "model: {hidden: [64, 32]}\ntrain: {batch_size: 512, epochs: 2}\ntracking: {enabled: false}\n"
    )
    config = load_config(tmp_path / "clickline.yaml")
    prepare(config)
    measured = train(config).evaluation.total
    assert measured.auc > 0.94 * best
    assert 0.9 < measured.calibration < 1.1


def test_a_missing_package_is_named_with_the_way_to_install_it(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [
        name
        for name in sys.modules
        if name.startswith(("clickline.training", "clickline.models", "clickline.pipeline.flow"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(project)
    from clickline.cli.stages import ProgressOptions
    from clickline.cli.stages import train as command

    with pytest.raises(
        ClicklineError, match=r"training needs the package torch: pip install 'clickline\[train\]'"
    ):
        command(ProgressOptions())
