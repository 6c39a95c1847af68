"""Follow mode warns if a model is worse than predicting the base rate."""

from __future__ import annotations

from pathlib import Path

from hour_world import HourWorld, make_hours

FIELDS = "data.fields={click: label, timestamp: time, I1: %s, C1: slot, C2: slot}"


def test_hour_worse_than_the_base_rate_names_the_unscaled_field(
    tmp_path: Path,
) -> None:
    make_hours(tmp_path / "made", hours=2, rows=1500)
    world = HourWorld(tmp_path / "unscaled", tmp_path / "made")
    world.arrive(0, 1)
    for hour in (0, 1):
        head, *lines = world.log(hour).read_text().splitlines()
        place = head.split(",").index("I1")
        rows = [line.split(",") for line in lines]
        for number, row in enumerate(rows):
            row[place] = str(200_000 + 37_717 * number % 1_000_000)
        world.log(hour).write_text("\n".join([head, *(",".join(row) for row in rows)]) + "\n")
    said = world.follow(2, FIELDS % "none", "gate.accuracy=0.01").said
    (first, *_) = [line for line in said if "base rate" in line]
    assert first.startswith("20260101/00: log loss is ")
    assert "are the likely cause: I1 (transform: none; median " in first


def test_hour_with_an_empty_first_shard_is_trained(tmp_path: Path) -> None:
    make_hours(tmp_path / "made", hours=1, rows=3000)
    world = HourWorld(tmp_path / "ads", tmp_path / "made")
    world.arrive(0)
    head, *lines = world.log(0).read_text().splitlines()
    times, numbers = head.split(",").index("timestamp"), head.split(",").index("I1")
    bad, good = [], []
    for number, line in enumerate(lines):
        cells = line.split(",")
        cells[numbers] = str(200_000 + 37_717 * number % 1_000_000)
        good.append(",".join(cells))
        cells[times] = "2082758400"  # 2036
        bad.append(",".join(cells))
    (world.hour(0) / "part-00000.csv").write_text("\n".join([head, *bad]) + "\n")
    (world.hour(0) / "part-00001.csv").write_text("\n".join([head, *good]) + "\n")
    options = FIELDS % "none", "gate.accuracy=0.01", "data.max_bad_ratio=0.6", "data.shard_size=64KiB"
    said = world.follow(1, *options).said
    assert [record["state"] for record in world.records()] == ["learned"]
    assert any("are the likely cause: I1 (transform: none; median " in line for line in said)
