"""The prepare stage: click logs to a dataset, read top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clickline.artifacts.dataset import Dataset, current_id, dataset_folder
from clickline.artifacts.from_config import storage_of
from clickline.artifacts.manifest import MANIFEST, as_json, fingerprint
from clickline.config import Config
from clickline.data.input_blocks import open_reader
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.dataset_builder import Making, identity_of, no_slots, tell_damage
from clickline.data.prepare.field_statistics import measure
from clickline.data.prepare.thread_executor import Threads
from clickline.data.schema import Layout
from clickline.distributed.session import session
from clickline.errors import ArtifactError
from clickline.progress import Progress, usual
from clickline.records import SourceFile
from clickline.storage.log_files import DateRange, resolve
from clickline.storage.storage import Storage

if TYPE_CHECKING:
    from clickline.data.prepare.ray_executor import Spread


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
    progress = progress or usual()
    storage = storage_of(config)
    sources = find_sources(config, storage, progress)
    identity = identity_of(config, storage, sources)
    name = fingerprint(identity)
    making = Making.at(config, storage, dataset_folder(config.home, name))
    found = making.finished()
    if found is not None and not making.in_work:  # else it was killed between the manifest and tidying up
        progress.say(f"dataset {name} is up to date: same config, same input")
        found.make_current(storage, config.home)
        return PrepareResult(found, True, time.monotonic() - began)
    previous = current_id(storage, config.home)
    for change in _changes(_identity_of(storage, config.home, previous), identity):
        progress.say(f"changed since dataset {previous}: {change}")

    with making.alone():
        found = making.finished()  # another process may have made it while we waited
        reused = found is not None
        if found is None:
            found = _make(making, sources, identity, progress)
        making.tidy()
    found.make_current(storage, config.home)
    _tell(found, progress)
    _prune(storage, config.home, {name, previous}, progress)
    return PrepareResult(found, reused, time.monotonic() - began)


def _make(
    making: Making,
    sources: Mapping[str, list[SourceFile]],
    identity: Mapping[str, Any],
    progress: Progress,
) -> Dataset:
    config = making.config
    fields = making.fields(sources["train"], progress)
    if not fields.features.fields:
        raise no_slots(config, sources["train"])
    raw = open_reader(config.data, fields)
    inputs = {split: making.inputs(files, raw, fields) for split, files in sources.items()}
    with _crew(config, fields, progress) as crew:
        features = measure(inputs["train"], fields.features, crew, progress)
        reader = LabelledReader(raw, features, fields.targets, making.clock())
        splits = {
            split: making.split(split, inputs[split], reader, crew, progress, title=f"prepare {split}")
            for split in sources
        }
    return making.finish(identity, features, splits)


@contextmanager
def _crew(config: Config, fields: Layout, progress: Progress) -> Iterator[Threads | Spread]:
    """This machine's threads, or the processes of the cluster that the model is trained on."""
    if config.train.mode != "cluster" or config.cluster.address is None:
        yield Threads()
        return
    home = Path(config.home) if Storage.is_local(config.home) else None
    with session(config.cluster.address, home=home, progress=progress) as opened:
        from clickline.data.prepare.ray_executor import Spread  # here, because Ray takes a while to load

        opened.await_cpus(progress)
        yield Spread(opened, config, fields)


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


def _tell(dataset: Dataset, progress: Progress) -> None:
    tell_damage(dataset, progress)
    for name, split in dataset.splits.items():
        if split.report["clicks"] in (0, split.report["shows"]):
            what = "no row was clicked" if split.report["clicks"] == 0 else "every row was clicked"
            progress.say(
                f"data.{name}: {what}. Nothing can be learned or measured from it; check the label field"
            )
    for slot in dataset.splits["train"].report["slots"]:
        if slot["missing_rate"] == 1.0:
            progress.say(f"slot {slot['name']} never occurs in the training data")


# ── around it ──────────────────────────────────────────────────────────────────────────────────


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
