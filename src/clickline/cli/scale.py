"""clickline scale: how many workers train on the cluster from now on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clickline.cli.console import emit
from clickline.cli.options import ConfigFile, Json, Overrides
from clickline.errors import ConfigError, Mistake


def scale(
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=4096, help="How many are to compute.")
    ],
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Change how many workers compute while training runs on a cluster.

    It shrinks at once and grows as soon as the cluster has room. The wish ends with the run.
    """
    from clickline.config import load_config
    from clickline.pipeline.up_folder import UpFolder
    from clickline.training.cluster.job_status import ask_workers

    config = load_config(config_file, overrides or ())
    most = config.train.workers.max
    if most is not None and workers > most:
        problem = f"is {workers}, above train.workers.max {most}."
        raise ConfigError([Mistake("", 0, "--workers", problem, f"Allowed: 1 to {most}.")])
    status = ask_workers(UpFolder(config).home, workers)
    now = sum(one["state"] != "lost" for one in status.get("workers", ()))
    if as_json:
        emit({"run": status["run"], "workers": now, "asked": workers, "most": status.get("most")})
        return
    typer.echo(f"run {status['run']}: {_running(now)}; {_coming(now, workers)}")


def _running(now: int) -> str:
    return {0: "no worker runs yet", 1: "1 worker runs now"}.get(now, f"{now} workers run now")


def _coming(now: int, workers: int) -> str:
    if workers == now:
        return "it stays so"
    if workers < now:
        return f"it goes on with {workers}"
    return f"it grows to {workers} as the cluster has room (`clickline status` shows it)"
