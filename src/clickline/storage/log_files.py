"""Finds the input files: paths, globs, and {date}/{hour} patterns over hourly folders."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Literal, Protocol

from clickline.errors import ConfigError, HourNotReady, Mistake, SourceNotFound
from clickline.progress import Progress
from clickline.records import SourceFile
from clickline.storage.donefile_list import (
    is_donefile_list,
    is_listed,
    path_without_host,
    paths_in_donefile,
)
from clickline.storage.filesystems import protocol_of
from clickline.storage.glob_patterns import fixed_prefix, is_glob, remove_escaped, unescape
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_POLL_SECONDS = 10.0


class Clock(Protocol):
    """What waiting needs of the module `time`."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True)
class DateRange:
    """Hours from `first` to `last`, both included, written YYYYMMDD or YYYYMMDD/HH, in UTC.

    A day without an hour means its first hour in `first` and its last hour in `last`; None: no end.
    """

    first: str
    last: str | None

    def hours(self) -> range:
        """The hours of the range, counted from 1970-01-01T00."""
        first = _hour_number("from", self.first, 0)
        if self.last is None:
            raise _wrong_date(
                "to",
                "is missing. Only `clickline up --follow` works without it.",
                "Give the last date or hour.",
            )
        last = _hour_number("to", self.last, 23)
        if last < first:
            raise _wrong_date(
                "from", f"is {self.first}, after dates.to {self.last}.", "Lower it or raise dates.to."
            )
        return range(first, last + 1)


@dataclass(frozen=True)
class _Period:
    """One hour of a pattern, or one day if the pattern has no {hour}."""

    source: str  # the pattern as written
    pattern: str  # of its files
    folder: str  # where the donefile marks it as complete
    file_is_dated: (
        bool  # the placeholder is in the file name: the folder alone does not show that the hour exists
    )
    hour: int
    daily: bool

    @property
    def label(self) -> str:
        return hour_label(self.hour, 24 if self.daily else 1)


def resolve_files(
    storage: Storage,
    patterns: Sequence[str],
    dates: DateRange | None = None,
    donefile: str | None = None,
    wait_seconds: float = 0,
    progress: Progress | None = None,
    clock: Clock = time,
) -> list[SourceFile]:
    """The files of all patterns, each once, sorted by hour and URI.

    An hour of a {date}/{hour} pattern is ready if its folder has the `donefile`, or is listed in it if `donefile` is a
    path, or exists if none is configured.
    Other hours are waited for and then raise HourNotReady; they are never skipped.
    """
    progress = progress or Progress()
    periods = {pattern: list(_periods(pattern, dates)) for pattern in patterns}
    expected = [period for of_pattern in periods.values() for period in of_pattern]
    _wait_until_ready(storage, expected, donefile, wait_seconds, progress, clock)

    found: list[SourceFile] = []
    for pattern, of_pattern in periods.items():
        files = _dated_files(storage, of_pattern, donefile, progress) if of_pattern else storage.list(pattern)
        files = [file for file in files if not _is_donefile(file, donefile)]
        if not files:
            raise SourceNotFound(_nothing_found(storage, pattern))
        found += files
    return _deduplicate(found)


def existing_files(
    storage: Storage, patterns: Sequence[str], dates: DateRange | None = None
) -> list[SourceFile]:
    """The existing files of all patterns, whether or not their hours are complete."""
    found: list[SourceFile] = []
    for pattern in patterns:
        periods = [period.pattern for period in _periods(pattern, dates)]
        found += [file for one in periods or [pattern] for file in storage.list(one)]
    return _deduplicate(found)


def overlap_warning(train: Sequence[str], eval_files: Sequence[str]) -> str | None:
    """A warning about files that are used for both training and evaluation; None if there are none."""
    train_files = {_canonical_uri(uri) for uri in train}
    both = sorted(redacted(uri) for uri in eval_files if _canonical_uri(uri) in train_files)
    if not both:
        return None
    files = (
        "its only file is" if len(eval_files) == 1 else f"{len(both):,} of its {len(eval_files):,} files are"
    )
    return (
        f"data.eval: {files} also in data.train ({', '.join(both[:3])}{', …' if len(both) > 3 else ''}). The model is "
        "evaluated on its own training rows, so its metrics, and the gate, say nothing about new rows. "
        "Give data.eval other files, later in time than data.train."
    )


def _canonical_uri(uri: str) -> str:
    """One URI for all names of the same file."""
    return os.path.realpath(uri) if Storage.is_local(uri) else uri


def _deduplicate(files: list[SourceFile]) -> list[SourceFile]:
    found: dict[str, SourceFile] = {}
    for file in files:
        found.setdefault(_canonical_uri(file.uri), file)
    return sorted(found.values(), key=lambda file: (-1 if file.hour is None else file.hour, file.uri))


# ── hour by hour ───────────────────────────────────────────────────────────────────


