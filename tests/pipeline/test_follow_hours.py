"""Hours are trained in order, once each; hours that cannot be used are reported and can be backfilled."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hour_world import HourWorld, Stop, Watcher

from clickline.artifacts.checkpoint import Checkpoint, latest_checkpoint
from clickline.artifacts.from_config import registry_of
from clickline.data.prepare.hour_dataset import prepare_hour
from clickline.embedding.serving import ServingTable, merged_blocks
from clickline.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    HourNotReady,
    SourceNotFound,
)
from clickline.models.model import open_checkpoint
from clickline.pipeline.follow import follow
from clickline.progress import Progress
from clickline.publishing import run as publishing
from clickline.scoring.open_scorer import open_scorer
from clickline.storage.log_files import DateRange
from id_counters import Counters, counters_in, direct_count

HOURS = 8
FIRST = 490896  # 2026-01-01T00 in hours since 1970


def newest(world: HourWorld) -> Checkpoint:
    found = latest_checkpoint(world.home / "runs/follow")
    assert found is not None
    return found


def counted(world: HourWorld, *hours: int) -> Counters:
    """Impressions and clicks of every id, counted over the logs."""
    config, features = world.config(), newest(world).features
    return direct_count(*(prepare_hour(config, FIRST + hour, features, Progress()).dataset for hour in hours))


def served(world: HourWorld) -> set[int]:
    """The ids of the newest version, including those of its base."""
    registry = registry_of(world.config())
    chain = registry.chain(registry.versions()[-1])
    tables = ServingTable.open([Path(version.folder) for version in chain])
    try:
        return {int(one) for block in merged_blocks(tables) for one in block.ids_N}
    finally:
        tables.close()


def test_each_hour_is_scored_trained_and_published(world: HourWorld):
    world.arrive(0, 1, 2)
    watcher = world.follow(3)
    records = world.records()
    assert [record["hour"] for record in records] == [f"20260101/0{hour}" for hour in range(3)]
    assert all(record["state"] == "learned" and record["rows"] == 1500 for record in records)
    assert records[2]["progressive"]["auc"] > records[0]["progressive"]["auc"] + 0.03
    # Few held-out rows: those of the hour before are added.
    assert records[1]["held_out"]["rows"] == pytest.approx(2 * 150, abs=50)
    versions = world.versions()
    assert [version.manifest.model.hour for version in versions] == [record["hour"] for record in records]
    assert [record["version"] for record in records] == [1, 2, 3]
    assert versions[-1].manifest.model.data_until == (FIRST + 3) * 3600
    assert registry_of(world.config()).current().version == 3
    assert counters_in(newest(world)) == counted(world, 0, 1, 2)
    assert [facts["last"]["hour"] for facts in watcher.facts if facts.get("last")][-1] == "20260101/02"


@pytest.mark.slow
def test_served_scores_match_the_trained_model(world: HourWorld):
    """Also for delta versions, and after a restart, when the delta is computed from the files."""
    world.arrive(0, 1, 2)
    world.follow(3, "follow.holdout=0")  # else the checkpoint is trained on more rows than the version
    world.arrive(3)
    world.follow(4, "follow.holdout=0")
    config = world.config()
    registry = registry_of(config)
    version = registry.versions()[-1]
    assert version.manifest.model.hour == "20260101/03"
    model = open_checkpoint(latest_checkpoint(world.home / "runs/follow"), 1)
    dataset = prepare_hour(config, FIRST + 3, model.features, Progress()).dataset
    rows = dataset.read(Path(dataset.folder, dataset.splits["train"].shards[0].file), [0])
    scorer = open_scorer(registry, version, Path(config.cache.dir), 1)
    try:
        assert np.abs(scorer.probabilities(rows) - model.score(rows)).max() < 1e-6
    finally:
        scorer.close()


@pytest.mark.slow
def test_trained_hour_is_not_trained_again(world: HourWorld):
    world.arrive(0, 1)
    world.follow(2)
    before = world.checkpoint()
    world.follow(2)
    assert world.checkpoint() == before
    assert len(world.versions()) == 2


def test_hours_refused_by_the_gate_are_trained_but_not_published(world: HourWorld):
    world.arrive(0, 1, 2)
    lines = world.log(1).read_text().splitlines()
    world.log(1).write_text(
        "\n".join([lines[0], *(f"{n % 2},{line[2:]}" for n, line in enumerate(lines[1:]))])
    )
    watcher = world.follow(3, "gate.auc=0.634")  # reached: 0.685, 0.614, 0.654
    assert any("20260101/01: the gate refused: AUC is" in line for line in watcher.said)
    assert [version.manifest.model.hour for version in world.versions()] == ["20260101/00", "20260101/02"]
    assert [record["gate"]["passed"] for record in world.records()] == [True, False, True]
    assert counters_in(newest(world)) == counted(world, 0, 1, 2)


@pytest.mark.slow
def test_version_with_wrong_scores_is_not_published_and_training_continues(world: HourWorld, monkeypatch):
    world.arrive(0, 1, 2)
    real = publishing._verify_scores

    def second_is_damaged(config, registry, release, *rest):
        if release.origin.hour == "20260101/01":
            raise ArtifactError("the packed files score the sample differently.")
        return real(config, registry, release, *rest)

    monkeypatch.setattr(publishing, "_verify_scores", second_is_damaged)
    watcher = world.follow(3, "follow.holdout=0")
    assert any(line.startswith("20260101/01 was not published: the packed files") for line in watcher.said)
    assert [record["version"] for record in world.records()][0::2] == [1, world.versions()[-1].number]
    assert world.records()[1]["version"] is None
    assert served(world) == counters_in(newest(world)).keys()


@pytest.mark.slow
def test_vs_current_compares_with_the_live_version(world: HourWorld):
    world.arrive(0, 1)
    watcher = world.follow(2, "gate.vs_current=0.9")
    assert [version.number for version in world.versions()] == [
        1
    ]  # the first one has nothing to compare with
    assert any("the gate refused" in line and "current version" in line for line in watcher.said)


@pytest.mark.slow
def test_corrupt_hour_is_skipped_and_can_be_backfilled(world: HourWorld):
    world.arrive(0, 1, 2)
    good = world.log(1).read_text()
    world.log(1).write_text(good.splitlines()[0] + "\n" + "7,nonsense\n" * 200)
    watcher = world.follow(3)
    assert any(line.startswith("20260101/01 was not trained: 200 of 200 rows") for line in watcher.said)
    assert [record["state"] for record in world.records()] == ["learned", "corrupt", "learned"]
    assert list((world.home / "hours/20260101-01/quarantine").iterdir())
    assert world.follow(3).said[0].startswith("2 hours were trained")  # and is not retried
    world.log(1).write_text(good)
    world.follow(3, backfill=DateRange("20260101/00", "20260101/02"))
    assert [record["state"] for record in world.records()] == ["learned", "learned", "learned"]
    assert counters_in(newest(world)) == counted(world, 0, 1, 2)
    assert world.versions()[-1].manifest.model.hour == "20260101/01"


@pytest.mark.slow
def test_corrupt_hour_stops_the_run_if_configured(world: HourWorld):
    world.arrive(0, 1)
    world.log(1).write_text("click\n1\n")
    with pytest.raises(DataError):
        world.follow(2, "follow.on_corrupt_hour=stop")
    assert [record["state"] for record in world.records()] == ["learned"]


@pytest.mark.slow
def test_corrupt_first_hour_is_an_error(world: HourWorld):
    world.arrive(0, 1)
    world.log(0).write_text("click,timestamp\n" + "7,x\n" * 100)
    with pytest.raises(DataError):
        world.follow(2)


@pytest.mark.slow
def test_late_hour_is_reported_and_waited_for(world: HourWorld):
    world.arrive(0, 2)

    late = threading.Thread(target=lambda: world.arrive(1))

    class Waiting(Watcher):
        def log(self, message: str) -> None:
            super().log(message)
            if "20260101/01 is late" in message:
                late.start()

    watcher = Waiting("20260101/03")
    with pytest.raises(Stop):
        follow(world.config(), watcher)
    assert any("20260101/01 is late: its donefile is missing" in line for line in watcher.said)
    assert any(facts.get("late") and facts["hour"] == "20260101/01" for facts in watcher.facts)
    assert [record["hour"] for record in world.records()] == [f"20260101/0{hour}" for hour in range(3)]
    assert world.checkpoint()["hourly"]["trained_hours"] == [[FIRST, FIRST + 3]]


@pytest.mark.slow
def test_missing_hour_is_skipped_if_configured(world: HourWorld):
    world.arrive(0, 2)
    watcher = world.follow(3, "follow.on_missing_hour=skip")
    assert any("--backfill 20260101/01..20260101/01" in line for line in watcher.said)
    assert [record["state"] for record in world.records()] == ["learned", "skipped", "learned"]
    world.arrive(1)
    world.follow(3, backfill=DateRange("20260101/01", "20260101/01"))
    assert counters_in(newest(world)) == counted(world, 0, 1, 2)


@pytest.mark.slow
def test_missing_hour_stops_the_run_if_configured(world: HourWorld):
    world.arrive(0, 2)
    with pytest.raises(HourNotReady, match=r"20260101/01 did not arrive within follow\.missing_after, 1 s"):
        world.follow(3, "follow.on_missing_hour=stop")


def test_backfilled_range_gets_one_version(world: HourWorld):
    world.arrive(0, 1, 2, 3, 5)
    watcher = world.follow(4, backfill=DateRange("20260101/01", "20260101/06"))
    assert "backfill: 20260101/04 is missing or incomplete; left out" in watcher.said
    assert "backfill: 4 of 6 hours to train" in watcher.said
    # The range first, then the hours of the config; each of them once.
    assert [version.manifest.model.hour for version in world.versions()] == ["20260101/05", "20260101/00"]
    assert counters_in(newest(world)) == counted(world, 0, 1, 2, 3, 5)


def test_hour_without_rows_counts_as_trained(world: HourWorld):
    world.arrive(0, 2)
    world.hour(1).mkdir()
    (world.hour(1) / "donefile").touch()
    world.follow(3)
    records = world.records()
    assert [record.get("rows") for record in records] == [1500, 0, 1500]
    assert records[1]["version"] is None
    assert world.checkpoint()["hourly"]["trained_hours"] == [[FIRST, FIRST + 3]]


@pytest.mark.slow
def test_history_is_trained_before_new_hours(world: HourWorld):
    world.arrive(*range(6))
    watcher = world.follow(
        6,
        "data.dates={from: 20260101/00, to: 20260101/03}",
        "data.eval=arrived/20260101/03/*.csv",
        "gate.auc=0.55",
    )
    assert world.checkpoint()["hourly"]["trained_hours"] == [[FIRST, FIRST + 6]]
    assert [record["hour"] for record in world.records()] == ["20260101/04", "20260101/05"]
    assert [version.manifest.model.hour for version in world.versions()] == [
        None,
        "20260101/04",
        "20260101/05",
    ]
    assert any(line.startswith("warm start from") for line in watcher.said)
    assert counters_in(newest(world)) == counted(world, *range(6))


@pytest.mark.slow
def test_tables_stay_within_max_table_memory(world: HourWorld):
    """The longest idle ids are evicted first, from the versions too."""
    world.arrive(*range(6))
    bound = 7 << 18
    watcher = world.follow(6, f"follow.max_table_memory={bound}", "follow.holdout=0")
    records = world.records()
    assert all(record["memory"] <= bound for record in records)
    assert sum(record["evicted"] for record in records) > 0
    assert any("the sparse tables reached follow.max_table_memory, 1.8 MiB" in line for line in watcher.said)
    assert served(world) == counters_in(newest(world)).keys()


def test_too_small_max_table_memory_is_refused(world: HourWorld):
    world.arrive(0)
    with pytest.raises(
        ConfigError, match=r"follow\.max_table_memory is 1\.0 MiB, too little .* Give at least"
    ):
        world.follow(1, "follow.max_table_memory=1MiB", "model.embedding_dim=64")


@pytest.mark.slow
def test_eviction_and_decay_run_each_hour(world: HourWorld):
    world.arrive(*range(6))
    world.follow(6, "train.eviction={max_idle_hours: 1, decay: 0.5}", "follow.holdout=0")
    records = world.records()
    assert all(record["evicted"] > 0 for record in records[2:])
    assert all(record["ids"] < 1.3 * records[1]["ids"] for record in records)
    assert served(world) == counters_in(newest(world)).keys()
    impressions = [show for show, _ in counters_in(newest(world)).values()]
    assert any(show != int(show) for show in impressions)


@pytest.mark.slow
def test_evicted_ids_are_tombstones_in_the_delta(world: HourWorld):
    world.arrive(*range(7))
    for hour in (5, 6):  # little is new in the last hours, and ids of the first hour are evicted
        world.log(hour).write_text("\n".join(world.log(hour).read_text().splitlines()[:60]) + "\n")
    world.follow(7, "train.eviction={max_idle_hours: 4}", "follow.holdout=0")
    last = world.versions()[-1].manifest
    assert last.table == "delta"
    assert last.tombstones == world.records()[-1]["evicted"] > 0
    assert served(world) == counters_in(newest(world)).keys()


@pytest.mark.slow
def test_calibration_is_fitted_each_hour(world: HourWorld):
    world.arrive(*range(3))
    world.follow(3, "train.calibration={method: platt}")
    assert world.checkpoint()["calibration"][
        "method" if "method" in world.checkpoint()["calibration"] else "kind"
    ]
    assert world.versions()[-1].manifest.calibration == world.checkpoint()["calibration"]


@pytest.mark.slow
def test_changed_model_shape_is_refused_and_changed_learning_rate_is_not(world: HourWorld):
    world.arrive(0, 1)
    world.follow(1)
    with pytest.raises(ArtifactError, match=r"hidden was \[16\], now \[8\]. Change the config back"):
        world.follow(2, "model.hidden=[8]")
    world.follow(2, "train.learning_rate=0.002")
    assert len(world.records()) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.dates=null", "data.train=arrived/20260101/00/*.csv"], "data.dates is missing"),
        (["home=memory://x"], "--follow needs a home on local disk"),
    ],
)
def test_follow_requirements_are_checked(world: HourWorld, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        follow(world.config(*overrides))


@pytest.mark.slow
def test_follow_with_daily_folders(world: HourWorld, made: Path):
    """A pattern without {hour} is followed day by day."""
    for day in ("20260101", "20260102"):
        folder = world.folder / "daily" / day
        folder.mkdir(parents=True)
        lines: list[str] = []
        for hour in (0, 1) if day == "20260101" else (2, 3):
            lines += (
                (made / f"coming/20260101/0{hour}/part-00000.csv").read_text().splitlines()[bool(lines) :]
            )
        (folder / "log.csv").write_text("\n".join(lines) + "\n")
        (folder / "donefile").touch()
    with pytest.raises(Stop):
        follow(world.config("data.train=daily/{date}/*.csv"), Watcher("20260103"))
    assert [record["hour"] for record in world.records()] == ["20260101", "20260102"]
    assert [record["rows"] for record in world.records()] == [3000, 3000]
    assert world.versions()[-1].manifest.model.data_until == (FIRST + 48) * 3600


def test_source_that_never_answered_is_an_immediate_error(world: HourWorld):
    with pytest.raises((ConfigError, SourceNotFound, Exception), match="nosuch"):
        follow(world.config("data.train=nosuch://x/{date}/{hour}/*.csv"))
