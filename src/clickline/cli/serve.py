"""clickline serve: the registry's current version answers over gRPC and HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clickline.cli.console import facts, needing
from clickline.cli.options import ConfigFile, Json, Overrides

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.stages.serve.run import Up

__all__ = ["serve"]


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
        from clickline.stages.serve.run import serve as run

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
    section = config.serve
    scheme = "http" if section.tls is None else "https"
    host = f"[{section.host}]" if ":" in section.host else section.host
    version = (
        "none is loaded yet: the current one is served once it is" if told.version is None else told.version
    )
    facts(
        {
            "model": ", ".join((config.name, *section.aliases)),
            "version": version,
            "gRPC": f"{host}:{section.grpc_port}",
            "HTTP": f"{scheme}://{host}:{section.http_port}",
            "metrics": f"{scheme}://{host}:{section.metrics_port}/metrics",
            "processes": told.processes,
        }
    )
    token = (
        "" if section.token_file is None else f' -H "Authorization: Bearer $(head -n1 {section.token_file})"'
    )
    known = "" if section.tls is None else f" --cacert {section.tls.authority or section.tls.certificate}"
    reached = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    url = f"{scheme}://{reached}:{section.http_port}/v1/models/{config.name}"
    asked = url if told.example is None else f"{url}:predict -d '{json.dumps({'instances': [told.example]})}'"
    typer.echo(f"\ntry it:\n  curl{known}{token} {asked}")
