"""`kill -9` at named moments: the model that goes on is the same, to the bit, as one that was never disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hour_world import HourWorld, make_hours, same_model

from clickline.artifacts.from_config import registry_of

pytestmark = pytest.mark.slow

# Each strikes the second time it comes by: one hour is learned, the next is in the middle of it.
MOMENTS = {
    "preparing": ("clickline.data.prepare.dataset_builder", "finish_dataset", 2, False),
    "scoring": ("clickline.training.hourly_trainer:HourlyTrainer", "_score", 2, False),
    "learning": ("clickline.training.hourly_trainer:HourlyTrainer", "_learn", 20, False),
    "publishing": ("clickline.artifacts.version:Draft", "commit", 2, False),
    "published": ("clickline.artifacts.registry:Registry", "move", 2, True),
    "learning what was held out": ("clickline.training.hourly_trainer:HourlyTrainer", "finish", 2, False),
    "the checkpoint is half written": ("clickline.artifacts.checkpoint", "write_manifest", 2, False),
    "the checkpoint is whole": ("clickline.artifacts.checkpoint", "write_manifest", 2, True),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hours")
    make_hours(folder, 9, 1500)
    return folder


def test_killed_in_every_stage_the_model_is_the_same_to_the_bit(tmp_path: Path, made: Path):
    overrides = ("gate.auc=0.52", "gate.vs_current=-0.5", "train.eviction={decay: 0.9, max_idle_hours: 4}")
    calm, hit = HourWorld(tmp_path / "calm", made), HourWorld(tmp_path / "hit", made)
    for world in (calm, hit):
        world.arrive(*range(9))
    calm.follow(9, *overrides)
    for moment, death in MOMENTS.items():
        child = hit.start(9, f"from dying import die_at; die_at(*{death!r})", *overrides)
        assert child.wait(120) == -9, moment
    last = hit.start(9, "", *overrides)
    assert last.wait(120) == 0

    same_model(calm, hit)

    def told(world: HourWorld) -> list[object]:
        return [(r["hour"], r["rows"], r["progressive"], r["held_out"], r["ids"]) for r in world.records()]

    assert told(hit) == told(calm)
    # Every hour has been published, and the last one is live.
    hours = {version.body["model"]["hour"] for version in hit.versions()}
    assert max(hours) == "20260101/08"
    assert all(record["version"] is not None for record in hit.records())
    shutil.rmtree(tmp_path / "hit")


def test_killed_before_the_pointer_moves_the_version_becomes_current(tmp_path: Path, made: Path):
    world = HourWorld(tmp_path / "ads", made)
    world.arrive(0, 1)
    before_it_moves = ("clickline.artifacts.registry:Registry", "move", 2, False)
    assert world.start(2, f"from dying import die_at; die_at(*{before_it_moves!r})").wait(120) == -9
    registry = registry_of(world.config())
    assert [version.number for version in registry.versions()] == [1, 2]
    assert registry.current().version == 1
    world.follow(2)
    assert registry.current().version == world.records()[-1]["version"]
    assert registry.version(registry.current().version).body["model"]["hour"] == "20260101/01"
