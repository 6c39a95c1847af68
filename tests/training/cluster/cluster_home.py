"""A small project that is trained in local mode and on a cluster, and what there is to compare."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint
from clickline.config import Config, load_config
from clickline.data.prepare.run import prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.embedding import Tables, load_snapshot, read_header
from clickline.embedding.table import Table
from clickline.models.model_plan import ModelPlan
from clickline.pipeline.flow import TrainResult, train
from clickline.progress import Progress

# Every slot is small, so that there are ids in every part of every batch; the learning rates are those of a long run.
CONFIG = """
data: {format: criteo, train: data/train.tsv, eval: data/eval.tsv, shard_size: 1MiB}
cache: {dir: cache}
model: {embedding_dim: 4, hidden: [16, 8]}
train:
  batch_size: 300
  checkpoint_every: 1h
  learning_rate: 0.0005
  embedding: {learning_rate: 0.01}
gate: {extra_epochs: 0}
tracking: {enabled: false}
"""


def prepared(
    folder: Path, rows: int = 12_000, shard_size: str = "1MiB", *, of_preset: bool = False, **sample: Any
) -> Path:
    """A project whose data are prepared; with a small model, or that of the preset."""
    generate(SampleOptions(format="criteo", rows=rows, out=folder / "data", seed=5, **sample), Progress())
    preset = files("clickline.config.presets").joinpath("criteo.yaml").read_text()
    (folder / "clickline.yaml").write_text(preset if of_preset else CONFIG)
    prepare(config_of(folder, f"data.shard_size={shard_size}"))
    return folder


def sharing(project: Path, folder: Path) -> Path:
    """Another project with the same dataset, and runs of its own: what a cluster has learned is not learned again
    because there are other workers."""
    for name in ("clickline.yaml", "data"):
        (folder / name).symlink_to(project / name)
    (folder / ".clickline").mkdir()
    (folder / ".clickline" / "datasets").symlink_to(project / ".clickline" / "datasets")
    return folder


def cluster_options(workers: int, shards: int) -> list[str]:
    """Cluster mode with so many of each, from the start."""
    return [
        "train.mode=cluster",
        f"train.workers.min={workers}",
        f"train.workers.max={workers}",
        f"train.embedding_servers={shards}",
    ]


def config_of(project: Path, *overrides: str) -> Config:
    return load_config(project / "clickline.yaml", list(overrides))


def run(project: Path, *overrides: str, progress: Progress | None = None) -> TrainResult:
    return train(config_of(project, *overrides), progress)


def rows_of(checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """All that the sparse tables hold, sorted by id: admitted rows, and candidates."""
    found: dict[str, list[NDArray[Any]]] = {"admitted": [], "candidates": []}
    place = Table.restore

    def keep(self: Table, records: NDArray[Any], *, candidates: bool) -> None:
        found["candidates" if candidates else "admitted"].append(records.copy())
        place(self, records, candidates=candidates)

    plan = ModelPlan.from_json(checkpoint.manifest.plan)
    wide = read_header(checkpoint.tables[0])["wide_optimizer"] is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "restore", keep)
        load_snapshot(Tables(**plan.tables(uses_wide=wide)), checkpoint.tables)
    return {
        kind: np.sort(np.concatenate(pieces), order="id") if pieces else np.empty(0)
        for kind, pieces in found.items()
    }


def assert_same(one: Checkpoint, other: Checkpoint, rtol: float, atol: float) -> None:
    """Counters equal exactly; weights and the state of optimizers as nearly as said."""
    assert one.step == other.step
    mine, theirs = rows_of(one), rows_of(other)
    for kind in ("admitted", "candidates"):
        assert mine[kind].dtype == theirs[kind].dtype
        assert len(mine[kind]) == len(theirs[kind])
        for field in mine[kind].dtype.names or ():
            if field in ("vector", "vector_state", "wide", "wide_state"):
                np.testing.assert_allclose(mine[kind][field], theirs[kind][field], rtol, atol, err_msg=field)
            else:
                assert np.array_equal(mine[kind][field], theirs[kind][field]), field
    assert len(mine["admitted"]) > 100
    weights, others = _dense(one), _dense(other)
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(value, others[name], rtol, atol, err_msg=name)
        else:
            assert np.array_equal(value, others[name]), name


def _dense(checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """Without what each worker draws for its own rows, and the figures by the hour, which a cluster has none of."""
    arrays = checkpoint.dense().items()
    return {name: value for name, value in arrays if name != "random" and not name.startswith("hours/")}
