"""clickline serve: the registry's current version answers over gRPC and HTTP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clickline.cli.console import facts, needing
from clickline.cli.options import ConfigFile, Json, Overrides
from clickline.pipeline.endpoint import endpoint

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.serving.supervisor import Up


def serve(
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Answer predictions with the registry's current version, and follow it, until stopped.

    The ports open at once, also before the first publish. Ctrl-C or SIGTERM lets running requests end. Logs are
    lines of JSON on stderr.
    """
    from clickline.config import load_config

    config = load_config(config_file, overrides or ())
    with needing("serve", "serving"):
        from clickline.serving.run import serve as run

    def up(told: Up) -> None:
        if as_json:
            typer.echo(json.dumps(_document(config, told)))
        else:
            _show(config, told)

    run(config, up)


def _document(config: Config, told: Up) -> dict[str, object]:
    section = config.serve
    return {
        "name": config.name,
        "version": told.version,
        "processes": told.processes,
        "host": section.host,
        "grpc_port": section.grpc_port,
        "http_port": section.http_port,
        "metrics_port": section.metrics_port,
        "tls": section.tls is not None,
        "token": section.token_file is not None,
    }


def _show(config: Config, told: Up) -> None:
    from clickline.config.deploy_sections import SERVICE_VARIABLE

    version = (
        "none is loaded yet: the current one is served once it is" if told.version is None else told.version
    )
    where = endpoint(config, told.example)
    service = os.environ.get(SERVICE_VARIABLE)
    reached = {"gRPC": where.grpc, "HTTP": where.http, "metrics": where.metrics}
    if service is not None:
        scheme = "http" if config.serve.tls is None else "https"
        there = {
            "gRPC": f"{service}:{config.serve.grpc_port}",
            "HTTP": f"{scheme}://{service}:{config.serve.http_port}",
        }
        reached = there if service else {}
    facts(
        {
            "model": ", ".join((config.name, *config.serve.aliases)),
            "version": version,
            **reached,
            "processes": told.processes,
        }
    )
    if service is None:
        typer.echo(f"\ntry it:\n  {where.curl}")
