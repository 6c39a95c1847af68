"""The prepare stage: turns click logs into a dataset."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clickline.artifacts.dataset import Dataset, current_id, dataset_folder
from clickline.artifacts.from_config import storage_of
from clickline.artifacts.manifest import MANIFEST, as_json, fingerprint
from clickline.config import Config
from clickline.data.input_blocks import files_from_config, open_inputs
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.dataset_builder import DatasetBuilder, identity_of, no_slots_error, report_damage
from clickline.data.prepare.field_statistics import measure_fields
from clickline.data.prepare.thread_executor import ThreadExecutor
from clickline.data.schema import Schema
from clickline.distributed.session import open_session
from clickline.errors import ArtifactError
from clickline.progress import Progress, default_progress
from clickline.records import SourceFile
from clickline.storage.file_lock import locked
from clickline.storage.storage import Storage

if TYPE_CHECKING:
    from clickline.data.prepare.ray_executor import RayExecutor


@dataclass(frozen=True)
class PrepareResult:
    """The dataset that `prepare` built or reused."""

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
    """Build the dataset that the config describes, or reuse the existing one."""
    began = time.monotonic()
    progress = progress or default_progress()
    storage = storage_of(config)
    sources = find_sources(config, storage, progress)
    identity = identity_of(config, storage, sources)
    name = fingerprint(identity)
    builder = DatasetBuilder.for_folder(config, storage, dataset_folder(config.home, name))
    dataset = builder.finished_dataset()
    if (
        dataset is not None and not builder.in_progress
    ):  # else a process was killed between the manifest and clean_up
        progress.log(f"dataset {name} is up to date: same config, same input")
        dataset.make_current(storage, config.home)
        return PrepareResult(dataset, True, time.monotonic() - began)
    previous = current_id(storage, config.home)
    for change in _describe_changes(_identity_of(storage, config.home, previous), identity):
        progress.log(f"changed since dataset {previous}: {change}")

    with builder.locked():
        dataset = builder.finished_dataset()  # another process may have built it while we waited
        reused = dataset is not None
        if dataset is None:
            dataset = _build(builder, sources, identity, progress)
        builder.clean_up()
    dataset.make_current(storage, config.home)
    _report(dataset, progress)
    _prune(storage, config.home, {name, previous}, progress)
    return PrepareResult(dataset, reused, time.monotonic() - began)


def _build(
    builder: DatasetBuilder,
    sources: Mapping[str, list[SourceFile]],
    identity: Mapping[str, Any],
    progress: Progress,
) -> Dataset:
    config = builder.config
    schema = builder.infer_schema(sources["train"], progress)
    if not schema.features.fields:
        raise no_slots_error(config, sources["train"])
    inputs = open_inputs(config.data, sources["train"], schema, builder.cache, builder.storage)
    with _executor(config, schema, progress) as executor:
        features = measure_fields(inputs, schema.features, executor, progress)
        reader = LabelledReader(inputs.reader, features, schema.targets, builder.reference_time())
        splits = {
            split: builder.build_split(
                split, replace(inputs, files=files), reader, executor, progress, title=f"prepare {split}"
            )
            for split, files in sources.items()
        }
    return builder.finish(identity, features, splits)


@contextmanager
def _executor(config: Config, schema: Schema, progress: Progress) -> Iterator[ThreadExecutor | RayExecutor]:
    """Threads of this machine, or processes of the cluster that trains the model."""
    if config.train.mode != "cluster" or config.cluster.address is None:
        yield ThreadExecutor()
        return
    home = Path(config.home) if Storage.is_local(config.home) else None
    with open_session(config.cluster.address, home=home, progress=progress) as ray_session:
        from clickline.data.prepare.ray_executor import RayExecutor  # here, because Ray is slow to import

        ray_session.await_cpus(progress)
        yield RayExecutor(ray_session, config, schema)


def find_sources(config: Config, storage: Storage, progress: Progress) -> dict[str, list[SourceFile]]:
    """The files of each split, in reading order."""
    splits = ["train"] if config.data.eval is None else ["train", "eval"]
    return {split: find_split(config, storage, split, progress) for split in splits}


def find_split(config: Config, storage: Storage, split: str, progress: Progress) -> list[SourceFile]:
    """The files of one split; HourNotReady when hours of its pattern have not arrived in time."""
    data = config.data
    patterns, dates = (data.train, data.dates) if split == "train" else (data.eval or (), data.eval_dates)
    return files_from_config(data, patterns, dates, storage, progress)


# ── identity ───────────────────────────────────────────────────────────────────────


def _identity_of(storage: Storage, home: str, name: str | None) -> Mapping[str, Any] | None:
    """The identity of an earlier dataset; None if there is none that this release can read."""
    try:
        return None if name is None else Dataset.open(storage, dataset_folder(home, name)).identity
    except ArtifactError:
        return None


def _describe_changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two identities, as messages."""
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
        message = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if message:
            yield f"data.{split} files: {message}"


def _report(dataset: Dataset, progress: Progress) -> None:
    report_damage(dataset, progress)
    for name, split in dataset.splits.items():
        if split.report["clicks"] in (0, split.report["impressions"]):
            what = "no row was clicked" if split.report["clicks"] == 0 else "every row was clicked"
            progress.log(
                f"data.{name}: {what}. No model can be trained or evaluated on it; check the label field"
            )
    for slot in dataset.splits["train"].report["slots"]:
        if slot["missing_rate"] == 1.0:
            progress.log(f"slot {slot['name']} never occurs in the training data")


# ── pruning ──────────────────────────────────────────────────────────────────────────────────


def _prune(storage: Storage, home: str, keep: set[str | None], progress: Progress) -> None:
    """Remove datasets that nothing refers to any more: older ones, and unfinished ones that no process is building."""
    for folder in storage.folders(Storage.pattern_in(Storage.join(home, "datasets"), "*")):
        name = folder.rstrip("/").rsplit("/", 1)[-1]
        if name in keep:
            continue
        finished = storage.describe(Storage.join(folder, MANIFEST)) is not None
        if finished or not _may_be_in_progress(folder):
            storage.delete(folder)
            progress.log(f"removed dataset {name}, {'older than the last two' if finished else 'unfinished'}")


def _may_be_in_progress(folder: str) -> bool:
    """Whether a process may be building the dataset. Unknown, so true, if home is a remote store."""
    lock = Path(folder, "work", "lock")
    if not Storage.is_local(folder):
        return True
    if not lock.exists():
        return False
    with locked(lock, wait=False) as free:
        return not free
