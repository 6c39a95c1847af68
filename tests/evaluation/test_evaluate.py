"""Evaluation of any checkpoint on any data: the same rows give the same metrics, and errors are explained."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import clickline
from clickline.artifacts.checkpoint import find_checkpoint, open_checkpoint_folder
from clickline.artifacts.dataset import Dataset, concat_rows
from clickline.config import load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.errors import ArtifactError, ConfigError, DataError, SourceNotFound, TooManyBadRows
from clickline.evaluation.binary_metrics import MetricCounts
from clickline.evaluation.run import evaluate
from clickline.features import encoder_kernels
from clickline.models.model import open_checkpoint
from clickline.progress import Progress
from clickline.storage.storage import Storage


class RecordingProgress(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows = 0

    def log(self, message: str) -> None:
        self.said.append(message)

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        self.rows += rows


def scored(project: Path, checkpoint: Path, split: str = "eval"):
    """All rows of a split with the scores of the model, computed naively."""
    found = open_checkpoint_folder(checkpoint)
    assert found is not None
    dataset = Dataset.current(Storage(), str(project / ".clickline"))
    shards = dataset.splits[split].shards
    rows = concat_rows(
        [dataset.read(Path(dataset.folder, shards[s].file), [g]) for s, g, _ in dataset.row_groups(split)]
    )
    return rows, open_checkpoint(found, 2).score(rows)


# ── the same rows, the same figures ────────────────────────────────────────────────────────────


def test_evaluate_gives_the_same_metrics_as_training(project, config, checkpoint):
    result = evaluate(config)
    report = json.loads((checkpoint.parent / "report.json").read_text())["evaluation"]
    measured = result.evaluation.total
    assert measured.rows == 1600
    for name in ("auc", "logloss", "calibration", "ece", "normalised_entropy", "accuracy"):
        assert getattr(measured, name) == pytest.approx(report[name], rel=1e-5), name
    rows, scores = scored(project, checkpoint)
    direct = MetricCounts()
    direct.add(rows.label_B, rows.weight_B, scores)
    assert measured == direct.metrics()


@pytest.mark.parametrize("split", ["eval", "train"])
def test_raw_logs_give_exactly_the_metrics_of_the_dataset(project, config, split):
    prepared = evaluate(config, split=split, slices=["C1", "I4"])
    raw = evaluate(config, data=[str(project / "data" / f"{split}.tsv")], slices=["C1", "I4"])
    assert raw.evaluation == prepared.evaluation
    assert len(Dataset.current(Storage(), config.home).splits[split].shards) > 3


def test_compressed_logs_and_globs_are_read(project, config):
    lines = (project / "data" / "eval.tsv").read_bytes().splitlines(keepends=True)
    (project / "more").mkdir()
    (project / "more" / "a.tsv").write_bytes(b"".join(lines[:700]))
    (project / "more" / "b.tsv.gz").write_bytes(gzip.compress(b"".join(lines[700:])))
    progress = RecordingProgress()
    raw = evaluate(config, progress, data=[str(project / "more" / "*")])
    assert raw.evaluation == evaluate(config).evaluation
    assert progress.rows == 1600


def test_dataset_is_named_by_its_folder(project, config):
    folder = Dataset.current(Storage(), config.home).folder
    elsewhere = project / "kept"
    shutil.copytree(folder, elsewhere)
    shutil.rmtree(project / ".clickline" / "datasets")
    assert evaluate(config, data=[str(elsewhere)]).evaluation.total.rows == 1600


def test_raw_logs_are_encoded_with_training_statistics(project, config, tmp_path):
    """A single row: with its own mean and quantiles it would be encoded differently."""
    first = (project / "data" / "eval.tsv").read_bytes().split(b"\n")[0]
    (tmp_path / "one.tsv").write_bytes(first + b"\n")
    alone = evaluate(config, data=[str(tmp_path / "one.tsv")]).evaluation.total
    _, scores = scored(project, find_checkpoint(None, config.home).folder)
    assert alone.mean_prediction == pytest.approx(float(scores[0]), rel=1e-5)


SOURCES = {
    "csv": "format: csv, train: data/train.csv, eval: data/eval.csv, "
    "fields: {click: label, I1: log1p, C1: slot, C2: slot, C3: slot}",
    "slots": "format: slots, train: data/train.txt, eval: data/eval.txt",
    "paddlerec": "format: paddlerec, train: data/train.txt, eval: data/eval.txt, fields: {dense_4: ignore}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SOURCES))
def test_raw_logs_of_every_format_are_read(name, tmp_path):
    made = generate(SampleOptions(format=name, rows=2000, out=tmp_path / "data", cardinality=100), Progress())
    (tmp_path / "clickline.yaml").write_text(
        f"data: {{{SOURCES[name]}}}\ncache: {{dir: cache}}\nmodel: {{embedding_dim: 2, hidden: [4]}}\n"
        "tracking: {enabled: false}\ngate: {accuracy: 0.01}\n"  # so few rows train no useful model
    )
    config = load_config(tmp_path / "clickline.yaml")
    clickline.prepare(config)
    clickline.train(config)
    (logs,) = (str(file) for file in made.files if file.name.startswith("eval."))
    slot = evaluate(config).rows.dataset.features.slots[0].name  # type: ignore[attr-defined]
    raw = evaluate(config, data=[logs], slices=[slot])
    assert raw.evaluation == evaluate(config, slices=[slot]).evaluation
    named = raw.names[slot]
    assert all(one.id in named for one in raw.evaluation.slices[slot])


@pytest.mark.slow
def test_hours_of_a_pattern_are_evaluated_separately(tmp_path):
    generate(SampleOptions(format="criteo", rows=3000, out=tmp_path / "data", hours=3), Progress())
    days = sorted(path.relative_to(tmp_path / "data") for path in (tmp_path / "data").glob("*/*"))
    hours = [f"{path.parent.name}/{path.name}" for path in days]
    dates = f"{{from: {hours[0]}, to: {hours[1]}}}"
    (tmp_path / "clickline.yaml").write_text(
        f"data: {{train: 'data/{{date}}/{{hour}}/*.tsv', dates: {dates}}}\ncache: {{dir: cache}}\n"
        "model: {embedding_dim: 2, hidden: [4]}\ntracking: {enabled: false}\n"
    )
    config = load_config(tmp_path / "clickline.yaml")
    clickline.prepare(config)
    clickline.train(config)
    with pytest.raises(DataError, match=r"has no eval rows; it has: train\. Choose one of them with --split"):
        evaluate(config)
    trained = evaluate(config, split="train")
    assert len(trained.evaluation.hours) == 2
    again = load_config(tmp_path / "clickline.yaml", [f"data.dates.to={hours[2]}"])
    later = evaluate(again, data=[str(tmp_path / "data" / "{date}" / "{hour}" / "*.tsv")])
    assert [hour.metrics.rows for hour in later.evaluation.hours] == [1000, 1000, 1000]
    for hour, known in zip(later.evaluation.hours, trained.evaluation.hours, strict=False):
        assert hour.hour == known.hour  # a network's last bits depend on how many rows it scores at once
        assert hour.metrics.logloss == pytest.approx(known.metrics.logloss, rel=1e-5)
    assert later.evaluation.hours[2].utc == f"{hours[2][:4]}-{hours[2][4:6]}-{hours[2][6:8]}T{hours[2][9:]}"


# ── bad rows ───────────────────────────────────────────────────────────────────────────────────


def test_bad_rows_are_excluded_counted_and_listed(project, config):
    lines = (project / "data" / "eval.tsv").read_bytes().splitlines(keepends=True)
    broken = project / "data" / "broken.tsv"
    broken.write_bytes(b"".join([*lines[:10], b"only\ttwo\n", *lines[10:], b"7" + lines[0][1:]]))
    result = evaluate(config, data=[str(broken)])
    assert result.evaluation == evaluate(config).evaluation
    assert result.bad == {"wrong column count": 1, "bad label": 1}
    found = json.loads(Path(result.report).read_text())["data"]
    assert found["bad"] == {"bad label": 1, "wrong column count": 1}
    assert [(row["line"], row["reason"]) for row in found["bad_rows"]] == [
        (11, "wrong column count"),
        (1602, "bad label"),
    ]


def test_too_many_bad_rows_are_an_error_with_examples(project, config):
    lines = (project / "data" / "eval.tsv").read_bytes().splitlines(keepends=True)
    broken = project / "data" / "broken.tsv"
    broken.write_bytes(b"".join([*lines[:50], b"only\ttwo\n"]))
    with pytest.raises(TooManyBadRows) as caught:
        evaluate(config, data=[str(broken)])
    assert "1 of 51 rows of" in str(caught.value)
    assert "broken.tsv:51: 2 columns, 40 expected" in str(caught.value)
    assert "raise data.max_bad_ratio" in str(caught.value)
    more = load_config(project / "clickline.yaml", ["data.max_bad_ratio=0.05"])
    assert evaluate(more, data=[str(broken)]).evaluation.total.rows == 50


def test_logs_without_rows_are_refused(project, config):
    (project / "data" / "empty.tsv").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.tsv has no rows\. Name the files with the logs"):
        evaluate(config, data=[str(project / "data" / "empty.tsv")])
    (project / "data" / "rubbish.tsv").write_bytes(b"a\nb\n")
    with pytest.raises(TooManyBadRows, match=r"2 of 2 rows of .*rubbish\.tsv are bad"):
        evaluate(
            load_config(project / "clickline.yaml", ["data.max_bad_ratio=1"]),
            data=[str(project / "data" / "rubbish.tsv")],
        )


# ── what may be wrong ──────────────────────────────────────────────────────────────────────────


def test_missing_logs_are_refused(project, config):
    with pytest.raises(SourceNotFound, match=r"nowhere\.tsv matches no file"):
        evaluate(config, data=[str(project / "nowhere.tsv")])


def test_split_option_with_raw_logs_is_refused(project, config):
    with pytest.raises(
        ConfigError, match=r"--split is train, but --data names raw logs, which have no splits"
    ):
        evaluate(config, data=[str(project / "data" / "eval.tsv")], split="train")


def test_checkpoint_given_as_data_is_refused(config, checkpoint):
    with pytest.raises(ArtifactError, match=r"has kind 'checkpoint'.*this release reads kind 'dataset'"):
        evaluate(config, data=[str(checkpoint)])


def test_dataset_with_other_features_is_refused_and_its_raw_logs_work(project):
    other = load_config(
        project / "clickline.yaml", ["data.train=data/eval.tsv", "data.fields={I3: zscore, C26: ignore}"]
    )
    model = str(next((project / ".clickline" / "runs").iterdir()))
    clickline.prepare(other)
    with pytest.raises(ArtifactError) as caught:
        evaluate(other, model=model)
    assert "not in the dataset: C26" in str(caught.value)
    assert "other statistics or transform: I3" in str(caught.value)
    assert "Name the raw logs with --data" in str(caught.value)
    assert (
        evaluate(other, model=model, data=[str(project / "data" / "eval.tsv")]).evaluation.total.rows == 1600
    )


def test_logs_without_the_models_columns_are_refused(project):
    (project / "other.txt").write_text("1 0 123:1 456:2\n1 1 123:1 456:2\n")
    other = load_config(project / "clickline.yaml", ["data.format=slots", "data.fields={}"])
    with pytest.raises(DataError, match=r"trained with the columns I1, I2, I3, I6, I7 and \d+ more"):
        evaluate(other, data=[str(project / "other.txt")])


def test_missing_checkpoint_error_names_the_command_to_run(project, config):
    shutil.rmtree(project / ".clickline" / "runs")
    with pytest.raises(ArtifactError, match=r"has no checkpoint\. Run `clickline train` first"):
        evaluate(config)


def test_model_is_found_by_checkpoint_run_or_name(config, checkpoint):
    found = [find_checkpoint(text, config.home) for text in (None, str(checkpoint), str(checkpoint.parent))]
    found.append(find_checkpoint(checkpoint.parent.name, config.home))
    assert {one.folder for one in found} == {checkpoint}


def test_newest_run_has_the_latest_checkpoint(project, config, checkpoint):
    other = checkpoint.parent.with_name("0" * 12)
    shutil.copytree(checkpoint.parent, other)
    old = checkpoint / "manifest.json"
    os.utime(old, ns=(0, old.stat().st_mtime_ns - 10**9))
    assert find_checkpoint(None, config.home).folder.parent == other
    new = other / checkpoint.name / "manifest.json"
    os.utime(new, ns=(0, old.stat().st_mtime_ns - 10**9))
    assert find_checkpoint(None, config.home).folder.parent == checkpoint.parent
    with pytest.raises(ArtifactError, match=f"newest first: {checkpoint.parent.name}, {'0' * 12}"):
        find_checkpoint("nothing", config.home)


@pytest.mark.parametrize("folder", ["data", ".clickline/datasets", "nowhere"])
def test_folder_without_a_model_is_refused_with_available_runs(project, config, checkpoint, folder):
    with pytest.raises(ArtifactError) as caught:
        evaluate(config, model=str(project / folder))
    assert "is neither a checkpoint nor a run with one. Name a folder such as" in str(caught.value)
    assert checkpoint.parent.name in str(caught.value)


def test_dataset_given_as_model_is_refused(project, config):
    with pytest.raises(ArtifactError, match="has kind 'dataset'"):
        evaluate(config, model=Dataset.current(Storage(), config.home).folder)


@pytest.mark.parametrize("name", ["dense.npz", "tables.bin"])
def test_damaged_checkpoint_is_refused(config, checkpoint, name):
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (checkpoint / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"{name}.*(damaged|checksum)"):
        evaluate(config)


def test_incomplete_checkpoint_is_refused(config, checkpoint):
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    with pytest.raises(ArtifactError, match=r"is not a manifest"):
        evaluate(config)


def test_damaged_shard_is_refused(config):
    dataset = Dataset.current(Storage(), config.home)
    shard = Path(dataset.folder, dataset.splits["eval"].shards[1].file)
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(
        ArtifactError, match=rf"{shard.name} is damaged.*[^.]\. Run `clickline prepare` again"
    ):
        evaluate(config)


# ── slices, importance, gate ───────────────────────────────────────────────────────────────────


def test_unknown_slots_are_refused_with_the_available_ones(config):
    with pytest.raises(ConfigError) as caught:
        evaluate(config, slices=["C1", "C99", "I3"])
    assert len(caught.value.mistakes) == 2
    assert "--slice C99 is not a slot of the model. Its slots: I4, I5, C1, C2," in str(caught.value)
    assert "Did you mean C9?" in str(caught.value)
    assert "--slice I3 is a dense field" in str(caught.value)


def test_slice_metrics_equal_those_of_its_rows_alone(project, config, checkpoint):
    rows, scores = scored(project, checkpoint)
    result = evaluate(config, data=[str(project / "data" / "eval.tsv")], slices=["C2"])
    slot = next(slot for slot in Dataset.current(Storage(), config.home).features.slots if slot.name == "C2")
    place = [s.name for s in Dataset.current(Storage(), config.home).features.slots].index("C2")
    texts = [
        line.split("\t")[1 + 13 + 1] for line in (project / "data" / "eval.tsv").read_text().splitlines()
    ]
    assert len(result.evaluation.slices["C2"]) == 20
    for one in result.evaluation.slices["C2"]:
        mine = rows.encoded.slots[place].ids_N == np.uint64(one.id)
        counts = MetricCounts()
        counts.add(rows.label_B[mine], rows.weight_B[mine], scores[mine])
        assert one.metrics == counts.metrics()
        name = result.name_of("C2", one.id)
        assert {text or "(missing)" for text, own in zip(texts, mine, strict=True) if own} == {name}
        if name != "(missing)":
            raw = np.frombuffer(name.encode(), np.uint8)
            assert one.id == int(
                encoder_kernels.fmix64(np.uint64(encoder_kernels.xxh64(raw, 0, raw.size)) ^ slot.salt)
            )
    shown = json.loads(Path(result.report).read_text())["evaluation"]["slices"]["C2"][0]
    assert shown["id"] == f"{result.evaluation.slices['C2'][0].id:016x}"
    assert shown["value"] == result.name_of("C2", result.evaluation.slices["C2"][0].id)


def test_frequent_values_of_a_dataset_have_names_and_others_are_hexadecimal(config):
    result = evaluate(config, slices=["C1", "C3"])
    raw = evaluate(config, data=[str(Path(config.home).parent / "data" / "eval.tsv")], slices=["C1", "C3"])
    for slot in ("C1", "C3"):
        for one in result.evaluation.slices[slot]:
            assert result.name_of(slot, one.id) in (raw.name_of(slot, one.id), f"{one.id:016x}")
        heaviest = result.evaluation.slices[slot][0].id
        assert result.name_of(slot, heaviest) == raw.name_of(slot, heaviest)


def test_bucket_slices_are_named_by_their_range(config):
    result = evaluate(config, slices=["I4", "I5"])
    names = {result.name_of("I4", one.id) for one in result.evaluation.slices["I4"]}
    slot = next(s for s in Dataset.current(Storage(), config.home).features.slots if s.name == "I4")
    assert slot.statistics is not None
    low, high = slot.statistics.edges[0], slot.statistics.edges[-1]
    assert {f"below {low:g}", f"{high:g} and more"} <= names
    powers = {result.name_of("I5", one.id) for one in result.evaluation.slices["I5"]}
    assert powers & {"1 to 2", "2 to 4", "4 to 8", "1024 to 2048"}
    assert not any(len(name) == 16 and name.isalnum() for name in powers)


def test_importance_is_reproducible_and_ranks_useful_fields_first(project, config, checkpoint):
    first = evaluate(config, importance=True, seed=4)
    again = evaluate(config, data=[str(project / "data" / "eval.tsv")], importance=True, seed=4)
    assert first.importance == again.importance
    assert first.importance != evaluate(config, importance=True, seed=5).importance
    assert first.importance is not None
    features = Dataset.current(Storage(), config.home).features
    assert {one.name for one in first.importance} == {field.name for field in features.fields}
    lost = [one.lost for one in first.importance]
    assert lost == sorted(lost, reverse=True) and lost[0] > 0.005
    # The most important field, shuffled manually.
    rows, _ = scored(project, checkpoint)
    top = first.importance[0]
    order = np.random.default_rng(1).permutation(rows.rows)
    if top.kind == "dense":
        d = [field.name for field in features.dense].index(top.name)
        dense_DB = rows.encoded.dense_DB.copy()
        dense_DB[d] = dense_DB[d, order]
        shuffled = replace(rows, encoded=replace(rows.encoded, dense_DB=dense_DB))
    else:
        s = [slot.name for slot in features.slots].index(top.name)
        slots = list(rows.encoded.slots)
        slots[s] = slots[s].take(order)
        shuffled = replace(rows, encoded=replace(rows.encoded, slots=tuple(slots)))
    model = find_checkpoint(None, config.home)
    counts = MetricCounts()
    counts.add(rows.label_B, rows.weight_B, open_checkpoint(model, 2).score(shuffled))
    expected = counts.metrics().auc
    assert expected is not None
    assert top.auc == pytest.approx(expected, abs=0.02)


def test_evaluate_reports_the_gate_without_failing(project):
    strict = load_config(project / "clickline.yaml", ["gate.auc=0.99", "gate.vs_current=-0.01"])
    verdict = evaluate(strict).verdict
    assert not verdict.passed
    assert "below gate.auc 0.99" in verdict.reasons[0] and len(verdict.reasons) == 1
    assert "gate.vs_current was not checked: there is no current version to compare with." in verdict.warnings


def test_report_is_complete_and_written_to_the_given_path(project, config, checkpoint):
    result = evaluate(config)
    run, step = checkpoint.parent.name, checkpoint.name
    dataset = Dataset.current(Storage(), config.home)
    assert Path(result.report) == project / f".clickline/evaluations/{run}-{step}-eval-of-{dataset.id}.json"
    document = json.loads(Path(result.report).read_text())
    assert document == json.loads(json.dumps(result.to_json()))
    assert document["model"] == {
        "checkpoint": str(checkpoint),
        "step": int(step.removeprefix("step-")),
        "dataset": dataset.id,
    }
    assert document["data"] == {"dataset": dataset.folder, "split": "eval"}
    assert document["evaluation"]["auc"] == result.evaluation.total.auc
    assert document["importance"] is None
    out = str(project / "reports" / "mine.json")
    assert evaluate(config, out=out).report == out
    assert json.loads(Path(out).read_text())["evaluation"] == document["evaluation"]
