"""The rows a model is evaluated on: a split of a prepared dataset, or raw logs, encoded as for the model's training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.manifest import MANIFEST, fingerprint
from clickline.config import Config
from clickline.data.input_blocks import files_from_config, map_in_order
from clickline.data.labelled_reader import LabelledLogs
from clickline.data.schema import Schema, target_fields
from clickline.data.slot_discovery import discover_slots
from clickline.errors import ArtifactError, ConfigError, DataError, Mistake
from clickline.evaluation.id_names import find_id_names, id_names_of
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.machine import cores
from clickline.progress import Progress
from clickline.records import LabelledRows, RawRows, SourceFile
from clickline.storage.file_cache import FileCache
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

Ids = Mapping[str, Sequence[int]]
Names = dict[str, dict[int, str]]


@dataclass(frozen=True)
class EvalSource:
    """The rows that a user wants models to be evaluated on."""

    config: Config
    storage: Storage
    cache: FileCache
    data: Sequence[str]  # a dataset's folder, or logs; empty: the current dataset
    split: str

    def open(self, features: FeatureSpec, progress: Progress) -> EvalRows:
        """Open the rows as a model with these features needs them."""
        storage, data, split = self.storage, self.data, self.split
        if not data:
            return self._open_dataset(Dataset.current(storage, self.config.home), features)
        if len(data) == 1 and storage.describe(Storage.join(data[0], MANIFEST)):
            return self._open_dataset(Dataset.open(storage, data[0]), features)
        if split != "eval":
            problem = f"is {split}, but --data names raw logs, which have no splits."
            raise ConfigError([Mistake("", 0, "--split", problem, "Remove one of the two.")])
        section = self.config.data
        files = files_from_config(section, data, section.eval_dates or section.dates, storage, progress)
        dense = discover_slots(section, files, self.cache, storage, progress, slots=False).dense
        schema = Schema(features, target_fields(section), dense)
        return LogRows(data, LabelledLogs.open(section, files, schema, self.cache, storage))

    def _open_dataset(self, dataset: Dataset, features: FeatureSpec) -> DatasetRows:
        if self.split not in dataset.splits:
            raise DataError(
                f"dataset {dataset.id} has no {self.split} rows; it has: {', '.join(dataset.splits)}. "
                f"Choose one of them with --split, name logs with --data, or set data.{self.split} and prepare again."
            )
        messages = _differences(dataset.features, features)
        if messages:
            raise ArtifactError(
                f"dataset {dataset.id} is encoded differently from the model's training data: {'; '.join(messages)}. "
                "Name the raw logs with --data instead: they are encoded for the model."
            )
        return DatasetRows(dataset, self.split, self.storage, self.cache)


def _differences(dataset_features: FeatureSpec, model_features: FeatureSpec) -> list[str]:
    """How the dataset's features differ from the model's, as messages."""
    dataset_fields: dict[str, DenseField | SlotField] = {f.name: f for f in dataset_features.fields}
    model_fields: dict[str, DenseField | SlotField] = {f.name: f for f in model_features.fields}
    differences = {
        "not in the dataset": [name for name in model_fields if name not in dataset_fields],
        "not in the model": [name for name in dataset_fields if name not in model_fields],
        "other statistics or transform": [
            n for n in model_fields if n in dataset_fields and model_fields[n] != dataset_fields[n]
        ],
    }
    messages = [f"{what}: {_first_names(names)}" for what, names in differences.items() if names]
    return (
        messages
        if messages or dataset_features == model_features
        else ["the order of the fields, or data.missing"]
    )


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ── a dataset ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class DatasetRows:
    """The rows of one split of a dataset."""

    dataset: Dataset
    split: str
    storage: Storage
    cache: FileCache
    _sources: dict[int, SourceFile | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Identifies the rows in a file name."""
        return f"{self.split}-of-{self.dataset.id}"

    def read(self, progress: Progress) -> Iterator[LabelledRows]:
        """All rows in order."""

        def read(number: int, place: tuple[int, int, int]) -> LabelledRows:
            shard, group, _ = place
            return self.group(shard, group)

        progress.begin("evaluate", total_rows=self.dataset.splits[self.split].rows)
        # One thread reads, all score.
        for _, rows in map_in_order(read, self.dataset.row_groups(self.split), 1):
            progress.advance(rows=rows.rows)
            yield rows
        progress.end()

    def group(self, shard: int, group: int) -> LabelledRows:
        """The rows of one row group."""
        uri = Storage.join(self.dataset.folder, self.dataset.splits[self.split].shards[shard].file)
        if shard not in self._sources:
            self._sources[shard] = self.storage.describe(uri)
        source = self._sources[shard]
        try:
            if source is None:
                raise FileNotFoundError
            with self.cache.local(source) as path:
                return self.dataset.read(path, [group])
        except (pa.ArrowException, FileNotFoundError) as error:
            raise ArtifactError(
                f"{uri} is damaged: {error}. Remove {self.dataset.folder} and run `clickline prepare` again."
            ) from error

    def names(self, ids: Ids) -> Names:
        """Look up the most frequent values of each slot, which `prepare` has stored as text."""
        slots = {slot.name: slot for slot in self.dataset.features.slots}
        reported = {slot["name"]: slot for slot in self.dataset.splits[self.split].report["slots"]}
        return {
            name: id_names_of(slots[name], [top["value"].encode() for top in reported[name]["top"]])
            for name in ids
        }

    def to_json(self) -> dict[str, Any]:
        return {"dataset": self.dataset.folder, "split": self.split}


# ── raw logs ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LogRows:
    """The rows of raw logs."""

    patterns: Sequence[str]
    logs: LabelledLogs

    @property
    def label(self) -> str:
        return f"logs-{fingerprint([file.uri for file in self.logs.inputs.files])}"

    def read(self, progress: Progress) -> Iterator[LabelledRows]:
        """All rows in order; can be called once, because bad rows are counted."""
        progress.begin("evaluate", total_bytes=self.logs.inputs.uncompressed_bytes(progress))
        for labelled in self.logs.read(cores(), progress):
            self._check_columns(labelled.raw)
            good = 0 if labelled.rows is None else labelled.rows.rows
            progress.advance(rows=good + sum(row.count for row in labelled.bad), size=labelled.size)
            if labelled.rows is not None:
                yield labelled.rows
        progress.end()

    def names(self, ids: Ids) -> Names:
        """The values behind ids, by slot, as far as they can be found."""
        return find_id_names(self.logs.inputs, self.logs.reader.features, ids)

    def to_json(self) -> dict[str, Any]:
        """A description of the rows; complete after they have been read."""
        return {
            "logs": [redacted(pattern) for pattern in self.patterns],
            "files": [redacted(file.uri) for file in self.logs.inputs.files],
            "bad": dict(sorted(self.logs.bad.items())),
            "bad_rows": [
                {"file": row.file, "line": row.line, "reason": row.reason, "detail": row.detail}
                for row in self.logs.examples
            ],
        }

    def _check_columns(self, raw: RawRows | None) -> None:
        missing = (
            [] if raw is None else [n for n in self.logs.reader.features.columns if n not in raw.columns]
        )
        if missing:
            raise DataError(
                f"the model was trained with the columns {_first_names(missing)}, which logs of this format do not "
                "have. Use the config it was trained with, or check data.format."
            )


EvalRows = DatasetRows | LogRows
