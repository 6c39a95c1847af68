"""clickline lookup: serves one shard of the embedding table."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from clickline.cli.console import emit, facts, requires_extra
from clickline.cli.options import JsonOptions
from clickline.progress import human_size

if TYPE_CHECKING:
    from clickline.serving.lookup.run import LookupServerInfo


def lookup(
    options: JsonOptions,
    shard: Annotated[int, typer.Option(metavar="I", min=0, help="Index of the shard, from 0.")],
    port: Annotated[
        int | None,
        typer.Option(
            metavar="P",
            min=0,
            max=65535,
            help="Port to listen on; 0: any free port.",
            show_default="serve.lookup_port",
        ),
    ] = None,
) -> None:
    """Serve one shard of the registry's current version to predictors that set serve.lookup."""
    config = options.config()
    with requires_extra("serve", "serving"):
        from clickline.serving.lookup.run import lookup as run

    def show(server: LookupServerInfo) -> None:
        if options.as_json:
            emit(asdict(server))
            return
        total = "" if server.shards is None else f" of {server.shards}"
        facts(
            {
                "address": server.address,
                "shard": f"{server.shard}{total}",
                "version": "none yet: lookups are answered once a version is published"
                if server.version is None
                else server.version,
                "rows": f"{server.rows:,}",
                "memory": f"{human_size(server.bytes)}, mapped",
            }
        )

    run(config, shard, port, show)
