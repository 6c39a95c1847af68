"""clickline down: stops the run of `up`."""

from __future__ import annotations

import typer

from clickline.cli.console import emit, note, show_progress
from clickline.cli.options import JsonOptions


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
