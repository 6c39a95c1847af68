"""clickline data: the local copies of remote logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clickline.cli.console import emit, note, table, watching
from clickline.cli.options import ConfigFile, Json, Overrides, Quiet
from clickline.progress import Progress, human_size

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.records import SourceFile
    from clickline.storage.file_cache import Cache
    from clickline.storage.storage import Storage

data = typer.Typer(help="Show, fetch or remove the local copies of remote logs.", no_args_is_help=False)

Which = Annotated[
    Literal["train", "eval"] | None,
    typer.Argument(metavar="train|eval", help="Only these logs.", show_default="both"),
]


@data.command()
def status(
    which: Which = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show how much of the logs is here."""
    from clickline.errors import HourNotReady

    config, storage, cache = _open(config_file, overrides)
    rows: list[dict[str, object]] = []
    for name in _splits(config, which):
        try:
            found = cache.status(_files(config, storage, name, Progress()))
        except HourNotReady as late:
            note(str(late))
            rows.append({"name": name, "phase": "Waiting"})
            continue
        rows.append(
            {
                "name": name,
                "files": found.files,
                "total_bytes": found.total_bytes,
                "cached_bytes": found.cached_bytes,
                "available_bytes": found.available_bytes,
                "phase": found.phase,
            }
        )
    if as_json:
        emit(rows)
        return
    sizes = ("total_bytes", "cached_bytes", "available_bytes")
    table(
        ("NAME", "FILES", "TOTAL SIZE", "CACHED SIZE", "AVAIL SPACE", "PHASE"),
        [
            (
                row["name"],
                f"{row['files']:,}" if "files" in row else "-",
                *(human_size(float(str(row[size]))) if size in row else "-" for size in sizes),
                row["phase"],
            )
            for row in rows
        ],
    )


@data.command()
def warm(
    which: Which = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch the logs that are not here yet."""
    with watching(as_json=as_json, quiet=quiet) as progress:
        config, storage, cache = _open(config_file, overrides)
        files = [_files(config, storage, name, progress) for name in _splits(config, which)]
        cache.warm([file for of in files for file in of], progress)
    status(which, config_file, overrides, as_json)


@data.command()
def clear(
    which: Which = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Remove the local copies of the logs; those that running work uses stay."""
    config, storage, cache = _open(config_file, overrides)
    files = [_files(config, storage, name, Progress()) for name in _splits(config, which)]
    cleared = cache.clear([file for of in files for file in of])
    if as_json:
        emit({"files": cleared.files, "bytes": cleared.size, "in_use": cleared.in_use})
        return
    kept = f"; {cleared.in_use} in use and kept" if cleared.in_use else ""
    typer.echo(f"removed {cleared.files} copies, {human_size(cleared.size)}{kept}")


def _open(config_file: Path, overrides: list[str] | None) -> tuple[Config, Storage, Cache]:
    from clickline.config import load_config
    from clickline.storage.file_cache import Cache
    from clickline.storage.storage import Storage

    config = load_config(config_file, overrides or ())
    credentials = config.storage.credentials
    storage = Storage(config.storage.options, Path(credentials) if credentials else None)
    return config, storage, Cache(Path(config.cache.dir), config.cache.size, storage)


def _splits(config: Config, which: Literal["train", "eval"] | None) -> list[str]:
    there = ["train"] if config.data.eval is None else ["train", "eval"]
    return [name for name in there if which in (None, name)]


def _files(config: Config, storage: Storage, split: str, progress: Progress) -> list[SourceFile]:
    from clickline.data.prepare.run import find_split

    return find_split(config, storage, split, progress)
