"""A checkpoint: one consistent cut of tables, network, optimizer, random state and place in the data.

<home>/runs/<run>/step-000001234/manifest.json   written last
                                 tables.bin      the sparse tables (embedding/snapshot.py)
                                 dense.npz       plain arrays
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.manifest import MANIFEST, digest, read_manifest, write_manifest
from clickline.errors import ArtifactError
from clickline.storage.stores import Storage

__all__ = [
    "CHECKPOINT_FORMAT",
    "Checkpoint",
    "checkpoint_folder",
    "latest",
    "open_checkpoint_folder",
    "prune",
    "result_of",
    "write_checkpoint",
]

CHECKPOINT_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on local disk."""

    folder: Path
    step: int
    body: Mapping[str, Any]  # position, dataset, features, config: as the trainer wrote them

    @property
    def tables(self) -> Path:
        return self.folder / "tables.bin"

    def is_whole(self) -> bool:
        """Whether its files are those that the manifest tells of. All of them are read, at the speed of SHA-256."""
        told = {"dense.npz": self.body["dense_sha256"], "tables.bin": self.body["tables_sha256"]}
        return all(
            (self.folder / name).is_file() and digest(self.folder / name) == sha256
            for name, sha256 in told.items()
        )

    def dense(self) -> dict[str, NDArray[Any]]:
        """The arrays of the dense part, once their checksum is known to be right."""
        path = self.folder / "dense.npz"
        if digest(path) != self.body["dense_sha256"]:
            raise ArtifactError(
                f"{path} is damaged: its checksum is not the manifest's. Remove {self.folder}."
            )
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)


def write_checkpoint(
    run: Path,
    step: int,
    write_tables: Callable[[Path], object],
    dense: Mapping[str, NDArray[Any]],
    body: Mapping[str, Any],
) -> Checkpoint:
    """Write everything, then the manifest: before that the folder does not count."""
    folder = checkpoint_folder(run, step)
    shutil.rmtree(folder, ignore_errors=True)  # the rest of a killed run
    folder.mkdir(parents=True)
    write_tables(folder / "tables.bin")
    np.savez(folder / "dense.npz", allow_pickle=False, **dense)
    for path in folder.iterdir():  # on disk before the manifest says so
        with path.open("rb") as file:
            os.fsync(file.fileno())
    whole = {
        **body,
        "step": step,
        "dense_sha256": digest(folder / "dense.npz"),
        "tables_sha256": digest(folder / "tables.bin"),
    }
    write_manifest(Storage(), str(folder), "checkpoint", CHECKPOINT_FORMAT, whole)
    return Checkpoint(folder, step, whole)


def open_checkpoint_folder(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, if there is one."""
    if not (folder / MANIFEST).is_file():
        return None
    document = read_manifest(Storage(), str(folder), "checkpoint", CHECKPOINT_FORMAT)
    return Checkpoint(folder, document["step"], document)


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:09d}"


def latest(run: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run."""
    whole = sorted(path.parent for path in run.glob(f"step-*/{MANIFEST}"))
    return open_checkpoint_folder(whole[-1]) if whole else None


def result_of(run: Path) -> Checkpoint | None:
    """The checkpoint that a run was judged by; before that its newest."""
    report = run / "report.json"
    judged = json.loads(report.read_text())["checkpoint"] if report.exists() else ""
    return (open_checkpoint_folder(run / judged) if judged else None) or latest(run)


def prune(run: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and that of step `best`, and what a killed run left
    half-written before them."""
    whole = sorted(path.parent for path in run.glob(f"step-*/{MANIFEST}"))
    newest = whole[-1].name if whole else ""
    kept = whole[-keep:] if best is None else [*whole[-keep:], checkpoint_folder(run, best)]
    for folder in run.glob("step-*"):
        if folder not in kept and folder.name <= newest:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
