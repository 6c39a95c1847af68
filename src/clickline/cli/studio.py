"""clickline studio: a web UI of the pipeline, its runs and versions, and the endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clickline.cli.console import emit, facts, note, requires_extra
from clickline.cli.options import Json, Overrides

if TYPE_CHECKING:
    from clickline.studio.run import StudioAddress


def studio(
    config_files: Annotated[
        list[Path] | None,
        typer.Option(
            "-c",
            "--config",
            metavar="FILE",
            help="A config whose home to show; may be repeated.",
            show_default="clickline.yaml",
        ),
    ] = None,
    homes: Annotated[
        list[Path] | None,
        typer.Option(
            "--home",
            metavar="DIR",
            help="A home to show without its config; may be repeated.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Address to listen on.", show_default="studio.host")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Port to listen on; 0: any free port.",
            min=0,
            max=65535,
            show_default="studio.port",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Serve a web UI for one or more homes: stages, runs, versions, serving, data, and a playground.

    Runs until Ctrl-C. Anyone on this machine can view it; rolling back, promoting and pinning need the token, whose
    file is printed.
    """
    with requires_extra("studio", "the studio"):
        from clickline.studio.homes import open_homes
        from clickline.studio.run import run

    changes = [*(overrides or ()), *([] if host is None else [f"studio.host={host}"])]
    files = config_files or ([] if homes else [Path("clickline.yaml")])
    opened = open_homes(files, homes or [], changes)
    section = opened[0].config.studio

    def show(address: StudioAddress) -> None:
        token = None if address.token_file is None else str(address.token_file)
        if as_json:
            emit({"url": address.url, "token_file": token, "homes": [home.id for home in opened]})
            return
        facts(
            {"studio": address.url, "token": token or "-", "homes": ", ".join(home.name for home in opened)}
        )
        if address.note:
            note(address.note)

    run(opened, host or section.host, section.port if port is None else port, show)
