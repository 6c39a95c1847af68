"""Which hours `--backfill FROM..TO` means."""

from __future__ import annotations

from clickline.errors import ConfigError, Mistake
from clickline.storage.log_files import DateRange


def hours_between(text: str) -> DateRange:
    """`YYYYMMDD[/HH]..YYYYMMDD[/HH]`, both ends included, in UTC."""
    first, dots, last = text.partition("..")
    found = DateRange(first, last)
    try:
        if dots and first and last:
            found.hours()
            return found
        problem = f"is {text!r}."
    except ConfigError as error:
        problem = f"is {text!r}: {error.mistakes[0].key.removeprefix('dates.')} {error.mistakes[0].problem}"
    raise ConfigError(
        [
            Mistake(
                "",
                0,
                "--backfill",
                problem,
                "Write FROM..TO, each a day YYYYMMDD or an hour YYYYMMDD/HH in UTC, FROM not after TO.",
            )
        ]
    )
