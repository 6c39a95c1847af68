"""What happened to each row: label, weight, shows, clicks, and the hour it happened in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.features.raw_columns import (
    Faults,
    as_text,
    equals_any,
    numbers,
    shown_value,
    single,
    without,
)
from clickline.records import (
    Block,
    EncodedRows,
    IntegerColumn,
    LabelledRows,
    RawColumn,
    RawRows,
    SourceFile,
    TextColumn,
    TimeUnit,
)

_MOST_SHOWS = 2**24  # counts up to here are exact in the float32 of a weight


@dataclass(frozen=True)
class TargetFields:
    """The source's columns that tell what happened to a row."""

    label: str = ""  # 0 or 1, or one of `positive`
    positive: tuple[str, ...] = ()
    shows: str = ""  # with `clicks`, in place of a label: a row that stands for several shows
    clicks: str = ""
    weight: str = ""
    time: str = ""
    time_format: str = ""
    time_unit: TimeUnit | None = None  # of unix times; None: what most times of a file are

    @property
    def columns(self) -> tuple[str, ...]:
        named = (self.label, self.shows, self.clicks, self.weight, self.time)
        return tuple(dict.fromkeys(column for column in named if column))


@dataclass(frozen=True)
class FileTimes:
    """Which times the rows of one file may have."""

    hour: int | None  # of the file, from its {date}/{hour} pattern
    latest: float  # unix seconds
    why: str  # what `latest` follows from, in words
    unit: TimeUnit | None  # that the file was found to have; None: its rows here tell

    @classmethod
    def of(cls, source: SourceFile, block: Block, clock: float) -> FileTimes:
        """`clock` is the time at which the logs are read: the same for all of a dataset."""
        latest, why = clock, "the clock when the logs were read"
        if source.hour is not None and (source.hour + source.span) * 3600.0 < clock:
            latest, why = (source.hour + source.span) * 3600.0, "the end of its file's hours"
        return cls(source.hour, latest + _TOLERANCE, why, block.time_unit)


@dataclass(frozen=True)
class Targets:
    """The targets of all rows of a block, bad ones included."""

    label_B: NDArray[np.float32]
    weight_B: NDArray[np.float32]
    show_B: NDArray[np.uint32]
    click_B: NDArray[np.uint32]
    event_hour_B: NDArray[np.int32]

    def with_features(self, encoded: EncodedRows) -> LabelledRows:
        return LabelledRows(
            self.label_B, self.weight_B, self.show_B, self.click_B, self.event_hour_B, encoded
        )


def targets(
    raw: RawRows, fields: TargetFields, missing: tuple[str, ...], file: FileTimes
) -> tuple[Targets, list[Faults]]:
    """Read the targets; faults name the rows that cannot be used."""
    faults: list[Faults] = []

    def column(name: str) -> RawColumn:
        one, bad = single(without(raw.columns[name], missing), name, "")
        faults.extend(bad)
        return one

    if fields.shows:
        show_B, click_B = _counts(column(fields.shows), column(fields.clicks), fields, faults)
        label_B = (click_B / np.maximum(show_B, 1)).astype(np.float32)
    else:
        click_B = _labels(column(fields.label), fields, faults)
        show_B = np.ones(raw.rows, dtype=np.uint32)
        label_B = click_B.astype(np.float32)
    weight_B = show_B.astype(np.float32)
    if fields.weight:
        own_B, bad = numbers(raw.columns[fields.weight], fields.weight, raw.rows, missing)
        faults += bad
        faults += Faults.where(
            ~(own_B >= 0),
            fields.weight,
            "bad weight",
            lambda row: f"{fields.weight} is {own_B[row]}, 0 or more expected",
        )
        weight_B *= own_B
    if fields.time:
        event_hour_B = _hours(column(fields.time), fields, raw.rows, file, faults)
    else:
        event_hour_B = np.full(raw.rows, -1 if file.hour is None else file.hour, dtype=np.int32)
    return Targets(label_B, weight_B, show_B, click_B, event_hour_B), faults


