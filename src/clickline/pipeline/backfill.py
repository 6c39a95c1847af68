"""Parses the hours of `--backfill FROM..TO`."""

from __future__ import annotations

from clickline.errors import ConfigError, Mistake
from clickline.storage.log_files import DateRange


def parse_backfill(text: str) -> DateRange:
    """Parse `YYYYMMDD[/HH]..YYYYMMDD[/HH]`, both ends included, in UTC."""
    first, dots, last = text.partition("..")
    dates = DateRange(first, last)
    try:
        if dots and first and last:
            dates.hours()
            return dates
        problem = f"is {text!r}."
    except ConfigError as error:
        problem = f"is {text!r}: {error.mistakes[0].key.removeprefix('dates.')} {error.mistakes[0].problem}"
    remedy = "Write FROM..TO, each a day YYYYMMDD or an hour YYYYMMDD/HH in UTC, FROM not after TO."
    raise ConfigError([Mistake("", 0, "--backfill", problem, remedy)])
