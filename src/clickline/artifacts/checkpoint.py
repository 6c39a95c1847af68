"""A checkpoint: one consistent cut of tables, network, optimizer, random state and place in the data.

<home>/runs/<run>/step-000001234/manifest.json   written last
                                 tables.bin      the sparse tables (embedding/snapshot.py), or
                                 tables-00-of-12.bin …   their parts, each written by the shard that has it
                                 dense.npz       plain arrays
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.arrays import read_arrays
from clickline.artifacts.manifest import MANIFEST, digest, read_manifest, write_manifest
from clickline.errors import ArtifactError
from clickline.storage.storage import Storage
from clickline.validation import checked

CHECKPOINT_FORMAT = 1

_STEP = re.compile(r"step-[0-9]+")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on local disk."""

    folder: Path
    step: int
    body: Mapping[str, Any]  # position, dataset, features, config: as the trainer wrote them

    @property
    def tables(self) -> tuple[Path, ...]:
        """The files of the sparse tables, in the order of the parts."""
        return tuple(self.folder / name for name in _tables_told(self.body))

    def is_whole(self) -> bool:
        """Whether its files are those that the manifest tells of. All of them are read, at the speed of SHA-256."""
        told = {"dense.npz": self.body["dense_sha256"], **_tables_told(self.body)}
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
        return read_arrays(path)


@dataclass(frozen=True)
class _Manifest:
    """What a manifest must hold for the folder to be a checkpoint; the rest is the trainer's."""

    step: int
    dense_sha256: str
    tables_sha256: str
    tables: dict[str, str] | None = None  # None: by an earlier release, which had only tables.bin


class Written(Protocol):
    """What is known of a file that was written."""

    @property
    def sha256(self) -> str: ...


def write_checkpoint(
    run: Path,
    step: int,
    write_tables: Callable[[Path], Written],
    dense: Mapping[str, NDArray[Any]],
    body: Mapping[str, Any],
) -> Checkpoint:
    """Write everything, then the manifest: before that the folder does not count."""
    folder = begin_checkpoint(run, step)
    (name,) = part_names(1)
    return finish_checkpoint(folder, step, {name: write_tables(folder / name).sha256}, dense, body)


def begin_checkpoint(run: Path, step: int) -> Path:
    """An empty folder for a checkpoint, into which whoever has a part of the tables writes it."""
    folder = checkpoint_folder(run, step)
    shutil.rmtree(folder, ignore_errors=True)  # the rest of a killed run
    folder.mkdir(parents=True, exist_ok=True)  # one of its shards may still be writing there
    return folder


def finish_checkpoint(
    folder: Path,
    step: int,
    tables: Mapping[str, str],
    dense: Mapping[str, NDArray[Any]],
    body: Mapping[str, Any],
) -> Checkpoint:
    """Write the dense part and the manifest. `tables` are the files that are there, named as `part_names` says, with
    the SHA-256 of each."""
    names = part_names(len(tables))
    if set(names) != set(tables):
        raise ValueError(f"{len(tables)} parts of tables are {', '.join(names)}, not {', '.join(tables)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ArtifactError(
            f"{folder} has no {', '.join(missing)}, though it was written: its machine has another folder of that "
            "name. Set `home` to a folder that all machines share."
        )
    np.savez(folder / "dense.npz", allow_pickle=False, **dense)
    for path in folder.iterdir():  # on disk before the manifest says so
        with path.open("rb") as file:
            os.fsync(file.fileno())
    parts = [tables[name] for name in names]
    whole = {
        **body,
        "step": step,
        "dense_sha256": digest(folder / "dense.npz"),
        "tables": {name: tables[name] for name in names},
        "tables_sha256": parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest(),
    }
    write_manifest(Storage(), str(folder), "checkpoint", CHECKPOINT_FORMAT, whole)
    return Checkpoint(folder, step, whole)


def part_names(parts: int) -> tuple[str, ...]:
    """What the files of the tables are called, in so many parts."""
    if parts == 1:
        return ("tables.bin",)
    return tuple(f"tables-{part:02d}-of-{parts:02d}.bin" for part in range(parts))


def _tables_told(body: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each file of the tables; manifests of earlier releases know only one file."""
    told = body.get("tables") or {"tables.bin": body["tables_sha256"]}
    return {name: told[name] for name in part_names(len(told))}


def open_checkpoint_folder(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, if there is one."""
    if not (folder / MANIFEST).is_file():
        return None
    document = read_manifest(Storage(), str(folder), "checkpoint", CHECKPOINT_FORMAT)
    told = checked(_Manifest, document, f"the manifest of {folder}")
    names = part_names(len(told.tables)) if told.tables else ("tables.bin",)
    if told.tables is not None and set(names) != set(told.tables):
        raise ArtifactError(
            f"the manifest of {folder} names the tables {', '.join(told.tables)[:200]}; expected are "
            f"{', '.join(names)[:200]}. Remove {folder}."
        )
    return Checkpoint(folder, told.step, document)


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:09d}"


def latest(run: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run."""
    whole = sorted(path.parent for path in run.glob(f"step-*/{MANIFEST}"))
    return open_checkpoint_folder(whole[-1]) if whole else None


def result_of(run: Path) -> Checkpoint | None:
    """The checkpoint that a run was judged by; before that its newest."""
    report = run / "report.json"
    try:
        judged = json.loads(report.read_bytes())["checkpoint"] if report.exists() else ""
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{report} is damaged ({error!r}). Run `clickline train` again.") from error
    if not judged:
        return latest(run)
    if not isinstance(judged, str) or not _STEP.fullmatch(judged):  # or it might lead out of the run
        raise ArtifactError(
            f"{report} names the checkpoint {judged!r:.80}; one of the run, step-…, is expected. Train again."
        )
    return open_checkpoint_folder(run / judged) or latest(run)


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
