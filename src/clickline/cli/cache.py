"""clickline cache: the local copies of remote logs."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clickline.cli.console import emit, note, table
from clickline.cli.options import CommandGroup, JsonOptions, ProgressOptions
from clickline.progress import Progress, human_size

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.records import SourceFile
    from clickline.storage.file_cache import FileCache
    from clickline.storage.storage import Storage

cache = CommandGroup(help="Show, prefetch or clear the local copies of remote logs.", no_args_is_help=False)

Which = Annotated[
    Literal["train", "eval"] | None,
    typer.Argument(metavar="train|eval", help="Only this split.", show_default="both"),
]


@cache.command()
def status(options: JsonOptions, which: Which = None) -> None:
    """Show how much of the logs is cached."""
    from clickline.data.prepare.run import find_split
    from clickline.errors import HourNotReady
    from clickline.pipeline.status_text import duration

    config, storage, files = _open(options)
    rows: list[dict[str, object]] = []
    for name in _splits(config, which):
        try:
            cached = files.status(find_split(config, storage, name, Progress()))
        except HourNotReady as error:
            note(str(error))
            rows.append({"name": name, "phase": "Waiting"})
            continue
        row = asdict(cached)
        since = row.pop("since")
        row["age_seconds"] = None if since is None else max(0, int(time.time() - since))
        rows.append({"name": name, **row})
    if options.as_json:
        emit(rows)
        return
    sizes = ("total_bytes", "cached_bytes", "available_bytes")
    table(
        ("NAME", "FILES", "TOTAL SIZE", "CACHED SIZE", "AVAIL SPACE", "PHASE", "AGE"),
        [
            (
                row["name"],
                f"{row['ready_files']:,}/{row['files']:,}" if "files" in row else "-",
                *(human_size(float(str(row[size]))) if size in row else "-" for size in sizes),
                row["phase"],
                "-" if row.get("age_seconds") is None else duration(float(str(row["age_seconds"]))),
            )
            for row in rows
        ],
    )


@cache.command()
def prefetch(options: ProgressOptions, which: Which = None) -> None:
    """Download the logs that are not cached yet."""
    with options.progress() as progress:
        config, storage, files = _open(options)
        files.prefetch(_files(config, storage, which, progress), progress)
    status(options, which)


@cache.command()
def clear(options: JsonOptions, which: Which = None) -> None:
    """Remove the local copies of the logs; copies in use by a running process stay."""
    config, storage, files = _open(options)
    cleared = files.clear(_files(config, storage, which, Progress()))
    if options.as_json:
        emit({"files": cleared.files, "bytes": cleared.size, "in_use": cleared.in_use})
        return
    kept = f"; kept {cleared.in_use} in use" if cleared.in_use else ""
    typer.echo(f"removed {cleared.files} copies, {human_size(cleared.size)}{kept}")


def _open(options: JsonOptions) -> tuple[Config, Storage, FileCache]:
    from clickline.artifacts.from_config import storage_of
    from clickline.storage.file_cache import FileCache

    config = options.config()
    storage = storage_of(config)
    return config, storage, FileCache(Path(config.cache.dir), config.cache.size, storage)


def _splits(config: Config, which: Which) -> list[str]:
    splits = ["train"] if config.data.eval is None else ["train", "eval"]
    return [name for name in splits if which in (None, name)]


def _files(config: Config, storage: Storage, which: Which, progress: Progress) -> list[SourceFile]:
    from clickline.data.prepare.run import find_split

    return [file for name in _splits(config, which) for file in find_split(config, storage, name, progress)]