def hour_step(patterns: Sequence[str]) -> Literal[1, 24]:
    """Hours between two periods of {date}/{hour} patterns: 1, or 24 where they have no {hour}."""
    remedy = "Give {date}/{hour} patterns, such as logs/{date}/{hour}/*, all hourly or all daily."
    for pattern in patterns:
        if "{date}" not in pattern:
            problem = f"holds {_display(pattern)}, which has no {{date}}: new hours cannot be identified."
            raise ConfigError([Mistake("", 0, "data.train", problem, remedy)])
    steps: set[Literal[1, 24]] = {1 if "{hour}" in pattern else 24 for pattern in patterns}
    if len(steps) > 1:
        problem = "mixes patterns with and without {hour}: the files of a day are not part of an hour."
        raise ConfigError([Mistake("", 0, "data.train", problem, remedy)])
    return steps.pop() if steps else 1


def hour_label(hour: int, step: int) -> str:
    """The label of a period: 20260101/03, or 20260101 for a day."""
    return f"{_EPOCH + timedelta(hours=hour):{'%Y%m%d' if step == 24 else '%Y%m%d/%H'}}"


def hour_is_complete(storage: Storage, patterns: Sequence[str], donefile: str | None, hour: int) -> bool:
    """Whether the hour, or day, that begins at `hour` is complete in all patterns; StorageError if that is unknown."""
    return not _not_ready(storage, _periods_of_hour(patterns, hour), donefile)


def hour_files(
    storage: Storage, patterns: Sequence[str], donefile: str | None, hour: int, progress: Progress
) -> list[SourceFile]:
    """The files of one hour or day, without the donefile; HourNotReady if it is not complete."""
    periods = _periods_of_hour(patterns, hour)
    for period in _not_ready(storage, periods, donefile):
        missing = f"its {_marker(donefile)}" if donefile else "its folder"
        raise HourNotReady(
            f"{period.label} of {_display(period.source)} is not complete: {missing} is missing. "
            "Wait until it arrives."
        )
    return _deduplicate(_dated_files(storage, periods, donefile, progress))


def _periods_of_hour(patterns: Sequence[str], hour: int) -> list[_Period]:
    label = hour_label(hour, hour_step(patterns))
    return [period for pattern in patterns for period in _periods(pattern, DateRange(label, label))]


# ── periods ────────────────────────────────────────────────────────────────────────────────────


