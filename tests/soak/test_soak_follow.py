"""Days of hourly training: memory stays flat, and the model stays near the best possible while one that stops training
does not.

The data drifts: half of a slot's weights change every 12 hours, and a fifth of the values of large slots are ids that
first appeared in the last hours. Thirty hours in every test run, two hundred with `make soak-parts`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import latest_checkpoint
from clickline.config import Config, load_config
from clickline.data.prepare.hour_dataset import prepare_hour
from clickline.data.sample.generate import SampleOptions, generate
from clickline.evaluation.binary_metrics import MetricCounts
from clickline.evaluation.evaluator import evaluate_rows
from clickline.models.model import open_checkpoint
from clickline.pipeline.follow import follow
from clickline.progress import Progress

FIRST = 490896  # 2026-01-01T00 in hours since 1970
ROWS = 2000  # an hour
BOUND = 2 << 20
YAML = """
name: ads
data:
  format: csv
  train: logs/{date}/{hour}/*.csv
  dates: {from: 20260101}
  fields:
    {click: label, timestamp: time, I1: log1p, I2: log1p, B1: {column: I1, transform: bucket},
     B2: {column: I2, transform: bucket}, C1: slot, C2: slot, C3: slot, C4: slot, C5: slot, C6: slot}
model: {embedding_dim: 4, hidden: [16]}
train: {embedding: {learning_rate: 0.2}, eviction: {max_idle_hours: 24}}
follow: {poll_interval: 0.05, max_table_memory: 2MiB}
tracking: {enabled: false}
cache: {dir: cache}
home: home
"""


class Enough(Exception):
    """All hours were trained."""


class Watcher(Progress):
    """Records each hour and the memory of the process after it, and keeps the model of one hour."""

    def __init__(self, folder: Path, frozen_after: int, hours: int) -> None:
        self.hours_seen: list[str] = []
        self.messages: list[str] = []
        self.resident: list[int] = []
        self._folder = folder
        self._frozen_after = frozen_after
        self._hours = hours
        self._last: Mapping[str, Any] = {}

    def log(self, message: str) -> None:
        self.messages.append(message)

    def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
        last = (facts or {}).get("last", self._last)
        if name != "follow" or last is self._last:
            return
        self._last = last
        self.hours_seen.append(last["hour"])
        self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        if len(self.hours_seen) == self._frozen_after:
            newest = max((self._folder / "home/runs/follow").glob("step-*"))
            shutil.copytree(newest, self._folder / "frozen" / newest.name)
        if len(self.hours_seen) == self._hours:
            raise Enough


@dataclass(frozen=True)
class Followed:
    """Results of following the hours."""

    watcher: Watcher
    records: list[dict[str, Any]]
    live_H: NDArray[np.float64]  # AUC before training on each hour
    frozen_L: NDArray[np.float64]  # of the model that stopped training, in the last hours
    best_H: NDArray[np.float64]  # of the true click probabilities


def followed(folder: Path, hours: int, frozen_after: int, last: int, seed: int, *overrides: str) -> Followed:
    options = SampleOptions(
        "csv", hours * ROWS, folder / "logs", hours, seed, slots=6, dense=2, cardinality=3000
    )
    generate(options, Progress())
    (folder / "clickline.yaml").write_text(YAML)
    config = load_config(folder / "clickline.yaml", overrides)
    watcher = Watcher(folder, frozen_after, hours)
    with pytest.raises(Enough):
        follow(config, watcher)
    records = [json.loads(path.read_text()) for path in sorted((folder / "home/follow/hours").iterdir())]
    live_H = np.array([record["progressive"]["auc"] for record in records])
    return Followed(watcher, records, live_H, frozen(folder, config, hours, last), best(folder))


def frozen(folder: Path, config: Config, hours: int, last: int) -> NDArray[np.float64]:
    found = latest_checkpoint(folder / "frozen")
    assert found is not None
    model = open_checkpoint(found, 1)
    aucs = []
    for hour in range(FIRST + hours - last, FIRST + hours):
        data = prepare_hour(config, hour, model.features, Progress()).dataset
        rows = [
            data.read(Path(data.folder, data.splits["train"].shards[shard].file), [group])
            for shard, group, _ in data.row_groups("train")
        ]
        aucs.append(evaluate_rows(model.score, rows).total.auc)
    return np.array(aucs, np.float64)


def best(folder: Path) -> NDArray[np.float64]:
    aucs = []
    for path in sorted((folder / "logs/truth").iterdir()):
        truth = pq.read_table(path)
        clicks_B = truth["label"].to_numpy().astype(np.float32)
        counts = MetricCounts()
        counts.add(clicks_B, np.ones_like(clicks_B), truth["p"].to_numpy())
        aucs.append(counts.metrics().auc)
    return np.array(aucs, np.float64)


@pytest.mark.parametrize(
    ("hours", "frozen_after", "last", "gain", "share"),
    [
        # This is the median of six seeds: 0.006 above the frozen one (0.0025 to 0.020), 0.86 of the way
        # (0.82 to 0.90).
        pytest.param(30, 12, 12, 0.003, 0.80, marks=pytest.mark.slow),
        # Over three seeds: 0.014 to 0.018, and 0.87 to 0.89.
        pytest.param(200, 24, 48, 0.010, 0.85, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_endless_hours(
    hours: int, frozen_after: int, last: int, gain: float, share: float, tmp_path: Path
) -> None:
    """`gain`: in AUC, over the model that stopped training; `share`: of the distance from chance to the best possible AUC."""
    made = followed(tmp_path, hours, frozen_after, last, seed=0)

    # Every hour once, in order.
    labels = [f"202601{1 + hour // 24:02d}/{hour % 24:02d}" for hour in range(hours)]
    assert made.watcher.hours_seen == labels
    assert [(r["hour"], r["state"], r["rows"]) for r in made.records] == [
        (label, "learned", ROWS) for label in labels
    ]
    newest = latest_checkpoint(tmp_path / "home/runs/follow")
    assert newest is not None
    assert newest.manifest.hourly.trained_hours == [[FIRST, FIRST + hours]]

    # Nothing grows: neither the tables, which have reached their limit, nor the process, nor the files on disk.
    assert max(record["memory"] for record in made.records) <= BOUND
    assert any("the sparse tables reached follow.max_table_memory" in line for line in made.watcher.messages)
    early, end = made.watcher.resident[hours // 4], made.watcher.resident[-1]
    assert end <= 1.1 * early, f"{early / 2**20:.0f} MiB have become {end / 2**20:.0f} MiB"
    assert len(list((tmp_path / "home/runs/follow").glob("step-*"))) == 2
    assert len(list((tmp_path / "home/registry/versions").iterdir())) < 40

    live, best = made.live_H[-last:].mean(), made.best_H[-last:].mean()
    assert live >= made.frozen_L.mean() + gain
    assert live - 0.5 >= share * (best - 0.5)
