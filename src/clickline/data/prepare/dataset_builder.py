"""How one dataset is made in its folder, whatever it is made of: a config's whole input, or one hour."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, NoReturn

from clickline.artifacts.dataset import DATASET_FORMAT, Dataset, Shard, Split, data_identity, finish
from clickline.artifacts.manifest import MANIFEST, fingerprint
from clickline.config import Config, resolved
from clickline.data.input_blocks import Inputs
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.column_sketches import Tally
from clickline.data.prepare.shard_builder import Maker, MakesShards, make_shards
from clickline.data.readers import Reader
from clickline.data.readers.slot_lines import read_slot_conf
from clickline.data.schema import Layout, layout, named_slots, target_fields
from clickline.data.slot_discovery import discover
from clickline.data.targets import unit_finder
from clickline.errors import ArtifactError, DataError, StorageError, TooManyBadRows
from clickline.features import ENCODER_FORMAT, FeatureSpec
from clickline.machine import cores
from clickline.progress import Progress
from clickline.records import SourceFile
from clickline.storage.atomic import remove_leftovers
from clickline.storage.file_cache import Cache
from clickline.storage.redaction import shown
from clickline.storage.storage import Storage

_ENOUGH_ROWS = 100_000  # to give up on
_LAYOUTS = {"slots": "show click feasign:slot …", "paddlerec": "click:0 dense_feature:0.5 … 1:feasign …"}
_DAMAGED = ("truncated", "corrupt")  # reasons that stand for an unknown number of rows
_NOT_CONTENT = {"train", "eval", "dates", "eval_dates", "donefile", "max_bad", "slot_conf", "reader"}


def identity_of(config: Config, storage: Storage, sources: Mapping[str, list[SourceFile]]) -> dict[str, Any]:
    """Everything the dataset's bytes depend on. Two runs with the same identity make the same dataset."""
    data = config.data
    return {
        "encoder_format": ENCODER_FORMAT,
        "dataset_format": DATASET_FORMAT,
        # Order counts: fields are applied and stored as they are written, and JSON keeps that.
        "data": data_identity(data.model_dump(mode="json", exclude=_NOT_CONTENT)),
        "slot_conf": None if data.slot_conf is None else _content(storage, data.slot_conf),
        "reader": None if data.reader is None else _content(storage, data.reader),
        "inputs": {
            split: [asdict(file) | {"uri": shown(file.uri)} for file in files]
            for split, files in sources.items()
        },
    }


def _content(storage: Storage, uri: str) -> str:
    return hashlib.sha256(storage.read(uri)).hexdigest()


