"""A small model, trained once, in a project that tests may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import clickline
from clickline.config import Config, load_config
from clickline.progress import Progress
from clickline.stages.sample.generate import SampleOptions, generate

# Statistics of the training rows (I3, I4) are part of the model; shards are small, so that a dataset and a log
# come in different pieces.
CONFIG = """
data:
  train: data/train.tsv
  eval: data/eval.tsv
  shard_size: 64KiB
  fields: {I3: zscore, I4: {transform: bucket, buckets: 4}, I5: {transform: bucket}}
cache: {dir: cache}
model: {embedding_dim: 4, hidden: [8]}
train: {batch_size: 256}
gate: {auc: 0.55, retries: 0}
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8,000 synthetic rows, prepared and learned once for all tests."""
    folder = tmp_path_factory.mktemp("trained")
    generate(
        SampleOptions(format="criteo", rows=8000, out=folder / "data", seed=3, cardinality=2000), Progress()
    )
    (folder / "clickline.yaml").write_text(CONFIG)
    config = load_config(folder / "clickline.yaml")
    clickline.prepare(config)
    clickline.train(config)
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy of one's own."""
    shutil.copytree(trained, tmp_path / "ads")
    return tmp_path / "ads"


@pytest.fixture
def config(project: Path) -> Config:
    return load_config(project / "clickline.yaml")


@pytest.fixture
def checkpoint(project: Path) -> Path:
    """The folder of the project's only checkpoint that counts."""
    return max((project / ".clickline" / "runs").glob("*/step-*"))
