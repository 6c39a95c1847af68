"""clickline check: reports every mistake in the config at once; runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clickline.cli.console import emit, say
from clickline.cli.options import JsonOptions

if TYPE_CHECKING:
    from clickline.config import Config, DataSection


def check(
    options: JsonOptions,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of the config, for editors.")
    ] = False,
) -> None:
    """Report every mistake in the config: file, line, key, remedy. Exit 2 if there is any."""
    from clickline.config import json_schema

    if schema:
        emit(json_schema())
        return
    config = options.config()
    _check_eval_rows(config, options.config_file)
    _check_files(config)
    notes = list(_notes(config))
    if options.as_json:
        emit({"file": str(options.config_file), "mistakes": [], "notes": notes})
        return
    typer.echo(f"{options.config_file}: no mistakes")
    for line in notes:
        say(f"note: {line}")


def _check_eval_rows(config: Config, config_file: Path) -> None:
    """Raise the error `train` would raise if nothing can be evaluated, unless the logs can only be followed."""
    from clickline.errors import ConfigError, Mistake

    problem = config.without_eval()
    if problem is not None and not _is_endless(config.data):
        remedy = "Set it, or remove what needs it."
        raise ConfigError([Mistake(str(config_file), 0, "data.eval", problem, remedy)])


def _is_endless(data: DataSection) -> bool:
    """Whether the logs have no last hour, so that only `up --follow` can train on them."""
    return data.dates is not None and data.dates.last is None


def _check_files(config: Config) -> None:
    """Raise the mistakes in the files that the config names: slot.conf, a custom reader, columns of the logs."""
    slot_conf, reader = config.data.slot_conf, config.data.reader
    if slot_conf is not None and "://" not in slot_conf and Path(slot_conf).is_file():
        from clickline.data.readers.slot_lines import read_slot_conf

        read_slot_conf(slot_conf, Path(slot_conf).read_bytes())
    if reader is not None:
        from clickline.data.readers import CustomReader

        CustomReader(Path(reader), ())
    elif config.data.format in ("csv", "parquet"):
        _check_columns(config.data)


def _check_columns(data: DataSection) -> None:
    """Raise the error `prepare` would raise for columns that the first local file lacks."""
    from clickline.data.input_blocks import reader_from_config
    from clickline.data.schema import build_schema
    from clickline.storage.storage import Storage

    for patterns in (data.train, data.eval or ()):
        local = (pattern for pattern in patterns if Storage.is_local(pattern))
        files = (file.uri for pattern in local for file in Storage().list(_any_hour(pattern)))
        first = next((uri for uri in files if Path(uri).name != data.donefile), None)
        if first is not None:
            next(iter(reader_from_config(data, build_schema(data)).blocks(first, Path(first))), None)


def _notes(config: Config) -> Iterator[str]:
    """What is not a mistake yet but will be when prepare runs: the data may arrive later than the config."""
    from clickline.storage.glob_patterns import unescape
    from clickline.storage.storage import Storage

    for key, patterns in (("data.train", config.data.train), ("data.eval", config.data.eval or ())):
        for pattern in patterns:
            if Storage.is_local(pattern) and not Storage().list(_any_hour(pattern)):
                yield f"{key}: {unescape(pattern)} matches no file yet."
    slot_conf = config.data.slot_conf
    if slot_conf is not None and "://" not in slot_conf and not Path(slot_conf).is_file():
        yield f"data.slot_conf: {slot_conf} does not exist yet."
    problem = config.without_eval()
    if problem is not None:
        yield f"data.eval {problem} `up --follow` evaluates on held-out rows instead (follow.holdout)."
    elif config.data.eval is None:
        yield "data.eval is not set: the model will not be evaluated."
    elif leak := _overlap(config.data):
        yield leak


def _overlap(data: DataSection) -> str | None:
    """The warning about local files that are in both data.train and data.eval."""
    from clickline.storage.log_files import DateRange, existing_files, overlap_warning
    from clickline.storage.storage import Storage

    splits = []
    for patterns, dates in ((data.train, data.dates), (data.eval or (), data.eval_dates)):
        if dates is not None and dates.last is None:
            return None  # endless hours are followed, and then data.eval is not read
        local = [pattern for pattern in patterns if Storage.is_local(pattern)]
        hours = None if dates is None else DateRange(dates.first, dates.last)
        files = existing_files(Storage(), local, hours)
        splits.append([file.uri for file in files if Path(file.uri).name != data.donefile])
    return overlap_warning(*splits)


def _any_hour(pattern: str) -> str:
    return pattern.replace("{date}", "*").replace("{hour}", "*")