def _periods(pattern: str, dates: DateRange | None) -> Iterator[_Period]:
    """The hours or days of a pattern; none for a plain path or glob."""
    live = remove_escaped(pattern)
    if "{" not in live:
        return
    unknown = re.search(r"\{[^}/]*\}?", live.replace("{date}", "").replace("{hour}", ""))
    if unknown or "{date}" not in pattern:
        problem = unknown[0] if unknown else "{hour} without {date}"
        raise SourceNotFound(
            f"{_display(pattern)} has {problem}. A pattern may have {{date}} (YYYYMMDD) and, with it, {{hour}}. "
            "Write a literal brace as [{]."
        )
    if dates is None:
        raise SourceNotFound(
            f"{_display(pattern)} has {{date}}, but no dates are given. Set data.dates: {{from: …, to: …}} "
            "as YYYYMMDD or YYYYMMDD/HH."
        )
    segments = pattern.split("/")
    dated = max(i for i, segment in enumerate(segments) if "{" in remove_escaped(segment))
    in_file_name = dated == len(segments) - 1
    folder = "/".join(segments[: dated if in_file_name else dated + 1])
    daily = "{hour}" not in pattern
    hours = dates.hours()
    for hour in range(hours.start // 24 * 24, hours.stop, 24) if daily else hours:
        moment = _EPOCH + timedelta(hours=hour)
        values = {"{date}": f"{moment:%Y%m%d}", "{hour}": f"{moment:%H}"}
        yield _Period(
            pattern,
            _fill_placeholders(pattern, values),
            _fill_placeholders(folder, values),
            in_file_name,
            hour,
            daily,
        )


def _fill_placeholders(text: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def _wait_until_ready(
    storage: Storage,
    pending: list[_Period],
    donefile: str | None,
    wait_seconds: float,
    progress: Progress,
    clock: Clock,
) -> None:
    """Poll until every period is ready, or the time is over: then raise HourNotReady."""
    deadline = clock.monotonic() + wait_seconds
    missing = f"the {_marker(donefile)}" if donefile else "its folder"
    logged = ""
    while pending := _not_ready(storage, pending, donefile):
        hours = " and ".join(
            f"{_format_periods(list(same))} of {_display(source)}"
            for source, same in groupby(pending, key=lambda period: period.source)
        )
        left = deadline - clock.monotonic()
        if left <= 0:
            waited = f" after {wait_seconds:g} s of waiting" if wait_seconds else ""
            raise HourNotReady(
                f"{hours}: not complete, {missing} is missing{waited}. "
                "Run again when they have arrived, wait longer (data.dates.wait), or change data.dates."
            )
        if hours != logged:
            progress.log(f"waiting up to {left:.0f} s for {missing}: {hours}")
            logged = hours
        clock.sleep(min(_POLL_SECONDS, left))


def _not_ready(storage: Storage, periods: list[_Period], donefile: str | None) -> list[_Period]:
    listed = (
        paths_in_donefile(storage, donefile) if donefile is not None and is_donefile_list(donefile) else None
    )
    return [period for period in periods if not _ready(storage, period, donefile, listed)]


def _ready(storage: Storage, period: _Period, donefile: str | None, listed: set[str] | None) -> bool:
    if period.file_is_dated and not storage.list(period.pattern):
        return False
    if donefile is None:
        return bool(storage.list(period.pattern) or storage.folders(period.folder))
    if listed is not None and period.file_is_dated:
        files = [path_without_host(file.uri) for file in storage.list(period.pattern)]
        return all(is_listed(file, listed) for file in files)
    folders = storage.folders(period.folder) if is_glob(period.folder) else [unescape(period.folder)]
    if listed is not None:
        return bool(folders) and all(is_listed(path_without_host(folder), listed) for folder in folders)
    return bool(folders) and all(storage.describe(storage.join(folder, donefile)) for folder in folders)


def _marker(donefile: str) -> str:
    return f"line in {redacted(donefile)}" if is_donefile_list(donefile) else f"donefile {donefile}"


def _format_periods(periods: list[_Period]) -> str:
    """Periods as ranges of consecutive hours: 20260101/03..05, 20260101/22..20260102/01."""
    runs: list[list[_Period]] = []
    for period in periods:
        step = 24 if period.daily else 1
        if runs and runs[-1][-1].hour + step == period.hour:
            runs[-1].append(period)
        else:
            runs.append([period])
    return ", ".join(_format_range(run[0].label, run[-1].label) for run in runs)


def _format_range(first: str, last: str) -> str:
    if first == last:
        return first
    day, _, hour = last.partition("/")
    return f"{first}..{hour}" if hour and first.startswith(day) else f"{first}..{last}"


def _dated_files(
    storage: Storage, periods: list[_Period], donefile: str | None, progress: Progress
) -> list[SourceFile]:
    files, empty = [], []
    for period in periods:
        data = [file for file in storage.list(period.pattern) if not _is_donefile(file, donefile)]
        files += [replace(file, hour=period.hour, span=24 if period.daily else 1) for file in data]
        if not data:
            empty.append(period)
    if empty:
        progress.log(f"complete, but empty: {_format_periods(empty)} of {_display(empty[0].source)}")
    return files


def _is_donefile(file: SourceFile, donefile: str | None) -> bool:
    return file.uri.rsplit("/", 1)[-1] == donefile


def _nothing_found(storage: Storage, pattern: str) -> str:
    """The message for a pattern that matches nothing."""
    found_nothing = f"{_display(pattern)} matches no file."
    if protocol_of(pattern) in ("http", "https"):
        return f"{found_nothing} Open the URL in a browser and correct it."
    if storage.folders(pattern):
        return f"{_display(pattern)} is a folder. Write {_display(storage.join(pattern, '*'))} for the files in it."
    folder = _nearest_folder(storage, pattern)
    if folder is None:
        return f"{found_nothing} Its bucket or top folder does not exist. Correct the pattern, or create it."
    names = storage.names(folder)
    inside = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{found_nothing} The nearest existing folder is {redacted(folder)}, in it: {inside or 'nothing'}. "
        "Correct the pattern, or put the files there."
    )


def _nearest_folder(storage: Storage, pattern: str) -> str | None:
    """The deepest existing folder on the path of the pattern."""
    fixed = fixed_prefix(pattern)
    path_start = fixed.index("://") + 3 if "://" in fixed else 0
    ends = (i for i in reversed(range(path_start, len(fixed))) if fixed[i] == "/")
    candidates = [fixed[:end] or "/" for end in ends]
    if storage.is_local(pattern):
        candidates.append(".")
    return next((folder for folder in candidates if storage.folders(glob.escape(folder))), None)


def _display(pattern: str) -> str:
    return redacted(unescape(pattern))


def _hour_number(key: str, text: str, default_hour: int) -> int:
    match = re.fullmatch(r"(\d{8})(?:/(\d{2}))?", text)
    try:
        if match is None:
            raise ValueError
        day = datetime.strptime(match[1], "%Y%m%d").replace(tzinfo=UTC)
        hour = int(match[2] or default_hour)
        if hour > 23:
            raise ValueError
    except ValueError:
        raise _wrong_date(
            key, f"is {text!r}.", "Write YYYYMMDD or YYYYMMDD/HH, hours from 00 to 23."
        ) from None
    return (day - _EPOCH) // timedelta(hours=1) + hour


def _wrong_date(key: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Mistake("", 0, f"dates.{key}", problem, remedy)])
