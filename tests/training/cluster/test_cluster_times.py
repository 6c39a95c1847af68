"""The newest hour of a cluster run is the newest trained hour, as in local mode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cluster_home import cluster_options

from clickline.config import load_config
from clickline.data.prepare.run import prepare
from clickline.distributed.session import RaySession
from clickline.pipeline.flow import train
from clickline.progress import Progress

START = 1_767_225_600  # 2026-01-01T00
CONFIG = """
data: {format: csv, train: train.csv, fields: {click: label, at: time, a: slot}}
model: {embedding_dim: 4, hidden: [8]}
train: {batch_size: 128, eviction: {max_idle_hours: 168}}
cache: {dir: cache}
tracking: {enabled: false}
"""


@pytest.mark.slow
def test_few_rows_dated_later_do_not_empty_the_embedding_servers(
    tmp_path: Path, ray_session: RaySession
) -> None:
    rng = np.random.default_rng(3)
    rows = ["click,at,a"]
    for row, a in enumerate(rng.integers(0, 50, 4000)):
        later = 30 * 86400 if 2000 <= row < 2005 else 0
        rows.append(f"{int(rng.random() < 0.3)},{START + 9 * row + later},a{a}")
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "clickline.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "clickline.yaml", cluster_options(2, 2))
    prepare(config, Progress())
    result = train(config, Progress())
    assert result.checkpoint.manifest.newest_hour == START // 3600 + 9
    (slot,) = json.loads(result.report.read_text())["slots"]
    assert (slot["ids"], slot["evicted"]) == (50, 0)
