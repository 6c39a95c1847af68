"""Reads the targets of each row: label, weight, impressions, clicks, and the hour of the event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
from numpy.typing import NDArray

from clickline.features.raw_columns import (
    ValidationErrors,
    as_text,
    drop_missing,
    equals_any,
    format_value,
    single_valued,
    to_float32,
)
from clickline.numba_cache import njit
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

_MAX_IMPRESSIONS = 2**24  # counts up to here are exact in the float32 of a weight


@dataclass(frozen=True)
class TargetFields:
    """The source columns that hold a row's targets."""

    label: str = ""  # 0 or 1, or one of `positive`
    positive: tuple[str, ...] = ()
    impressions: str = ""  # with `clicks`, in place of a label: a row that stands for several impressions
    clicks: str = ""
    weight: str = ""
    time: str = ""
    time_format: str = ""
    time_unit: TimeUnit | None = None  # of unix times; None: the most frequent unit in a file

    @property
    def columns(self) -> tuple[str, ...]:
        named = (self.label, self.impressions, self.clicks, self.weight, self.time)
        return tuple(dict.fromkeys(column for column in named if column))


@dataclass(frozen=True)
class TimeBounds:
    """The range of times allowed for the rows of one file."""

    hour: int | None  # of the file, from its {date}/{hour} pattern
    latest: float  # unix seconds
    origin: str  # what `latest` is derived from, for messages
    unit: TimeUnit | None  # found for the file; None: decided by the rows at hand

    @classmethod
    def for_file(cls, source: SourceFile, block: Block, reference_time: float) -> TimeBounds:
        """`reference_time` is when the logs are read, the same for a whole dataset."""
        latest, origin = reference_time, "the clock when the logs were read"
        if source.hour is not None and (source.hour + source.span) * 3600.0 < reference_time:
            latest, origin = (source.hour + source.span) * 3600.0, "the end of its file's hours"
        return cls(source.hour, latest + _TOLERANCE, origin, block.time_unit)


def read_targets(
    raw: RawRows, encoded: EncodedRows, fields: TargetFields, missing: tuple[str, ...], file: TimeBounds
) -> tuple[LabelledRows, list[ValidationErrors]]:
    """The encoded rows with their targets, bad ones included, and the validation errors of rows that cannot be
    used."""
    errors: list[ValidationErrors] = []

    def column(name: str) -> RawColumn:
        value, bad = single_valued(drop_missing(raw.columns[name], missing), name, "")
        errors.extend(bad)
        return value

    if fields.impressions:
        impression_B, click_B = _read_counts(
            column(fields.impressions), column(fields.clicks), fields, errors
        )
        label_B = (click_B / np.maximum(impression_B, 1)).astype(np.float32)
    else:
        click_B = _read_labels(column(fields.label), fields, errors)
        impression_B = np.ones(raw.rows, dtype=np.uint32)
        label_B = click_B.astype(np.float32)
    weight_B = impression_B.astype(np.float32)
    if fields.weight:
        row_weight_B, bad = to_float32(raw.columns[fields.weight], fields.weight, raw.rows, missing)
        errors += bad
        errors += ValidationErrors.where(
            ~(row_weight_B >= 0),
            fields.weight,
            "bad weight",
            lambda row: f"{fields.weight} is {row_weight_B[row]}, 0 or more expected",
        )
        weight_B *= row_weight_B
    if fields.time:
        event_hour_B = _read_hours(column(fields.time), fields, raw.rows, file, errors)
    else:
        event_hour_B = np.full(raw.rows, -1 if file.hour is None else file.hour, dtype=np.int32)
    return LabelledRows(label_B, weight_B, impression_B, click_B, event_hour_B, encoded), errors


