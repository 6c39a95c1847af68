"""A small prepared project to train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from clickline.config import load_config
from clickline.data.prepare.run import prepare
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

CONFIG = """
data: {format: criteo, train: data/train.tsv, eval: data/eval.tsv, shard_size: 1MiB}
cache: {dir: cache}
model: {name: wide_deep, embedding_dim: 4, hidden: [16, 8]}
train: {batch_size: 256, checkpoint_every: 0}
gate: {auc: 0.55, extra_epochs: 0}
tracking: {enabled: false}
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20,000 synthetic rows, prepared once for all tests."""
    folder = tmp_path_factory.mktemp("prepared")
    generate(SampleOptions(format="criteo", rows=20_000, out=folder / "data", seed=5), Progress())
    (folder / "clickline.yaml").write_text(CONFIG)
    prepare(load_config(folder / "clickline.yaml"))
    return folder


@pytest.fixture
def project(prepared: Path, tmp_path: Path) -> Path:
    """A project of its own that shares the prepared dataset."""
    (tmp_path / "clickline.yaml").write_text(CONFIG)
    (tmp_path / "data").symlink_to(prepared / "data")
    (tmp_path / ".clickline").mkdir()
    (tmp_path / ".clickline" / "datasets").symlink_to(prepared / ".clickline" / "datasets")
    return tmp_path
