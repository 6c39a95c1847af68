"""Which files a pattern names, hour by hour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clickline.errors import ConfigError, HourNotReady, SourceNotFound
from clickline.storage.log_files import DateRange, resolve_files
from clickline.storage.storage import Storage
from servers.web import Web
from servers.webhdfs import NameNode

from .conftest import Heard, Store

Filled = Callable[[Store, dict[str, bytes]], None]
NEW_YEAR = 490_896  # hours from 1970-01-01T00 to 2026-01-01T00


@dataclass
class FakeClock:
    """A clock that moves when someone sleeps, and then lets something happen."""

    on_sleep: Callable[[float], None] = lambda _: None
    time: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        self.on_sleep(self.time)


def _names(store: Store, **options: object) -> list[tuple[int | None, str]]:
    pattern = store.storage.join(store.base, str(options.pop("pattern", "{date}/{hour}/*")))
    files = resolve_files(store.storage, [pattern], **options)  # type: ignore[arg-type]
    return [(file.hour, file.uri.removeprefix(store.base + "/")) for file in files]


# Dates


@pytest.mark.parametrize(
    ("first", "last", "hours"),
    [
        ("20260101", "20260101", range(NEW_YEAR, NEW_YEAR + 24)),
        ("20260101/05", "20260101/05", range(NEW_YEAR + 5, NEW_YEAR + 6)),
        ("20251231/23", "20260101", range(NEW_YEAR - 1, NEW_YEAR + 24)),
        ("20260101", "20260101/02", range(NEW_YEAR, NEW_YEAR + 3)),
        ("20240228", "20240301/00", range(474_744, 474_744 + 49)),  # a leap day
    ],
)
def test_date_range(first: str, last: str, hours: range) -> None:
    assert DateRange(first, last).hours() == hours
    assert datetime(2026, 1, 1, tzinfo=UTC).timestamp() == NEW_YEAR * 3600


@pytest.mark.parametrize(
    "text", ["2026-01-01", "20260101/24", "20260101/5", "20261301", "20260230", "", "20260101/"]
)
def test_a_date_written_wrongly(text: str) -> None:
    with pytest.raises(ConfigError, match=r"dates\.from is .* Write YYYYMMDD or YYYYMMDD/HH"):
        DateRange(text, "20260101").hours()


def test_dates_the_wrong_way_round() -> None:
    with pytest.raises(ConfigError, match=r"dates\.from is 20260102, after dates\.to 20260101"):
        DateRange("20260102", "20260101").hours()


# Plain patterns


def test_files_of_several_patterns_come_once_and_sorted(store: Store, filled: Filled) -> None:
    filled(store, {"b.tsv": b"1", "a.tsv": b"2", "_SUCCESS": b"", "sub/c.tsv": b"3"})
    join, base = store.storage.join, store.base
    files = resolve_files(store.storage, [join(base, "*.tsv"), join(base, "a.tsv"), join(base, "sub/*")])
    assert [file.uri for file in files] == [join(base, name) for name in ("a.tsv", "b.tsv", "sub/c.tsv")]
    assert {file.hour for file in files} == {None}


def test_the_same_local_file_by_two_spellings_comes_once(folder: Store, filled: Filled) -> None:
    filled(folder, {"a.tsv": b"1"})
    files = resolve_files(folder.storage, [f"{folder.base}/a.tsv", f"{folder.base}/../logs/*.tsv"])
    assert [file.uri for file in files] == [f"{folder.base}/a.tsv"]


def test_a_pattern_that_matches_nothing_says_what_is_near(store: Store, filled: Filled) -> None:
    filled(store, {"train/a.tsv": b"1", "train/b.tsv": b"1"})
    with pytest.raises(SourceNotFound) as caught:
        resolve_files(store.storage, [f"{store.base}/train/2025/*.gz"])
    assert str(caught.value) == (
        f"{store.base}/train/2025/*.gz matches no file. The nearest existing folder is {store.base}/train, "
        "in it: a.tsv, b.tsv. Correct the pattern, or put the files there."
    )
    with pytest.raises(SourceNotFound, match=r"train is a folder\. Write .*/train/\* for the files in it"):
        resolve_files(store.storage, [f"{store.base}/train"])


def test_a_relative_path_without_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SourceNotFound, match=r"data/\*\.tsv matches no file\. The nearest .* is \., in it: nothing\."
    ):
        resolve_files(Storage({}, None), ["data/*.tsv"])


def test_a_missing_bucket_has_no_nearest_folder(s3: Store) -> None:
    with pytest.raises(SourceNotFound, match="Its bucket or top folder does not exist"):
        resolve_files(s3.storage, ["s3://no-such-bucket-here/a/*.gz"])


def test_http_url_that_does_not_exist(web: Web) -> None:
    with pytest.raises(SourceNotFound, match=r"/a\.gz matches no file\. Open the URL in a browser"):
        resolve_files(Storage({}, None), [f"{web.url}/a.gz"])


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("logs/{date}/*", r"has \{date\}, but no dates are given\. Set data\.dates"),
        ("logs/{hour}/*", r"has \{hour\} without \{date\}"),
        ("logs/{date}/{minute}/*", r"has \{minute\}\. A pattern may have \{date\}"),
        ("logs/{a,b}/*", r"has \{a,b\}.* Write a literal brace as \[\{\]\."),
        ("logs/{date}/{hour/*", r"has \{hour\. A pattern may have"),
        ("logs/{date/*", r"has \{date\. A pattern may have"),
    ],
)
def test_placeholders_that_cannot_be_filled(pattern: str, problem: str) -> None:
    with pytest.raises(SourceNotFound, match=problem):
        resolve_files(Storage({}, None), [pattern])


# Hours


def test_hours_in_order_without_the_donefile(store: Store, filled: Filled) -> None:
    filled(
        store,
        {
            "20260101/00/b.gz": b"1",
            "20260101/00/a.gz": b"1",
            "20260101/00/done": b"",
            "20251231/23/z.gz": b"1",
            "20251231/23/done": b"",
            "20260101/01/c.gz": b"1",  # beyond the range
        },
    )
    dates = DateRange("20251231/23", "20260101/00")
    assert _names(store, dates=dates, donefile="done") == [
        (NEW_YEAR - 1, "20251231/23/z.gz"),
        (NEW_YEAR, "20260101/00/a.gz"),
        (NEW_YEAR, "20260101/00/b.gz"),
    ]


def test_hours_without_a_donefile_are_all_named(store: Store, filled: Filled) -> None:
    done = {f"20260101/{hour:02}/done": b"" for hour in range(24) if hour not in (3, 4, 5, 9, 22, 23)}
    filled(store, {**done, "20260101/03/a.gz": b"1", "20260102/00/a.gz": b"1", "20260102/01/done": b""})
    with pytest.raises(HourNotReady) as caught:
        _names(store, dates=DateRange("20260101", "20260102/01"), donefile="done")
    assert str(caught.value) == (
        "20260101/03..05, 20260101/09, 20260101/22..20260102/00 of " + store.base + "/{date}/{hour}/*: "
        "not complete, the donefile done is missing. "
        "Run again when they have arrived, wait longer (data.dates.wait), or change data.dates."
    )


def test_an_hour_that_arrives_is_waited_for(store: Store, filled: Filled, heard: Heard) -> None:
    filled(store, {"20260101/00/a.gz": b"1", "20260101/00/done": b"", "20260101/01/b.gz": b"1"})

    def arrive(time: float) -> None:
        if time >= 1030:
            filled(store, {"20260101/01/done": b""})

    clock = FakeClock(arrive)
    dates = DateRange("20260101/00", "20260101/01")
    files = _names(store, dates=dates, donefile="done", wait_seconds=60, progress=heard, clock=clock)
    assert [name for _, name in files] == ["20260101/00/a.gz", "20260101/01/b.gz"]
    assert clock.slept == [10, 10, 10]
    [said] = heard.said
    assert said.startswith("waiting up to 60 s for the donefile done: 20260101/01 of ")


def test_waiting_ends(store: Store, filled: Filled, heard: Heard) -> None:
    filled(store, {"20260101/00/a.gz": b"1"})
    clock = FakeClock()
    dates = DateRange("20260101/00", "20260101/00")
    with pytest.raises(HourNotReady, match="the donefile done is missing after 25 s of waiting"):
        _names(store, dates=dates, donefile="done", wait_seconds=25, progress=heard, clock=clock)
    assert clock.slept == [10, 10, 5]


def test_without_a_donefile_a_missing_folder_is_still_reported(store: Store, filled: Filled) -> None:
    filled(store, {"20260101/00/a.gz": b"1", "20260101/02/b.gz": b"1"})
    with pytest.raises(HourNotReady, match=r"20260101/01 of .* its folder is missing"):
        _names(store, dates=DateRange("20260101/00", "20260101/02"))
    assert len(_names(store, dates=DateRange("20260101/00", "20260101/00"))) == 1


def test_a_complete_hour_without_data_is_reported(store: Store, filled: Filled, heard: Heard) -> None:
    done = {f"20260101/{hour:02}/done": b"" for hour in range(4)}
    filled(store, {**done, "20260101/01/a.gz": b"1"})
    dates = DateRange("20260101/00", "20260101/03")
    assert _names(store, dates=dates, donefile="done", progress=heard) == [(NEW_YEAR + 1, "20260101/01/a.gz")]
    assert heard.said == [
        "complete, but empty: 20260101/00, 20260101/02..03 of " + store.base + "/{date}/{hour}/*"
    ]


def test_all_hours_without_data_is_an_error(store: Store, filled: Filled) -> None:
    filled(store, {"20260101/00/done": b"", "20260101/00/a.tsv": b"1"})
    with pytest.raises(SourceNotFound, match=r"\*\.gz matches no file\. The nearest existing folder"):
        _names(
            store,
            pattern="{date}/{hour}/*.gz",
            dates=DateRange("20260101/00", "20260101/00"),
            donefile="done",
        )


def test_files_below_the_hour_and_the_donefile_beside_them(store: Store, filled: Filled) -> None:
    filled(store, {"20260101/00/done": b"", "20260101/00/part-0/a.gz": b"1", "20260101/00/part-1/b.gz": b"1"})
    dates = DateRange("20260101/00", "20260101/00")
    files = _names(store, pattern="{date}/{hour}/part-*/*.gz", dates=dates, donefile="done")
    assert [name for _, name in files] == ["20260101/00/part-0/a.gz", "20260101/00/part-1/b.gz"]


def test_days(store: Store, filled: Filled) -> None:
    filled(
        store,
        {"d=20260101/a.gz": b"1", "d=20260101/done": b"", "d=20260103/b.gz": b"1", "d=20260103/done": b""},
    )
    with pytest.raises(HourNotReady, match=r"^20260102 of "):
        _names(store, pattern="d={date}/*.gz", dates=DateRange("20260101/07", "20260103/02"), donefile="done")
    filled(store, {"d=20260102/done": b""})
    files = _names(
        store, pattern="d={date}/*.gz", dates=DateRange("20260101/07", "20260103/02"), donefile="done"
    )
    assert files == [(NEW_YEAR, "d=20260101/a.gz"), (NEW_YEAR + 48, "d=20260103/b.gz")]


def test_date_in_the_file_name(store: Store, filled: Filled) -> None:
    filled(store, {"click-20260101-00.gz": b"1", "click-20260101-02.gz": b"1"})
    pattern = "click-{date}-{hour}.gz"
    with pytest.raises(HourNotReady, match=r"20260101/01 of "):
        _names(store, pattern=pattern, dates=DateRange("20260101/00", "20260101/02"))
    filled(store, {"click-20260101-01.gz": b"1"})
    hours = [
        hour for hour, _ in _names(store, pattern=pattern, dates=DateRange("20260101/00", "20260101/02"))
    ]
    assert hours == [NEW_YEAR, NEW_YEAR + 1, NEW_YEAR + 2]
    with pytest.raises(HourNotReady, match="the donefile done is missing"):
        _names(store, pattern=pattern, dates=DateRange("20260101/00", "20260101/02"), donefile="done")


def test_every_folder_of_an_hour_needs_its_donefile(store: Store, filled: Filled) -> None:
    filled(
        store, {"host1/20260101/00/a.gz": b"1", "host1/20260101/00/done": b"", "host2/20260101/00/b.gz": b"1"}
    )
    options = {"pattern": "host*/{date}/{hour}/*.gz", "dates": DateRange("20260101/00", "20260101/00")}
    with pytest.raises(HourNotReady, match="20260101/00"):
        _names(store, **options, donefile="done")
    filled(store, {"host2/20260101/00/done": b""})
    assert len(_names(store, **options, donefile="done")) == 2


def test_hours_over_http_by_full_address(web: Web) -> None:
    web.files = {"/20260101/00/a.gz": b"1", "/20260101/00/done": b"", "/20260101/01/a.gz": b"1"}
    store = Store(Storage({}, None), web.url)
    pattern = "{date}/{hour}/a.gz"
    dates = DateRange("20260101/00", "20260101/01")
    assert len(_names(store, pattern=pattern, dates=dates)) == 2
    with pytest.raises(HourNotReady, match=r"20260101/01 of .* the donefile done is missing"):
        _names(store, pattern=pattern, dates=dates, donefile="done")


def test_polling_asks_only_for_the_hours_that_are_missing(
    hdfs: Store, name_node: NameNode, filled: Filled
) -> None:
    filled(hdfs, {f"20260101/{hour:02}/done": b"" for hour in range(23)} | {"20260101/00/a": b""})
    name_node.operations.clear()
    with pytest.raises(HourNotReady, match="20260101/23 of"):
        _names(
            hdfs, dates=DateRange("20260101", "20260101"), donefile="done", wait_seconds=50, clock=FakeClock()
        )
    assert len(name_node.operations) == 24 + 5
