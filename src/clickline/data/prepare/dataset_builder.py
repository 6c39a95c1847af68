"""Builds one dataset in its folder: from all input files of a config, or from one hour."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from clickline.artifacts.dataset import DATASET_FORMAT, Dataset, Shard, Split, data_identity, finish_dataset
from clickline.artifacts.manifest import MANIFEST, fingerprint
from clickline.config import Config, resolved
from clickline.data.input_blocks import Inputs
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.column_sketches import RowStatistics
from clickline.data.prepare.shard_builder import ShardBuilder, ShardExecutor, build_shards
from clickline.data.readers.slot_lines import read_slot_conf
from clickline.data.schema import Schema, build_schema, named_slots, target_fields
from clickline.data.slot_discovery import discover_slots
from clickline.errors import ArtifactError, DataError, StorageError, TooManyBadRows
from clickline.features import ENCODER_FORMAT, FeatureSpec
from clickline.progress import Progress
from clickline.records import SourceFile
from clickline.storage.atomic import remove_leftovers
from clickline.storage.file_cache import FileCache
from clickline.storage.file_lock import acquire, read_owner, write_owner
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

_MIN_ROWS_TO_STOP = 100_000  # read before bad rows may stop the run early
_LINE_LAYOUTS = {"slots": "show click feasign:slot …", "paddlerec": "click:0 dense_feature:0.5 … 1:feasign …"}
_DAMAGED = ("truncated", "corrupt")  # reasons for losing an unknown number of rows
_NOT_CONTENT = {"train", "eval", "dates", "eval_dates", "donefile", "max_bad_ratio", "slot_conf", "reader"}


def identity_of(config: Config, storage: Storage, sources: Mapping[str, list[SourceFile]]) -> dict[str, Any]:
    """Everything the dataset's bytes depend on. Two runs with the same identity build the same dataset."""
    data = config.data
    return {
        "encoder_format": ENCODER_FORMAT,
        "dataset_format": DATASET_FORMAT,
        # Order matters: fields are applied and stored in the order of the config, and JSON keeps it.
        "data": data_identity(data.model_dump(mode="json", exclude=_NOT_CONTENT)),
        "slot_conf": None if data.slot_conf is None else _content(storage, data.slot_conf),
        "reader": None if data.reader is None else _content(storage, data.reader),
        "inputs": {
            split: [asdict(file) | {"uri": redacted(file.uri)} for file in files]
            for split, files in sources.items()
        },
    }


def _content(storage: Storage, uri: str) -> str:
    return hashlib.sha256(storage.read(uri)).hexdigest()


