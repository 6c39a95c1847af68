"""The prepare stage: click logs to a dataset, read top to bottom."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, NoReturn

from clickline.artifacts.dataset import (
    DATASET_FORMAT,
    Dataset,
    Split,
    current_id,
    dataset_folder,
    finish,
)
from clickline.artifacts.manifest import MANIFEST, as_json, fingerprint
from clickline.config import Config, resolved
from clickline.errors import ArtifactError, DataError, StorageError, TooManyBadRows
from clickline.features import ENCODER_FORMAT, FeatureSpec
from clickline.intake.discovery import discover
from clickline.intake.inputs import Inputs, cores, open_reader
from clickline.intake.labelled import LabelledReader
from clickline.intake.layout import Layout, layout, named_slots
from clickline.intake.stores import storage_of
from clickline.progress import Progress
from clickline.readers.slots import read_slot_conf
from clickline.records import SourceFile
from clickline.stages.prepare.measuring import measure
from clickline.stages.prepare.shards import Finished, Maker, make_shards
from clickline.stages.prepare.statistics import Tally
from clickline.storage.atomic import remove_leftovers
from clickline.storage.cache import Cache
from clickline.storage.redaction import shown
from clickline.storage.sources import DateRange, resolve
from clickline.storage.stores import Storage

__all__ = ["PrepareResult", "prepare"]

_ENOUGH_ROWS = 100_000  # to give up on
_LAYOUTS = {"slots": "show click feasign:slot …", "paddlerec": "click:0 dense_feature:0.5 … 1:feasign …"}
_DAMAGED = ("truncated", "corrupt")  # reasons that stand for an unknown number of rows


@dataclass(frozen=True)
class PrepareResult:
    """What `prepare` made, or found already made."""

    dataset: Dataset
    reused: bool
    seconds: float

    @property
    def train_rows(self) -> int:
        return self.dataset.splits["train"].rows

    @property
    def eval_rows(self) -> int:
        return self.dataset.splits["eval"].rows if "eval" in self.dataset.splits else 0

    @property
    def bad_rows(self) -> int:
        return sum(sum(split.report["bad"].values()) for split in self.dataset.splits.values())


def prepare(config: Config, progress: Progress | None = None) -> PrepareResult:
    """Make the dataset that the config describes, or take the one that is there."""
    began = time.monotonic()
    progress = progress or Progress()
    storage = storage_of(config)
    cache = Cache(Path(config.cache.dir), config.cache.size, storage)
    sources = find_sources(config, storage, progress)
    identity = _identity(config, storage, sources)
    name = fingerprint(identity)
    folder = dataset_folder(config.home, name)
    scratch = _scratch(config, folder, name)
    found = _finished(storage, folder)
    if found is not None and not scratch.exists():  # else it was killed between the manifest and tidying up
        progress.say(f"dataset {name} is up to date: same config, same input")
        found.make_current(storage, config.home)
        return PrepareResult(found, True, time.monotonic() - began)
    previous = current_id(storage, config.home)
    for change in _changes(_identity_of(storage, config.home, previous), identity):
        progress.say(f"changed since dataset {previous}: {change}")

    with _alone(scratch, folder):
        found = _finished(storage, folder)  # another process may have made it while we waited
        reused = found is not None
        if found is None:
            _make_dataset(config, storage, cache, sources, identity, folder, scratch, progress)
            found = Dataset.open(storage, folder)
        storage.delete(Storage.join(folder, "work"))
        shutil.rmtree(scratch, ignore_errors=True)
    found.make_current(storage, config.home)
    _tell(found, progress)
    _prune(storage, config.home, {name, previous}, progress)
    return PrepareResult(found, reused, time.monotonic() - began)


def _make_dataset(
    config: Config,
    storage: Storage,
    cache: Cache,
    sources: Mapping[str, list[SourceFile]],
    identity: Mapping[str, Any],
    folder: str,
    scratch: Path,
    progress: Progress,
) -> None:
    fields = _fields(config, storage, cache, sources["train"], progress)
    reader = open_reader(config.data, fields)
    inputs = {split: Inputs(files, reader, cache, storage) for split, files in sources.items()}
    features = measure(inputs["train"], fields.features, cores(), progress)
    splits: dict[str, Split] = {}
    for split in sources:
        maker = Maker(storage, folder, scratch, split, LabelledReader(reader, features, fields.targets))
        done = _make(maker, inputs[split], config, progress)
        tally = _sum(done, len(features.slots))
        _judge(folder, split, tally, config.data.max_bad)
        splits[split] = Split(tuple(item.shard for item in done), _report(features, tally))
    storage.put(Storage.join(folder, "resolved.yaml"), resolved(config).encode())
    finish(storage, folder, fingerprint(identity), features, identity, splits)


def find_sources(config: Config, storage: Storage, progress: Progress) -> dict[str, list[SourceFile]]:
    """The files of each split, in the order they are read."""
    splits = ["train"] if config.data.eval is None else ["train", "eval"]
    return {split: find_split(config, storage, split, progress) for split in splits}


def find_split(config: Config, storage: Storage, split: str, progress: Progress) -> list[SourceFile]:
    """The files of one split; HourNotReady when hours of its pattern have not arrived in time."""
    data = config.data
    patterns, dates = (data.train, data.dates) if split == "train" else (data.eval or (), data.eval_dates)
    return resolve(
        storage,
        list(patterns),
        None if dates is None else DateRange(dates.first, dates.last),
        data.donefile,
        0 if dates is None else dates.wait,
        progress,
    )


# ── what it is made from ───────────────────────────────────────────────────────────────────────

_NOT_CONTENT = {"train", "eval", "dates", "eval_dates", "donefile", "max_bad", "slot_conf", "reader"}


def _identity(config: Config, storage: Storage, sources: Mapping[str, list[SourceFile]]) -> dict[str, Any]:
    """Everything the dataset's bytes depend on. Two runs with the same identity make the same dataset."""
    data = config.data
    return {
        "encoder_format": ENCODER_FORMAT,
        "dataset_format": DATASET_FORMAT,
        # Order counts: fields are applied and stored as they are written, and JSON keeps that.
        "data": data.model_dump(mode="json", exclude=_NOT_CONTENT),
        "slot_conf": None if data.slot_conf is None else _content(storage, data.slot_conf),
        "reader": None if data.reader is None else _content(storage, data.reader),
        "inputs": {
            split: [asdict(file) | {"uri": shown(file.uri)} for file in files]
            for split, files in sources.items()
        },
    }


