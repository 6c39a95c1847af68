"""What a model is evaluated on: a part of a prepared dataset, or raw logs, encoded as the model was trained."""

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
from clickline.data.input_blocks import Inputs, in_order, open_reader
from clickline.data.labelled_reader import Labelled, LabelledReader
from clickline.data.schema import Layout, target_fields
from clickline.data.slot_discovery import discover
from clickline.data.targets import unit_finder
from clickline.errors import ArtifactError, ConfigError, DataError, Mistake, TooManyBadRows
from clickline.evaluation.id_names import names_of
from clickline.evaluation.id_names_in_logs import names_in_blocks
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.machine import cores
from clickline.progress import Progress
from clickline.records import BadRow, LabelledRows, SourceFile
from clickline.storage.file_cache import Cache
from clickline.storage.log_files import DateRange, resolve
from clickline.storage.redaction import shown
from clickline.storage.storage import Storage

_SHOWN_BAD = 20  # bad rows in a report, with their words

Ids = Mapping[str, Sequence[int]]
Names = dict[str, dict[int, str]]


class Rows(Protocol):
    """Labelled rows to evaluate on."""

    @property
    def label(self) -> str:
        """Names them in a file's name."""

    def read(self, progress: Progress) -> Iterator[LabelledRows]:
        """All rows, in order; once."""

    def names(self, ids: Ids) -> Names:
        """By slot: what an id stands for, as far as it can be told."""

    def to_json(self) -> dict[str, Any]:
        """What they are; complete when they have been read."""


def open_rows(
    config: Config,
    storage: Storage,
    cache: Cache,
    data: Sequence[str],
    split: str,
    features: FeatureSpec,
    progress: Progress,
) -> Rows:
    """The rows that `data` names: nothing, for the current dataset; a dataset's folder; or logs."""
    if not data:
        return _of_dataset(Dataset.current(storage, config.home), split, features, storage, cache)
    if len(data) == 1 and storage.describe(Storage.join(data[0], MANIFEST)):
        return _of_dataset(Dataset.open(storage, data[0]), split, features, storage, cache)
    if split != "eval":
        problem = f"is {split}, but --data names raw logs, which have no splits."
        raise ConfigError([Mistake("", 0, "--split", problem, "Leave out one of the two.")])
    return _of_logs(config, storage, cache, data, features, progress)


# ── a dataset ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class DatasetRows:
    """The rows of one split of a dataset."""

    dataset: Dataset
    split: str
    storage: Storage
    cache: Cache
    _described: dict[int, SourceFile | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.split}-of-{self.dataset.id}"

    def read(self, progress: Progress) -> Iterator[LabelledRows]:
        def read(number: int, place: tuple[int, int, int]) -> LabelledRows:
            shard, group, _ = place
            return self.group(shard, group)

        progress.begin("evaluate", total_rows=self.dataset.splits[self.split].rows)
        for _, rows in in_order(read, self.dataset.row_groups(self.split), 1):  # one reads, all score
            progress.advance(rows=rows.rows)
            yield rows
        progress.end()

    def group(self, shard: int, group: int) -> LabelledRows:
        """The rows of one row group."""
        place = Storage.join(self.dataset.folder, self.dataset.splits[self.split].shards[shard].file)
        if shard not in self._described:
            self._described[shard] = self.storage.describe(place)
        source = self._described[shard]
        try:
            if source is None:
                raise FileNotFoundError
            with self.cache.local(source) as path:
                return self.dataset.read(path, [group])
        except (pa.ArrowException, FileNotFoundError) as error:
            raise ArtifactError(
                f"{place} is damaged: {error}. Remove {self.dataset.folder} and run `clickline prepare` again."
            ) from error

    def names(self, ids: Ids) -> Names:
        """Prepare has kept the most frequent values of each slot as text."""
        slots = {slot.name: slot for slot in self.dataset.features.slots}
        reported = {slot["name"]: slot for slot in self.dataset.splits[self.split].report["slots"]}
        return {
            name: names_of(slots[name], [top["value"].encode() for top in reported[name]["top"]])
            for name in ids
        }

    def to_json(self) -> dict[str, Any]:
        return {"dataset": self.dataset.folder, "split": self.split}


