"""clickline logs: what the stages of `up` say, and the processes of training on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clickline.cli.console import note, say
from clickline.cli.options import ConfigFile, Overrides
from clickline.errors import ConfigError, Mistake


def logs(
    stage: Annotated[
        str | None,
        typer.Argument(
            metavar="STAGE",
            help="Only this one; of a cluster also driver, network, worker, worker-3, shard or shard-0.",
            show_default="all",
        ),
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
    """Show what the stages of `clickline up` say, and the processes of training on a cluster, in the order of time."""
    from clickline.config import load_config
    from clickline.pipeline.stage_logs import LOGS, Line, LogReader, is_role, role_logs
    from clickline.pipeline.up_folder import UpFolder
    from clickline.training.cluster.job_status import read_status

    folder = UpFolder(load_config(config_file, overrides or ()))
    there = [name for name in LOGS if (folder.logs / f"{name}.log").exists()]
    there += role_logs(folder.home)
    if stage is not None and stage not in LOGS and not is_role(stage):
        problem = f"is {stage!r}. There are logs of: {', '.join(there) or 'nothing yet'}."
        allowed = f"Allowed: {', '.join(LOGS)}, driver, network, worker, worker-N, shard, shard-N."
        raise ConfigError([Mistake("", 0, "STAGE", problem, allowed)])

    def ended() -> bool:
        cluster = read_status(folder.home)
        return folder.look().holder is None and not (cluster and cluster["alive"])

    if folder.look().state == "never" and not there and ended():
        note(f"nothing was run in {folder.home} yet: `clickline up` does")
        return

    def show(line: Line) -> None:
        name = "" if stage == line.stage else f"{line.stage:<8} "
        say(f"{line.at} {name}{line.text}")

    stages = [name for name in LOGS if stage in (None, name)]
    reader = LogReader(folder.logs, stages, lambda: role_logs(folder.home, stage))
    try:
        for line in reader.last(lines):
            show(line)
        if follow:
            for line in reader.follow(ended):
                show(line)
    finally:
        reader.close()
