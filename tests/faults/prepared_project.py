"""Prepared projects to train."""

from __future__ import annotations

from pathlib import Path

from clickline.config import load_config
from clickline.data.prepare.run import prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

CONFIG = """
data: {format: criteo, train: data/train.tsv, eval: data/eval.tsv, shard_size: 1MiB}
cache: {dir: cache}
model: {name: wide_deep, embedding_dim: 4, hidden: [16, 8]}
train:
  workers: {min: 2, max: 2}
  embedding_servers: 2
  batch_size: 256
  checkpoint_every: 1h
  checkpoint_steps: 40
gate: {auc: 0.51, extra_epochs: 0}
tracking: {enabled: false}
"""


def make_project(folder: Path, rows: int) -> Path:
    generate(SampleOptions(format="criteo", rows=rows, out=folder / "data", seed=5), Progress())
    (folder / "clickline.yaml").write_text(CONFIG)
    prepare(load_config(folder / "clickline.yaml"))
    return folder


def copy_project(world: Path, folder: Path) -> Path:
    """A project of its own with the same dataset."""
    (folder / "clickline.yaml").write_text(CONFIG)
    (folder / "data").symlink_to(world / "data")
    (folder / ".clickline").mkdir()
    (folder / ".clickline" / "datasets").symlink_to(world / ".clickline" / "datasets")
    return folder
