"""clickline lookup: one shard of the sparse table as a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clickline.cli.console import emit, facts, needing
from clickline.cli.options import ConfigFile, Json, Overrides
from clickline.progress import human_size

if TYPE_CHECKING:
    from clickline.serving.lookup.run import Up


def lookup(
    shard: Annotated[int, typer.Option("--shard", metavar="I", min=0, help="Which one, counted from 0.")],
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="P", min=0, max=65535, help="0: any.", show_default="serve.lookup_port"
        ),
    ] = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Serve one shard of the registry's current version to predictors that set serve.lookup."""
    from clickline.config import load_config

    config = load_config(config_file, overrides or ())
    with needing("serve", "serving"):
        from clickline.serving.lookup.run import lookup as run

    def show(up: Up) -> None:
        if as_json:
            emit(
                {
                    "address": up.address,
                    "shard": up.shard,
                    "shards": up.shards,
                    "version": up.version,
                    "rows": up.rows,
                    "bytes": up.bytes,
                }
            )
            return
        of = "" if up.shards is None else f" of {up.shards}"
        facts(
            {
                "address": up.address,
                "shard": f"{up.shard}{of}",
                "version": "none is open yet: lookups are answered once the current one is"
                if up.version is None
                else up.version,
                "rows": f"{up.rows:,}",
                "memory": f"{human_size(up.bytes)}, mapped",
            }
        )

    run(config, shard, port, show)
