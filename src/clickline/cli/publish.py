"""clickline publish: a checkpoint whose gate passed becomes the current version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clickline.cli.console import emit, facts, needing, watching
from clickline.cli.options import ConfigFile, Json, Overrides, Quiet
from clickline.progress import human_size


def publish(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FOLDER",
            help="A checkpoint, or a run, whose result is meant.",
            show_default="the newest run",
        ),
    ] = None,
    base: Annotated[
        bool, typer.Option("--base", help="Make a version that depends on no other, not a delta.")
    ] = False,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Recorded with the move of the pointer.")
    ] = "published",
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pack a checkpoint that passed its gate, prove the files, and make it the current version."""
    from clickline.config import load_config

    config = load_config(config_file, overrides or ())
    with needing("train,serve", "publishing"):
        from clickline.publishing.run import publish as run
    with watching(as_json=as_json, quiet=quiet) as progress:
        result = run(config, progress, model=model, base=base, reason=reason)
    version = result.version
    body = version.body
    if as_json:
        emit(
            {
                "version": version.number,
                "folder": version.folder,
                "table": body["table"],
                "parent": version.parent,
                "rows": body["rows"],
                "tombstones": body["tombstones"],
                "bytes": result.version.size,
                "current": result.move is not None,
                "reused": result.reused,
                "difference": result.difference,
                "cost": dict(result.cost),
                "seconds": result.seconds,
            }
        )
        return
    kind = "base" if version.parent is None else f"delta of version {version.parent}"
    gone = f", {body['tombstones']:,} ids removed" if body["tombstones"] else ""
    state = (", up to date" if result.reused else "") + (
        ", current" if result.move else ", not current: see above"
    )
    named: dict[str, object] = {
        "version": f"{version.number}, {kind}{state}",
        "table": f"{body['rows']:,} rows{gone}, {body['precision']}, {body['shards']} shards",
        "size": human_size(version.size),
        "proof": f"{body['sample']['rows']} rows scored again, largest difference {result.difference:.1g}",
    }
    if result.cost["rows"]:
        named["precision costs"] = (
            f"AUC {_signed(result.cost['auc'])}, log loss {_signed(result.cost['logloss'])} "
            f"on {result.cost['rows']:,} rows"
        )
    named["folder"] = version.folder
    named["time"] = f"{result.seconds:.1f} s"
    facts(named)


def _signed(value: float | None) -> str:
    return "not measured" if value is None else f"{value:+.5f}"
