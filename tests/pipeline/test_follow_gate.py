"""The gate of follow mode: the evaluated model is the published one, whatever rows, versions or models come before."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hour_world import HourWorld, make_hours

from clickline.artifacts.checkpoint import latest_checkpoint
from clickline.artifacts.from_config import registry_of
from clickline.data.prepare.hour_dataset import prepare_hour
from clickline.embedding.snapshot import SnapshotReader
from clickline.errors import ArtifactError
from clickline.evaluation.evaluator import evaluate_rows
from clickline.features import FeatureSpec
from clickline.progress import Progress
from clickline.scoring.open_scorer import open_scorer
from clickline.scoring.stored_sample import read_sample
from clickline.training.batches import Batches

HOURS = 4
FIRST = 490896  # 2026-01-01T00 in hours since 1970
YEAR_2036 = int(datetime(2036, 1, 1, tzinfo=UTC).timestamp())


def redate(world: HourWorld, hour: int, time: int, rows: int = 1) -> None:
    """Give some rows of an hour another time."""
    lines = world.log(hour).read_text().splitlines()
    column = lines[0].split(",").index("timestamp")
    for line in range(700, 700 + rows):
        cells = lines[line].split(",")
        cells[column] = str(time)
        lines[line] = ",".join(cells)
    world.log(hour).write_text("\n".join(lines) + "\n")


def last_seen(world: HourWorld) -> set[int]:
    """The hours that the tables of the newest checkpoint hold."""
    found = latest_checkpoint(world.home / "runs/follow")
    assert found is not None
    reader = SnapshotReader(found.tables)
    return {
        int(hour)
        for part in range(len(reader.tables))
        for rows in reader.rows(part)
        for hour in np.unique(rows["hour"])
    }


def held_out_auc(world: HourWorld, number: int, hour: int) -> float | None:
    """AUC of a version on the rows that were held out of an hour."""
    config = world.config()
    registry = registry_of(config)
    scorer = open_scorer(registry, registry.version(number), Path(config.cache.dir), 1)
    try:
        dataset = prepare_hour(config, FIRST + hour, scorer.features, Progress()).dataset
        batches = Batches(dataset, 128, config.train.seed, held_out=config.follow.holdout)
        return evaluate_rows(scorer.probabilities, batches.held_out()).total.auc
    finally:
        scorer.close()


@pytest.mark.parametrize("time", [YEAR_2036, (FIRST + 2) * 3600 + 9 * 86400, FIRST * 3600 * 10**6])
def test_row_with_a_wrong_time_is_excluded_and_the_model_kept(world: HourWorld, time: int):
    """A row dated 2036 or nine days ahead once emptied the tables; one in microseconds crashed training."""
    world.arrive(0, 1, 2)
    redate(world, 1, time)
    world.follow(3, "train.eviction={max_idle_hours: 168}", "gate={auc: 0.55, vs_current: -0.1}")
    records = world.records()
    assert [(record["state"], record["bad"]) for record in records] == [
        ("learned", 0),
        ("learned", 1),
        ("learned", 0),
    ]
    assert [record["evicted"] for record in records] == [0, 0, 0]
    assert records[2]["progressive"]["auc"] > records[1]["progressive"]["auc"]
    assert world.checkpoint()["newest_hour"] == FIRST + 2
    (listed,) = (world.home / "hours/20260101-01/quarantine").iterdir()
    assert json.loads(listed.read_text())["reason"] == "bad time"


def test_newest_hour_comes_from_file_names_not_rows(world: HourWorld):
    """Rows may be dated up to 24 hours ahead of their file: nothing is evicted early because of them."""
    world.arrive(0, 1, 2)
    redate(world, 0, (FIRST + 20) * 3600, rows=300)
    world.follow(3, "train.eviction={max_idle_hours: 4}")
    assert [record["evicted"] for record in world.records()] == [0, 0, 0]
    assert [record["bad"] for record in world.records()] == [0, 0, 0]
    assert world.checkpoint()["newest_hour"] == FIRST + 2
    assert last_seen(world) == {FIRST, FIRST + 1, FIRST + 2}


def test_model_of_another_encoder_format_error_explains_how_to_restart(world: HourWorld):
    world.arrive(0)
    world.follow(1)
    manifest = sorted((world.home / "runs/follow").glob("step-*/manifest.json"))[-1]
    document = json.loads(manifest.read_text())
    document["features"]["encoder_format"] = 1
    manifest.chmod(0o644)
    manifest.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=r"start over: choose another home, or remove .*/runs/follow"):
        world.follow(1)
    shutil.rmtree(world.home / "runs/follow")
    world.follow(1)
    assert [record["state"] for record in world.records()] == ["learned"]


def test_published_model_is_the_evaluated_one(world: HourWorld):
    """After eviction and with its calibration; the stored sample has the scores that the gate evaluated."""
    world.arrive(0)
    world.follow(1, "train.eviction={threshold: 0.5}", "train.calibration={method: platt}")
    (record,) = world.records()
    (version,) = world.versions()
    assert record["evicted"] > 0
    assert version.manifest.report["evaluation"]["auc"] == record["held_out"]["auc"]
    assert held_out_auc(world, 1, 0) == pytest.approx(record["held_out"]["auc"], abs=1e-6)
    # The stored sample consists of the first rows that the gate evaluated.
    config = world.config()
    scorer = open_scorer(registry_of(config), version, Path(config.cache.dir), 1)
    dataset = prepare_hour(config, FIRST, scorer.features, Progress()).dataset
    scorer.close()
    held_out = Batches(dataset, 128, config.train.seed, held_out=config.follow.holdout).held_out()
    rows = next(held_out)
    sample, _ = read_sample(Path(version.folder), len(scorer.features.slots))
    assert np.array_equal(sample.slots[0].ids_N, rows.encoded.slots[0].ids_N[: config.publish.sample_rows])


def test_gate_refuses_a_model_emptied_by_eviction(tmp_path: Path):
    """Held-out rows of earlier hours, scored by earlier models, do not let it pass."""
    make_hours(tmp_path / "made", 5, 5000)
    world = HourWorld(tmp_path / "ads", tmp_path / "made")
    options = "gate={auc: 0.68, vs_current: -0.05}", "follow.holdout=0.2"
    world.arrive(0, 1, 2, 3)
    world.follow(4, *options)
    assert [record["gate"]["passed"] for record in world.records()] == [True] * 4
    world.arrive(4)
    watcher = world.follow(5, *options, "train.eviction={threshold: 1000000}")
    last = world.records()[-1]
    assert last["evicted"] > 0
    assert last["held_out"]["rows"] > 4000  # of several hours, which together would pass
    assert not last["gate"]["passed"]
    own, beside = last["gate"]["reasons"]
    assert (
        own.startswith("on this hour's own 1,029 held-out rows AUC is ") and "gate.auc requires 0.68" in own
    )
    assert beside.startswith("on this hour's own 1,029 held-out rows AUC is ") and "gate.vs_current" in beside
    assert any("20260101/04: the gate refused: on this hour's own " in line for line in watcher.said)
    assert registry_of(world.config()).current().version == 4


def test_changed_network_is_published_again(world: HourWorld):
    """Hour and step are the same after runs/follow was removed, as the error about another shape suggests."""
    world.arrive(0)
    world.follow(1)
    shutil.rmtree(world.home / "runs/follow")
    watcher = world.follow(1, "model.hidden=[8]")
    assert not any("up to date" in line for line in watcher.said)
    assert [version.manifest.network.hidden for version in world.versions()] == [(16,), (8,)]
    assert registry_of(world.config()).current().version == 2
    assert world.records()[-1]["version"] == 2


def test_model_with_changed_rows_is_published_again(world: HourWorld):
    """The models differ only in the rows that eviction has removed."""
    world.arrive(0)
    world.follow(1)
    shutil.rmtree(world.home / "runs/follow")
    world.follow(1, "train.eviction={threshold: 2}")
    assert world.records()[-1]["evicted"] > 0
    assert world.records()[-1]["version"] == 2
    assert registry_of(world.config()).current().version == 2


def test_model_published_before_is_checked_against_the_current_gate(world: HourWorld):
    world.arrive(0)
    world.follow(1)
    shutil.rmtree(world.home / "runs/follow")
    world.follow(1)
    assert world.records()[-1]["version"] == 1  # the same model
    shutil.rmtree(world.home / "runs/follow")
    world.follow(1, "gate.auc=0.99")
    assert not world.records()[-1]["gate"]["passed"]
    assert world.records()[-1]["version"] is None


def test_damaged_version_of_the_same_model_is_not_made_current_again(world: HourWorld):
    world.arrive(0)
    world.follow(1)
    shutil.rmtree(world.home / "runs/follow")
    damaged = Path(world.versions()[0].folder, "dense.onnx")
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    watcher = world.follow(1)
    assert any("publishing the same model again: version 1 is incomplete" in line for line in watcher.said)
    assert world.records()[-1]["version"] == 2
    assert registry_of(world.config()).current().version == 2


def test_version_stays_published_if_its_held_out_rows_diverge(world: HourWorld):
    option = "data.fields.I1={kind: dense, transform: none}"
    world.arrive(0)
    world.follow(1, option)
    world.arrive(1)
    config = world.config(option)
    features = FeatureSpec.from_json(world.checkpoint()["features"])
    dataset = prepare_hour(config, FIRST + 1, features, Progress()).dataset
    batches = Batches(dataset, 128, config.train.seed, held_out=config.follow.holdout)
    held_out = np.flatnonzero(batches._held_out_mask(0, 0, dataset.splits["train"].rows))
    lines = world.log(1).read_text().splitlines()
    for row in held_out[:6]:  # clicks and non-clicks: some gradients overflow
        cells = lines[1 + row].split(",")
        cells[lines[0].split(",").index("I1")] = "3e38"
        lines[1 + row] = ",".join(cells)
    world.log(1).write_text("\n".join(lines) + "\n")
    watcher = world.follow(2, option)
    record = world.records()[-1]
    assert (record["state"], record["version"]) == ("corrupt", 2)
    assert record["reason"].endswith(
        "Version 2 was published before the held-out rows were trained, and stays live."
    )
    assert any("stays live" in line for line in watcher.said)
    assert registry_of(config).current().version == 2


@pytest.mark.parametrize("file", ["dense.onnx", "manifest.json"])
def test_damaged_live_version_does_not_block_its_replacement(world: HourWorld, file: str):
    world.arrive(0)
    world.follow(1)
    world.arrive(1)
    damaged = Path(world.versions()[0].folder, file)
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    watcher = world.follow(2, "gate={auc: 0.52, vs_current: -0.002}")
    (said,) = (line for line in watcher.said if line.startswith("gate.vs_current"))
    assert said.startswith(
        "gate.vs_current is not checked: the current version, 1, cannot be compared with: "
    )
    gate = world.records()[-1]["gate"]
    assert gate["passed"]
    assert [one for one in gate["warnings"] if "vs_current" in one] == [said.replace("is not", "was not", 1)]
    assert registry_of(world.config()).current().version == 2


def test_missing_holdout_is_reported_instead_of_a_comparison(world: HourWorld):
    world.arrive(0, 1)
    world.follow(2, "gate.vs_current=-0.5", "follow.holdout=0")
    assert (
        "gate.vs_current was not checked: follow.holdout is 0" in world.records()[-1]["gate"]["warnings"][0]
    )


def test_first_hour_with_one_row_warns_about_statistics(world: HourWorld):
    world.arrive(0, 1)
    head, row, *_ = world.log(0).read_text().splitlines()
    world.log(0).write_text(f"{head}\n{row}\n")
    numbers = "data.fields.I1={kind: dense}", "data.fields.I2={kind: dense}"
    watcher = world.follow(2, *numbers)
    (refused,) = (line for line in watcher.said if "20260101/00: the gate refused" in line)
    assert "no rows are held out yet to evaluate the model on: the hour has 1 rows" in refused
    (few,) = (line for line in watcher.said if "few values of" in line)
    assert "20260101/00, which has few values of: I1 1, I2 1. " in few
    features = FeatureSpec.from_json(world.checkpoint()["features"])
    dataset = prepare_hour(world.config(*numbers), FIRST + 1, features, Progress()).dataset
    rows = dataset.read(Path(dataset.folder, dataset.splits["train"].shards[0].file), [0])
    assert all(np.unique(values_B).size > 5 for values_B in rows.encoded.dense_DB)
