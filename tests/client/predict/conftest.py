"""Published models behind real servers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import Live, serving

import clickline
from clickline.config import load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress
from clickline.publishing.run import publish

SLOTS_CONFIG = """
data: {format: slots, train: data/train.txt, eval: data/eval.txt}
cache: {dir: cache}
model: {embedding_dim: 4, hidden: [8]}
train: {batch_size: 256}
tracking: {enabled: false}
"""


@pytest.fixture(scope="session")
def published(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Criteo model as version 1 of a registry."""
    folder = tmp_path_factory.mktemp("published") / "ads"
    shutil.copytree(trained, folder)
    publish(load_config(folder / "clickline.yaml"))
    return folder


@pytest.fixture(scope="session")
def live(published: Path) -> Iterator[Live]:
    """A server of the small Criteo model, for tests that do not change it."""
    with serving(published) as service:
        yield service


@pytest.fixture(scope="session")
def live_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a model whose logs have feature ids, several in some slots."""
    folder = tmp_path_factory.mktemp("slots")
    generate(
        SampleOptions(format="slots", rows=4000, out=folder / "data", seed=4, cardinality=500), Progress()
    )
    (folder / "clickline.yaml").write_text(SLOTS_CONFIG)
    config = load_config(folder / "clickline.yaml")
    clickline.prepare(config)
    clickline.train(config)
    publish(config)
    with serving(folder) as service:
        yield service