def _read_counts(
    impressions: RawColumn, clicks: RawColumn, fields: TargetFields, errors: list[ValidationErrors]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    if not isinstance(impressions, IntegerColumn) or not isinstance(clicks, IntegerColumn):
        raise TypeError("a reader of impressions and clicks must deliver integers")
    errors += ValidationErrors.where(
        impressions.values_N > _MAX_IMPRESSIONS,
        fields.impressions,
        "bad label",
        lambda row: (
            f"{fields.impressions} is {impressions.values_N[row]}, at most {_MAX_IMPRESSIONS:,} are allowed in one row"
        ),
    )
    errors += ValidationErrors.where(
        (impressions.values_N < 1) | (clicks.values_N > impressions.values_N),
        fields.clicks,
        "bad label",
        lambda row: (
            f"{fields.impressions} is {impressions.values_N[row]} and {fields.clicks} {clicks.values_N[row]}, "
            f"{fields.impressions} >= 1 and {fields.clicks} <= {fields.impressions} expected"
        ),
    )
    return impressions.values_N.astype(np.uint32), clicks.values_N.astype(np.uint32)


def _read_labels(
    column: RawColumn, fields: TargetFields, errors: list[ValidationErrors]
) -> NDArray[np.uint32]:
    name = fields.label
    if fields.positive:
        text = as_text(column)
        errors += ValidationErrors.where(
            text.starts_N == text.ends_N, name, "bad label", lambda row: f"{name} is empty"
        )
        return equals_any(text, fields.positive).astype(np.uint32)
    rows = column.starts_N.size if isinstance(column, TextColumn) else column.values_N.size
    values_B, _ = to_float32(column, name, rows)
    errors += ValidationErrors.where(
        (values_B != 0) & (values_B != 1),
        name,
        "bad label",
        lambda row: (
            f"{name} is {format_value(column, row)}, 0 or 1 expected; for other labels set "
            "positive: [values that mean a click]"
        ),
    )
    return np.equal(values_B, 1).astype(np.uint32)


# ── time ───────────────────────────────────────────────────────────────────────────────────────

# Unix times of these years fall in disjoint ranges for each unit, so a number reveals its unit; dates written as
# 20260131, 26013123 or 20260131235959 fall in none.
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
"""Seconds by which a row's time may be after the end of its file's hours, and after the clock. This allows for folders
named in local time and for wrong clocks. There is no lower bound: rows may arrive late."""

Doubles = NDArray[np.float64]


def time_unit_detector(
    fields: TargetFields, missing: tuple[str, ...]
) -> Callable[[RawRows], TimeUnit | None] | None:
    """A function that detects the unit of unix times in rows; None if the unit is given or not needed."""
    if not fields.time or fields.time_format or fields.time_unit:
        return None
    return partial(_detect_unit, fields=fields, missing=missing)


def _detect_unit(raw: RawRows, *, fields: TargetFields, missing: tuple[str, ...]) -> TimeUnit | None:
    column, _ = single_valued(drop_missing(raw.columns[fields.time], missing), fields.time, "")
    number_B, seconds_B = _parse_times(column, fields, raw.rows)
    # Dates need no unit: without this, every block of the file would be searched for one.
    return _most_frequent_unit(number_B) or ("s" if _in_years(seconds_B).any() else None)


def _most_frequent_unit(number_B: Doubles) -> TimeUnit | None:
    """The unit in which most of the numbers are plausible; None if no number is plausible in any."""
    counts = {unit: int(_in_years(number_B / scale).sum()) for unit, (scale, _) in _UNITS.items()}
    unit = max(counts, key=counts.__getitem__)  # the first one if two are equally frequent
    return unit if counts[unit] else None


def _in_years(seconds_B: Doubles) -> NDArray[np.bool_]:
    inside_B: NDArray[np.bool_] = (seconds_B >= _EARLIEST) & (seconds_B < _LATEST)  # false for NaN
    return inside_B


def _read_hours(
    column: RawColumn, fields: TargetFields, rows: int, file: TimeBounds, errors: list[ValidationErrors]
) -> NDArray[np.int32]:
    number_B, seconds_B = _parse_times(column, fields, rows)
    unit = fields.time_unit or file.unit or _most_frequent_unit(number_B) or "s"
    scale, unit_name = _UNITS[unit]
    seconds_B = np.where(np.isnan(number_B), seconds_B, number_B / scale)
    bad_B = ~_in_years(seconds_B)
    hint = "" if fields.time_unit else " (like most times in this file)"
    allowed = (
        f"expected unix time in {unit_name}{hint} or YYYY-MM-DD HH:MM:SS, {_YEARS}; "
        "otherwise set unit: or time_format:"
    )
    if fields.time_format:
        allowed = f"expected a time written as {fields.time_format}, {_YEARS}"
    name = fields.time
    errors += ValidationErrors.where(
        bad_B, name, "bad time", lambda row: f"{name} is {format_value(column, row)}, {allowed}"
    )
    in_bounds_B = seconds_B <= file.latest
    errors += ValidationErrors.where(
        ~bad_B & ~in_bounds_B,
        name,
        "bad time",
        lambda row: (
            f"{name} is {format_value(column, row)}, which is {_utc(seconds_B[row])}; at most {_utc(file.latest)} "
            f"is allowed, {_TOLERANCE / 3600:.0f} hours after {file.origin}"
        ),
    )
    return (np.where(bad_B | ~in_bounds_B, 0.0, seconds_B) // 3600.0).astype(np.int32)


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(float(seconds), UTC):%Y-%m-%d %H:%M:%S} UTC"


def _parse_times(column: RawColumn, fields: TargetFields, rows: int) -> tuple[Doubles, Doubles]:
    """Times as numbers of any unit, and dates as seconds; NaN for the other kind and for anything else."""
    number_B, seconds_B = np.full(rows, np.nan), np.full(rows, np.nan)
    if isinstance(column, IntegerColumn) and column.timestamps:
        seconds_B = np.where(column.missing_N, np.nan, column.values_N.view(np.int64).astype(np.float64))
    elif isinstance(column, TextColumn) or fields.time_format:
        if fields.time_format:  # only blanks are removed: the text may end in zeros
            text = column if isinstance(column, TextColumn) else as_text(column)
            _parse_by_format(text, fields.time_format, seconds_B)
        else:
            text = as_text(column)
            _read_times(text.data, text.starts_N, text.ends_N, number_B, seconds_B)
    elif isinstance(column, IntegerColumn):
        signed = column.values_N.view(np.int64) if column.signed else column.values_N
        number_B = np.where(column.missing_N, np.nan, signed.astype(np.float64))
    else:
        number_B = column.values_N.astype(np.float64)
    return number_B, seconds_B


def _parse_by_format(text: TextColumn, time_format: str, seconds_B: NDArray[np.float64]) -> None:
    parsed: dict[bytes, float] = {}  # logs repeat their times: the slow parser runs once per text
    for row in range(seconds_B.size):
        value = bytes(text.data[text.starts_N[row] : text.ends_N[row]]).strip(b" \t\r\n")
        if value not in parsed:
            try:
                moment = datetime.strptime(value.decode(), time_format)
                parsed[value] = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):  # another format, not UTF-8, or an impossible year
                parsed[value] = np.nan
        seconds_B[row] = parsed[value]