def _counts(
    shows: RawColumn, clicks: RawColumn, fields: TargetFields, faults: list[Faults]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    if not isinstance(shows, IntegerColumn) or not isinstance(clicks, IntegerColumn):
        raise TypeError("a reader of shows and clicks delivers whole numbers")
    faults += Faults.where(
        shows.values_N > _MOST_SHOWS,
        fields.shows,
        "bad label",
        lambda row: f"{fields.shows} is {shows.values_N[row]}, at most {_MOST_SHOWS:,} allowed in one row",
    )
    return shows.values_N.astype(np.uint32), clicks.values_N.astype(np.uint32)


def _labels(column: RawColumn, fields: TargetFields, faults: list[Faults]) -> NDArray[np.uint32]:
    name = fields.label
    if fields.positive:
        text = as_text(column)
        faults += Faults.where(
            text.starts_N == text.ends_N, name, "bad label", lambda row: f"{name} is empty"
        )
        return equals_any(text, fields.positive).astype(np.uint32)
    rows = column.starts_N.size if isinstance(column, TextColumn) else column.values_N.size
    values_B, _ = numbers(column, name, rows)
    faults += Faults.where(
        (values_B != 0) & (values_B != 1),
        name,
        "bad label",
        lambda row: (
            f"{name} is {shown_value(column, row)}, 0 or 1 expected; else set positive: [what means a click]"
        ),
    )
    return np.equal(values_B, 1).astype(np.uint32)


# ── time ───────────────────────────────────────────────────────────────────────────────────────

# Unix times of these years lie in ranges that do not meet, so a number tells its unit; and dates written as 20260131,
# 26013123 or 20260131235959 lie in none.
_EARLIEST = 631_152_000.0  # 1990
_LATEST = 4_102_444_800.0  # 2100
_YEARS = "of the years 1990 to 2099"
_UNITS: dict[TimeUnit, tuple[float, str]] = {
    "s": (1.0, "seconds"),
    "ms": (1e3, "milliseconds"),
    "us": (1e6, "microseconds"),
    "ns": (1e9, "nanoseconds"),
}
_TOLERANCE = 24 * 3600.0
"""Seconds by which a row's time may lie behind the end of its file's hours, and behind the clock. It covers folders
that are named in local time, and clocks that are wrong. There is no such bound before the file: rows arrive late."""

Doubles = NDArray[np.float64]


def unit_finder(
    fields: TargetFields, missing: tuple[str, ...]
) -> Callable[[RawRows], TimeUnit | None] | None:
    """What tells the unit of a file's unix times by its first rows; None where nobody needs to know."""
    if not fields.time or fields.time_format or fields.time_unit:
        return None
    return partial(_unit_of_rows, fields=fields, missing=missing)


def _unit_of_rows(raw: RawRows, *, fields: TargetFields, missing: tuple[str, ...]) -> TimeUnit | None:
    column, _ = single(without(raw.columns[fields.time], missing), fields.time, "")
    number_B, seconds_B = _written(column, fields, raw.rows)
    # Dates tell that nobody needs a unit: without this, every block of their file would be looked at for one.
    return _most_frequent_unit(number_B) or ("s" if _in_years(seconds_B).any() else None)


def _most_frequent_unit(number_B: Doubles) -> TimeUnit | None:
    """The unit that most of the numbers are plausible in; None when none is in any."""
    counts = {unit: int(_in_years(number_B / scale).sum()) for unit, (scale, _) in _UNITS.items()}
    unit = max(counts, key=counts.__getitem__)  # the first, where two are as frequent
    return unit if counts[unit] else None


def _in_years(seconds_B: Doubles) -> NDArray[np.bool_]:
    inside_B: NDArray[np.bool_] = (seconds_B >= _EARLIEST) & (seconds_B < _LATEST)  # neither for NaN
    return inside_B


def _hours(
    column: RawColumn, fields: TargetFields, rows: int, file: FileTimes, faults: list[Faults]
) -> NDArray[np.int32]:
    number_B, seconds_B = _written(column, fields, rows)
    unit = fields.time_unit or file.unit or _most_frequent_unit(number_B) or "s"
    scale, words = _UNITS[unit]
    seconds_B = np.where(np.isnan(number_B), seconds_B, number_B / scale)
    bad_B = ~_in_years(seconds_B)
    why = "" if fields.time_unit else " (as most times of this file)"
    allowed = (
        f"expected unix time in {words}{why} or YYYY-MM-DD HH:MM:SS, {_YEARS}; else set unit: or time_format:"
    )
    if fields.time_format:
        allowed = f"expected a time written as {fields.time_format}, {_YEARS}"
    name = fields.time
    faults += Faults.where(
        bad_B, name, "bad time", lambda row: f"{name} is {shown_value(column, row)}, {allowed}"
    )
    early_B = seconds_B <= file.latest
    faults += Faults.where(
        ~bad_B & ~early_B,
        name,
        "bad time",
        lambda row: (
            f"{name} is {shown_value(column, row)}, which is {_utc(seconds_B[row])}; at most {_utc(file.latest)} "
            f"is allowed, {_TOLERANCE / 3600:.0f} hours after {file.why}"
        ),
    )
    return (np.where(bad_B | ~early_B, 0.0, seconds_B) // 3600.0).astype(np.int32)


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(float(seconds), UTC):%Y-%m-%d %H:%M:%S} UTC"


def _written(column: RawColumn, fields: TargetFields, rows: int) -> tuple[Doubles, Doubles]:
    """Times as they are written: as a number of any unit, or as a date, which is seconds; NaN what is not so."""
    number_B, seconds_B = np.full(rows, np.nan), np.full(rows, np.nan)
    if isinstance(column, IntegerColumn) and column.timestamps:
        seconds_B = np.where(column.missing_N, np.nan, column.values_N.view(np.int64).astype(np.float64))
    elif isinstance(column, TextColumn) or fields.time_format:
        if fields.time_format:  # of a written time only the blanks go: a format may end in zeros
            text = column if isinstance(column, TextColumn) else as_text(column)
            _by_format(text, fields.time_format, seconds_B)
        else:
            text = as_text(column)
            _read_times(text.data, text.starts_N, text.ends_N, number_B, seconds_B)
    elif isinstance(column, IntegerColumn):
        signed = column.values_N.view(np.int64) if column.signed else column.values_N
        number_B = np.where(column.missing_N, np.nan, signed.astype(np.float64))
    else:
        number_B = column.values_N.astype(np.float64)
    return number_B, seconds_B


def _by_format(text: TextColumn, time_format: str, seconds_B: NDArray[np.float64]) -> None:
    known: dict[bytes, float] = {}  # logs repeat their times: the slow parser runs once for each
    for row in range(seconds_B.size):
        value = bytes(text.data[text.starts_N[row] : text.ends_N[row]]).strip(b" \t\r\n")
        if value not in known:
            try:
                moment = datetime.strptime(value.decode(), time_format)
                known[value] = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):  # not of this format, not UTF-8, or a year that no clock has
                known[value] = np.nan
        seconds_B[row] = known[value]


