"""clickline serve: serves the registry's current version over gRPC and HTTP."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import typer

from clickline.cli.console import facts, requires_extra
from clickline.cli.options import JsonOptions
from clickline.pipeline.endpoint import endpoint_of

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.serving.supervisor import ServerInfo


def serve(options: JsonOptions) -> None:
    """Serve predictions with the registry's current version, and switch when it changes, until stopped.

    The ports open at once, even before the first publish. Ctrl-C or SIGTERM lets running requests finish. Logs are
    JSON lines on stderr.
    """
    config = options.config()
    with requires_extra("serve", "serving"):
        from clickline.serving.run import serve as run

    shown = False

    def show(server: ServerInfo) -> None:
        nonlocal shown
        if shown:  # the server's log reports further versions
            return
        shown = True
        if options.as_json:
            typer.echo(json.dumps(_document(config, server)))
        else:
            _show(config, server)

    run(config, show)


def _document(config: Config, server: ServerInfo) -> dict[str, object]:
    section = config.serve
    return {
        "name": config.name,
        "version": server.version,
        "processes": server.processes,
        "host": section.host,
        "grpc_port": section.grpc_port,
        "http_port": section.http_port,
        "brpc_port": section.brpc_port,
        "metrics_port": section.metrics_port,
        "tls": section.tls is not None,
        "token": section.token_file is not None,
    }


def _show(config: Config, server: ServerInfo) -> None:
    from clickline.config.deploy_sections import SERVICE_VARIABLE

    version = "none yet: served once a version is published" if server.version is None else server.version
    endpoint = endpoint_of(config, server.example)
    service = os.environ.get(SERVICE_VARIABLE)
    addresses = {"gRPC": endpoint.grpc, "HTTP": endpoint.http, "metrics": endpoint.metrics}
    if config.serve.brpc_port is not None:
        addresses["brpc"] = f"{endpoint.grpc.rpartition(':')[0]}:{config.serve.brpc_port}"
    if service is not None:
        scheme = "http" if config.serve.tls is None else "https"
        through_service = {
            "gRPC": f"{service}:{config.serve.grpc_port}",
            "HTTP": f"{scheme}://{service}:{config.serve.http_port}",
        }
        addresses = through_service if service else {}
    facts(
        {
            "model": ", ".join((config.name, *config.serve.aliases)),
            "version": version,
            **addresses,
            "processes": server.processes,
        }
    )
    if service is None:
        typer.echo(f"\ntry it:\n  {endpoint.curl}")