@dataclass(frozen=True)
class DatasetBuilder:
    """Builds a dataset in its folder: first shards, quarantine and work records, then the manifest."""

    config: Config
    storage: Storage
    cache: FileCache
    folder: str
    scratch: Path  # where shards are written until they are complete

    @classmethod
    def for_folder(cls, config: Config, storage: Storage, folder: str) -> DatasetBuilder:
        cache = Path(config.cache.dir)
        # Beside the shards, or on this machine if home is a remote store.
        beside = Path(folder, "work")
        elsewhere = cache.with_name(f"{cache.name}-work") / fingerprint(folder)
        scratch = beside if Storage.is_local(folder) else elsewhere
        return cls(config, storage, FileCache(cache, config.cache.size, storage), folder, scratch)

    def finished_dataset(self) -> Dataset | None:
        """The dataset if it is finished, None if not. A damaged one is an error."""
        manifest = self.storage.describe(Storage.join(self.folder, MANIFEST))
        return Dataset.open(self.storage, self.folder) if manifest else None

    @property
    def in_progress(self) -> bool:
        """Whether a process is building the dataset, or was killed while building it."""
        return self.scratch.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this dataset, and remove the leftovers of a killed process."""
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            lock = acquire(self.scratch / "lock")
        except OSError as error:
            raise StorageError(
                f"{self.scratch}: {error.strerror}. It is part of `home`, which must be a writable "
                "folder: change home in the config, or make the folder writable."
            ) from error
        if lock is None:
            owner = (read_owner(self.scratch / "lock") or {}).get("pid", "unknown")
            raise ArtifactError(
                f"another `clickline prepare` (process {owner}) is building this dataset. Wait for it, or stop it."
            )
        try:
            for leftover in self.scratch.glob("*.tmp"):
                leftover.unlink()
            if Storage.is_local(self.folder):
                remove_leftovers(Path(self.folder))
            with suppress(OSError):  # the real work reports a full disk
                write_owner(lock, {"pid": os.getpid()})
            yield
        finally:
            os.close(lock)

    def reference_time(self) -> float:
        """The unix time against which the times of rows are checked: when the dataset was first started, however often
        it was interrupted, so that all shards are checked alike. Shards built before the time was recorded are built
        again."""
        path = self._clock_file
        if self.storage.describe(path) is None:
            for note in self.storage.list(Storage.pattern_in(Storage.join(self.folder, "work"), "*-*.json")):
                self.storage.delete(note.uri)
            self.storage.delete(Storage.join(self.folder, "quarantine"))
            self.storage.put(path, f"{int(time.time())}\n".encode())
        return float(self.storage.read(path))

    @property
    def _clock_file(self) -> str:
        return Storage.join(self.folder, "work", "clock")

    def _clock_hint(self, statistics: RowStatistics) -> str:
        """A hint for errors about bad times: the clock may be wrong. The next run reads the clock again."""
        if not statistics.bad["bad time"]:
            return ""
        moment = datetime.fromtimestamp(self.reference_time(), UTC)
        self.storage.delete(self._clock_file)
        return (
            f" Times were compared with this machine's clock, {moment:%Y-%m-%d %H:%M} UTC. If it is wrong, correct it; "
            "the next run reads the clock and the logs again."
        )

    def clean_up(self) -> None:
        """Remove what was needed only while building."""
        self.storage.delete(Storage.join(self.folder, "work"))
        shutil.rmtree(self.scratch, ignore_errors=True)

    def infer_schema(self, train: list[SourceFile], progress: Progress) -> Schema:
        """Features and targets. Without a slot.conf, slots are discovered in the training data.

        If the data have no slot and the config names none, the schema has no features."""
        data = self.config.data
        if data.format not in ("slots", "paddlerec"):
            return build_schema(data)
        detect = data.slot_conf is None
        discovered = discover_slots(data, train, self.cache, self.storage, progress, slots=detect)
        if data.slot_conf is not None:
            slots = read_slot_conf(data.slot_conf, self.storage.read(data.slot_conf))
        elif discovered.slots or data.fields:
            slots = discovered.slots
        else:
            return Schema(FeatureSpec((), (), data.missing), target_fields(data), discovered.dense)
        return build_schema(
            data, dict.fromkeys([*slots, *sorted(named_slots(data.fields))]), discovered.dense
        )

    def build_split(
        self,
        name: str,
        inputs: Inputs,
        reader: LabelledReader,
        executor: ShardExecutor,
        progress: Progress,
        *,
        title: str,
        may_be_empty: bool = False,
    ) -> Split:
        """Build every shard of a split."""
        shard_builder = ShardBuilder(self.storage, self.folder, self.scratch, name, reader)
        shards: dict[int, Shard] = {}
        total = inputs.uncompressed_bytes(progress)
        statistics = RowStatistics.empty(len(reader.features.slots))
        size = 0
        progress.begin(title, total_bytes=total)
        try:
            for item in build_shards(shard_builder, inputs, self.config.data.shard_size, executor, progress):
                shards[item.number] = item.shard
                statistics.merge(item.statistics)  # at once: together they would take shards x slots x 8 KiB
                size += item.size
                progress.advance(rows=item.statistics.rows + item.statistics.bad.total(), size=item.size)
                if total:
                    self._stop_if_hopeless(name, statistics, size / total)
        finally:
            progress.end()
        if not statistics.rows and not may_be_empty:
            self._raise_no_rows(name, inputs, statistics)
        self._check_bad_rows(name, statistics)
        return Split(tuple(shards[number] for number in sorted(shards)), _report(reader.features, statistics))

    def finish(
        self, identity: Mapping[str, Any], features: FeatureSpec, splits: Mapping[str, Split]
    ) -> Dataset:
        """Write the manifest: from here on the dataset exists."""
        self.storage.put(Storage.join(self.folder, "resolved.yaml"), resolved(self.config).encode())
        finish_dataset(self.storage, self.folder, fingerprint(identity), features, identity, splits)
        return Dataset.open(self.storage, self.folder)

    # Input that is refused

    def _raise_no_rows(self, split: str, inputs: Inputs, statistics: RowStatistics) -> NoReturn:
        first = redacted(inputs.files[0].uri) + (" and others" if len(inputs.files) > 1 else "")
        if not statistics.bad:
            raise DataError(f"data.{split} has no rows: {first} is empty. Name the files that hold the logs.")
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in statistics.bad.most_common())
        raise DataError(
            f"data.{split} has no usable rows in {first}: {reasons}.{self._example(split)} Check "
            f"data.format and data.fields; each row is listed in {Storage.join(self.folder, 'quarantine')}."
            f"{self._clock_hint(statistics)}"
        )

    def _example(self, split: str) -> str:
        """A sentence about the first bad row: it is often all that is needed to fix the config."""
        folder = Storage.join(self.folder, "quarantine")
        for name in sorted(name for name in self.storage.names(folder) if name.startswith(f"{split}-")):
            row = json.loads(self.storage.read(Storage.join(folder, name)).partition(b"\n")[0])
            return f" The first: line {row['line']} of {row['file']}, {row['detail'] or row['reason']}."
        return ""

    def _stop_if_hopeless(self, split: str, statistics: RowStatistics, read: float) -> None:
        """Stop early at twice the bad rows that the whole input may have: it is the wrong format or file."""
        rows = statistics.rows + statistics.bad.total()
        if (
            rows > _MIN_ROWS_TO_STOP
            and statistics.bad.total() > 2 * self.config.data.max_bad_ratio * rows / min(read, 1.0)
        ):
            self._check_bad_rows(split, statistics)

    def _check_bad_rows(self, split: str, statistics: RowStatistics) -> None:
        allowed = self.config.data.max_bad_ratio
        bad = statistics.bad.total()
        total = statistics.rows + bad
        if bad <= allowed * total:
            return
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in statistics.bad.most_common())
        listed = Storage.join(self.folder, "quarantine")
        raise TooManyBadRows(
            f"{bad:,} of {total:,} rows of data.{split} are bad ({bad / total:.2%}; data.max_bad_ratio allows "
            f"{allowed:.2%}): {reasons}.{self._example(split)} Each is listed with its file, line and reason in "
            f"{listed}. "
            "Fix the data, check data.format, or raise data.max_bad_ratio"
            f"{'.' + clock if (clock := self._clock_hint(statistics)) else '; finished shards are kept.'}"
        )


def no_slots_error(config: Config, train: list[SourceFile]) -> DataError:
    """The error for a slots or paddlerec source without any slot."""
    data = config.data
    return DataError(
        f"no slot was found in data.train ({redacted(train[0].uri)} first). A row in the format {data.format} "
        f"looks like `{_LINE_LAYOUTS[str(data.format)]}`. Check data.format, or name the slots in data.slot_conf."
    )


def report_damage(dataset: Dataset, progress: Progress) -> None:
    """Report what is lost: rows after a damaged place cannot be counted or listed."""
    for name, split in dataset.splits.items():
        for reason, count in split.report["bad"].items():
            if reason.startswith(_DAMAGED):
                progress.log(
                    f"data.{name}: {reason}, {count:,} time(s): the rows after the damage are lost. "
                    f"The files are named in {Storage.join(dataset.folder, 'quarantine')}"
                )


def _report(features: FeatureSpec, statistics: RowStatistics) -> dict[str, Any]:
    return {
        "rows": statistics.rows,
        "impressions": statistics.impressions,
        "clicks": statistics.clicks,
        "click_rate": statistics.clicks / statistics.impressions if statistics.impressions else 0.0,
        "hours": list(statistics.hours) if statistics.hours else None,
        "bad": dict(sorted(statistics.bad.items())),
        "slots": [
            slot_statistics.report(slot.name, statistics.rows)
            for slot, slot_statistics in zip(features.slots, statistics.slots, strict=True)
        ],
    }
