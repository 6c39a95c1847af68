"""clickline publish: turns a checkpoint that passed the gate into the current version."""

from __future__ import annotations

from typing import Annotated

import typer

from clickline.cli.console import emit, facts, requires_extra
from clickline.cli.options import ProgressOptions
from clickline.progress import human_size


def publish(
    options: ProgressOptions,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="A checkpoint folder, or a run (its result).",
            show_default="the newest run",
        ),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Write a full version instead of a delta.")] = False,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Recorded in the history.")] = "published",
) -> None:
    """Package a checkpoint that passed the gate, verify the files, and make it the current version."""
    config = options.config()
    with requires_extra("train,serve", "publishing"):
        from clickline.publishing.run import publish as run
    with options.progress() as progress:
        result = run(config, progress, model=model, base=base, reason=reason)
    version = result.version
    manifest = version.manifest
    if options.as_json:
        emit(
            {
                "version": version.number,
                "folder": version.folder,
                "table": manifest.table,
                "parent": version.parent,
                "rows": manifest.rows,
                "tombstones": manifest.tombstones,
                "bytes": result.version.size,
                "current": result.move is not None,
                "reused": result.reused,
                "difference": manifest.sample.difference,
                "cost": vars(manifest.cost),
                "seconds": result.seconds,
            }
        )
        return
    kind = "base" if version.parent is None else f"delta of version {version.parent}"
    removed = f", {manifest.tombstones:,} ids removed" if manifest.tombstones else ""
    state = (", up to date" if result.reused else "") + (
        ", current" if result.move else ", not current: see above"
    )
    named: dict[str, object] = {
        "version": f"{version.number}, {kind}{state}",
        "table": f"{manifest.rows:,} rows{removed}, {manifest.table_precision}, {manifest.shards} shards",
        "size": human_size(version.size),
        "verified": f"{manifest.sample.rows} rows scored again, largest difference "
        f"{manifest.sample.difference:.1g}",
    }
    cost = manifest.cost
    if cost.rows:
        named["quantization"] = (
            f"AUC {_signed(cost.auc)}, log loss {_signed(cost.logloss)} on {cost.rows:,} rows"
        )
    named["folder"] = version.folder
    named["time"] = f"{result.seconds:.1f} s"
    facts(named)


def _signed(value: float | None) -> str:
    return "not measured" if value is None else f"{value:+.5f}"
