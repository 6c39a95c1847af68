"""clickline logs: the logs of the stages of `up` and of the processes that train on a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from clickline.cli.console import note, say, wrong_argument
from clickline.cli.options import ConfigOptions


def logs(
    options: ConfigOptions,
    stage: Annotated[
        str | None,
        typer.Argument(
            metavar="STAGE",
            help="Only this log; of a cluster also driver, network, worker, worker-3, shard or shard-0.",
            show_default="all",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing new lines until the run ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", metavar="N", min=0, help="Number of last lines to show.")
    ] = 100,
) -> None:
    """Show the logs of the stages of `clickline up` and of cluster training, ordered by time."""
    from clickline.pipeline.stage_logs import LOG_NAMES, LogLine, LogReader, cluster_logs, is_cluster_role
    from clickline.pipeline.up_folder import UpFolder
    from clickline.training.cluster.job_status import read_status

    folder = UpFolder(options.config())
    available = [name for name in LOG_NAMES if (folder.logs / f"{name}.log").exists()]
    available += cluster_logs(folder.home)
    if stage is not None and stage not in LOG_NAMES and not is_cluster_role(stage):
        problem = f"is {stage!r}. Available logs: {', '.join(available) or 'none yet'}."
        allowed = f"Allowed: {', '.join(LOG_NAMES)}, driver, network, worker, worker-N, shard, shard-N."
        raise wrong_argument("STAGE", problem, allowed)

    def ended() -> bool:
        cluster = read_status(folder.home)
        return folder.read().holder is None and not (cluster and cluster["alive"])

    if folder.read().state == "never" and not available and ended():
        note(f"nothing has run in {folder.home} yet: start with `clickline up`")
        return

    def show(line: LogLine) -> None:
        name = "" if stage == line.stage else f"{line.stage:<8} "
        say(f"{line.at} {name}{line.text}")

    stages = [name for name in LOG_NAMES if stage in (None, name)]
    reader = LogReader(folder.logs, stages, lambda: cluster_logs(folder.home, stage))
    try:
        for line in reader.last(lines):
            show(line)
        if follow:
            for line in reader.follow(ended):
                show(line)
    finally:
        reader.close()
