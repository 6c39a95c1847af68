"""clickline logs, scale, down: what to do with a run of `up`, or of training on a cluster, while it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from clickline.cli.console import emit, note, say, show_progress, wrong_argument
from clickline.cli.options import ConfigOptions, JsonOptions


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


def scale(
    options: JsonOptions,
    workers: Annotated[int, typer.Option(metavar="N", min=1, max=4096, help="Number of workers.")],
) -> None:
    """Change the number of workers of a training run on a cluster.

    It shrinks at once and grows as soon as the cluster has room. The setting ends with the run.
    """
    from clickline.pipeline.up_folder import UpFolder
    from clickline.training.cluster.job_status import request_workers

    config = options.config()
    limit = config.train.workers.max
    if limit is not None and workers > limit:
        problem = f"is {workers}, above train.workers.max {limit}."
        raise wrong_argument("--workers", problem, f"Allowed: 1 to {limit}.")
    status = request_workers(UpFolder(config).home, workers)
    now = sum(one["state"] != "lost" for one in status.get("workers", ()))
    if options.as_json:
        emit({"run": status["run"], "workers": now, "requested": workers, "most": status.get("most")})
        return
    typer.echo(f"run {status['run']}: {_current(now)}; {_change(now, workers)}")


def _current(now: int) -> str:
    return {0: "no workers are running yet", 1: "1 worker is running"}.get(now, f"{now} workers are running")


def _change(now: int, workers: int) -> str:
    if workers == now:
        return "nothing to change"
    if workers < now:
        return f"scaling down to {workers}"
    return f"scaling up to {workers} as the cluster has room (see `clickline status`)"


def down(options: JsonOptions) -> None:
    """Stop `clickline up` and all its processes, after running requests have finished."""
    from clickline.pipeline.down import down as run

    config = options.config()
    with show_progress(as_json=options.as_json, quiet=True) as progress:
        result = run(config, progress)
    if options.as_json:
        emit(
            {
                "before": result.before.state,
                "ended": [process.to_json() for process in result.stopped],
                "killed": [process.to_json() for process in result.killed],
            }
        )
        return
    if not result.stopped:
        typer.echo(f"nothing is running for {config.home}")
        return
    for process in result.killed:
        note(f"{process.role} (pid {process.pid}) did not stop in time and was killed")
    count = len(result.stopped)
    typer.echo(f"stopped {count} process{'' if count == 1 else 'es'}")
