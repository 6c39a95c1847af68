"""Event times: units of unix time, allowed years, and rows dated after their file or in the future."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickline.data import input_blocks
from clickline.data.prepare import dataset_builder, shard_builder
from clickline.data.targets import TargetFields, TimeBounds, read_targets
from clickline.errors import ConfigError, DataError
from clickline.records import Block, EncodedRows, IntegerColumn, NumberColumn, RawRows, SourceFile, TextColumn

START = 1_767_225_600  # 2026-01-01T00
HOUR = START // 3600
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
ONE_HOUR = {"from": "20260101/05", "to": "20260101/05"}
FIELDS = {"y": "label", "u": "slot", "at": "time"}


def csv(*times: object) -> str:
    return "y,u,at\n" + "".join(f"{row % 2},u{row},{at}\n" for row, at in enumerate(times))


def configure(project, train: str = "a.csv", at: object = "time", **data: object) -> None:
    project.configure(
        {"format": "csv", "train": train, "fields": {**FIELDS, "at": at}, "max_bad_ratio": 1, **data}
    )


def hours(project, result) -> list[int]:
    return project.table(result).column("event_hour").to_pylist()


def bad(result) -> list[dict[str, object]]:
    files = sorted(Path(result.dataset.folder, "quarantine").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("unit", PER_SECOND)
def test_unit_of_unix_times_is_recognised(project, unit):
    project.write("a.csv", csv(*(PER_SECOND[unit] * (START + 1800 * n) for n in range(4))))
    configure(project)
    assert hours(project, project.prepare()) == [HOUR, HOUR, HOUR + 1, HOUR + 1]
    table = pa.table(
        {"y": [0, 1], "u": ["a", "b"], "at": [PER_SECOND[unit] * (START + n) for n in (0, 3600)]}
    )
    pq.write_table(table, project.folder / "a.parquet")
    configure(project, "a.parquet", format="parquet")
    assert hours(project, project.prepare()) == [HOUR, HOUR + 1]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_row_of_another_unit_than_its_file_is_quarantined(project, unit):
    stray = PER_SECOND[unit] * START
    project.write("a.csv", csv(START, stray, START + 3600))
    project.write("b.csv", csv(stray, START, stray))  # another file has its own unit
    configure(project, "*.csv")
    result = project.prepare()
    assert hours(project, result) == [HOUR, HOUR + 1, HOUR, HOUR]
    first, second = bad(result)
    assert (first["reason"], first["line"], second["line"]) == ("bad time", 3, 3)
    assert str(first["detail"]).startswith(f"at is '{stray}', expected unix time in seconds")
    assert result.dataset.splits["train"].report["bad"] == {"bad time": 2}


def test_declared_unit_is_the_only_one(project):
    project.write("a.csv", csv(START, START, START * 10**6, "2026-01-01 00:00:00"))
    configure(project, at={"kind": "time", "unit": "us"})
    result = project.prepare()
    assert hours(project, result) == [HOUR, HOUR]
    assert [row["detail"] for row in bad(result)] == [
        f"at is '{START}', expected unix time in microseconds or YYYY-MM-DD HH:MM:SS, of the years 1990 to 2099; "
        "otherwise set unit: or time_format:"
    ] * 2


@pytest.mark.parametrize(
    ("time_format", "times"),
    [
        ("%Y%m%d%H%M%S.%f", ["20260101000000.000", " 20260101010000.000000\t", "20260101020000.500"]),
        ("%Y%m%d.%H", ["20260101.00", "20260101.01", "20260101.02 "]),
        ("%Y%m%d%H", ["2026010100", " 2026010101", "2026010102"]),
    ],
)
def test_written_time_keeps_its_zeros_and_loses_its_blanks(project, time_format, times):
    project.write("a.csv", csv(*times))
    configure(project, at={"kind": "time", "time_format": time_format})
    result = project.prepare()
    assert bad(result) == []
    assert hours(project, result) == [HOUR, HOUR + 1, HOUR + 2]


def test_unit_beside_a_time_format_is_refused(project):
    configure(project, at={"kind": "time", "unit": "us", "time_format": "%Y"})
    with pytest.raises(ConfigError, match="unit is given, but time_format too"):
        project.prepare()


def test_unit_applies_to_the_whole_file_at_any_block_size(project):
    """The first rows decide for a file; later blocks do not."""
    rows = 20_000
    times = [START] * (rows // 2) + [START * 1000] * (rows // 2)
    project.write("a.csv", csv(*times))
    configure(project, shard_size="64KiB")
    result = project.prepare()
    assert len(result.dataset.splits["train"].shards) > 3
    assert hours(project, result) == [HOUR] * (rows // 2)
    assert result.dataset.splits["train"].report["bad"] == {"bad time": rows // 2}


NO_TIMES = (
    "1985-01-01",
    "2100-01-01 00:00:00",
    "5200-01-01",
    "9999-12-31 23:59:59",
    "0001-01-01",
    "631151999",
    "-5",
    "nan",
    "1e400",
    "9" * 400,
    "20260131",
    "20260131235959",
    str(2**63),
    str(2**64 - 1),
)


def test_times_outside_the_allowed_years_are_quarantined(project):
    project.write("a.csv", csv(START, *NO_TIMES, START))
    configure(project)
    result = project.prepare()
    assert hours(project, result) == [HOUR, HOUR]
    assert result.dataset.splits["train"].report["bad"] == {"bad time": len(NO_TIMES)}
    assert all("of the years 1990 to 2099" in str(row["detail"]) for row in bad(result))


def test_times_of_a_format_outside_the_years_are_quarantined(project):
    project.write("a.csv", csv("2026-01-01", "1000-01-01", "9999-12-31"))
    configure(project, at={"kind": "time", "time_format": "%Y-%m-%d"})
    result = project.prepare()
    assert hours(project, result) == [HOUR]
    assert {row["detail"].partition(", ")[2] for row in bad(result)} == {
        "expected a time written as %Y-%m-%d, of the years 1990 to 2099"
    }


def test_row_dated_long_after_its_file_is_quarantined(project):
    """Up to 24 hours after the end of the file's hour it may be a folder in local time, or a wrong clock."""
    project.write("logs/20260101/05/donefile", "")
    project.write("logs/20260101/05/a.csv", csv(START + 5 * 3600, START + 30 * 3600, START + 30 * 3600 + 1))
    configure(project, "logs/{date}/{hour}/*.csv", dates=ONE_HOUR)
    result = project.prepare()
    assert hours(project, result) == [HOUR + 5, HOUR + 30]
    (row,) = bad(result)
    assert row["reason"] == "bad time"
    assert row["detail"] == (
        f"at is '{START + 30 * 3600 + 1}', which is 2026-01-02 06:00:01 UTC; at most 2026-01-02 06:00:00 UTC is "
        "allowed, 24 hours after the end of its file's hours"
    )


