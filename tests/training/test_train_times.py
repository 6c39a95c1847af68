"""Training goes by when rows happened, and a few rows with a wrong time do not change what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from clickline.config import Config, load_config
from clickline.data.prepare.run import prepare
from clickline.pipeline.flow import TrainResult, train
from clickline.progress import Progress

START = 1_767_225_600  # 2026-01-01T00
CONFIG = """
data:
  format: csv
  train: train.csv
  eval: eval.csv
  fields: {click: label, at: time, a: slot, b: slot}
model: {embedding_dim: 4, hidden: [8]}
train: {batch_size: 128, order: time}
gate: {auc: 0.6, extra_epochs: 0}
cache: {dir: cache}
tracking: {enabled: false}
"""


def write(folder: Path, per_second: int = 1, strays: int = 0) -> Config:
    """Ten hours to learn and one to measure on; `strays` rows are dated 30 days later."""
    rng = np.random.default_rng(3)
    worth = rng.normal(0, 1, (2, 50))
    for name, hours in (("train", range(10)), ("eval", range(10, 11))):
        rows = ["click,at,a,b"]
        for hour in hours:
            for row, (a, b) in enumerate(rng.integers(0, 50, (400, 2))):
                click = rng.random() < 1 / (1 + np.exp(-worth[0, a] - worth[1, b]))
                at = START + 3600 * hour + row + (30 * 86400 if row < strays and hour == 4 else 0)
                rows.append(f"{int(click)},{at * per_second},a{a},b{b}")
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
    (folder / "clickline.yaml").write_text(CONFIG)
    return load_config(folder / "clickline.yaml", ["train.eviction={max_idle_hours: 168}"])


def trained(config: Config) -> tuple[TrainResult, dict]:
    prepare(config, Progress())
    result = train(config, Progress())
    return result, json.loads(result.report.read_text())


def test_few_rows_dated_later_do_not_empty_the_model(tmp_path):
    """Without file hours, and before the clock: no bound says that they are wrong."""
    result, report = trained(write(tmp_path, strays=5))
    assert result.checkpoint.manifest.newest_hour == START // 3600 + 9
    assert [(slot["ids"], slot["evicted"]) for slot in report["slots"]] == [(50, 0), (50, 0)]
    assert report["evaluation"]["auc"] > 0.6


def test_training_on_microseconds_gives_the_model_of_seconds(tmp_path):
    found = []
    for per_second in (1, 10**6):
        folder = tmp_path / str(per_second)
        folder.mkdir()
        found.append(trained(write(folder, per_second)))
    assert found[0][0].checkpoint.manifest.tables_sha256 == found[1][0].checkpoint.manifest.tables_sha256
    seconds, micros = (report["progressive"]["hours"] for _, report in found)
    assert seconds == micros
    assert [hour["utc"] for hour in micros] == [f"2026-01-01T{hour:02d}" for hour in range(10)]


@pytest.mark.slow
def test_evaluation_uses_the_model_after_eviction(tmp_path):
    """What the gate judges is the checkpoint that is published: its tables have lost what eviction takes."""
    from clickline.artifacts.dataset import Dataset
    from clickline.evaluation.evaluator import evaluate_rows
    from clickline.models.model import open_checkpoint
    from clickline.storage.storage import Storage

    config = write(tmp_path)
    config = load_config(tmp_path / "clickline.yaml", ["train.eviction={threshold: 35}"])
    result, report = trained(config)
    assert sum(slot["evicted"] for slot in report["slots"]) > 0
    model = open_checkpoint(result.checkpoint, threads=1)
    assert model.tables.size == sum(slot["ids"] for slot in report["slots"])
    dataset = Dataset.current(Storage(), config.home)
    rows = [
        dataset.read(Path(dataset.folder, dataset.splits["eval"].shards[shard].file), [group])
        for shard, group, _ in dataset.row_groups("eval")
    ]
    assert evaluate_rows(model.score, rows).total.auc == pytest.approx(report["evaluation"]["auc"], abs=1e-9)
