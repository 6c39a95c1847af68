"""clickline scale: changes the number of workers of a training run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clickline.cli.console import emit
from clickline.cli.options import ConfigFile, Json, Overrides
from clickline.errors import ConfigError, Mistake


def scale(
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=4096, help="Number of workers.")
    ],
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Change the number of workers of a training run on a cluster.

    It shrinks at once and grows as soon as the cluster has room. The setting ends with the run.
    """
    from clickline.config import load_config
    from clickline.pipeline.up_folder import UpFolder
    from clickline.training.cluster.job_status import request_workers

    config = load_config(config_file, overrides or ())
    limit = config.train.workers.max
    if limit is not None and workers > limit:
        problem = f"is {workers}, above train.workers.max {limit}."
        raise ConfigError([Mistake("", 0, "--workers", problem, f"Allowed: 1 to {limit}.")])
    status = request_workers(UpFolder(config).home, workers)
    now = sum(one["state"] != "lost" for one in status.get("workers", ()))
    if as_json:
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
