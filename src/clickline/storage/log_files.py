"""Which files are the input: paths, globs, and {date}/{hour} patterns over hourly folders."""

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
from clickline.storage.filesystems import protocol_of
from clickline.storage.glob_patterns import fixed_part, is_glob, literal, live_part
from clickline.storage.redaction import shown
from clickline.storage.storage import Storage

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_POLL_SECONDS = 10.0


class Clock(Protocol):
    """Time, as far as waiting needs it."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class DateRange:
    """Hours from `first` to `last`, both included, written YYYYMMDD or YYYYMMDD/HH, in UTC.

    A day without an hour means its first hour in `first` and its last in `last`; None: there is no end.
    """

    first: str
    last: str | None

    def hours(self) -> range:
        """The hours of the range, counted from 1970-01-01T00."""
        first = _hour_number("from", self.first, 0)
        if self.last is None:
            raise _wrong_date(
                "to",
                "is missing. Only `clickline up --follow` can do without it.",
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
    folder: str  # which the donefile marks as complete
    file_is_dated: bool  # the placeholder is in the file's name: a folder alone does not make the hour exist
    hour: int
    daily: bool

    @property
    def label(self) -> str:
        return hour_label(self.hour, 24 if self.daily else 1)


def resolve(
    storage: Storage,
    patterns: Sequence[str],
    dates: DateRange | None = None,
    donefile: str | None = None,
    wait_seconds: float = 0,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> list[SourceFile]:
    """The files of all patterns, each once, sorted by hour and URI.

    An hour of a {date}/{hour} pattern is ready when its folder holds `donefile`, or exists if none is named.
    The others are waited for, then raised as HourNotReady; they are never left out.
    """
    progress = progress or Progress()
    periods = {pattern: list(_periods(pattern, dates)) for pattern in patterns}
    expected = [period for of_pattern in periods.values() for period in of_pattern]
    _await(storage, expected, donefile, wait_seconds, progress, clock or SystemClock())

    found: list[SourceFile] = []
    for pattern, of_pattern in periods.items():
        files = _dated_files(storage, of_pattern, donefile, progress) if of_pattern else storage.list(pattern)
        files = [file for file in files if not _is_donefile(file, donefile)]
        if not files:
            raise SourceNotFound(_nothing_found(storage, pattern))
        found += files
    return _each_once(found)


def files_there(
    storage: Storage, patterns: Sequence[str], dates: DateRange | None = None
) -> list[SourceFile]:
    """The files of all patterns that are there now, whether or not their hours are complete."""
    found: list[SourceFile] = []
    for pattern in patterns:
        periods = [period.pattern for period in _periods(pattern, dates)]
        found += [file for one in periods or [pattern] for file in storage.list(one)]
    return _each_once(found)


def in_both(train: Sequence[str], evaluated: Sequence[str]) -> str | None:
    """What to say of files that a model would both learn and be measured on; None if there are none."""
    learned = {_same(uri) for uri in train}
    both = sorted(shown(uri) for uri in evaluated if _same(uri) in learned)
    if not both:
        return None
    files = (
        "its only file is" if len(evaluated) == 1 else f"{len(both):,} of its {len(evaluated):,} files are"
    )
    return (
        f"data.eval: {files} in data.train too ({', '.join(both[:3])}{', …' if len(both) > 3 else ''}). The model is "
        "measured on rows that it has learned, so its figures, and the gate's verdict, say nothing about new rows. "
        "Give data.eval other files, later in time than data.train."
    )


def _same(uri: str) -> str:
    """What two names of one file have in common."""
    return os.path.realpath(uri) if Storage.is_local(uri) else uri


def _each_once(files: list[SourceFile]) -> list[SourceFile]:
    found: dict[str, SourceFile] = {}
    for file in files:
        found.setdefault(_same(file.uri), file)
    return sorted(found.values(), key=lambda file: (-1 if file.hour is None else file.hour, file.uri))


# ── one hour after the other ───────────────────────────────────────────────────────────────────


def hour_step(patterns: Sequence[str]) -> Literal[1, 24]:
    """Hours between two periods of {date}/{hour} patterns: 1, or 24 where they have no {hour}."""
    remedy = "Give {date}/{hour} patterns, such as logs/{date}/{hour}/*, all hourly or all daily."
    for pattern in patterns:
        if "{date}" not in pattern:
            problem = (
                f"holds {_told(pattern)}, which has no {{date}}: hours that arrive cannot be told apart."
            )
            raise ConfigError([Mistake("", 0, "data.train", problem, remedy)])
    steps: set[Literal[1, 24]] = {1 if "{hour}" in pattern else 24 for pattern in patterns}
    if len(steps) > 1:
        problem = "mixes patterns with {hour} and without: a day's files are not part of an hour."
        raise ConfigError([Mistake("", 0, "data.train", problem, remedy)])
    return steps.pop() if steps else 1


def hour_label(hour: int, step: int) -> str:
    """How a period is written: 20260101/03, or 20260101 for a day."""
    return f"{_EPOCH + timedelta(hours=hour):{'%Y%m%d' if step == 24 else '%Y%m%d/%H'}}"


def hour_is_complete(storage: Storage, patterns: Sequence[str], donefile: str | None, hour: int) -> bool:
    """Whether the hour, or day, that begins at `hour` is there in all patterns; StorageError if nobody can say."""
    return all(_ready(storage, period, donefile) for period in _periods_of_hour(patterns, hour))


def hour_files(
    storage: Storage, patterns: Sequence[str], donefile: str | None, hour: int, progress: Progress
) -> list[SourceFile]:
    """The files of one hour or day, none of them the donefile; HourNotReady when it is not complete."""
    periods = _periods_of_hour(patterns, hour)
    for period in periods:
        if not _ready(storage, period, donefile):
            lacking = f"its donefile {donefile}" if donefile else "its folder"
            raise HourNotReady(
                f"{period.label} of {_told(period.source)} is not complete: {lacking} is missing. "
                "Wait until it has arrived."
            )
    return _each_once(_dated_files(storage, periods, donefile, progress))


def _periods_of_hour(patterns: Sequence[str], hour: int) -> list[_Period]:
    label = hour_label(hour, hour_step(patterns))
    return [period for pattern in patterns for period in _periods(pattern, DateRange(label, label))]


# ── periods ────────────────────────────────────────────────────────────────────────────────────


def _periods(pattern: str, dates: DateRange | None) -> Iterator[_Period]:
    """The hours or days of a pattern; none if it is a plain path or glob."""
    live = live_part(pattern)
    if "{" not in live:
        return
    unknown = re.search(r"\{[^}/]*\}?", live.replace("{date}", "").replace("{hour}", ""))
    if unknown or "{date}" not in pattern:
        problem = unknown[0] if unknown else "{hour} without {date}"
        raise SourceNotFound(
            f"{_told(pattern)} has {problem}. A pattern may have {{date}} (YYYYMMDD) and, with it, {{hour}}. "
            "Write a brace of the name itself as [{]."
        )
    if dates is None:
        raise SourceNotFound(
            f"{_told(pattern)} has {{date}}, but no dates are given. Set data.dates: {{from: …, to: …}} "
            "as YYYYMMDD or YYYYMMDD/HH."
        )
    segments = pattern.split("/")
    dated = max(i for i, segment in enumerate(segments) if "{" in live_part(segment))
    in_file_name = dated == len(segments) - 1
    folder = "/".join(segments[: dated if in_file_name else dated + 1])
    daily = "{hour}" not in pattern
    hours = dates.hours()
    for hour in range(hours.start // 24 * 24, hours.stop, 24) if daily else hours:
        moment = _EPOCH + timedelta(hours=hour)
        values = {"{date}": f"{moment:%Y%m%d}", "{hour}": f"{moment:%H}"}
        yield _Period(pattern, _filled(pattern, values), _filled(folder, values), in_file_name, hour, daily)


def _filled(text: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def _await(
    storage: Storage,
    pending: list[_Period],
    donefile: str | None,
    wait_seconds: float,
    progress: Progress,
    clock: Clock,
) -> None:
    """Return when every period is ready; poll until the time is over, then raise."""
    deadline = clock.now() + wait_seconds
    lacking = f"the donefile {donefile}" if donefile else "its folder"
    said = ""
    while pending := [period for period in pending if not _ready(storage, period, donefile)]:
        hours = " and ".join(
            f"{_compact(list(same))} of {_told(source)}"
            for source, same in groupby(pending, key=lambda period: period.source)
        )
        left = deadline - clock.now()
        if left <= 0:
            waited = f" after {wait_seconds:g} s of waiting" if wait_seconds else ""
            raise HourNotReady(
                f"{hours}: not there or not complete, {lacking} is missing{waited}. "
                "Run again when they have arrived, wait longer (data.dates.wait), or change data.dates."
            )
        if hours != said:
            progress.say(f"waiting up to {left:.0f} s for {lacking}: {hours}")
            said = hours
        clock.sleep(min(_POLL_SECONDS, left))


def _ready(storage: Storage, period: _Period, donefile: str | None) -> bool:
    if period.file_is_dated and not storage.list(period.pattern):
        return False
    if donefile is None:
        return bool(storage.list(period.pattern) or storage.folders(period.folder))
    folders = storage.folders(period.folder) if is_glob(period.folder) else [literal(period.folder)]
    return bool(folders) and all(storage.describe(storage.join(folder, donefile)) for folder in folders)


def _compact(periods: list[_Period]) -> str:
    """20260101/03..05, 20260101/22..20260102/01: runs of hours that follow each other."""
    runs: list[list[_Period]] = []
    for period in periods:
        step = 24 if period.daily else 1
        if runs and runs[-1][-1].hour + step == period.hour:
            runs[-1].append(period)
        else:
            runs.append([period])
    return ", ".join(_run(run[0].label, run[-1].label) for run in runs)


def _run(first: str, last: str) -> str:
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
        progress.say(f"complete, but without data: {_compact(empty)} of {_told(empty[0].source)}")
    return files


def _is_donefile(file: SourceFile, donefile: str | None) -> bool:
    return file.uri.rsplit("/", 1)[-1] == donefile


def _nothing_found(storage: Storage, pattern: str) -> str:
    """What a user needs to know who wrote a pattern that matches nothing."""
    found_nothing = f"{_told(pattern)} matches no file."
    if protocol_of(pattern) in ("http", "https"):
        return f"{found_nothing} Open the address in a browser and correct it."
    if storage.folders(pattern):
        return f"{_told(pattern)} is a folder. Write {_told(storage.join(pattern, '*'))} for the files in it."
    folder = _nearest_folder(storage, pattern)
    if folder is None:
        return f"{found_nothing} Not even its bucket or top folder exists. Correct it, or create that first."
    names = storage.names(folder)
    inside = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{found_nothing} The nearest folder that exists is {shown(folder)}, in it: {inside or 'nothing'}. "
        "Correct the pattern, or put the files there."
    )


def _nearest_folder(storage: Storage, pattern: str) -> str | None:
    """The deepest folder on the way to the pattern that exists."""
    fixed = fixed_part(pattern)
    path_start = fixed.index("://") + 3 if "://" in fixed else 0
    ends = (i for i in reversed(range(path_start, len(fixed))) if fixed[i] == "/")
    candidates = [fixed[:end] or "/" for end in ends]
    if storage.is_local(pattern):
        candidates.append(".")
    return next((folder for folder in candidates if storage.folders(glob.escape(folder))), None)


def _told(pattern: str) -> str:
    return shown(literal(pattern))


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
