"""`kill -9` at given calls: the resumed model is bit-identical to one that was never killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hour_world import HourWorld, same_model

from clickline.artifacts.from_config import registry_of

HOURS = 9

pytestmark = pytest.mark.slow

# Each kills at the second call: one hour is trained, the next is in progress.
MOMENTS = {
    "preparing": ("clickline.data.prepare.dataset_builder", "finish_dataset", 2, False),
    "scoring": ("clickline.training.hourly_trainer:HourlyTrainer", "_score", 2, False),
    "training": ("clickline.training.hourly_trainer:HourlyTrainer", "_train_batch", 20, False),
    "publishing": ("clickline.artifacts.version:Draft", "commit", 2, False),
    "published": ("clickline.artifacts.registry:Registry", "move", 2, True),
    "training the held-out rows": (
        "clickline.training.hourly_trainer:HourlyTrainer",
        "finish_hour",
        2,
        False,
    ),
    "the checkpoint is half written": ("clickline.artifacts.checkpoint", "write_manifest", 2, False),
    "the checkpoint is complete": ("clickline.artifacts.checkpoint", "write_manifest", 2, True),
}


def test_model_is_bit_identical_after_kills_in_every_stage(tmp_path: Path, made: Path):
    overrides = ("gate.auc=0.52", "gate.vs_current=-0.5", "train.eviction={decay: 0.9, max_idle_hours: 4}")
    undisturbed, killed = HourWorld(tmp_path / "calm", made), HourWorld(tmp_path / "hit", made)
    for world in (undisturbed, killed):
        world.arrive(*range(9))
    undisturbed.follow(9, *overrides)
    for moment, point in MOMENTS.items():
        child = killed.start(9, f"from kill_point import kill_at; kill_at(*{point!r})", *overrides)
        assert child.wait(120) == -9, moment
    last = killed.start(9, "", *overrides)
    assert last.wait(120) == 0

    same_model(undisturbed, killed)

    def summary(world: HourWorld) -> list[object]:
        return [(r["hour"], r["rows"], r["progressive"], r["held_out"], r["ids"]) for r in world.records()]

    assert summary(killed) == summary(undisturbed)
    # Every hour has been published, and the last one is live.
    hours = {version.manifest.model.hour for version in killed.versions()}
    assert max(hours) == "20260101/08"
    assert all(record["version"] is not None for record in killed.records())
    shutil.rmtree(tmp_path / "hit")


def test_version_becomes_current_after_kill_before_the_pointer_moves(tmp_path: Path, made: Path):
    world = HourWorld(tmp_path / "ads", made)
    world.arrive(0, 1)
    before_it_moves = ("clickline.artifacts.registry:Registry", "move", 2, False)
    assert world.start(2, f"from kill_point import kill_at; kill_at(*{before_it_moves!r})").wait(120) == -9
    registry = registry_of(world.config())
    assert [version.number for version in registry.versions()] == [1, 2]
    assert registry.current().version == 1
    world.follow(2)
    assert registry.current().version == world.records()[-1]["version"]
    assert registry.version(registry.current().version).manifest.model.hour == "20260101/01"
