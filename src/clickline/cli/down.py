"""clickline down: ends what `up` runs."""

from __future__ import annotations

from pathlib import Path

import typer

from clickline.cli.console import emit, note, watching
from clickline.cli.options import ConfigFile, Json, Overrides


def down(
    config_file: ConfigFile = Path("clickline.yaml"), overrides: Overrides = None, as_json: Json = False
) -> None:
    """End what `clickline up` runs: running requests get the time to end, no process is left."""
    from clickline.config import load_config
    from clickline.pipeline.down import down as run

    config = load_config(config_file, overrides or ())
    with watching(as_json=as_json, quiet=True) as progress:
        result = run(config, progress)
    if as_json:
        emit(
            {
                "before": result.before.state,
                "ended": [process.to_json() for process in result.ended],
                "killed": [process.to_json() for process in result.killed],
            }
        )
        return
    if not result.ended:
        typer.echo(f"nothing runs for {config.home}")
        return
    for process in result.killed:
        note(f"{process.role} (pid {process.pid}) did not end in time and was killed")
    count = len(result.ended)
    typer.echo(f"ended: {count} process{'' if count == 1 else 'es'} of {config.home}, none is left")
