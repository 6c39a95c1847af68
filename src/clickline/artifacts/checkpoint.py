"""A checkpoint: a consistent snapshot of tables, network, optimizer, random state and position in the data.

<home>/runs/<run>/step-000001234/manifest.json   written last
                                 tables.bin      the sparse tables (embedding/snapshot.py), or
                                 tables-00-of-12.bin …   their parts, one per embedding server
                                 dense.npz       plain arrays
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.arrays import read_arrays
from clickline.artifacts.manifest import MANIFEST, digest, read_manifest, write_manifest
from clickline.errors import ArtifactError
from clickline.features import FeatureSpec
from clickline.storage.storage import Storage
from clickline.validation import validate

CHECKPOINT_FORMAT = 3

_STEP = re.compile(r"step-[0-9]+")


@dataclass(frozen=True)
class Position:
    """The next batch to train on."""

    epoch: int = 0
    window: int = 0
    batch: int = 0


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run of `clickline train`."""

    identity: dict[str, Any]  # what its result depends on
    dataset: str  # id
    position: Position
    epoch_end: bool
    evicted: dict[str, int]  # ids by slot
    trained_rows: int
    units: dict[str, Any] | None = None  # async training: work units that are done or leased


@dataclass(frozen=True)
class HourlyProgress:
    """The progress of `clickline up --follow`."""

    steps: int
    trained_hours: list[list[int]]  # ranges: first, stop
    record: dict[str, Any]  # of the last hour


