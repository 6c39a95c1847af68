"""A project whose rows are prepared once, with what a run on one machine makes of them; and clusters that end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from hosts import Cluster, Training

import clickline
from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.config import load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress
from clickline.storage.storage import Storage
from id_counters import counters_in, direct_count

_CONFIG = """
data: {train: data/train.tsv, eval: data/eval.tsv, shard_size: 256KiB}
model: {embedding_dim: 4, hidden: [16]}
train: {batch_size: 128}
tracking: {enabled: false}
"""


class World(NamedTuple):
    """What every run here is compared with."""

    folder: Path
    rows: int
    counts: Mapping[int, tuple[float, float]]
    auc: float


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    folder = tmp_path_factory.mktemp("hosts")
    generate(
        SampleOptions(format="criteo", rows=40_000, out=folder / "data", seed=5, cardinality=300), Progress()
    )
    (folder / "clickline.yaml").write_text(_CONFIG)
    config = load_config(folder / "clickline.yaml")
    prepared = clickline.prepare(config)
    local = clickline.train(config)
    assert local.evaluation is not None
    shutil.rmtree(folder / ".clickline" / "runs")
    rows = prepared.dataset.splits["train"].rows
    return World(
        folder,
        rows,
        direct_count(Dataset.current(Storage(), str(folder / ".clickline"))),
        local.evaluation.total.auc,
    )


@pytest.fixture
def ads(world: World, tmp_path: Path) -> Path:
    shutil.copytree(world.folder, tmp_path / "ads")
    return tmp_path / "ads"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def exact(world: World) -> Callable[[Training, Checkpoint], None]:
    """Each row was trained once, and the model is as good as that of an undisturbed run."""

    def check(training: Training, made: Checkpoint) -> None:
        assert made.manifest.run.trained_rows == world.rows
        assert counters_in(made) == world.counts
        assert abs(training.auc() - world.auc) < 0.005, (training.auc(), world.auc)

    return check
