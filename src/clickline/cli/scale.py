"""clickline scale: changes the number of workers of a training run on a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from clickline.cli.console import emit, wrong_argument
from clickline.cli.options import JsonOptions


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
        emit({"run": status["run"], "workers": now, "asked": workers, "most": status.get("most")})
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