@njit(cache=True, nogil=True)
def _digits(data: NDArray[np.uint8], at: int, count: int, end: int) -> int:
    """The number in `count` digits at `at`; -1 when they are not all there."""
    if at + count > end:
        return -1
    value = 0
    for i in range(at, at + count):
        if data[i] < 48 or data[i] > 57:
            return -1
        value = value * 10 + (data[i] - 48)
    return value


@njit(cache=True, nogil=True)
def _iso_seconds(data: NDArray[np.uint8], start: int, end: int) -> float:
    """Seconds since 1970 of YYYY-MM-DD[ T]HH[:MM[:SS[.f]]][Z|+HH:MM]; NaN when it is something else."""
    year = _digits(data, start, 4, end)
    month = _digits(data, start + 5, 2, end)
    day = _digits(data, start + 8, 2, end)
    if year < 1 or month < 1 or month > 12 or day < 1 or data[start + 4] != 45 or data[start + 7] != 45:
        return np.nan
    leap = (year % 4 == 0 and year % 100 != 0) or year % 400 == 0
    longest = 31 - (month - 1) % 7 % 2 if month != 2 else (29 if leap else 28)
    if day > longest:
        return np.nan
    # Days since 1970 in the proleptic Gregorian calendar, counting years from March.
    y = year - 1 if month <= 2 else year
    m = month + 9 if month <= 2 else month - 3
    days = 365 * y + y // 4 - y // 100 + y // 400 + (153 * m + 2) // 5 + day - 1 - 719468
    seconds = days * 86400.0
    at = start + 10
    if at == end:
        return seconds
    if data[at] != 32 and data[at] != 84:
        return np.nan
    hour = _digits(data, at + 1, 2, end)
    if hour < 0 or hour > 23:
        return np.nan
    seconds += hour * 3600.0
    at += 3
    for unit in (60.0, 1.0):
        if at < end and data[at] == 58:
            part = _digits(data, at + 1, 2, end)
            if part < 0 or part > 59 + (unit == 1.0):
                return np.nan
            seconds += part * unit
            at += 3
    if at < end and data[at] == 46:
        at += 1
        while at < end and 48 <= data[at] <= 57:
            at += 1
    if at == end or (data[at] == 90 and at + 1 == end):
        return seconds
    if data[at] != 43 and data[at] != 45:
        return np.nan
    sign = -1.0 if data[at] == 43 else 1.0
    away = _digits(data, at + 1, 2, end)
    at += 3
    if at < end and data[at] == 58:
        at += 1
    minutes = 0
    if at < end:
        minutes = _digits(data, at, 2, end)
        at += 2
    if away < 0 or minutes < 0 or at != end:
        return np.nan
    return seconds + sign * (away * 3600.0 + minutes * 60.0)


@njit(cache=True, nogil=True)
def _read_times(
    data: NDArray[np.uint8],
    starts_B: NDArray[np.int64],
    ends_B: NDArray[np.int64],
    number_B: NDArray[np.float64],
    seconds_B: NDArray[np.float64],
) -> None:
    """Digits alone are a number, with a fraction or not; anything else is a date."""
    for row in range(starts_B.size):
        whole = 0.0
        at = starts_B[row]
        end = ends_B[row]
        while at < end and 48 <= data[at] <= 57:
            whole = whole * 10.0 + (data[at] - 48)
            at += 1
        if at < end and data[at] == 46 and at > starts_B[row]:
            at += 1
            while at < end and 48 <= data[at] <= 57:
                at += 1
        if at == end and end > starts_B[row]:
            number_B[row] = whole
        else:
            seconds_B[row] = _iso_seconds(data, starts_B[row], end)