def _content(storage: Storage, uri: str) -> str:
    return hashlib.sha256(storage.read(uri)).hexdigest()


def _identity_of(storage: Storage, home: str, name: str | None) -> Mapping[str, Any] | None:
    """What an earlier dataset was made from; None when there is none that this release can read."""
    try:
        return None if name is None else Dataset.open(storage, dataset_folder(home, name)).identity
    except ArtifactError:
        return None


def _changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two identities, in words."""
    if before is None:
        return
    for key in ("encoder_format", "dataset_format", "slot_conf", "reader"):
        if before.get(key) != now[key]:
            yield key
    old, new = before.get("data", {}), now["data"]
    for key in new:
        if as_json(old.get(key)) != as_json(new[key]):
            yield f"data.{key}"
    for split in sorted({*before.get("inputs", {}), *now["inputs"]}):
        old_files = {f["uri"]: f for f in before.get("inputs", {}).get(split, [])}
        new_files = {f["uri"]: f for f in now["inputs"].get(split, [])}
        counts = {
            "added": len(new_files.keys() - old_files.keys()),
            "removed": len(old_files.keys() - new_files.keys()),
            "changed": sum(new_files[uri] != old_files[uri] for uri in new_files.keys() & old_files.keys()),
        }
        said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if said:
            yield f"data.{split} files: {said}"


def _fields(
    config: Config, storage: Storage, cache: Cache, train: list[SourceFile], progress: Progress
) -> Layout:
    """Features and targets; slots that no slot.conf names are looked for in the training data."""
    data = config.data
    if data.format not in ("slots", "paddlerec"):
        return layout(data)
    found = discover(data.format, train, cache, storage, cores(), progress, slots=data.slot_conf is None)
    if data.slot_conf is None:
        slots = found.slots
        if not slots and not data.fields:
            raise DataError(
                f"no slot was found in data.train, {shown(train[0].uri)} first. In the format {data.format} a row "
                f"reads `{_LAYOUTS[data.format]}`. Check data.format, or name the slots in data.slot_conf."
            )
    else:
        slots = read_slot_conf(data.slot_conf, storage.read(data.slot_conf))
    return layout(data, dict.fromkeys([*slots, *sorted(named_slots(data.fields))]), found.dense)


# ── making it ──────────────────────────────────────────────────────────────────────────────────


def _make(maker: Maker, inputs: Inputs, config: Config, progress: Progress) -> list[Finished]:
    """Every shard of a split, in order."""
    done: list[Finished] = []
    total = inputs.text_bytes(progress)
    seen = Tally.empty(0)
    size = 0
    progress.begin(f"prepare {maker.split}", total_bytes=total)
    try:
        for item in make_shards(maker, inputs, config.data.shard_size, cores(), progress):
            done.append(item)
            seen.rows += item.tally.rows
            seen.bad.update(item.tally.bad)
            size += item.size
            progress.advance(rows=item.tally.rows + item.tally.bad.total(), size=item.size)
            if total:
                _give_up(maker, seen, size / total, config.data.max_bad)
    finally:
        progress.end()
    if not seen.rows:
        _no_rows(maker, inputs, seen)
    return sorted(done, key=lambda item: item.number)


def _no_rows(maker: Maker, inputs: Inputs, seen: Tally) -> NoReturn:
    first = shown(inputs.files[0].uri) + (" and others" if len(inputs.files) > 1 else "")
    if not seen.bad:
        raise DataError(
            f"data.{maker.split} holds no rows: {first} is empty. Name the files that hold the logs."
        )
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in seen.bad.most_common())
    raise DataError(
        f"data.{maker.split} holds no row that can be used in {first}: {reasons}. Check data.format and data.fields; "
        f"each row is listed in {Storage.join(maker.folder, 'quarantine')}."
    )


def _give_up(maker: Maker, seen: Tally, read: float, allowed: float) -> None:
    """Stop early when the bad rows are twice what the whole input may have: it is the wrong format or file."""
    rows = seen.rows + seen.bad.total()
    if rows > _ENOUGH_ROWS and seen.bad.total() > 2 * allowed * rows / min(read, 1.0):
        _judge(maker.folder, maker.split, seen, allowed)


def _sum(done: list[Finished], slots: int) -> Tally:
    total = Tally.empty(slots)
    for item in done:
        total.merge(item.tally)
    return total


def _judge(folder: str, split: str, tally: Tally, allowed: float) -> None:
    bad = tally.bad.total()
    seen = tally.rows + bad
    if bad <= allowed * seen:
        return
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in tally.bad.most_common())
    listed = Storage.join(folder, "quarantine")
    raise TooManyBadRows(
        f"{bad:,} of {seen:,} rows of data.{split} are bad ({bad / seen:.2%}; data.max_bad allows "
        f"{allowed:.2%}): {reasons}. Each is listed with its file, line and reason in {listed}. "
        "Mend the data, check data.format, or raise data.max_bad; what was read is kept."
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


def _tell(dataset: Dataset, progress: Progress) -> None:
    for name, split in dataset.splits.items():
        for reason, count in split.report["bad"].items():
            if reason.startswith(_DAMAGED):
                progress.say(
                    f"data.{name}: {reason}, {count:,} time(s): what stood behind the damage is lost. "
                    f"The files are named in {Storage.join(dataset.folder, 'quarantine')}"
                )
        if split.report["clicks"] in (0, split.report["shows"]):
            what = "no row was clicked" if split.report["clicks"] == 0 else "every row was clicked"
            progress.say(
                f"data.{name}: {what}. Nothing can be learned or measured from it; check the label field"
            )
    for slot in dataset.splits["train"].report["slots"]:
        if slot["missing_rate"] == 1.0:
            progress.say(f"slot {slot['name']} never occurs in the training data")


# ── around it ──────────────────────────────────────────────────────────────────────────────────


def _scratch(config: Config, folder: str, name: str) -> Path:
    """Where shards grow until they are whole: beside them, or on this machine for a home that is elsewhere."""
    if Storage.is_local(folder):
        return Path(folder, "work")
    cache = Path(config.cache.dir)
    return cache.with_name(f"{cache.name}-work") / name


@contextmanager
def _alone(scratch: Path, folder: str) -> Iterator[None]:
    """The only process that makes this dataset; leftovers of a killed one are removed."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{scratch}: {error.strerror}. It is part of `home`, which must be a folder that can be written: "
            "change home in the config, or make it so."
        ) from error
    with (scratch / "lock").open("a+") as lock:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise ArtifactError(
                f"another `clickline prepare` (process {owner}) makes this dataset. Wait for it or stop it."
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        for leftover in scratch.glob("*.tmp"):
            leftover.unlink()
        if Storage.is_local(folder):
            remove_leftovers(Path(folder))
        yield


def _finished(storage: Storage, folder: str) -> Dataset | None:
    """The dataset in `folder` if it was finished; a torn one is an error, an unfinished one is None."""
    return Dataset.open(storage, folder) if storage.describe(Storage.join(folder, MANIFEST)) else None


def _prune(storage: Storage, home: str, keep: set[str | None], progress: Progress) -> None:
    """Remove what nothing points at any more: older datasets, and unfinished ones that nobody works on."""
    for folder in storage.folders(Storage.inside(Storage.join(home, "datasets"), "*")):
        name = folder.rstrip("/").rsplit("/", 1)[-1]
        if name in keep:
            continue
        finished = storage.describe(Storage.join(folder, MANIFEST)) is not None
        if finished or not _in_work(folder):
            storage.delete(folder)
            progress.say(
                f"removed dataset {name}, {'which is older than the last two' if finished else 'unfinished'}"
            )


def _in_work(folder: str) -> bool:
    """Whether a process may be making the dataset. Of a home in a store one cannot tell: then it may."""
    lock = Path(folder, "work", "lock")
    if not Storage.is_local(folder):
        return True
    if not lock.exists():
        return False
    with lock.open("a") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return True
    return False
