"""The inputs of a plan, its results and its error messages."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import clickline
from clickline.artifacts.dataset import Dataset
from clickline.cli.app import app
from clickline.config import load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.errors import ClicklineError, ConfigError, DataError
from clickline.pipeline.planning.cost_probe import run_probe
from clickline.pipeline.planning.run import plan
from clickline.progress import Progress
from clickline.storage.storage import Storage

GIB = 1 << 30


def invoke(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


# A plan writes nothing: tests that only look share the trained project, where the dataset fits its logs.


# ── what it looks at ───────────────────────────────────────────────────────────────────────────


def test_plan_without_data_explains_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "clickline.yaml").write_text("data: {train: data/train.tsv}\n")
    with pytest.raises(DataError, match=r"no data to plan from: .*data/train\.tsv.*`clickline sample`"):
        plan(load_config(tmp_path / "clickline.yaml"))
    assert not (tmp_path / ".clickline").exists()


def test_prepared_dataset_is_used_if_up_to_date(trained: Path) -> None:
    config = load_config(trained / "clickline.yaml")
    found = plan(config, probe=False)
    dataset = Dataset.current(Storage(), config.home)
    report = dataset.splits["train"].report
    assert found.basis == f"dataset {dataset.id}, prepared"
    assert (found.rows.train, found.rows.eval, found.rows.exact) == (6400, 1600, True)
    assert [slot.distinct for slot in found.ids.slots] == [slot["distinct"] for slot in report["slots"]]
    assert found.ids.admitted == found.ids.distinct
    assert found.time is None
    assert json.loads(json.dumps(found.to_json()))["rows"]["batch_size"] == 256


def test_changed_logs_are_sampled(project: Path) -> None:
    config = load_config(project / "clickline.yaml")
    clickline.prepare(config)
    with (project / "data" / "train.tsv").open("ab") as file:
        file.write((project / "data" / "eval.tsv").read_bytes())
    found = plan(config, probe=False)
    assert found.basis.startswith("all of the raw logs, ")
    assert found.rows.train == 8000
    assert found.rows.eval == pytest.approx(1600, rel=0.01)
    assert any("was prepared from other logs" in line for line in found.assumptions)


def test_other_fields_need_another_dataset_but_another_model_does_not(trained: Path) -> None:
    file = trained / "clickline.yaml"
    assert plan(load_config(file, ["model.embedding_dim=16"]), probe=False).basis.startswith("dataset ")
    assert plan(load_config(file, ["data.fields.C1=ignore"]), probe=False).basis.startswith("all of the raw")


def test_dataset_is_used_if_logs_are_missing(project: Path) -> None:
    shutil.rmtree(project / "data")
    found = plan(load_config(project / "clickline.yaml"), probe=False)
    assert found.basis.startswith("dataset ")
    assert any("the raw logs were not read" in line for line in found.assumptions)


def test_sample_counts_match_prepare(trained: Path) -> None:
    """All rows are read, so nothing is extrapolated: ids agree as far as prepare's own estimate goes."""
    config = load_config(trained / "clickline.yaml")
    counted = plan(config, probe=False)
    sampled = plan(config.model_copy(update={"home": str(trained / "elsewhere")}), probe=False)
    assert sampled.rows.train == counted.rows.train
    assert sampled.rows.eval == pytest.approx(counted.rows.eval, rel=0.01)
    numbers = {"I4"}  # quantiles need statistics of all rows, which a sample does without
    for mine, theirs in zip(sampled.ids.slots, counted.ids.slots, strict=True):
        assert mine.name in numbers or mine.distinct == pytest.approx(theirs.distinct, rel=0.05, abs=1)
    assert not (trained / "elsewhere").exists()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48,000 training rows and 12,000 more."""
    folder = tmp_path_factory.mktemp("logs")
    generate(SampleOptions("criteo", 60_000, folder / "data", seed=2, cardinality=5000), Progress())
    return folder / "data"


def test_rows_and_ids_are_extrapolated_from_a_sample(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "clickline.yaml").write_text(f"data: {{train: {logs}/train.tsv, eval: {logs}/eval.tsv}}\n")
    config = load_config(tmp_path / "clickline.yaml")
    found = plan(config, probe=False, sample_bytes=3 << 20)
    assert not found.rows.exact
    assert found.rows.train == pytest.approx(48_000, rel=0.03)
    assert found.rows.eval == pytest.approx(12_000, rel=0.03)
    clickline.prepare(config)
    real = plan(config, probe=False)
    assert found.ids.distinct == pytest.approx(real.ids.distinct, rel=0.2)
    assert found.ids.low <= real.ids.distinct * 1.05
    assert found.ids.high >= real.ids.distinct * 0.95


@pytest.mark.parametrize("kind", ["hours", "gzip", "parquet"])
def test_rows_are_extrapolated_for_all_file_types(logs: Path, tmp_path: Path, kind: str) -> None:
    lines = (logs / "train.tsv").read_bytes().splitlines(keepends=True)
    data = "{train: 'part-*'}"
    if kind == "hours":  # the earlier the hour, the fewer rows
        for n, (first, last) in enumerate(pairwise([0, 1000, 5000, 12_000, 26_000, 48_000])):
            (tmp_path / f"part-{n}.tsv").write_bytes(b"".join(lines[first:last]))
    elif kind == "gzip":
        (tmp_path / "part-0.tsv.gz").write_bytes(gzip.compress(b"".join(lines), 3))
    else:
        columns = zip(*(line.decode().rstrip("\n").split("\t")[:20] for line in lines), strict=True)
        table = pa.table({f"f{n}": list(column) for n, column in enumerate(columns)})
        pq.write_table(table, tmp_path / "part-0.parquet", row_group_size=5000)
        fields = ", ".join(f"f{n}: slot" for n in range(14, 20))
        data = f"{{format: parquet, train: 'part-*', shard_size: 64KiB, fields: {{f0: label, {fields}}}}}"
    (tmp_path / "clickline.yaml").write_text(f"data: {data}\n")
    found = plan(load_config(tmp_path / "clickline.yaml"), probe=False, sample_bytes=1 << 18)
    assert found.basis.startswith("a sample of the raw logs")
    assert found.rows.train == pytest.approx(48_000, rel=0.05)


def test_empty_log_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").touch()
    (tmp_path / "clickline.yaml").write_text("data: {train: train.tsv}\n")
    with pytest.raises(DataError, match=r"no row of .*train\.tsv could be used"):
        plan(load_config(tmp_path / "clickline.yaml"), probe=False)


def test_slots_are_discovered_in_the_sample(tmp_path: Path) -> None:
    generate(SampleOptions("slots", 3000, tmp_path / "data", seed=2), Progress())
    (tmp_path / "clickline.yaml").write_text("data: {format: slots, train: data/train.txt}\n")
    config = load_config(tmp_path / "clickline.yaml")
    found = plan(config, probe=False)
    clickline.prepare(config)
    real = plan(config, probe=False)
    assert [slot.name for slot in found.ids.slots] == [slot.name for slot in real.ids.slots]
    assert found.memory.peak == pytest.approx(real.memory.peak, rel=0.05)


# ── what follows from the config ───────────────────────────────────────────────────────────────


def test_admission_and_eviction_change_the_kept_ids(trained: Path) -> None:
    file = trained / "clickline.yaml"
    plain = plan(load_config(file), probe=False)
    admitted = plan(load_config(file, ["train.admission.min_impressions=3"]), probe=False)
    assert admitted.ids.distinct == plain.ids.distinct
    assert 0 < admitted.ids.admitted < plain.ids.admitted
    assert admitted.ids.admitted + admitted.ids.candidates == pytest.approx(plain.ids.distinct, abs=2)
    assert admitted.disk.version < plain.disk.version
    evicted = plan(load_config(file, ["train.eviction={threshold: 0.35}"]), probe=False)
    assert evicted.ids.admitted == pytest.approx(plain.ids.admitted, rel=0.01)
    assert evicted.ids.kept < plain.ids.kept
    assert evicted.disk.checkpoint < plain.disk.checkpoint


def test_second_epoch_admits_candidates_of_the_first(trained: Path) -> None:
    file = trained / "clickline.yaml"
    once = plan(load_config(file, ["train.admission.min_impressions=2"]), probe=False)
    twice = plan(load_config(file, ["train.admission.min_impressions=2", "train.epochs=2"]), probe=False)
    assert twice.ids.admitted == pytest.approx(twice.ids.distinct, rel=0.01)
    assert twice.ids.candidates == once.ids.candidates  # their memory was taken in the first epoch


def test_negative_sampling_reduces_rows_and_ids(trained: Path) -> None:
    settings = ["train.negative_sampling=0.1", "train.calibration={holdout: 0.2}"]
    found = plan(load_config(trained / "clickline.yaml", settings), probe=False)
    clicks = Dataset.current(Storage(), str(trained / ".clickline")).splits["train"].report["clicks"]
    assert found.rows.learned == int((clicks + (6400 - clicks) * 0.1) * 0.8)
    assert found.ids.distinct < plan(load_config(trained / "clickline.yaml"), probe=False).ids.distinct


def test_remedies_if_it_does_not_fit(trained: Path) -> None:
    config = load_config(trained / "clickline.yaml")
    large = plan(config, probe=False, memory=64 * GIB)
    assert large.fit.train_fits
    assert large.fit.remedies == ()
    nowhere = plan(config, probe=False, memory=GIB // 4)
    assert not nowhere.fit.train_fits
    assert nowhere.fit.train_shards is None


def test_remedy_equals_the_plan_of_the_changed_config(trained: Path) -> None:
    file = trained / "clickline.yaml"
    # Dims of thousands make the tables the larger part, as they are with many ids.
    wide = "model.embedding_dim=1000"
    peak = plan(load_config(file, [wide]), probe=False).memory.peak
    found = plan(load_config(file, [wide]), probe=False, memory=int(peak * 1.05))
    assert not found.fit.train_fits
    assert found.fit.train_shards is not None
    remedies = {remedy.change: remedy for remedy in found.fit.remedies}
    for change in (
        "model.embedding_dim=500",
        "train.embedding.optimizer=rowwise_adagrad",
    ):
        planned = plan(load_config(file, [wide, change]), probe=False)
        assert remedies[change].train_peak == planned.memory.peak
        assert remedies[change].version == planned.disk.version
        assert remedies[change].fits == (planned.memory.peak <= found.fit.usable)
    assert any(remedy.fits for remedy in remedies.values())


# ── the probe ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_probe_measures_time_and_memory(trained: Path) -> None:
    config = load_config(trained / "clickline.yaml")
    found = plan(config)
    assert found.time is not None
    assert found.time.prepare is None
    assert found.time.rows_per_second > 0
    assert found.time.epoch == pytest.approx(found.time.learn + found.time.evaluate + found.time.checkpoint)
    assert found.memory.process > 100 << 20
    assert found.memory.peak == found.memory.process + found.memory.working + found.memory.tables.total


@pytest.mark.slow
def test_probe_failures_are_reported(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(trained / "clickline.yaml")
    dataset = Dataset.current(Storage(), config.home)
    with pytest.raises(ClicklineError, match="manifest"):
        run_probe(config, replace(dataset, folder=str(tmp_path)), 6400, [0])
    ended = tmp_path / "ended"
    ended.write_text("#!/bin/sh\nkill -9 $$\n")
    ended.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ended))
    with pytest.raises(ClicklineError, match=r"by signal 9 \(SIGKILL\), perhaps because memory ran out"):
        run_probe(config, dataset, 6400, [0])


# ── the command ────────────────────────────────────────────────────────────────────────────────


def test_plan_command_prints_a_table(trained: Path) -> None:
    told = invoke("--no-probe", "-q", "--memory", "300MiB", "-c", trained / "clickline.yaml")
    lines = told.splitlines()
    assert lines[0].startswith("from           dataset ")
    assert lines[1] == "rows           6,400 train, 1,600 eval"
    assert "machines with 300.0 MiB" in lines
    assert "  usable: 300.0 MiB x 0.9 = 270.0 MiB" in lines
    assert any(line.startswith("  to train, no number is enough") for line in lines)
    assert "assumptions" in lines


def test_plan_json_is_the_plan(trained: Path) -> None:
    told = json.loads(invoke("--no-probe", "--json", "-c", trained / "clickline.yaml"))
    assert told["rows"]["train"] == 6400
    assert told["fit"]["train_fits"] is True
    assert len(told["ids"]["slots"]) == 28


def test_invalid_memory_size_is_refused(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"--memory is 'much'.*16GiB"):
        invoke("--no-probe", "--memory", "much", "-c", trained / "clickline.yaml")