@dataclass(frozen=True)
class Making:
    """A folder that becomes a dataset: shards, quarantine and notes first, its manifest last."""

    config: Config
    storage: Storage
    cache: Cache
    folder: str
    scratch: Path  # where shards grow until they are whole

    @classmethod
    def at(cls, config: Config, storage: Storage, folder: str) -> Making:
        cache = Path(config.cache.dir)
        # Beside the shards, or on this machine for a home that is elsewhere.
        beside = Path(folder, "work")
        elsewhere = cache.with_name(f"{cache.name}-work") / fingerprint(folder)
        scratch = beside if Storage.is_local(folder) else elsewhere
        return cls(config, storage, Cache(cache, config.cache.size, storage), folder, scratch)

    def finished(self) -> Dataset | None:
        """The dataset if it was finished; a torn one is an error, an unfinished one is None."""
        there = self.storage.describe(Storage.join(self.folder, MANIFEST))
        return Dataset.open(self.storage, self.folder) if there else None

    @property
    def in_work(self) -> bool:
        """Whether it is being made, or was when its process was killed."""
        return self.scratch.exists()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The only process that makes this dataset; leftovers of a killed one are removed."""
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
            lock = (self.scratch / "lock").open("a+")
        except OSError as error:
            raise StorageError(
                f"{self.scratch}: {error.strerror}. It is part of `home`, which must be a folder that can be "
                "written: change home in the config, or make it so."
            ) from error
        with lock:
            try:
                flock(lock, LOCK_EX | LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                raise ArtifactError(
                    f"another `clickline prepare` (process {owner}) makes this dataset. Wait for it or stop it."
                ) from error
            for leftover in self.scratch.glob("*.tmp"):
                leftover.unlink()
            if Storage.is_local(self.folder):
                remove_leftovers(Path(self.folder))
            _sign(lock.fileno())
            yield

    def clock(self) -> float:
        """The time by which the dataset's rows are judged, in unix seconds: that of its first beginning, however often
        it was interrupted, so that all of its shards come out the same. What was made by a clock that is forgotten
        is made again."""
        path = self._clock_file
        if self.storage.describe(path) is None:
            for note in self.storage.list(Storage.inside(Storage.join(self.folder, "work"), "*-*.json")):
                self.storage.delete(note.uri)
            self.storage.delete(Storage.join(self.folder, "quarantine"))
            self.storage.put(path, f"{int(time.time())}\n".encode())
        return float(self.storage.read(path))

    @property
    def _clock_file(self) -> str:
        return Storage.join(self.folder, "work", "clock")

    def _doubted_clock(self, seen: Tally) -> str:
        """What to add to a refusal with times among its reasons: the clock may be wrong. The next run reads it anew."""
        if not seen.bad["bad time"]:
            return ""
        moment = datetime.fromtimestamp(self.clock(), UTC)
        self.storage.delete(self._clock_file)
        return (
            f" Times were judged by this machine's clock, which said {moment:%Y-%m-%d %H:%M} UTC: if that is wrong, "
            "set it right. The next run reads it, and the logs, anew."
        )

    def inputs(self, files: Sequence[SourceFile], reader: Reader, fields: Layout) -> Inputs:
        """Files of logs, to be read by this reader."""
        find_unit = unit_finder(fields.targets, fields.features.missing)
        return Inputs(files, reader, self.cache, self.storage, find_unit)

    def tidy(self) -> None:
        """Remove what was only needed while it was made."""
        self.storage.delete(Storage.join(self.folder, "work"))
        shutil.rmtree(self.scratch, ignore_errors=True)

    def fields(self, train: list[SourceFile], progress: Progress) -> Layout:
        """Features and targets; slots that no slot.conf names are looked for in the training data.

        Without any slot there, and none named in the config, there are no features at all."""
        data = self.config.data
        if data.format not in ("slots", "paddlerec"):
            return layout(data)
        look = data.slot_conf is None
        found = discover(data.format, train, self.cache, self.storage, cores(), progress, slots=look)
        if data.slot_conf is not None:
            slots = read_slot_conf(data.slot_conf, self.storage.read(data.slot_conf))
        elif found.slots or data.fields:
            slots = found.slots
        else:
            return Layout(FeatureSpec((), (), data.missing), target_fields(data), found.dense)
        return layout(data, dict.fromkeys([*slots, *sorted(named_slots(data.fields))]), found.dense)

    def split(
        self,
        name: str,
        inputs: Inputs,
        reader: LabelledReader,
        crew: MakesShards,
        progress: Progress,
        *,
        title: str,
        may_be_empty: bool = False,
    ) -> Split:
        """Make every shard of a split."""
        maker = Maker(self.storage, self.folder, self.scratch, name, reader)
        shards: dict[int, Shard] = {}
        total = inputs.text_bytes(progress)
        tally = Tally.empty(len(reader.features.slots))
        size = 0
        progress.begin(title, total_bytes=total)
        try:
            for item in make_shards(maker, inputs, self.config.data.shard_size, crew, progress):
                shards[item.number] = item.shard
                tally.merge(item.tally)  # not kept: tallies of all shards would be shards x slots x 8 KiB
                size += item.size
                progress.advance(rows=item.tally.rows + item.tally.bad.total(), size=item.size)
                if total:
                    self._give_up(name, tally, size / total)
        finally:
            progress.end()
        if not tally.rows and not may_be_empty:
            self._no_rows(name, inputs, tally)
        self._judge(name, tally)
        return Split(tuple(shards[number] for number in sorted(shards)), _report(reader.features, tally))

    def finish(
        self, identity: Mapping[str, Any], features: FeatureSpec, splits: Mapping[str, Split]
    ) -> Dataset:
        """From here on the dataset exists."""
        self.storage.put(Storage.join(self.folder, "resolved.yaml"), resolved(self.config).encode())
        finish(self.storage, self.folder, fingerprint(identity), features, identity, splits)
        return Dataset.open(self.storage, self.folder)

    # What is too little, and what is too bad

    def _no_rows(self, split: str, inputs: Inputs, seen: Tally) -> NoReturn:
        first = shown(inputs.files[0].uri) + (" and others" if len(inputs.files) > 1 else "")
        if not seen.bad:
            raise DataError(
                f"data.{split} holds no rows: {first} is empty. Name the files that hold the logs."
            )
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in seen.bad.most_common())
        raise DataError(
            f"data.{split} holds no row that can be used in {first}: {reasons}.{self._example(split)} Check "
            f"data.format and data.fields; each row is listed in {Storage.join(self.folder, 'quarantine')}."
            f"{self._doubted_clock(seen)}"
        )

    def _example(self, split: str) -> str:
        """The first bad row in words: what it says is mostly all that is needed to mend the config."""
        folder = Storage.join(self.folder, "quarantine")
        for name in sorted(name for name in self.storage.names(folder) if name.startswith(f"{split}-")):
            row = json.loads(self.storage.read(Storage.join(folder, name)).partition(b"\n")[0])
            return f" The first: line {row['line']} of {row['file']}, {row['detail'] or row['reason']}."
        return ""

    def _give_up(self, split: str, seen: Tally, read: float) -> None:
        """Stop early when the bad rows are twice what the whole input may have: it is the wrong format or file."""
        rows = seen.rows + seen.bad.total()
        if rows > _ENOUGH_ROWS and seen.bad.total() > 2 * self.config.data.max_bad * rows / min(read, 1.0):
            self._judge(split, seen)

    def _judge(self, split: str, tally: Tally) -> None:
        allowed = self.config.data.max_bad
        bad = tally.bad.total()
        seen = tally.rows + bad
        if bad <= allowed * seen:
            return
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in tally.bad.most_common())
        listed = Storage.join(self.folder, "quarantine")
        raise TooManyBadRows(
            f"{bad:,} of {seen:,} rows of data.{split} are bad ({bad / seen:.2%}; data.max_bad allows "
            f"{allowed:.2%}): {reasons}.{self._example(split)} Each is listed with its file, line and reason in "
            f"{listed}. "
            "Mend the data, check data.format, or raise data.max_bad"
            f"{'.' + clock if (clock := self._doubted_clock(tally)) else '; what was read is kept.'}"
        )


def no_slots(config: Config, train: list[SourceFile]) -> DataError:
    """Rows of a slots or paddlerec source, and not one slot in them."""
    data = config.data
    return DataError(
        f"no slot was found in data.train, {shown(train[0].uri)} first. In the format {data.format} a row "
        f"reads `{_LAYOUTS[str(data.format)]}`. Check data.format, or name the slots in data.slot_conf."
    )


def tell_damage(dataset: Dataset, progress: Progress) -> None:
    """Say what is lost for good: rows behind a damaged place cannot be counted or listed."""
    for name, split in dataset.splits.items():
        for reason, count in split.report["bad"].items():
            if reason.startswith(_DAMAGED):
                progress.say(
                    f"data.{name}: {reason}, {count:,} time(s): what stood behind the damage is lost. "
                    f"The files are named in {Storage.join(dataset.folder, 'quarantine')}"
                )


def _report(features: FeatureSpec, tally: Tally) -> dict[str, Any]:
    return {
        "rows": tally.rows,
        "shows": tally.shows,
        "clicks": tally.clicks,
        "click_rate": tally.clicks / tally.shows if tally.shows else 0.0,
        "hours": list(tally.hours) if tally.hours else None,
        "bad": dict(sorted(tally.bad.items())),
        "slots": [
            slot_tally.report(slot.name, tally.rows)
            for slot, slot_tally in zip(features.slots, tally.slots, strict=True)
        ],
    }


def _sign(lock: int) -> None:
    """Write down who holds a lock, for whoever finds it held. A full disk will be told by the real work."""
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
