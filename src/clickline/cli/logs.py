"""clickline logs: what the stages of `up` say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clickline.cli.console import note
from clickline.cli.options import ConfigFile, Overrides
from clickline.errors import ConfigError, Mistake

__all__ = ["logs"]


def logs(
    stage: Annotated[
        str | None, typer.Argument(metavar="STAGE", help="Only this one.", show_default="all")
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with what is added, until the run ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
) -> None:
    """Show what the stages of `clickline up` say, in the order of time."""
    from clickline.config import load_config
    from clickline.pipeline.logs import LOGS, Line, LogReader
    from clickline.pipeline.state import UpFolder

    folder = UpFolder(load_config(config_file, overrides or ()))
    if stage is not None and stage not in LOGS:
        there = [name for name in LOGS if (folder.logs / f"{name}.log").exists()]
        problem = f"is {stage!r}. There are logs of: {', '.join(there) or 'nothing yet'}."
        raise ConfigError([Mistake("", 0, "STAGE", problem, f"Allowed: {', '.join(LOGS)}.")])
    if folder.look().state == "never" and not folder.logs.exists():
        note(f"nothing was run in {folder.home} yet: `clickline up` does")
        return

    def show(line: Line) -> None:
        name = "" if stage is not None else f"{line.stage:<9}"
        typer.echo(f"{line.at} {name}{line.text}")

    reader = LogReader(folder.logs, LOGS if stage is None else (stage,))
    try:
        for line in reader.last(lines):
            show(line)
        if follow:
            for line in reader.follow(lambda: folder.look().holder is None):
                show(line)
    finally:
        reader.close()