def _of_dataset(
    dataset: Dataset, split: str, features: FeatureSpec, storage: Storage, cache: Cache
) -> DatasetRows:
    if split not in dataset.splits:
        raise DataError(
            f"dataset {dataset.id} has no {split} rows; it has: {', '.join(dataset.splits)}. "
            f"Use --split for one of these, name logs with --data, or set data.{split} and prepare again."
        )
    differs = _differences(dataset.features, features)
    if differs:
        raise ArtifactError(
            f"dataset {dataset.id} is encoded otherwise than the model was trained: {'; '.join(differs)}. "
            "Name the raw logs with --data: they are encoded as for the model."
        )
    return DatasetRows(dataset, split, storage, cache)


def _differences(found: FeatureSpec, wanted: FeatureSpec) -> list[str]:
    """How the dataset's features differ from the model's, in words."""
    there: dict[str, DenseField | SlotField] = {f.name: f for f in found.fields}
    asked: dict[str, DenseField | SlotField] = {f.name: f for f in wanted.fields}
    told = {
        "not in the dataset": [name for name in asked if name not in there],
        "not in the model": [name for name in there if name not in asked],
        "other statistics or transform": [n for n in asked if n in there and asked[n] != there[n]],
    }
    differs = [f"{what}: {_few(names)}" for what, names in told.items() if names]
    return differs if differs or found == wanted else ["the order of the fields, or data.missing"]


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ── raw logs ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class LogRows:
    """The rows of raw logs; bad ones are left out, counted, and the first of them kept with their words."""

    patterns: Sequence[str]
    inputs: Inputs
    reader: LabelledReader
    max_bad: float
    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[BadRow] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"logs-{fingerprint([file.uri for file in self.inputs.files])}"

    def read(self, progress: Progress) -> Iterator[LabelledRows]:
        progress.begin("evaluate", total_bytes=self.inputs.text_bytes(progress))
        for labelled in self.reader.rows(self.inputs, cores(), progress):
            self._count(labelled)
            if labelled.rows is not None:
                yield labelled.rows
        progress.end()
        self._judge()

    def names(self, ids: Ids) -> Names:
        return names_in_blocks(self.inputs, self.reader.features, ids)

    def to_json(self) -> dict[str, Any]:
        return {
            "logs": [shown(pattern) for pattern in self.patterns],
            "files": [shown(file.uri) for file in self.inputs.files],
            "bad": dict(sorted(self.bad.items())),
            "bad_rows": [
                {"file": row.file, "line": row.line, "reason": row.reason, "detail": row.detail}
                for row in self.examples
            ],
        }

    def _count(self, labelled: Labelled) -> None:
        if labelled.raw is not None:
            absent = [name for name in self.reader.features.columns if name not in labelled.raw.columns]
            if absent:
                raise DataError(
                    f"the model was trained with the columns {_few(absent)}, which logs of this format do not "
                    "have. Use the config it was trained with, or check data.format."
                )
        self.rows += 0 if labelled.rows is None else labelled.rows.rows
        for row in labelled.bad:
            self.bad[row.reason] += row.count
        self.examples += labelled.bad[: _SHOWN_BAD - len(self.examples)]

    def _judge(self) -> None:
        bad = self.bad.total()
        first = shown(self.inputs.files[0].uri) + (" and others" if len(self.inputs.files) > 1 else "")
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())
        if not self.rows and not bad:
            raise DataError(f"{first} holds no rows. Name the files that hold the logs.")
        seen = self.rows + bad
        if not self.rows or bad > self.max_bad * seen:
            places = "; ".join(f"{row.file}:{row.line}: {row.detail}" for row in self.examples[:3])
            raise TooManyBadRows(
                f"{bad:,} of {seen:,} rows of {first} are bad ({bad / seen:.2%}; data.max_bad allows "
                f"{self.max_bad:.2%}): {reasons}. The first: {places}. "
                "Mend the data, check data.format, or raise data.max_bad."
            )


def _of_logs(
    config: Config,
    storage: Storage,
    cache: Cache,
    patterns: Sequence[str],
    features: FeatureSpec,
    progress: Progress,
) -> LogRows:
    data = config.data
    dates = data.eval_dates or data.dates
    files: list[SourceFile] = resolve(
        storage,
        patterns,
        None if dates is None else DateRange(dates.first, dates.last),
        data.donefile,
        0 if dates is None else dates.wait,
        progress,
    )
    layout = Layout(features, target_fields(data))
    if data.format == "paddlerec":
        found = discover(data.format, files, cache, storage, cores(), progress, slots=False)
        layout = replace(layout, dense=found.dense)
    reader = open_reader(data, layout)
    inputs = Inputs(files, reader, cache, storage, unit_finder(layout.targets, features.missing))
    labelled = LabelledReader(reader, features, layout.targets, time.time())
    return LogRows(patterns, inputs, labelled, data.max_bad)
