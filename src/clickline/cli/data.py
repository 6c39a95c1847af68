"""clickline data: the local copies of remote logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clickline.cli.console import emit, table, watching
from clickline.cli.options import ConfigFile, Json, Overrides, Quiet
from clickline.progress import Progress, human_size

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.records import SourceFile
    from clickline.storage.cache import Cache

__all__ = ["data"]

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
    files, cache = _sources(config_file, overrides, which, Progress())
    found = {name: cache.status(of) for name, of in files.items()}
    if as_json:
        emit(
            [
                {
                    "name": name,
                    "files": row.files,
                    "total_bytes": row.total_bytes,
                    "cached_bytes": row.cached_bytes,
                    "available_bytes": row.available_bytes,
                    "phase": row.phase,
                }
                for name, row in found.items()
            ]
        )
        return
    table(
        ("NAME", "FILES", "TOTAL SIZE", "CACHED SIZE", "AVAIL SPACE", "PHASE"),
        [
            (
                name,
                f"{row.files:,}",
                human_size(row.total_bytes),
                human_size(row.cached_bytes),
                human_size(row.available_bytes),
                row.phase,
            )
            for name, row in found.items()
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
        files, cache = _sources(config_file, overrides, which, progress)
        cache.warm([file for of in files.values() for file in of], progress)
    status(which, config_file, overrides, as_json)


@data.command()
def clear(
    which: Which = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Remove the local copies of the logs; those that running work uses stay."""
    files, cache = _sources(config_file, overrides, which, Progress())
    cleared = cache.clear([file for of in files.values() for file in of])
    if as_json:
        emit({"files": cleared.files, "bytes": cleared.size, "in_use": cleared.in_use})
        return
    kept = f"; {cleared.in_use} in use and kept" if cleared.in_use else ""
    typer.echo(f"removed {cleared.files} copies, {human_size(cleared.size)}{kept}")


def _sources(
    config_file: Path,
    overrides: list[str] | None,
    which: Literal["train", "eval"] | None,
    progress: Progress,
) -> tuple[dict[str, list[SourceFile]], Cache]:
    from clickline.config import load_config
    from clickline.stages.prepare.run import find_sources
    from clickline.storage.cache import Cache
    from clickline.storage.stores import Storage

    config: Config = load_config(config_file, overrides or ())
    credentials = config.storage.credentials
    storage = Storage(config.storage.options, Path(credentials) if credentials else None)
    files = find_sources(config, storage, progress)
    return (
        {name: of for name, of in files.items() if which in (None, name)},
        Cache(Path(config.cache.dir), config.cache.size, storage),
    )
