"""One hour of the logs as a dataset of its own, for a model that learns hour after hour.

    <home>/hours/20260101-03/       an ordinary dataset folder with one split, "train"; 20260101 for a day

The features are the model's and never measured again, so that a row means the same in every hour.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import storage_of
from clickline.artifacts.manifest import MANIFEST, fingerprint
from clickline.config import Config
from clickline.data.input_blocks import open_reader
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.dataset_builder import Making, identity_of, no_slots, tell_damage
from clickline.data.prepare.field_statistics import measure
from clickline.data.prepare.thread_executor import Threads
from clickline.data.schema import Layout, layout, target_fields
from clickline.data.slot_discovery import discover
from clickline.errors import ArtifactError, DataError, HourNotReady
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.progress import Progress
from clickline.records import SourceFile
from clickline.storage.log_files import hour_files, hour_label, hour_step
from clickline.storage.storage import Storage

_KEPT_QUARANTINE = 720  # hours
_FEW_VALUES = 1000  # to measure a field by
_said_slots: set[tuple[str, str]] = set()  # home and slot: the same news every hour is none


@dataclass(frozen=True)
class PreparedHour:
    """The rows of one hour, or of one day where the patterns of data.train have no {hour}."""

    hour: int  # hours since 1970-01-01T00 UTC
    dataset: Dataset  # one split, "train"; its features are those given
    reused: bool
    seconds: float


def prepare_hour(config: Config, hour: int, features: FeatureSpec | None, progress: Progress) -> PreparedHour:
    """Encode the hour by `features`; or, with None, by what is found and measured in it, for the very first hour.

    HourNotReady when it is not complete yet, or changes meanwhile. An hour without rows gives a dataset without
    rows; if it was to tell the features too, those of the dataset mean nothing: ask the next hour.
    """
    began = time.monotonic()
    storage = storage_of(config)
    label = hour_label(hour, hour_step(config.data.train))
    files = hour_files(storage, config.data.train, config.data.donefile, hour, progress)
    identity = {
        **identity_of(config, storage, {"train": files}),
        "features": None if features is None else features.to_json(),
    }
    making = Making.at(config, storage, Storage.join(_home_of_hours(config), label.replace("/", "-")))
    found = _finished(making, features, identity)
    if found is not None and not making.in_work:
        progress.say(f"hour {label} is prepared already: same config, same input")
        return PreparedHour(hour, found, True, time.monotonic() - began)
    with making.alone():
        found = _finished(making, features, identity)
        reused = found is not None
        if found is None:
            _begin(making, fingerprint(identity))
            try:
                found = _make(making, label, files, features, identity, progress)
            except DataError as error:
                _refuse_if_changed(config, storage, hour, files, error)
                raise
            _refuse_if_changed(config, storage, hour, files, None)
        making.tidy()
    tell_damage(found, progress)
    return PreparedHour(hour, found, reused, time.monotonic() - began)


def _refuse_if_changed(
    config: Config, storage: Storage, hour: int, files: list[SourceFile], cause: DataError | None
) -> None:
    """A file that came, went or grew while others were read: part of an hour would pass for all of it."""
    if hour_files(storage, config.data.train, config.data.donefile, hour, Progress()) != files:
        label = hour_label(hour, hour_step(config.data.train))
        raise HourNotReady(
            f"{label} changed while it was read, so it is not complete in spite of what marks it so. "
            "Wait until nothing is written to it any more."
        ) from cause


def _finished(making: Making, features: FeatureSpec | None, identity: Mapping[str, Any]) -> Dataset | None:
    """What is there, if it is whole and what would be made now."""
    try:
        found = making.finished()
    except ArtifactError:  # torn, or of another release: it is made again
        return None
    if found is None:
        return None
    # Features that an hour was asked for are afterwards given, with the model: they are the same ones.
    same = found.identity.get("features") is None if features is None else found.features == features
    as_now = {**found.identity, "features": identity["features"]}
    return found if same and fingerprint(as_now) == fingerprint(identity) else None


def _begin(making: Making, name: str) -> None:
    """Go on with what an earlier run began, if it was to become the same; else there is nothing to keep."""
    storage, folder = making.storage, making.folder
    work = Storage.join(folder, "work")
    begun = Storage.join(work, "begun")
    if storage.describe(begun) and storage.read(begun).decode() == name:
        return
    storage.delete(Storage.join(folder, MANIFEST))  # first: what is half removed is no dataset
    for place, kept in ((work, "lock"), (folder, "work")):
        for old in storage.names(place):
            if old != kept:
                storage.delete(Storage.join(place, old))
    storage.put(begun, name.encode())


def _make(
    making: Making,
    label: str,
    files: list[SourceFile],
    features: FeatureSpec | None,
    identity: Mapping[str, Any],
    progress: Progress,
) -> Dataset:
    known = features is not None
    crew = Threads()  # an hour is too little to send around
    fields = making.fields(files, progress) if features is None else _given(making, files, features, progress)
    raw = open_reader(making.config.data, fields)
    inputs = making.inputs(files, raw, fields)
    if not known:
        features = measure(inputs, fields.features, crew, progress)
        _tell_few(features, label, progress)
    features = features or fields.features
    reader = LabelledReader(raw, features, fields.targets, making.clock())
    train = making.split("train", inputs, reader, crew, progress, title=f"prepare {label}", may_be_empty=True)
    if train.rows and not features.fields:
        raise no_slots(making.config, files)
    return making.finish(identity, features, {"train": train})


def _tell_few(features: FeatureSpec, label: str, progress: Progress) -> None:
    """What is measured in the first hour is never measured again, however little there was."""
    known = {
        field.column: field.statistics.count for field in features.fields if field.statistics is not None
    }
    few = [f"{column} {count:,}" for column, count in known.items() if count < _FEW_VALUES]
    if few:
        progress.say(
            f"how numbers are scaled is measured once, in the first hour, {label}, which has few values of: "
            f"{', '.join(few)}. Begin with some history (data.dates with `to`), or set log1p for these fields"
        )


def _given(making: Making, files: list[SourceFile], features: FeatureSpec, progress: Progress) -> Layout:
    """The layout of logs that are read with given features."""
    data = making.config.data
    fields = Layout(features, target_fields(data))
    if data.format not in ("slots", "paddlerec"):
        return fields
    look = data.slot_conf is None  # else somebody has chosen among them
    found = discover(data.format, files, making.cache, making.storage, cores(), progress, slots=look)
    if found.slots:
        own = [int(column) for column in features.columns if column.isdigit()]
        there = layout(data, dict.fromkeys([*own, *found.slots]), found.dense).features.slots
        new = [slot.column for slot in there if slot.column not in features.columns]
        _tell_new_slots(making.config.home, new, progress)
    needed = [int(column[6:]) for column in fields.columns if re.fullmatch(r"dense_\d+", column)]
    # Rows with fewer dense values than the model needs are bad ones; how many more there are, the logs tell.
    return replace(fields, dense=max(found.dense, *needed, 0) if data.format == "paddlerec" else 0)


def _tell_new_slots(home: str, slots: list[str], progress: Progress) -> None:
    news = [slot for slot in slots if (home, slot) not in _said_slots]
    if news:
        _said_slots.update((home, slot) for slot in news)
        progress.say(
            f"slots that the model does not have are ignored: {', '.join(news)}. "
            "To use them, train anew with logs that hold them"
        )


# ── what stays ─────────────────────────────────────────────────────────────────────────────────


def forget_hours(config: Config, keep: Collection[int]) -> None:
    """Remove prepared hours but those to keep; bad rows stay to be looked at, those of the newest 720 hours."""
    storage = storage_of(config)
    home = _home_of_hours(config)
    there = {name: hour for name in storage.names(home) if (hour := _hour_of(name)) is not None}
    newest = max(there.values(), default=0)
    for name, hour in there.items():
        if hour in keep:
            continue
        folder = Storage.join(home, name)
        storage.delete(Storage.join(folder, MANIFEST))  # first: what is half removed is no dataset
        quarantine = Storage.join(folder, "quarantine")
        if hour <= newest - _KEPT_QUARANTINE or not storage.names(quarantine):
            storage.delete(folder)
            continue
        for old in storage.names(folder):
            if old != "quarantine":
                storage.delete(Storage.join(folder, old))


def _home_of_hours(config: Config) -> str:
    return Storage.join(config.home, "hours")


def _hour_of(name: str) -> int | None:
    """The hour that a folder is named by; None for a folder that is not ours."""
    if re.fullmatch(r"\d{8}(-\d{2})?", name) is None:
        return None
    try:
        moment = datetime.strptime(name, "%Y%m%d-%H" if "-" in name else "%Y%m%d").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) // 3600
