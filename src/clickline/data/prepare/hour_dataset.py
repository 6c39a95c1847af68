"""One hour of the logs as a dataset of its own, for a model that is trained hour after hour.

    <home>/hours/20260101-03/       an ordinary dataset folder with one split, "train"; 20260101 for a day

The features are those of the model and are never measured again, so that a row means the same in every hour.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import storage_of
from clickline.artifacts.manifest import MANIFEST, fingerprint
from clickline.config import Config
from clickline.data.input_blocks import open_inputs
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.dataset_builder import DatasetBuilder, identity_of, no_slots_error, report_damage
from clickline.data.prepare.field_statistics import measure_fields
from clickline.data.prepare.thread_executor import ThreadExecutor
from clickline.data.schema import Schema, build_schema, target_fields
from clickline.data.slot_discovery import discover_slots
from clickline.errors import ArtifactError, ConfigError, DataError, HourNotReady
from clickline.features import FeatureSpec
from clickline.progress import Progress
from clickline.records import SourceFile
from clickline.storage.log_files import DateRange, hour_files, hour_label, hour_step
from clickline.storage.storage import Storage

_QUARANTINE_HOURS = 720  # hours
_MIN_VALUES = 1000  # for reliable statistics of a field
_reported_slots: set[tuple[str, str]] = set()  # home and slot, so that each new slot is reported once


@dataclass(frozen=True)
class PreparedHour:
    """The dataset of one hour, or of one day if the patterns of data.train have no {hour}."""

    hour: int  # hours since 1970-01-01T00 UTC
    dataset: Dataset  # one split, "train"; its features are those given
    reused: bool
    seconds: float


def prepare_hour(config: Config, hour: int, features: FeatureSpec | None, progress: Progress) -> PreparedHour:
    """Encode the hour with `features`, or with None, for the first hour, with features measured in it.

    Raises HourNotReady if the hour is not complete yet or changes meanwhile. An hour without rows gives a dataset
    without rows; if it was also meant to provide the features, these are meaningless: use the next hour.
    """
    began = time.monotonic()
    storage = storage_of(config)
    label = hour_label(hour, hour_step(config.data.train))
    files = hour_files(storage, config.data.train, config.data.donefile, hour, progress)
    identity = {
        **identity_of(config, storage, {"train": files}),
        "features": None if features is None else features.to_json(),
    }
    builder = DatasetBuilder.for_folder(
        config, storage, Storage.join(_hours_folder(config), label.replace("/", "-"))
    )
    dataset = _reusable(builder, features, identity)
    if dataset is not None and not builder.in_progress:
        progress.log(f"hour {label} is already prepared: same config, same input")
        return PreparedHour(hour, dataset, True, time.monotonic() - began)
    with builder.locked():
        dataset = _reusable(builder, features, identity)
        reused = dataset is not None
        if dataset is None:
            _start_or_resume(builder, fingerprint(identity))
            try:
                dataset = _build(builder, label, files, features, identity, progress)
            except DataError as error:
                _refuse_if_changed(config, storage, hour, files, error)
                raise
            _refuse_if_changed(config, storage, hour, files, None)
        builder.clean_up()
    report_damage(dataset, progress)
    return PreparedHour(hour, dataset, reused, time.monotonic() - began)


def _refuse_if_changed(
    config: Config, storage: Storage, hour: int, files: list[SourceFile], cause: DataError | None
) -> None:
    """Refuse an hour whose files changed while they were read: it would be trained on only in part."""
    if hour_files(storage, config.data.train, config.data.donefile, hour, Progress()) != files:
        label = hour_label(hour, hour_step(config.data.train))
        raise HourNotReady(
            f"{label} changed while it was read, so it is not complete although it is marked complete. "
            "Wait until nothing is written to it any more."
        ) from cause


def _reusable(
    builder: DatasetBuilder, features: FeatureSpec | None, identity: Mapping[str, Any]
) -> Dataset | None:
    """The existing dataset, if it is complete and equal to what would be built now."""
    try:
        dataset = builder.finished_dataset()
    except ArtifactError:  # damaged, or of another release: it is built again
        return None
    if dataset is None:
        return None
    # Features measured in the first hour later come back with the model: they are the same.
    same = dataset.identity.get("features") is None if features is None else dataset.features == features
    expected = {**dataset.identity, "features": identity["features"]}
    return dataset if same and fingerprint(expected) == fingerprint(identity) else None


def _start_or_resume(builder: DatasetBuilder, name: str) -> None:
    """Resume an earlier run of the same identity; otherwise remove what it left."""
    storage, folder = builder.storage, builder.folder
    work = Storage.join(folder, "work")
    marker = Storage.join(work, "begun")
    if storage.describe(marker) and storage.read(marker).decode() == name:
        return
    storage.delete(Storage.join(folder, MANIFEST))  # first: a half-removed folder is not a dataset
    for place, kept in ((work, "lock"), (folder, "work")):
        for old in storage.names(place):
            if old != kept:
                storage.delete(Storage.join(place, old))
    storage.put(marker, name.encode())


def _build(
    builder: DatasetBuilder,
    label: str,
    files: list[SourceFile],
    features: FeatureSpec | None,
    identity: Mapping[str, Any],
    progress: Progress,
) -> Dataset:
    given = features is not None
    executor = ThreadExecutor()  # an hour is too small to distribute
    schema = (
        builder.infer_schema(files, progress)
        if features is None
        else _schema_for(builder, files, features, progress)
    )
    inputs = open_inputs(builder.config.data, files, schema, builder.cache, builder.storage)
    if not given:
        features = measure_fields(inputs, schema.features, executor, progress)
        _warn_few_values(features, label, progress)
    features = features or schema.features
    reader = LabelledReader(inputs.reader, features, schema.targets, builder.reference_time())
    train = builder.build_split(
        "train", inputs, reader, executor, progress, title=f"prepare {label}", may_be_empty=True
    )
    if train.rows and not features.fields:
        raise no_slots_error(builder.config, files)
    return builder.finish(identity, features, {"train": train})


def _warn_few_values(features: FeatureSpec, label: str, progress: Progress) -> None:
    """Warn about fields with few values in the first hour: they are never measured again."""
    known = {
        field.column: field.statistics.count for field in features.fields if field.statistics is not None
    }
    few = [f"{column} {count:,}" for column, count in known.items() if count < _MIN_VALUES]
    if few:
        progress.log(
            f"numbers are scaled by statistics of the first hour, {label}, which has few values of: "
            f"{', '.join(few)}. Start with some history (data.dates with `to`), or set log1p for these fields"
        )


def _schema_for(
    builder: DatasetBuilder, files: list[SourceFile], features: FeatureSpec, progress: Progress
) -> Schema:
    """The schema of logs that are read with given features."""
    data = builder.config.data
    schema = Schema(features, target_fields(data))
    if data.format not in ("slots", "paddlerec"):
        return schema
    detect = data.slot_conf is None  # else the user has chosen the slots
    discovered = discover_slots(data, files, builder.cache, builder.storage, progress, slots=detect)
    if discovered.slots:
        known = [int(column) for column in features.columns if column.isdigit()]
        slots = build_schema(
            data, dict.fromkeys([*known, *discovered.slots]), discovered.dense
        ).features.slots
        new = [slot.column for slot in slots if slot.column not in features.columns]
        _report_new_slots(builder.config.home, new, progress)
    needed = [int(column[6:]) for column in schema.columns if re.fullmatch(r"dense_\d+", column)]
    # Rows with fewer dense values than the model needs are bad; the logs may have more.
    return replace(schema, dense=max(discovered.dense, *needed, 0) if data.format == "paddlerec" else 0)


def _report_new_slots(home: str, slots: list[str], progress: Progress) -> None:
    unreported = [slot for slot in slots if (home, slot) not in _reported_slots]
    if unreported:
        _reported_slots.update((home, slot) for slot in unreported)
        progress.log(
            f"ignoring slots that the model does not have: {', '.join(unreported)}. "
            "To use them, train a new model on logs that hold them"
        )


# ── pruning ─────────────────────────────────────────────────────────────────────────────────


def prune_hours(config: Config, keep: Collection[int]) -> None:
    """Remove prepared hours except those to keep; quarantined rows of the newest 720 hours are kept."""
    storage = storage_of(config)
    home = _hours_folder(config)
    prepared = {name: hour for name in storage.names(home) if (hour := _hour_of(name)) is not None}
    newest = max(prepared.values(), default=0)
    for name, hour in prepared.items():
        if hour in keep:
            continue
        folder = Storage.join(home, name)
        storage.delete(Storage.join(folder, MANIFEST))  # first: a half-removed folder is not a dataset
        quarantine = Storage.join(folder, "quarantine")
        if hour <= newest - _QUARANTINE_HOURS or not storage.names(quarantine):
            storage.delete(folder)
            continue
        for old in storage.names(folder):
            if old != "quarantine":
                storage.delete(Storage.join(folder, old))


def _hours_folder(config: Config) -> str:
    return Storage.join(config.home, "hours")


def _hour_of(name: str) -> int | None:
    """The hour a folder is named after; None for any other folder."""
    label = name.replace("-", "/")
    try:
        return DateRange(label, label).hours().start
    except ConfigError:
        return None
