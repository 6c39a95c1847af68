"""The report of an evaluation as a document: one format for `train` and `evaluate`, for the page and for programs.

    format     1
    run        name, home, project, created
    config     the resolved config as YAML
    lineage    dataset, checkpoint, version
    evaluation, curves              metrics and curves (evaluation/)
    importance, importance_rows     importance of each field, and the rows it was measured on
    slot_table, drift               the fields in train and eval
    learning, epochs                learning curve and metrics of each epoch
    current    the live version on the same rows
    gate       the verdict
    notes      what is missing, and why

The contents of a part are documented where it is created. A missing part is null or empty, and `notes` has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.dataset import Dataset, Split, concat_rows
from clickline.artifacts.manifest import as_json
from clickline.embedding import Tables
from clickline.embedding.snapshot import SnapshotReader
from clickline.evaluation.drift import drift
from clickline.evaluation.evaluator import Evaluation, evaluate_rows
from clickline.evaluation.gate import Verdict
from clickline.evaluation.id_names import id_names_of
from clickline.evaluation.importance import FieldImportance, ImportanceCounts, ScoreFn
from clickline.evaluation.report.page import page_of, write_page
from clickline.features import FeatureSpec
from clickline.progress import Progress
from clickline.records import LabelledRows
from clickline.storage.storage import Storage

FORMAT = 2

SAMPLED_ROWS = 100_000
"""Rows of each of train and eval that are compared for drift."""

_MAX_GROUPS = 8
_IMPORTANCE_ROWS = 1 << 18  # rows scored for the importance of all fields: about two seconds on two cores
_MIN_ROWS = 1000
_MAX_SCORED_FIELDS = 1_000_000  # shuffled fields times fields scored each time: all of 1,000, 100 of 10,000
_LOOKUP_ROWS = 8192  # per lookup
_MAX_READ_BYTES = 1 << 30  # takes some seconds
_MAX_SLICED_SLOTS = 4
_SLICE_VALUES = range(2, 65)
_MAX_INPUTS = 20

Names = Mapping[str, Mapping[int, str]]
"""The values of known ids, by slot."""

ReadRows = Callable[[int, int], LabelledRows]
"""Reads a row group, by the indices of its shard and of the group."""


@dataclass(frozen=True)
class LiveEvaluation:
    """The evaluation of the live version on the same rows."""

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
class ReportInputs:
    """The inputs of a report; None stands for what is not available."""

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
    current: LiveEvaluation | None = None
    names: Names | None = None
    notes: Sequence[str] = ()


def build_document(inputs: ReportInputs) -> dict[str, Any]:
    """Build the whole document, ready for JSON."""
    names = inputs.names or {}
    evaluation, metrics = inputs.evaluation, None
    if evaluation is not None:
        metrics = {**evaluation.to_json(), "slices": slices_of(evaluation, names)}
    return {
        "format": FORMAT,
        "run": {
            "name": inputs.name,
            "home": inputs.home,
            "project": inputs.project,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "lineage": dict(inputs.lineage),
        "evaluation": metrics,
        "curves": None if evaluation is None else evaluation.curves,
        "learning": inputs.learning,
        "epochs": list(inputs.epochs),
        "importance": None if inputs.importance is None else [one.to_json() for one in inputs.importance],
        "importance_rows": inputs.importance_rows,
        "slot_table": list(inputs.slot_table),
        "drift": inputs.drift,
        "current": None if inputs.current is None else inputs.current.to_json(names),
        "gate": inputs.verdict.to_json(),
        "notes": [*(() if evaluation is None else evaluation.total.notes), *inputs.notes],
        "config": inputs.config,
    }


# ── files ──────────────────────────────────────────────────────────────────────────────────────


def write_report(document: Mapping[str, Any], path: str, storage: Storage, progress: Progress) -> str | None:
    """Write the document to `path` and its page next to it; returns the page's path, None if it could not be
    written."""
    storage.put(path, as_json(document, indent=1))
    return write_page_of(document, path, storage, progress)


def write_page_of(document: Mapping[str, Any], path: str, storage: Storage, progress: Progress) -> str | None:
    """Write the page of the document at `path`. A failure is only logged, since the document has all figures."""
    page = page_of(path)
    try:
        write_page(document, page, storage)
        return page
    except Exception as error:  # noqa: BLE001 - a failed page must not fail the training
        progress.log(f"{page} was not written: {str(error) or type(error).__name__}")
        return None


# ── lineage ────────────────────────────────────────────────────────────────────────────────────


def lineage(
    dataset: Dataset | None, checkpoint: Checkpoint | None, version: int | None = None
) -> dict[str, Any]:
    """The dataset, checkpoint and version that a report is about."""
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
        "inputs": inputs[:_MAX_INPUTS],
        "files": len(inputs),
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    run = checkpoint.manifest.run
    return {
        "folder": str(checkpoint.folder),
        "step": checkpoint.step,
        "epoch": None if run is None else run.position.epoch,
        "trained_rows": None if run is None else run.trained_rows,
    }


# ── samples and slices ─────────────────────────────────────────────────────────────────────────


def sample(dataset: Dataset, split: str, read: ReadRows) -> LabelledRows | None:
    """At most `SAMPLED_ROWS` evenly spaced rows of evenly spaced row groups; None if there are none."""
    groups = list(dataset.row_groups(split)) if split in dataset.splits else []
    indices = np.unique(np.linspace(0, len(groups) - 1, min(len(groups), _MAX_GROUPS)).astype(np.int64))
    chosen = [groups[index] for index in indices]
    stride = max(1, -(-sum(rows for _, _, rows in chosen) // SAMPLED_ROWS))
    parts = []
    for shard, group, rows in chosen:
        parts.append(read(shard, group).take(np.arange(0, rows, stride)))
    return concat_rows(parts) if parts else None


def dataset_id_names(dataset: Dataset, features: FeatureSpec) -> dict[str, dict[int, str]]:
    """The ids of the most frequent values, which `prepare` has stored as text."""
    values: dict[str, list[bytes]] = {slot.name: [] for slot in features.slots}
    for split in dataset.splits.values():
        for slot in split.report["slots"]:
            values.get(slot["name"], []).extend(top["value"].encode() for top in slot["top"])
    return {slot.name: id_names_of(slot, values[slot.name]) for slot in features.slots}


def slots_to_slice(dataset: Dataset, features: FeatureSpec) -> dict[str, int]:
    """Slots with few values in the eval rows, with their indices: categories first, then buckets."""
    if "eval" not in dataset.splits:
        return {}
    distinct = {slot["name"]: slot["distinct"] for slot in dataset.splits["eval"].report["slots"]}
    candidates = [
        (index, slot)
        for index, slot in enumerate(features.slots)
        if distinct.get(slot.name, 0) in _SLICE_VALUES
    ]
    candidates.sort(key=lambda one: one[1].source in ("log2", "quantiles"))
    return {slot.name: index for index, slot in candidates[:_MAX_SLICED_SLOTS]}


def slices_of(evaluation: Evaluation, names: Names) -> dict[str, list[dict[str, Any]]]:
    """The slices of each slot, with the values of known ids."""
    return {
        slot: [{**one.to_json(), "value": names.get(slot, {}).get(one.id)} for one in found]
        for slot, found in evaluation.slices.items()
    }


# ── fields ─────────────────────────────────────────────────────────────────────────────────────


def measure_importance(
    score: ScoreFn, rows: LabelledRows, features: FeatureSpec
) -> tuple[tuple[FieldImportance, ...], int]:
    """The importance of each field on a sample of the rows, and the size of the sample. With more than 1,000 fields
    only the first ones are measured, because the work grows with the square of their number."""
    wanted = max(_MIN_ROWS, _IMPORTANCE_ROWS // max(1, len(features.fields)))
    sampled = rows.take(np.arange(0, rows.rows, max(1, -(-rows.rows // wanted))))
    counts = ImportanceCounts(features, first=max(1, _MAX_SCORED_FIELDS // max(1, len(features.fields))))
    total = evaluate_rows(score, [sampled], importance=counts).total
    return counts.result(total), sampled.rows


def unseen_shares(tables: Tables, rows: LabelledRows) -> list[float]:
    """The share of values without an embedding in the tables, by slot."""
    unseen_S, values_S = np.zeros((2, len(tables.slots)))
    for start in range(0, rows.rows, _LOOKUP_ROWS):
        part = rows.encoded.slice(start, start + _LOOKUP_ROWS)
        lookup = tables.find(part.slots, part.rows, train=False)
        for found, members in zip(lookup.tables, tables.slots_by_table, strict=True):
            for number, s in enumerate(members):
                first, last = found.batch.jagged.starts_S1[number : number + 2]
                unseen_S[s] += np.count_nonzero(
                    found.batch.row_N[first:last] == number
                )  # the slot's default row
                values_S[s] += last - first
    return [float(share) for share in unseen_S / np.maximum(values_S, 1)]


def unseen_shares_in_files(snapshot: Sequence[Path], rows: LabelledRows) -> list[float] | None:
    """The same for tables in files; None if they are too large to read in reasonable time."""
    if sum(path.stat().st_size for path in snapshot) > _MAX_READ_BYTES:
        return None
    reader = SnapshotReader(snapshot)
    share_S = [0.0] * len(rows.encoded.slots)
    for table, members in enumerate(reader.slots_by_table):
        ids = np.unique(np.concatenate([rows.encoded.slots[s].ids_N for s in members]))
        known = np.zeros(ids.size, dtype=np.bool_)
        for records in reader.rows(table):
            index = np.minimum(np.searchsorted(ids, records["id"]), ids.size - 1)
            known[index[ids[index] == records["id"]]] = True
        for s in members:
            ids_N = rows.encoded.slots[s].ids_N
            share_S[s] = float(np.mean(~known[np.searchsorted(ids, ids_N)])) if ids_N.size else 0.0
    return share_S


def slot_table(
    features: FeatureSpec,
    train_split: Split | None,
    eval_split: Split | None,
    table_stats: Sequence[Mapping[str, Any]] | None,
    unseen_shares: Sequence[float] | None,
) -> list[dict[str, Any]]:
    """One row per field: counts of `prepare`, contents of the tables, and the share of eval values they do not have."""
    train, eval = (
        {} if split is None else {slot["name"]: slot for slot in split.report["slots"]}
        for split in (train_split, eval_split)
    )
    stats = {slot["name"]: slot for slot in table_stats or ()}
    shares = (
        {}
        if unseen_shares is None
        else dict(zip((s.name for s in features.slots), unseen_shares, strict=True))
    )
    return [
        {
            "slot": field.name,
            "kind": kind,
            "distinct_train": train.get(field.name, {}).get("distinct"),
            "distinct_eval": eval.get(field.name, {}).get("distinct"),
            "missing_train": train.get(field.name, {}).get("missing_rate"),
            "missing_eval": eval.get(field.name, {}).get("missing_rate"),
            "ids": stats.get(field.name, {}).get("ids"),
            "candidates": stats.get(field.name, {}).get("candidates"),
            "evicted": stats.get(field.name, {}).get("evicted"),
            "unseen_eval": shares.get(field.name),
        }
        for kind, fields in (("slot", features.slots), ("dense", features.dense))
        for field in fields
    ]


def drift_between(
    features: FeatureSpec, train: LabelledRows, eval: LabelledRows, names: Names
) -> dict[str, Any]:
    """The drift of all fields between train and eval rows, largest first."""
    return {
        "rows_train": train.rows,
        "rows_eval": eval.rows,
        "fields": [field.to_json() for field in drift(features, train, eval, names)],
    }
