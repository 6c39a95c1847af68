"""The rows a model is evaluated on: a split of a prepared dataset, or raw logs, encoded as for the model's training."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow as pa

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.manifest import MANIFEST, fingerprint
from clickline.config import Config
from clickline.data.input_blocks import Inputs, map_in_order, reader_from_config
from clickline.data.labelled_reader import LabelledBlock, LabelledReader
from clickline.data.schema import Schema, target_fields
from clickline.data.slot_discovery import discover_slots
from clickline.data.targets import time_unit_detector
from clickline.errors import ArtifactError, ConfigError, DataError, Mistake, TooManyBadRows
from clickline.evaluation.id_names import id_names_of
from clickline.evaluation.id_names_in_logs import find_id_names
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.machine import cores
from clickline.progress import Progress
from clickline.records import BadRow, LabelledRows, SourceFile
from clickline.storage.file_cache import FileCache
from clickline.storage.log_files import DateRange, resolve_files
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

_MAX_EXAMPLES = 20  # bad rows that a report lists

Ids = Mapping[str, Sequence[int]]
Names = dict[str, dict[int, str]]


class EvalRows(Protocol):
    """Labelled rows to evaluate on."""

    @property
    def label(self) -> str:
        """Identifies the rows in a file name."""

    def read(self, progress: Progress) -> Iterator[LabelledRows]:
        """Read all rows in order; can be called once."""

    def names(self, ids: Ids) -> Names:
        """The values behind ids, by slot, as far as they can be found."""

    def to_json(self) -> dict[str, Any]:
        """A description of the rows; complete after they have been read."""


def open_rows(
    config: Config,
    storage: Storage,
    cache: FileCache,
    data: Sequence[str],
    split: str,
    features: FeatureSpec,
    progress: Progress,
) -> EvalRows:
    """Open the rows that `data` names: a dataset's folder or logs; by default, the current dataset."""
    if not data:
        return _open_dataset(Dataset.current(storage, config.home), split, features, storage, cache)
    if len(data) == 1 and storage.describe(Storage.join(data[0], MANIFEST)):
        return _open_dataset(Dataset.open(storage, data[0]), split, features, storage, cache)
    if split != "eval":
        problem = f"is {split}, but --data names raw logs, which have no splits."
        raise ConfigError([Mistake("", 0, "--split", problem, "Remove one of the two.")])
    return _open_logs(config, storage, cache, data, features, progress)


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
        return f"{self.split}-of-{self.dataset.id}"

    def read(self, progress: Progress) -> Iterator[LabelledRows]:
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


def _open_dataset(
    dataset: Dataset, split: str, features: FeatureSpec, storage: Storage, cache: FileCache
) -> DatasetRows:
    if split not in dataset.splits:
        raise DataError(
            f"dataset {dataset.id} has no {split} rows; it has: {', '.join(dataset.splits)}. "
            f"Choose one of them with --split, name logs with --data, or set data.{split} and prepare again."
        )
    messages = _differences(dataset.features, features)
    if messages:
        raise ArtifactError(
            f"dataset {dataset.id} is encoded differently from the model's training data: {'; '.join(messages)}. "
            "Name the raw logs with --data instead: they are encoded for the model."
        )
    return DatasetRows(dataset, split, storage, cache)


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


# ── raw logs ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class LogRows:
    """The rows of raw logs; bad ones are left out and counted, and the first of them are kept for the report."""

    patterns: Sequence[str]
    inputs: Inputs
    reader: LabelledReader
    max_bad_ratio: float
    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[BadRow] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"logs-{fingerprint([file.uri for file in self.inputs.files])}"

    def read(self, progress: Progress) -> Iterator[LabelledRows]:
        progress.begin("evaluate", total_bytes=self.inputs.uncompressed_bytes(progress))
        for labelled in self.reader.rows(self.inputs, cores(), progress):
            self._count(labelled)
            if labelled.rows is not None:
                yield labelled.rows
        progress.end()
        self._check_bad_rows()

    def names(self, ids: Ids) -> Names:
        return find_id_names(self.inputs, self.reader.features, ids)

    def to_json(self) -> dict[str, Any]:
        return {
            "logs": [redacted(pattern) for pattern in self.patterns],
            "files": [redacted(file.uri) for file in self.inputs.files],
            "bad": dict(sorted(self.bad.items())),
            "bad_rows": [
                {"file": row.file, "line": row.line, "reason": row.reason, "detail": row.detail}
                for row in self.examples
            ],
        }

    def _count(self, labelled: LabelledBlock) -> None:
        if labelled.raw is not None:
            missing = [name for name in self.reader.features.columns if name not in labelled.raw.columns]
            if missing:
                raise DataError(
                    f"the model was trained with the columns {_first_names(missing)}, which logs of this format do not "
                    "have. Use the config it was trained with, or check data.format."
                )
        self.rows += 0 if labelled.rows is None else labelled.rows.rows
        for row in labelled.bad:
            self.bad[row.reason] += row.count
        self.examples += labelled.bad[: _MAX_EXAMPLES - len(self.examples)]

    def _check_bad_rows(self) -> None:
        bad = self.bad.total()
        first = redacted(self.inputs.files[0].uri) + (" and others" if len(self.inputs.files) > 1 else "")
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())
        if not self.rows and not bad:
            raise DataError(f"{first} has no rows. Name the files with the logs.")
        total = self.rows + bad
        if not self.rows or bad > self.max_bad_ratio * total:
            places = "; ".join(f"{row.file}:{row.line}: {row.detail}" for row in self.examples[:3])
            raise TooManyBadRows(
                f"{bad:,} of {total:,} rows of {first} are bad ({bad / total:.2%}; data.max_bad_ratio allows "
                f"{self.max_bad_ratio:.2%}): {reasons}. The first: {places}. "
                "Fix the data, check data.format, or raise data.max_bad_ratio."
            )


def _open_logs(
    config: Config,
    storage: Storage,
    cache: FileCache,
    patterns: Sequence[str],
    features: FeatureSpec,
    progress: Progress,
) -> LogRows:
    data = config.data
    dates = data.eval_dates or data.dates
    files: list[SourceFile] = resolve_files(
        storage,
        patterns,
        None if dates is None else DateRange(dates.first, dates.last),
        data.donefile,
        0 if dates is None else dates.wait,
        progress,
    )
    schema = Schema(features, target_fields(data))
    if data.format == "paddlerec":
        found = discover_slots(data, files, cache, storage, cores(), progress, slots=False)
        schema = replace(schema, dense=found.dense)
    reader = reader_from_config(data, schema)
    inputs = Inputs(files, reader, cache, storage, time_unit_detector(schema.targets, features.missing))
    labelled = LabelledReader(reader, features, schema.targets, time.time())
    return LogRows(patterns, inputs, labelled, data.max_bad_ratio)
