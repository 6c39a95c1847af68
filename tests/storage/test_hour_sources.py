"""One hour of {date}/{hour} patterns: how it is written, whether it is complete, which files it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from clickline.errors import ConfigError, HourNotReady, StorageError
from clickline.progress import Progress
from clickline.storage.log_files import DateRange, hour_files, hour_is_complete, hour_label, hour_step
from clickline.storage.storage import Storage

FIRST = 20454 * 24  # 2026-01-01T00


def put(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("hour", [0, 5, FIRST, FIRST + 23, FIRST + 24 * 59])
def test_an_hour_label_has_the_format_of_dates(hour):
    assert DateRange(hour_label(hour, 1), hour_label(hour, 1)).hours() == range(hour, hour + 1)
    day = hour // 24 * 24
    assert DateRange(hour_label(hour, 24), hour_label(hour, 24)).hours() == range(day, day + 24)


def test_labels():
    assert hour_label(FIRST + 3, 1) == "20260101/03"
    assert hour_label(FIRST, 24) == "20260101"


def test_the_step_follows_from_the_patterns():
    assert hour_step(["a/{date}/{hour}/*", "b/{date}-{hour}.tsv"]) == 1
    assert hour_step(["a/{date}/*"]) == 24
    with pytest.raises(ConfigError, match=r"data\.train mixes patterns with and without \{hour\}"):
        hour_step(["a/{date}/{hour}/*", "b/{date}/*"])
    with pytest.raises(
        ConfigError, match=r"data\.train holds b/\*, which has no \{date\}.*Give \{date\}/\{hour\}"
    ):
        hour_step(["a/{date}/{hour}/*", "b/*"])


def test_an_hour_is_complete_when_it_is_so_in_all_patterns(tmp_path):
    patterns = [f"{tmp_path}/{name}/{{date}}/{{hour}}/*" for name in ("a", "b")]
    storage = Storage()

    def complete(donefile: str | None = "donefile") -> bool:
        return hour_is_complete(storage, patterns, donefile, FIRST + 3)

    put(tmp_path / "a/20260101/03/part")
    put(tmp_path / "a/20260101/03/donefile")
    assert not complete()
    assert not complete(None)
    put(tmp_path / "b/20260101/03/part")
    assert not complete()
    assert complete(None)
    put(tmp_path / "b/20260101/03/donefile")
    assert complete()
    assert not hour_is_complete(storage, patterns, "donefile", FIRST + 4)
    assert not hour_is_complete(storage, patterns, "_SUCCESS", FIRST + 3)


def test_files_of_an_hour_each_once_and_no_donefile(tmp_path):
    patterns = [f"{tmp_path}/{{date}}/{{hour}}/*", f"{tmp_path}/{{date}}/{{hour}}/b*"]
    for name in ("b", "a", "donefile"):
        put(tmp_path / "20260101/03" / name)
    put(tmp_path / "20260101/04/later")
    found = hour_files(Storage(), patterns, "donefile", FIRST + 3, Progress())
    assert [(file.uri, file.hour) for file in found] == [
        (f"{tmp_path}/20260101/03/a", FIRST + 3),
        (f"{tmp_path}/20260101/03/b", FIRST + 3),
    ]
    with pytest.raises(
        HourNotReady, match=r"^20260101/04 of .*\{hour\}/\* is not complete: its donefile donefile"
    ):
        hour_files(Storage(), patterns, "donefile", FIRST + 4, Progress())
    with pytest.raises(HourNotReady, match="its folder is missing"):
        hour_files(Storage(), patterns, None, FIRST + 5, Progress())


def test_a_complete_hour_may_be_empty(tmp_path):
    put(tmp_path / "20260101/03/donefile", "")
    pattern = f"{tmp_path}/{{date}}/{{hour}}/*"
    assert hour_files(Storage(), [pattern], "donefile", FIRST + 3, Progress()) == []


def test_a_day_is_one_period(tmp_path):
    put(tmp_path / "20260102/a")
    put(tmp_path / "20260102/donefile")
    pattern = f"{tmp_path}/{{date}}/*"
    assert hour_is_complete(Storage(), [pattern], "donefile", FIRST + 24)
    (file,) = hour_files(Storage(), [pattern], "donefile", FIRST + 24, Progress())
    assert file.hour == FIRST + 24


def test_an_hour_in_a_file_name_exists_with_the_file(tmp_path):
    put(tmp_path / "donefile")
    put(tmp_path / "20260101-03.tsv")
    pattern = f"{tmp_path}/{{date}}-{{hour}}.tsv"
    assert hour_is_complete(Storage(), [pattern], "donefile", FIRST + 3)
    assert not hour_is_complete(Storage(), [pattern], "donefile", FIRST + 4)


def test_a_store_that_cannot_be_reached_is_an_error(tmp_path):
    with pytest.raises(StorageError):
        hour_is_complete(Storage(), ["http://127.0.0.1:9/{date}/{hour}/a"], "donefile", FIRST)


@pytest.mark.parametrize(
    "line",
    [
        '{{"id": "1767236400", "key": "1767236400", "input": "{0}"}}',
        '{{"id":"1","key":"1","input":"hdfs://namenode:9000{0}/base/feature"}}',
        "20260101\t1767236400\t{0}/\t3\t0",
        "{0}",
        "20260101/03",
    ],
)
def test_one_donefile_may_list_the_complete_hours(tmp_path, line):
    """The lines of cube's donefile/base.txt, of PaddleRec's donefile.txt, and plain paths."""
    pattern, donefile = f"{tmp_path}/logs/{{date}}/{{hour}}/*", f"{tmp_path}/donefile/base.txt"
    put(tmp_path / "logs/20260101/03/part")
    put(tmp_path / "logs/20260101/04/part")

    def complete(hour: int) -> bool:
        return hour_is_complete(Storage(), [pattern], donefile, FIRST + hour)

    assert not complete(3)  # no donefile yet
    put(tmp_path / "donefile/base.txt", "\n")
    assert not complete(3)
    put(tmp_path / "donefile/base.txt", line.format(tmp_path / "logs/20260101/03") + "\n")
    assert complete(3)
    assert not complete(4)
    (file,) = hour_files(Storage(), [pattern], donefile, FIRST + 3, Progress())
    assert file.uri == f"{tmp_path}/logs/20260101/03/part"
    with pytest.raises(HourNotReady, match=r"^20260101/04 of .* its line in .*base.txt is missing"):
        hour_files(Storage(), [pattern], donefile, FIRST + 4, Progress())


def test_a_donefile_may_list_files_of_hours(tmp_path):
    donefile = f"{tmp_path}/done.txt"
    for name in ("a", "b"):
        put(tmp_path / f"20260101-03-{name}.tsv")
    put(tmp_path / "done.txt", f"{tmp_path}/20260101-03-a.tsv\n")
    pattern = f"{tmp_path}/{{date}}-{{hour}}-*.tsv"
    assert not hour_is_complete(Storage(), [pattern], donefile, FIRST + 3)
    put(tmp_path / "done.txt", f"{tmp_path}/20260101-03-a.tsv\n{tmp_path}/20260101-03-b.tsv\n")
    assert hour_is_complete(Storage(), [pattern], donefile, FIRST + 3)


def test_a_line_without_a_path_is_reported_unless_it_is_still_written(tmp_path):
    pattern, donefile = f"{tmp_path}/{{date}}/{{hour}}/*", f"{tmp_path}/base.txt"
    put(tmp_path / "base.txt", '{"id": "1", "inp')
    assert not hour_is_complete(Storage(), [pattern], donefile, FIRST + 3)
    put(tmp_path / "base.txt", '{"id": "1"}\n')
    with pytest.raises(
        StorageError, match=r"line 1 of .*base.txt names no path\. Allowed: a JSON object with `input`"
    ):
        hour_is_complete(Storage(), [pattern], donefile, FIRST + 3)
