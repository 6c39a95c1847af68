"""The prepare stage: click logs to a dataset, read top to bottom."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from clickline.artifacts.dataset import DATASET_FORMAT, Dataset, Split, dataset_folder, finish
from clickline.artifacts.manifest import MANIFEST, fingerprint
from clickline.config import Config, Dates, resolved
from clickline.errors import ArtifactError, DataError, TooManyBadRows
from clickline.features import ENCODER_FORMAT, FeatureSpec
from clickline.progress import Progress
from clickline.readers import Reader, open_reader
from clickline.readers.base import BLOCK_BYTES
from clickline.readers.slots import read_slot_conf
from clickline.records import SourceFile
from clickline.stages.prepare.discovery import discover, measure
from clickline.stages.prepare.layout import Layout, layout, named_slots
from clickline.stages.prepare.shards import Finished, Inputs, Maker, cores, make_shards
from clickline.stages.prepare.statistics import Tally
from clickline.storage.cache import Cache
from clickline.storage.redaction import shown
from clickline.storage.sources import DateRange, resolve
from clickline.storage.stores import Storage

__all__ = ["PrepareResult", "prepare"]

_KEPT_DATASETS = 2  # the new one, and the one a running training may still read
_HOPELESS_ROWS = 100_000
_HOPELESS_SHARE = 0.5
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
    storage = Storage(config.storage.options, _path(config.storage.credentials))
    cache = Cache(Path(config.cache.dir), config.cache.size, storage)
    sources = find_sources(config, storage, progress)
    identity = _identity(config, storage, sources)
    name = fingerprint(identity)
    folder = dataset_folder(config.home, name)
    found = _finished(storage, folder)
    if found is not None:
        progress.say(f"dataset {name} is up to date: same config, same input")
        found.make_current(storage, config.home)
        return PrepareResult(found, True, time.monotonic() - began)
    previous = _previous(storage, config.home)
    if previous is not None:
        for change in _changes(previous.identity, identity):
            progress.say(f"changed since dataset {previous.id}: {change}")

    scratch = Path(folder, "work") if Storage.is_local(folder) else Path(config.cache.dir, "work", name)
    with _alone(scratch):
        fields = _fields(config, storage, cache, sources["train"], progress)
        reader = _reader(config, fields)
        inputs = {split: Inputs(files, reader, cache) for split, files in sources.items()}
        features = measure(inputs["train"], fields.features, cores(), progress)
        tallies: dict[str, Tally] = {}
        splits: dict[str, Split] = {}
        for split in sources:
            maker = Maker(storage, folder, scratch, split, reader, features, fields.targets)
            done = _make(maker, inputs[split], config, progress)
            tallies[split] = _sum(done, len(features.slots))
            splits[split] = Split(tuple(item.shard for item in done), _report(features, tallies[split]))
            _judge(folder, split, tallies[split], config.data.max_bad)
        storage.put(Storage.join(folder, "resolved.yaml"), resolved(config).encode())
        finish(storage, folder, name, features, identity, splits)
    storage.delete(Storage.join(folder, "work"))
    dataset = Dataset.open(storage, folder)
    dataset.make_current(storage, config.home)
    _tell(dataset, progress)
    _prune(storage, config.home, [name] + ([previous.id] if previous else []), progress)
    return PrepareResult(dataset, False, time.monotonic() - began)


def find_sources(config: Config, storage: Storage, progress: Progress) -> dict[str, list[SourceFile]]:
    """The files of each split, in the order they are read."""
    data = config.data
    wanted: list[tuple[str, tuple[str, ...], Dates | None]] = [("train", data.train, data.dates)]
    if data.eval is not None:
        wanted.append(("eval", data.eval, data.eval_dates))
    return {
        split: resolve(
            storage,
            list(patterns),
            None if dates is None else DateRange(dates.first, dates.last),
            data.donefile,
            0 if dates is None else dates.wait,
            progress,
        )
        for split, patterns, dates in wanted
    }


# ── what it is made from ───────────────────────────────────────────────────────────────────────

_NOT_CONTENT = {"train", "eval", "dates", "eval_dates", "donefile", "max_bad", "slot_conf", "reader"}


def _identity(config: Config, storage: Storage, sources: Mapping[str, list[SourceFile]]) -> dict[str, Any]:
    """Everything the dataset's bytes depend on. Two runs with the same identity make the same dataset."""
    data = config.data
    return {
        "encoder_format": ENCODER_FORMAT,
        "dataset_format": DATASET_FORMAT,
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


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two identities, in words."""
    for key in ("encoder_format", "dataset_format", "slot_conf", "reader"):
        if before.get(key) != now[key]:
            yield key
    old, new = before.get("data", {}), now["data"]
    for key in new:
        if old.get(key) != new[key]:
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
    found = discover(data.format, train, cache, cores(), progress, slots=data.slot_conf is None)
    if data.slot_conf is None:
        slots = found.slots
    else:
        slots = read_slot_conf(data.slot_conf, storage.read(data.slot_conf))
    return layout(data, dict.fromkeys([*slots, *sorted(named_slots(data.fields))]), found.dense)


def _reader(config: Config, fields: Layout) -> Reader:
    data = config.data
    slots = [int(column) for column in fields.features.columns if column.isdigit()]
    return open_reader(
        Path(data.reader) if data.reader is not None else str(data.format),
        fields.columns,
        delimiter=data.delimiter,
        header=data.header,
        columns=data.columns or (),
        slots=slots,
        dense=fields.dense,
        modulo=data.modulo,
        block_bytes=min(BLOCK_BYTES, data.shard_size),
    )


# ── making it ──────────────────────────────────────────────────────────────────────────────────


def _make(maker: Maker, inputs: Inputs, config: Config, progress: Progress) -> list[Finished]:
    """Every shard of a split, in order."""
    done: list[Finished] = []
    rows = bad = 0
    progress.begin(f"prepare {maker.split}", total_bytes=inputs.text_bytes(progress))
    try:
        for item in make_shards(maker, inputs, config.data.shard_size, cores(), progress):
            done.append(item)
            rows += item.tally.rows
            bad += item.tally.bad.total()
            progress.advance(rows=item.tally.rows + item.tally.bad.total(), size=item.size)
            if rows + bad > _HOPELESS_ROWS and bad > _HOPELESS_SHARE * (rows + bad):
                break  # the wrong format or the wrong file: the whole of it would say nothing new
    finally:
        progress.end()
    done.sort(key=lambda item: item.number)
    if rows == 0 and bad == 0:
        raise DataError(f"data.{maker.split} holds no rows in {len(inputs.files):,} file(s).")
    return done


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
    report = dataset.splits["train"].report
    for slot in report["slots"]:
        if slot["missing_rate"] == 1.0:
            progress.say(f"slot {slot['name']} never occurs in the training data")
    if report["clicks"] in (0, report["shows"]):
        what = "no row was clicked" if report["clicks"] == 0 else "every row was clicked"
        progress.say(f"{what}: nothing can be learned from data.train as it is")


# ── around it ──────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    """The only process that makes this dataset; leftovers of a killed one are removed."""
    scratch.mkdir(parents=True, exist_ok=True)
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
        yield


def _finished(storage: Storage, folder: str) -> Dataset | None:
    """The dataset in `folder` if it was finished; a torn one is an error, an unfinished one is None."""
    return Dataset.open(storage, folder) if storage.list(Storage.join(folder, MANIFEST)) else None


def _previous(storage: Storage, home: str) -> Dataset | None:
    try:
        return Dataset.current(storage, home)
    except ArtifactError:
        return None  # none yet, or one that this release cannot read: nothing to compare with


def _prune(storage: Storage, home: str, keep: list[str], progress: Progress) -> None:
    """Remove finished datasets that nothing points at any more."""
    for manifest in storage.list(Storage.join(home, "datasets", "*", MANIFEST)):
        name = manifest.uri.rsplit("/", 2)[-2]
        if name not in keep[:_KEPT_DATASETS]:
            storage.delete(Storage.join(home, "datasets", name))
            progress.say(f"removed dataset {name}, which is older than the last two")


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
