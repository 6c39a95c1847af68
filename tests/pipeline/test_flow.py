"""The stages of the flow: each is reported as it runs, and is skipped when nothing changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clickline.config import load_config
from clickline.data.sample.generate import SampleOptions, generate
from clickline.errors import GateRefused
from clickline.pipeline.flow import run_flow
from clickline.progress import Progress

CONFIG = """
data: {format: criteo, train: data/train.tsv, eval: data/eval.tsv}
model: {hidden: [4], embedding_dim: 2}
train: {batch_size: 256}
tracking: {enabled: false}
"""


class StageRecorder(Progress):
    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, name: str, state: str, facts: Mapping[str, Any] | None = None) -> None:
        self.stages.append(f"{name} {state}")


def stages_of(folder: Path, *overrides: str) -> list[str]:
    recorder = StageRecorder()
    try:
        run_flow(load_config(folder / "clickline.yaml", list(overrides)), recorder)
    except GateRefused:
        recorder.stages.append("GateRefused")
    return recorder.stages


@pytest.fixture
def project(tmp_path: Path) -> Path:
    generate(SampleOptions(format="criteo", rows=10_000, out=tmp_path / "data", seed=5), Progress())
    (tmp_path / "clickline.yaml").write_text(CONFIG)
    return tmp_path


def test_refused_model_is_trained_more_then_published_with_a_lower_gate_and_skipped_afterwards(
    project: Path,
) -> None:
    epoch = ["train running", "train done", "evaluate running", "evaluate done"]
    assert stages_of(project, "gate={auc: 0.99, extra_epochs: 1}") == [
        "prepare running",
        "prepare done",
        *epoch,
        *epoch,
        "gate refused",
        "GateRefused",
    ]
    found = stages_of(project, "gate={extra_epochs: 0}")
    assert found[:2] == ["prepare running", "prepare skipped"]
    assert found[-3:] == ["gate done", "publish running", "publish done"]
    assert [one for one in stages_of(project, "gate={extra_epochs: 0}") if "running" not in one] == [
        "prepare skipped",
        "train skipped",
        "evaluate skipped",
        "gate done",
        "publish skipped",
    ]
