"""A checkpoint: one consistent cut of tables, network, optimizer, random state and place in the data.

<home>/runs/<run>/step-000001234/manifest.json   written last
                                 tables.bin      the sparse tables (embedding/snapshot.py)
                                 dense.npz       plain arrays
"""

from __future__ import annotations

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

__all__ = ["CHECKPOINT_FORMAT", "Checkpoint", "latest", "prune", "write_checkpoint"]

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
    folder = run / f"step-{step:09d}"
    shutil.rmtree(folder, ignore_errors=True)  # the rest of a killed run
    folder.mkdir(parents=True)
    write_tables(folder / "tables.bin")
    np.savez(folder / "dense.npz", allow_pickle=False, **dense)
    for path in folder.iterdir():  # on disk before the manifest says so
        with path.open("rb") as file:
            os.fsync(file.fileno())
    whole = {**body, "step": step, "dense_sha256": digest(folder / "dense.npz")}
    write_manifest(Storage(), str(folder), "checkpoint", CHECKPOINT_FORMAT, whole)
    return Checkpoint(folder, step, whole)


def latest(run: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run."""
    whole = sorted(path.parent for path in run.glob(f"step-*/{MANIFEST}"))
    if not whole:
        return None
    document = read_manifest(Storage(), str(whole[-1]), "checkpoint", CHECKPOINT_FORMAT)
    return Checkpoint(whole[-1], document["step"], document)


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what a killed run left half-written before them."""
    whole = sorted(path.parent for path in run.glob(f"step-*/{MANIFEST}"))
    newest = whole[-1].name if whole else ""
    for folder in run.glob("step-*"):
        if folder not in whole[-keep:] and folder.name <= newest:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
