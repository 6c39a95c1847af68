"""Following says so when what it has learned is worth less than the base rate."""

from __future__ import annotations

from pathlib import Path

from hour_world import HourWorld, make_hours

FIELDS = "data.fields={click: label, timestamp: time, I1: %s, C1: slot, C2: slot}"


def test_an_hour_whose_model_is_worse_than_the_base_rate_is_said_with_the_field(
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
