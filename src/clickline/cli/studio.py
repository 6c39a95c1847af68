"""clickline studio: a web page of what runs, what was learned and what is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clickline.cli.console import emit, facts, needing, note
from clickline.cli.options import Json, Overrides

if TYPE_CHECKING:
    from clickline.studio.run import Address


def studio(
    config_files: Annotated[
        list[Path] | None,
        typer.Option(
            "-c",
            "--config",
            metavar="FILE",
            help="A config whose home is shown; may be repeated.",
            show_default="clickline.yaml",
        ),
    ] = None,
    homes: Annotated[
        list[Path] | None,
        typer.Option(
            "--home",
            metavar="DIR",
            help="A home without its config; may be repeated.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="HOST", help="Address to listen on.", show_default="studio.host"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            help="Port of the page; 0: any that is free.",
            min=0,
            max=65535,
            show_default="studio.port",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show a web page of one home or several: stages, runs, versions, serving, data, and a form to try the model.

    Until Ctrl-C. Whoever is on this machine may look; to roll back or pin takes the token, whose file is named.
    """
    with needing("studio", "the studio"):
        from clickline.studio.homes import open_homes
        from clickline.studio.run import run

    changes = [*(overrides or ()), *([] if host is None else [f"studio.host={host}"])]
    files = config_files or ([] if homes else [Path("clickline.yaml")])
    shown = open_homes(files, homes or [], changes)
    section = shown[0].config.studio

    def up(address: Address) -> None:
        token = None if address.token_file is None else str(address.token_file)
        if as_json:
            emit({"url": address.url, "token_file": token, "homes": [home.id for home in shown]})
            return
        facts({"studio": address.url, "token": token or "-", "homes": ", ".join(home.name for home in shown)})
        if address.note:
            note(address.note)

    run(shown, host or section.host, section.port if port is None else port, up)
