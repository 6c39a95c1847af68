"""Which checkpoint is meant: by its folder, by its run, or the newest."""

from __future__ import annotations

import os
import time
from pathlib import Path

from clickline.artifacts.checkpoint import Checkpoint, open_checkpoint_folder, result_of
from clickline.artifacts.manifest import MANIFEST
from clickline.errors import ArtifactError


def find_checkpoint(text: str | None, home: str) -> Checkpoint:
    """The checkpoint that a text names: its folder, a run's folder or the run's name in `home`, whose result is
    meant (its newest checkpoint as long as it has none); None means the run that wrote a checkpoint last, or that
    was taken anew since."""
    if text is None:
        return _newest(home)
    runs = Path(home, "runs")
    for place in (Path(text), runs / text):
        found = open_checkpoint_folder(place) or result_of(place)
        if found is not None:
            return found
    there = ", ".join(path.name for path in _by_age(runs)[:5]) or "none"
    raise ArtifactError(
        f"{text} is no checkpoint and no run with one. Name a folder such as .clickline/runs/RUN or "
        f".clickline/runs/RUN/step-…; the runs in {home}, newest first: {there}."
    )


def make_newest(checkpoint: Checkpoint) -> None:
    """Let a checkpoint that was there already be the one that `find_checkpoint(None)` means."""
    newest = max(_written(checkpoint.folder.parent.parent).values(), default=0)
    now = max(time.time_ns(), newest + 1)  # the clock may have gone back since
    os.utime(checkpoint.folder / MANIFEST, ns=(now, now))


def _newest(home: str) -> Checkpoint:
    runs = _by_age(Path(home, "runs"))
    found = result_of(runs[0]) if runs else None
    if found is None:
        raise ArtifactError(
            f"{home} holds no checkpoint. Run `clickline train` first, or name one by --model."
        )
    return found


def _by_age(runs: Path) -> list[Path]:
    """The runs that have a checkpoint, the one that wrote one last first."""
    written = _written(runs)
    return sorted(written, key=lambda run: (-written[run], run.name))


def _written(runs: Path) -> dict[Path, int]:
    """When each run wrote its last checkpoint."""
    written: dict[Path, int] = {}
    for manifest in runs.glob(f"*/step-*/{MANIFEST}"):
        run = manifest.parent.parent
        written[run] = max(written.get(run, 0), manifest.stat().st_mtime_ns)
    return written
