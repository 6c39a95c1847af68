"""clickline down: stops the run of `up`."""

from __future__ import annotations

from pathlib import Path

import typer

from clickline.cli.console import emit, note, show_progress
from clickline.cli.options import ConfigFile, Json, Overrides


def down(
    config_file: ConfigFile = Path("clickline.yaml"), overrides: Overrides = None, as_json: Json = False
) -> None:
    """Stop `clickline up` and all its processes, after running requests have finished."""
    from clickline.config import load_config
    from clickline.pipeline.down import down as run

    config = load_config(config_file, overrides or ())
    with show_progress(as_json=as_json, quiet=True) as progress:
        result = run(config, progress)
    if as_json:
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