@dataclass(frozen=True)
class CheckpointState:
    """What the trainer adds to a checkpoint's manifest: the model, and the progress of a run or of hourly training."""

    features: dict[str, Any]
    plan: dict[str, Any]
    calibration: dict[str, Any] | None
    newest_hour: int
    run: RunProgress | None = None
    hourly: HourlyProgress | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest(CheckpointState):
    """The manifest of a checkpoint."""

    step: int
    dense_sha256: str
    tables: dict[str, str]  # the SHA-256 of each file, named as in `part_names`
    tables_sha256: str  # of all of them


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on local disk."""

    folder: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def dataset(self) -> str | None:
        """The id of the dataset that it was trained on; None for one of `clickline up --follow`."""
        return None if self.manifest.run is None else self.manifest.run.dataset

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """What the result of its run depends on; None for one of `clickline up --follow`."""
        return None if self.manifest.run is None else self.manifest.run.identity

    @property
    def features(self) -> FeatureSpec:
        return FeatureSpec.from_json(self.manifest.features)

    @property
    def tables(self) -> tuple[Path, ...]:
        """The files of the sparse tables, in the order of the parts."""
        return tuple(self.folder / name for name in part_names(len(self.manifest.tables)))

    def is_intact(self) -> bool:
        """Whether all files match the checksums in the manifest. Reads every file."""
        checksums = {"dense.npz": self.manifest.dense_sha256, **self.manifest.tables}
        return all(
            (self.folder / name).is_file() and digest(self.folder / name) == sha256
            for name, sha256 in checksums.items()
        )

    def dense(self) -> dict[str, NDArray[Any]]:
        """The arrays of the dense part, after checking their checksum."""
        path = self.folder / "dense.npz"
        if digest(path) != self.manifest.dense_sha256:
            raise ArtifactError(
                f"{path} is damaged: its checksum differs from the manifest. Remove {self.folder}."
            )
        return read_arrays(path)


class WrittenFile(Protocol):
    """The checksum of a file that was written."""

    @property
    def sha256(self) -> str: ...


def write_checkpoint(
    run: Path,
    step: int,
    write_tables: Callable[[Path], WrittenFile],
    dense: Mapping[str, NDArray[Any]],
    state: CheckpointState,
) -> Checkpoint:
    """Write all files, then the manifest: without it the folder is not a checkpoint."""
    folder = begin_checkpoint(run, step)
    (name,) = part_names(1)
    return finish_checkpoint(folder, step, {name: write_tables(folder / name).sha256}, dense, state)


def begin_checkpoint(run: Path, step: int) -> Path:
    """Create an empty folder for a checkpoint; each embedding server writes its part of the tables there."""
    folder = checkpoint_folder(run, step)
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
    folder.mkdir(parents=True, exist_ok=True)  # an embedding server of that run may still be writing there
    return folder


def finish_checkpoint(
    folder: Path,
    step: int,
    tables: Mapping[str, str],
    dense: Mapping[str, NDArray[Any]],
    state: CheckpointState,
) -> Checkpoint:
    """Write the dense part and the manifest. `tables` maps each table file, named as in `part_names`, to its
    SHA-256."""
    names = part_names(len(tables))
    if set(names) != set(tables):
        raise ValueError(f"{len(tables)} table parts are named {', '.join(names)}, not {', '.join(tables)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ArtifactError(
            f"{folder} has no {', '.join(missing)}, although it was written: it is another folder on the machine that "
            "wrote it. Set `home` to a folder that all machines share."
        )
    np.savez(folder / "dense.npz", allow_pickle=False, **dense)
    for path in folder.iterdir():  # flushed to disk before the manifest lists it
        with path.open("rb") as file:
            os.fsync(file.fileno())
    parts = [tables[name] for name in names]
    manifest = CheckpointManifest(
        **vars(state),
        step=step,
        dense_sha256=digest(folder / "dense.npz"),
        tables={name: tables[name] for name in names},
        tables_sha256=parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest(),
    )
    write_manifest(Storage(), str(folder), "checkpoint", CHECKPOINT_FORMAT, manifest)
    return Checkpoint(folder, manifest)


def part_names(parts: int) -> tuple[str, ...]:
    """The names of the table files of a checkpoint with this number of parts."""
    if parts == 1:
        return ("tables.bin",)
    return tuple(f"tables-{part:02d}-of-{parts:02d}.bin" for part in range(parts))


def open_checkpoint_folder(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, or None."""
    if not (folder / MANIFEST).is_file():
        return None
    document = read_manifest(Storage(), str(folder), "checkpoint", CHECKPOINT_FORMAT)
    manifest = validate(CheckpointManifest, document, f"the manifest of {folder}")
    names = part_names(max(1, len(manifest.tables)))
    if set(names) != set(manifest.tables):
        raise ArtifactError(
            f"the manifest of {folder} lists the tables {', '.join(manifest.tables)[:200]}; expected are "
            f"{', '.join(names)[:200]}. Remove {folder}."
        )
    return Checkpoint(folder, manifest)


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:09d}"


def latest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run."""
    complete = sorted(path.parent for path in run.glob(f"step-*/{MANIFEST}"))
    return open_checkpoint_folder(complete[-1]) if complete else None


def run_result(run: Path) -> Checkpoint | None:
    """The checkpoint that a run's report evaluates; without a report, the newest one."""
    report = run / "report.json"
    try:
        evaluated = json.loads(report.read_bytes())["checkpoint"] if report.exists() else ""
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{report} is damaged ({error!r}). Run `clickline train` again.") from error
    if not evaluated:
        return latest_checkpoint(run)
    if not isinstance(evaluated, str) or not _STEP.fullmatch(evaluated):  # it must not lead out of the run
        raise ArtifactError(
            f"{report} names the checkpoint {evaluated!r:.80}; expected is one of the run, step-…. Train again."
        )
    return open_checkpoint_folder(run / evaluated) or latest_checkpoint(run)


def prune_checkpoints(run: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and that of step `best`, and older incomplete ones of a
    killed run."""
    complete = sorted(path.parent for path in run.glob(f"step-*/{MANIFEST}"))
    newest = complete[-1].name if complete else ""
    kept = complete[-keep:] if best is None else [*complete[-keep:], checkpoint_folder(run, best)]
    for folder in run.glob("step-*"):
        if folder not in kept and folder.name <= newest:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)


# ── finding a checkpoint ───────────────────────────────────────────────────────────────────────


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