@njit(cache=True, nogil=True)
def _digits(data: NDArray[np.uint8], at: int, count: int, end: int) -> int:
    """The number in the `count` digits at `at`; -1 if they are not all digits."""
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
    """Seconds since 1970 of YYYY-MM-DD[ T]HH[:MM[:SS[.f]]][Z|+HH:MM]; NaN for any other text."""
    year = _digits(data, start, 4, end)
    month = _digits(data, start + 5, 2, end)
    day = _digits(data, start + 8, 2, end)
    if year < 1 or month < 1 or month > 12 or day < 1 or data[start + 4] != 45 or data[start + 7] != 45:
        return np.nan
    leap = (year % 4 == 0 and year % 100 != 0) or year % 400 == 0
    days_in_month = 31 - (month - 1) % 7 % 2 if month != 2 else (29 if leap else 28)
    if day > days_in_month:
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
    offset_hours = _digits(data, at + 1, 2, end)
    at += 3
    if at < end and data[at] == 58:
        at += 1
    offset_minutes = 0
    if at < end:
        offset_minutes = _digits(data, at, 2, end)
        at += 2
    if offset_hours < 0 or offset_minutes < 0 or at != end:
        return np.nan
    return seconds + sign * (offset_hours * 3600.0 + offset_minutes * 60.0)


@njit(cache=True, nogil=True)
def _read_times(
    data: NDArray[np.uint8],
    starts_B: NDArray[np.int64],
    ends_B: NDArray[np.int64],
    number_B: NDArray[np.float64],
    seconds_B: NDArray[np.float64],
) -> None:
    """Parse texts: digits, with or without a fraction, are a number; anything else is a date."""
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