def test_file_of_a_day_has_all_of_its_hours(project):
    project.write("logs/20260101/donefile", "")
    project.write("logs/20260101/a.csv", csv(START + 23 * 3600, START + 48 * 3600, START + 48 * 3600 + 1))
    configure(project, "logs/{date}/*.csv", dates={"from": "20260101", "to": "20260101"})
    assert hours(project, project.prepare()) == [HOUR + 23, HOUR + 48]


def test_row_that_arrives_late_is_used(project):
    project.write("logs/20260101/05/donefile", "")
    project.write("logs/20260101/05/a.csv", csv(START - 400 * 86400, START))
    configure(project, "logs/{date}/{hour}/*.csv", dates=ONE_HOUR)
    assert hours(project, project.prepare()) == [HOUR - 400 * 24, HOUR]


def test_row_dated_in_the_future_is_quarantined(project):
    now = int(time.time())
    project.write("a.csv", csv(now, now + 20 * 3600, now + 30 * 3600, now + 9 * 86400))
    configure(project)
    result = project.prepare()
    assert hours(project, result) == [now // 3600, (now + 20 * 3600) // 3600]
    assert [row["line"] for row in bad(result)] == [4, 5]
    assert all(
        "24 hours after the clock when the logs were read" in str(row["detail"]) for row in bad(result)
    )


def test_a_wrong_clock_is_read_again_after_an_error(project, monkeypatch):
    project.write("a.csv", csv(*(START + n for n in range(4))))
    configure(project, max_bad_ratio=0.5)
    with monkeypatch.context() as booted:
        booted.setattr(dataset_builder.time, "time", lambda: 1_700_000_000.0)  # 2023: nobody has set it yet
        with pytest.raises(DataError, match=r"clock, 2023-11-14 22:13 UTC\. If it is wrong"):
            project.prepare()
    result = project.prepare()
    assert result.train_rows == 4
    assert not bad(result)


@pytest.mark.parametrize(
    "at", ["time", {"kind": "time", "unit": "ms"}, {"kind": "time", "time_format": "%Y"}]
)
@pytest.mark.parametrize("unit", PER_SECOND)
def test_parquet_timestamps_need_no_unit(project, unit, at):
    """Their type includes the unit."""
    times = pa.array([(START + n) * PER_SECOND[unit] for n in (0, 3600)] + [None], pa.timestamp(unit))
    pq.write_table(
        pa.table({"y": [0, 1, 1], "u": ["a", "b", "c"], "at": times}), project.folder / "a.parquet"
    )
    configure(project, "a.parquet", at, format="parquet")
    result = project.prepare()
    assert hours(project, result) == [HOUR, HOUR + 1]
    (row,) = bad(result)
    assert str(row["detail"]).startswith("at is missing, expected ")


def test_file_of_dates_is_searched_once_for_its_unit(project, monkeypatch):
    """Nor is the unit needed to measure numbers."""
    looked = 0
    real = input_blocks.time_unit_detector

    def counting(*args):
        find = real(*args)

        def counted(raw):
            nonlocal looked
            looked += 1
            return find(raw)

        return counted

    monkeypatch.setattr(input_blocks, "time_unit_detector", counting)
    lines = (f"{n % 2},u{n},2026-01-01 {n % 24:02d}:00:00,{n}\n" for n in range(20_000))
    project.write("a.csv", "y,u,at,x\n" + "".join(lines))
    fields = {**FIELDS, "x": "minmax"}
    project.configure({"format": "csv", "train": "a.csv", "fields": fields, "shard_size": "64KiB"})
    assert project.prepare().train_rows == 20_000
    assert looked == 1


def test_interrupted_dataset_keeps_its_reference_time(project, monkeypatch):
    """Resumed days later, rows that were dated in the future are still bad rows, in every shard."""
    now = int(time.time())
    project.write("a.csv", csv(*(now + (5 * 86400 if row % 10 == 0 else 0) for row in range(20_000))))
    configure(project, shard_size="64KiB")
    real, made = shard_builder.ShardBuilder.build, []

    def fails(self, group):
        if len(made) == 2:
            raise DataError("interrupted")
        made.append(group.number)
        return real(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(shard_builder.ShardBuilder, "build", fails)
        with pytest.raises(DataError, match="interrupted"):
            project.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(dataset_builder.time, "time", lambda: now + 10 * 86400.0)
        result = project.prepare()
    assert result.dataset.splits["train"].report["bad"] == {"bad time": 2000}
    assert not Path(result.dataset.folder, "work").exists()


def read(column, rows: int, **fields: str):
    labels = IntegerColumn(np.ones(rows, np.uint64), np.zeros(rows, np.bool_), False)
    raw = RawRows(rows, {"y": labels, "at": column}, np.arange(rows))
    file = TimeBounds.for_file(SourceFile("a", 1, "1"), Block("a", 1, None, 1), START + 86400.0)
    encoded = EncodedRows(rows, np.empty((0, rows), np.float32), ())
    return read_targets(raw, encoded, TargetFields(label="y", time="at", **fields), (), file)


@given(
    st.lists(st.binary(max_size=40) | st.integers(-(2**70), 2**70).map(lambda n: str(n).encode()), min_size=1)
)
def test_no_text_makes_reading_a_time_fail(values):
    ends = np.cumsum([len(value) for value in values])
    data = np.frombuffer(b"".join(values), np.uint8)
    found, faults = read(TextColumn(data, np.concatenate(([0], ends[:-1])), ends), len(values))
    wrong = {int(row) for group in faults for row in group.rows_F}
    for group in faults:
        assert [group.describe(int(row)) for row in group.rows_F]
    good = [int(hour) for row, hour in enumerate(found.event_hour_B) if row not in wrong]
    assert all(631_152_000 // 3600 <= hour <= HOUR + 48 for hour in good)


@given(st.lists(st.floats(width=64) | st.just(math.inf) | st.just(float(START)), min_size=1))
def test_no_number_makes_reading_a_time_fail(values):
    found, faults = read(NumberColumn(np.array(values)), len(values))
    wrong = {int(row) for group in faults for row in group.rows_F}
    assert {int(found.event_hour_B[row]) for row in range(len(values)) if row not in wrong} <= set(
        range(631_152_000 // 3600, HOUR + 49)
    )
