"""The document of one evaluation: what `train` and `evaluate` both tell, in one shape, for the page and for programs.

    format     1
    run        name, home, project, created
    config     the resolved config as YAML
    lineage    dataset, checkpoint, version
    evaluation, curves              what was measured (evaluation/)
    importance, importance_rows     what each field is worth, and on how many rows that was told
    slot_table, drift               the fields in train and eval
    learning, epochs                how training went
    current    the live version on the same rows
    gate       the verdict
    notes      what could not be told, and why

What a part holds is told where it is made. One that cannot be told is null or empty, and `notes` has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.dataset import Dataset, Split, concat
from clickline.artifacts.manifest import as_json
from clickline.embedding import Tables
from clickline.embedding.snapshot import SnapshotReader
from clickline.evaluation.drift import drift
from clickline.evaluation.evaluator import Evaluation, measure
from clickline.evaluation.gate import Verdict
from clickline.evaluation.id_names import names_of
from clickline.evaluation.importance import FieldImportance, ImportanceCounts, Score
from clickline.evaluation.report.page import page_of, write_page
from clickline.features import FeatureSpec
from clickline.progress import Progress
from clickline.records import LabelledRows
from clickline.storage.storage import Storage

FORMAT = 1

SAMPLED_ROWS = 100_000
"""Rows of train, and of eval, that are compared with each other."""

_SAMPLED_GROUPS = 8
_SCORED = 1 << 18  # rows that are scored to tell the importance of all fields: some two seconds on two cores
_LEAST_ROWS = 1000
_SHUFFLED = (
    1_000_000  # fields that are shuffled times fields that are scored each time: all of 1,000, 100 of 10,000
)
_LOOKED_UP = 8192  # rows at a time
_MOST_READ = 1 << 30  # bytes: some seconds
_SLICED = 4
_SLICED_VALUES = range(2, 65)
_INPUTS = 20

Names = Mapping[str, Mapping[int, str]]
"""By slot: what an id stands for, where that is known."""

Read = Callable[[int, int], LabelledRows]
"""A row group of a shard."""


@dataclass(frozen=True)
class Current:
    """The live version, measured on the same rows."""

    version: int
    evaluation: Evaluation

    def to_json(self, names: Names) -> dict[str, Any]:
        return {
            "version": self.version,
            "evaluation": self.evaluation.total.to_json(),
            "curves": self.evaluation.curves,
            "slices": slices_of(self.evaluation, names),
        }


@dataclass(frozen=True)
class Told:
    """Everything that a document tells; what is None could not be told."""

    name: str
    home: str
    project: str
    config: str
    lineage: Mapping[str, Any]
    evaluation: Evaluation | None
    verdict: Verdict
    importance: Sequence[FieldImportance] | None = None
    importance_rows: int | None = None
    slot_table: Sequence[Mapping[str, Any]] = ()
    drift: Mapping[str, Any] | None = None
    learning: Mapping[str, Any] | None = None
    epochs: Sequence[Mapping[str, Any]] = ()
    current: Current | None = None
    names: Names | None = None
    notes: Sequence[str] = ()


def document(told: Told) -> dict[str, Any]:
    """The whole document, ready for JSON."""
    names = told.names or {}
    measured, evaluation = told.evaluation, None
    if measured is not None:
        evaluation = {**measured.to_json(), "slices": slices_of(measured, names)}
    return {
        "format": FORMAT,
        "run": {
            "name": told.name,
            "home": told.home,
            "project": told.project,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "lineage": dict(told.lineage),
        "evaluation": evaluation,
        "curves": None if measured is None else measured.curves,
        "learning": told.learning,
        "epochs": list(told.epochs),
        "importance": None if told.importance is None else [one.to_json() for one in told.importance],
        "importance_rows": told.importance_rows,
        "slot_table": list(told.slot_table),
        "drift": told.drift,
        "current": None if told.current is None else told.current.to_json(names),
        "gate": told.verdict.to_json(),
        "notes": [*(() if measured is None else measured.total.notes), *told.notes],
        "config": told.config,
    }


# ── files ──────────────────────────────────────────────────────────────────────────────────────


def write(document: Mapping[str, Any], path: str, storage: Storage, progress: Progress) -> str | None:
    """Write the document at `path` and its page beside it; where the page is, None if it could not be made."""
    storage.put(path, as_json(document, indent=1))
    return write_page_of(document, path, storage, progress)


def write_page_of(document: Mapping[str, Any], path: str, storage: Storage, progress: Progress) -> str | None:
    """Write the page of the document at `path`. That it cannot be is said, and nothing worse: the figures are there."""
    place = page_of(path)
    try:
        write_page(document, place, storage)
        return place
    except Exception as error:  # noqa: BLE001 - a picture is not worth a training
        progress.say(f"{place} was not written: {str(error) or type(error).__name__}")
        return None


# ── where it came from ─────────────────────────────────────────────────────────────────────────


def lineage(
    dataset: Dataset | None, checkpoint: Checkpoint | None, version: int | None = None
) -> dict[str, Any]:
    """Data to checkpoint to version."""
    return {
        "dataset": None if dataset is None else _dataset(dataset),
        "checkpoint": None if checkpoint is None else _checkpoint(checkpoint),
        "version": version,
    }


def _dataset(dataset: Dataset) -> dict[str, Any]:
    inputs = [file["uri"] for files in dataset.identity.get("inputs", {}).values() for file in files]
    rows = {name: split.rows for name, split in dataset.splits.items()}
    return {
        "id": dataset.id,
        "folder": dataset.folder,
        "train_rows": rows.get("train"),
        "eval_rows": rows.get("eval"),
        "inputs": inputs[:_INPUTS],
        "files": len(inputs),
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    body = checkpoint.body
    return {
        "folder": str(checkpoint.folder),
        "step": checkpoint.step,
        "epoch": body.get("position", {}).get("epoch"),
        "learned_rows": body.get("learned_rows"),
    }


# ── rows to look at closely ────────────────────────────────────────────────────────────────────


def sample(dataset: Dataset, split: str, read: Read) -> LabelledRows | None:
    """At most `SAMPLED_ROWS` rows of some row groups, all evenly spaced; None where there are none."""
    groups = list(dataset.row_groups(split)) if split in dataset.splits else []
    places = np.unique(np.linspace(0, len(groups) - 1, min(len(groups), _SAMPLED_GROUPS)).astype(np.int64))
    chosen = [groups[place] for place in places]
    stride = max(1, -(-sum(rows for _, _, rows in chosen) // SAMPLED_ROWS))
    parts = []
    for shard, group, rows in chosen:
        kept = np.arange(0, rows, stride)
        parts.append(read(shard, group).take(kept))
    return concat(parts) if parts else None


def names_in(dataset: Dataset, features: FeatureSpec) -> dict[str, dict[int, str]]:
    """What the ids of the most frequent values stand for: `prepare` has kept those as text."""
    values: dict[str, list[bytes]] = {slot.name: [] for slot in features.slots}
    for split in dataset.splits.values():
        for slot in split.report["slots"]:
            values.get(slot["name"], []).extend(top["value"].encode() for top in slot["top"])
    return {slot.name: names_of(slot, values[slot.name]) for slot in features.slots}


def slots_to_slice(dataset: Dataset, features: FeatureSpec) -> dict[str, int]:
    """Slots that part the eval rows into a few groups, with their places: categories first, then buckets."""
    if "eval" not in dataset.splits:
        return {}
    distinct = {slot["name"]: slot["distinct"] for slot in dataset.splits["eval"].report["slots"]}
    few = [
        (place, slot)
        for place, slot in enumerate(features.slots)
        if distinct.get(slot.name, 0) in _SLICED_VALUES
    ]
    few.sort(key=lambda one: one[1].source in ("log2", "quantiles"))
    return {slot.name: place for place, slot in few[:_SLICED]}


def slices_of(evaluation: Evaluation, names: Names) -> dict[str, list[dict[str, Any]]]:
    """By slot, its heaviest values with their figures and what they stand for."""
    return {
        slot: [{**one.to_json(), "value": names.get(slot, {}).get(one.id)} for one in found]
        for slot, found in evaluation.slices.items()
    }


# ── fields ─────────────────────────────────────────────────────────────────────────────────────


def importance_on(
    score: Score, rows: LabelledRows, features: FeatureSpec
) -> tuple[tuple[FieldImportance, ...], int]:
    """What each field is worth, told from some of the rows; how many. Of more than 1,000 fields only the first:
    each is scored with all the others, so that the work would grow with the square of their number."""
    asked = max(_LEAST_ROWS, _SCORED // max(1, len(features.fields)))
    some = rows.take(np.arange(0, rows.rows, max(1, -(-rows.rows // asked))))
    counts = ImportanceCounts(features, first=max(1, _SHUFFLED // max(1, len(features.fields))))
    whole = measure(score, [some], importance=counts).total
    return counts.found(whole), some.rows


def unseen_in(tables: Tables, rows: LabelledRows) -> list[float]:
    """By slot, which share of the values has no vector of its own in the tables."""
    unseen_S, values_S = np.zeros((2, len(tables.slots)))
    for start in range(0, rows.rows, _LOOKED_UP):
        part = rows.encoded.part(start, start + _LOOKED_UP)
        lookup = tables.find(part.slots, part.rows, train=False)
        for found, members in zip(lookup.tables, tables.members, strict=True):
            for number, s in enumerate(members):
                first, last = found.bags.starts_S1[number : number + 2]
                unseen_S[s] += np.count_nonzero(found.row_N[first:last] == number)  # the slot's default row
                values_S[s] += last - first
    return [float(share) for share in unseen_S / np.maximum(values_S, 1)]


def unseen_in_files(snapshot: Sequence[Path], rows: LabelledRows) -> list[float] | None:
    """The same of tables that are only there as files; None where it would take too long to read them."""
    if sum(path.stat().st_size for path in snapshot) > _MOST_READ:
        return None
    reader = SnapshotReader(snapshot)
    share_S = [0.0] * len(rows.encoded.slots)
    for table, members in enumerate(reader.members):
        asked = np.unique(np.concatenate([rows.encoded.slots[s].ids_N for s in members]))
        known = np.zeros(asked.size, dtype=np.bool_)
        for records in reader.rows(table):
            place = np.minimum(np.searchsorted(asked, records["id"]), asked.size - 1)
            known[place[asked[place] == records["id"]]] = True
        for s in members:
            ids_N = rows.encoded.slots[s].ids_N
            share_S[s] = float(np.mean(~known[np.searchsorted(asked, ids_N)])) if ids_N.size else 0.0
    return share_S


def slot_table(
    features: FeatureSpec,
    learned: Split | None,
    evaluated: Split | None,
    held: Sequence[Mapping[str, Any]] | None,
    unseen: Sequence[float] | None,
) -> list[dict[str, Any]]:
    """Every field: what `prepare` counted, what the tables hold, and the share of evaluated values they do not know."""
    train, eval = (
        {} if split is None else {slot["name"]: slot for slot in split.report["slots"]}
        for split in (learned, evaluated)
    )
    kept = {slot["name"]: slot for slot in held or ()}
    shares = {} if unseen is None else dict(zip((s.name for s in features.slots), unseen, strict=True))
    return [
        {
            "slot": field.name,
            "kind": kind,
            "distinct_train": train.get(field.name, {}).get("distinct"),
            "distinct_eval": eval.get(field.name, {}).get("distinct"),
            "missing_train": train.get(field.name, {}).get("missing_rate"),
            "missing_eval": eval.get(field.name, {}).get("missing_rate"),
            "ids": kept.get(field.name, {}).get("ids"),
            "candidates": kept.get(field.name, {}).get("candidates"),
            "evicted": kept.get(field.name, {}).get("evicted"),
            "unseen_eval": shares.get(field.name),
        }
        for kind, fields in (("slot", features.slots), ("dense", features.dense))
        for field in fields
    ]


def drift_between(
    features: FeatureSpec, train: LabelledRows, evaluated: LabelledRows, names: Names
) -> dict[str, Any]:
    """How far eval's fields differ from train's, the one that changed most first."""
    return {
        "rows_train": train.rows,
        "rows_eval": evaluated.rows,
        "fields": [field.to_json() for field in drift(features, train, evaluated, names)],
    }
