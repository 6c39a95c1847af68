"""Finds a checkpoint by its folder, by its run, or as the newest."""

from __future__ import annotations

import os
import time
from pathlib import Path

from clickline.artifacts.checkpoint import Checkpoint, open_checkpoint_folder, run_result
from clickline.artifacts.manifest import MANIFEST
from clickline.errors import ArtifactError


def find_checkpoint(text: str | None, home: str) -> Checkpoint:
    """The checkpoint that a text names: its folder, or a run by its folder or its name in `home`, for the run's result
    (its newest checkpoint until it has one). None means the run that was last to write a checkpoint or to be reused."""
    if text is None:
        return _newest(home)
    runs = Path(home, "runs")
    for folder in (Path(text), runs / text):
        checkpoint = open_checkpoint_folder(folder) or run_result(folder)
        if checkpoint is not None:
            return checkpoint
    existing = ", ".join(path.name for path in _by_age(runs)[:5]) or "none"
    raise ArtifactError(
        f"{text} is neither a checkpoint nor a run with one. Name a folder such as .clickline/runs/RUN or "
        f".clickline/runs/RUN/step-…; the runs in {home}, newest first: {existing}."
    )


def make_newest(checkpoint: Checkpoint) -> None:
    """Make an existing checkpoint the one that `find_checkpoint(None)` returns."""
    newest = max(_written(checkpoint.folder.parent.parent).values(), default=0)
    now = max(time.time_ns(), newest + 1)  # the clock may have been set back
    os.utime(checkpoint.folder / MANIFEST, ns=(now, now))


def _newest(home: str) -> Checkpoint:
    runs = _by_age(Path(home, "runs"))
    checkpoint = run_result(runs[0]) if runs else None
    if checkpoint is None:
        raise ArtifactError(
            f"{home} has no checkpoint. Run `clickline train` first, or name one with --model."
        )
    return checkpoint


def _by_age(runs: Path) -> list[Path]:
    """The runs that have a checkpoint, the most recently written first."""
    written = _written(runs)
    return sorted(written, key=lambda run: (-written[run], run.name))


def _written(runs: Path) -> dict[Path, int]:
    """When each run wrote its newest checkpoint."""
    written: dict[Path, int] = {}
    for manifest in runs.glob(f"*/step-*/{MANIFEST}"):
        run = manifest.parent.parent
        written[run] = max(written.get(run, 0), manifest.stat().st_mtime_ns)
    return written
