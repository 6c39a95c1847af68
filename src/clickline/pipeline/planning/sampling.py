"""What there is to learn from: the prepared dataset where it fits the config, else a sample of the raw logs.

A sample is made into a small dataset of its own, so that what comes after sees no difference.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from clickline.artifacts.dataset import (
    Dataset,
    Shard,
    ShardWriter,
    Split,
    concat_rows,
    current_id,
    data_identity,
    dataset_folder,
    finish_dataset,
)
from clickline.artifacts.from_config import storage_of
from clickline.artifacts.manifest import as_json
from clickline.config import Config
from clickline.data.input_blocks import Inputs, map_in_order, reader_from_config
from clickline.data.labelled_reader import LabelledReader
from clickline.data.readers import ParquetReader, Reader
from clickline.data.readers import open_reader as reader_of
from clickline.data.readers.paddlerec_lines import dense_and_slots_in
from clickline.data.readers.slot_lines import read_slot_conf, slots_in
from clickline.data.schema import Schema, build_schema, named_slots
from clickline.errors import ArtifactError, DataError
from clickline.features import ENCODER_FORMAT, DenseField, FeatureSpec, FieldStatistics, SlotField
from clickline.machine import cores
from clickline.progress import Progress, human_size
from clickline.records import Block, LabelledRows, SourceFile
from clickline.storage.file_cache import FileCache
from clickline.storage.log_files import DateRange, resolve_files
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

SAMPLE_BYTES = 128 << 20  # of raw logs
_SAMPLED_ROWS = 600_000  # of a prepared dataset
_SPREAD_LOCAL, _SPREAD_REMOTE = 8, 2  # files that a sample is spread over; a remote one is fetched whole
_ROW_GROUP_BYTES = 8 << 20  # of input, about as prepare cuts them


@dataclass(frozen=True)
class DataSample:
    """Rows and ids as far as they are known."""

    basis: str  # what the figures come from, in words
    dataset: Dataset  # the prepared one, or the sample
    train_rows: int
    eval_rows: int
    clicks: int  # rows' clicks among the train rows
    distinct: tuple[int, ...] | None  # ids of each slot in all train rows, where they were counted
    values_per_row: float  # ids of all slots
    prepare_seconds: float | None  # None: it is prepared already
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> FeatureSpec:
        return self.dataset.features

    @property
    def exact(self) -> bool:
        """Whether all rows were seen."""
        return self.dataset.splits["train"].rows >= self.train_rows


def sample_data(config: Config, scratch: Path, progress: Progress, sample_bytes: int = SAMPLE_BYTES) -> DataSample:
    """The prepared dataset if it was made from these logs as the config says; else a sample of them."""
    storage = storage_of(config)
    dataset = _prepared(storage, config.home)
    try:
        sources = _sources(config, storage, progress)
    except DataError as error:
        if dataset is not None:
            return _of_dataset(dataset, (f"the raw logs were not looked at: {error}",))
        raise _no_data(config, error) from error
    if dataset is not None and _fits(dataset, config, storage, sources):
        return _of_dataset(dataset)
    looked = _of_logs(config, storage, sources, scratch, progress, sample_bytes)
    if dataset is None:
        return looked
    note = f"dataset {dataset.id} was made from other logs or with other settings, so it was not used"
    return DataSample(**{**vars(looked), "notes": (*looked.notes, note)})


def sample_rows(dataset: Dataset) -> LabelledRows:
    """Some of the training rows, from all over the dataset, in their order."""
    groups = list(dataset.row_groups("train"))
    total = sum(rows for _, _, rows in groups)
    wanted = min(len(groups), max(1, len(groups) * _SAMPLED_ROWS // max(1, total)))
    places = np.unique(np.linspace(0, len(groups) - 1, wanted).astype(int)).tolist()
    shards = dataset.splits["train"].shards
    chosen = [groups[place] for place in places]
    return concat_rows([dataset.read(Path(dataset.folder, shards[s].file), [g]) for s, g, _ in chosen])


# ── a dataset ──────────────────────────────────────────────────────────────────────────────────


def _prepared(storage: Storage, home: str) -> Dataset | None:
    try:
        name = current_id(storage, home)
        dataset = None if name is None else Dataset.open(storage, dataset_folder(home, name))
    except ArtifactError:  # torn, or of another release: prepare says so
        return None
    return dataset if dataset is not None and Storage.is_local(dataset.folder) else None


def _fits(
    dataset: Dataset, config: Config, storage: Storage, sources: Mapping[str, Sequence[SourceFile]]
) -> bool:
    """Whether `prepare` would find it up to date."""
    identity, data = dataset.identity, config.data
    now = data_identity(data.model_dump(mode="json", include=set(identity["data"])))
    for key, uri in (("slot_conf", data.slot_conf), ("reader", data.reader)):
        content = None if uri is None else hashlib.sha256(storage.read(uri)).hexdigest()
        if identity.get(key) != content:
            return False
    inputs = {
        split: [asdict(file) | {"uri": redacted(file.uri)} for file in files] for split, files in sources.items()
    }
    return (
        identity["encoder_format"] == ENCODER_FORMAT
        and as_json(identity["data"]) == as_json(now)
        and as_json(identity["inputs"]) == as_json(inputs)
    )


def _of_dataset(dataset: Dataset, notes: tuple[str, ...] = ()) -> DataSample:
    train = dataset.splits["train"]
    if not train.rows:
        raise DataError(f"dataset {dataset.id} has no training rows. Check data.train.")
    return DataSample(
        f"dataset {dataset.id}, prepared",
        dataset,
        train.rows,
        dataset.splits["eval"].rows if "eval" in dataset.splits else 0,
        train.report["clicks"],
        tuple(slot["distinct"] for slot in train.report["slots"]),
        sum(slot["values_per_row"] for slot in train.report["slots"]),
        None,
        notes,
    )


# ── raw logs ───────────────────────────────────────────────────────────────────────────────────


def _sources(config: Config, storage: Storage, progress: Progress) -> dict[str, list[SourceFile]]:
    """The files of each split as prepare would read them, without waiting for hours that are to come."""
    data = config.data
    asked = {"train": (data.train, data.dates)}
    if data.eval is not None:
        asked["eval"] = (data.eval, data.eval_dates)
    return {
        split: resolve_files(
            storage,
            list(patterns),
            None if dates is None else DateRange(dates.first, dates.last),
            data.donefile,
            0,
            progress,
        )
        for split, (patterns, dates) in asked.items()
    }


def _no_data(config: Config, error: DataError) -> DataError:
    patterns = ", ".join(config.data.train)
    return type(error)(
        f"there is nothing to plan from: {config.home} holds no prepared dataset, and the logs of data.train "
        f"({patterns}) cannot be sampled: {error} Put logs there, or some of them, or make synthetic ones with "
        "`clickline sample`; then run `clickline plan` again."
    )


@dataclass(frozen=True)
class _Taken:
    """Blocks of some files, not parsed yet."""

    blocks: list[tuple[SourceFile, Block]]
    share: float  # of all the bytes that there are


def _of_logs(
    config: Config,
    storage: Storage,
    sources: Mapping[str, list[SourceFile]],
    scratch: Path,
    progress: Progress,
    sample_bytes: int,
) -> DataSample:
    cache = FileCache(Path(config.cache.dir), config.cache.size, storage)
    train = sources["train"]
    cutter = _cutter(config)
    progress.begin("sample the logs", total_bytes=sample_bytes)
    taken = _take(Inputs(train, cutter, cache, storage), sample_bytes, progress)
    fields = _fields(config, storage, taken.blocks)
    features = fields.features.with_statistics(
        {field.name: _any_statistics(field) for field in fields.features.fields if field.needs_statistics}
    )
    reader = LabelledReader(reader_from_config(config.data, fields), features, fields.targets, time.time())
    dataset, clicks, values, seconds = _keep(taken, reader, scratch)
    progress.end()
    rows = dataset.splits["train"].rows
    if not rows:
        raise DataError(
            f"no row of {redacted(train[0].uri)} could be used, so there is nothing to plan from. "
            "Check data.format and data.fields; `clickline prepare` lists what is wrong with each row."
        )
    ratio = sum(file.size for file in sources.get("eval", ())) / max(1, sum(file.size for file in train))
    size = sum(block.size for _, block in taken.blocks)
    read = human_size(size)
    whole = taken.share >= 1
    return DataSample(
        f"all of the raw logs, {read}"
        if whole
        else f"a sample of the raw logs, {read}, {taken.share:.1%} of them",
        dataset,
        rows if whole else round(rows / taken.share),
        round(rows / taken.share * ratio),
        round(clicks / taken.share),
        None,
        values / rows,
        _prepare_seconds(config, features, size / taken.share, ratio, seconds / size),
    )


def _prepare_seconds(
    config: Config, features: FeatureSpec, size: float, eval_ratio: float, rate: float
) -> float:
    """Of `prepare`, from the seconds a byte takes on all cores. A shard is made by one of them alone."""
    data, total = config.data, 0.0
    for part in (size, size * eval_ratio):
        shards = max(1, math.ceil(part / data.shard_size))
        total += part * rate * cores() / min(cores(), shards)
    # Fields with statistics, and slots that are to be found, take a pass over the training logs before.
    passes = bool(features.measured_columns) + (
        data.format in ("slots", "paddlerec") and data.slot_conf is None
    )
    return total + passes * size * rate


def _any_statistics(field: DenseField | SlotField) -> FieldStatistics:
    """Statistics decide what a number becomes, not how many rows or ids there are; for those any will do."""
    buckets = field.buckets if isinstance(field, SlotField) else 0
    return FieldStatistics(2, 0.0, 1.0, 0.5, 0.5, tuple(float(edge) for edge in range(1, buckets)), 0.5, 0.5)


def _cutter(config: Config) -> Reader:
    """Cuts files into blocks; of slots and paddlerec what is in them is not known yet."""
    if config.data.format in ("slots", "paddlerec"):
        return reader_of(config.data.format, ())
    return reader_from_config(config.data, build_schema(config.data))


def _take(inputs: Inputs, most: int, progress: Progress) -> _Taken:
    """Blocks from the beginnings of files that lie evenly among all; of few bytes, all."""
    files, storage = inputs.files, inputs.storage
    total = inputs.uncompressed_bytes(progress) or sum(file.size for file in files)
    wanted = len(files)
    if total > most:
        spread = _SPREAD_LOCAL if all(storage.is_local(file.uri) for file in files) else _SPREAD_REMOTE
        wanted = min(spread, len(files))
    places = np.unique(np.linspace(0, len(files) - 1, wanted).astype(int)).tolist()
    blocks: list[tuple[SourceFile, Block]] = []
    stood_for = 0.0  # stored bytes that the blocks came from
    for place in places:
        file = files[place]
        got, ended = _beginning(
            Inputs([file], inputs.reader, inputs.cache, storage), most // len(places), progress
        )
        blocks += [(file, block) for block in got]
        read = sum(block.size for block in got)
        stood_for += file.size if ended else min(file.size, _stored(inputs, file, got, read, total))
    stored = sum(file.size for file in files)
    return _Taken(blocks, min(1.0, stood_for / stored) if stored else 1.0)


def _beginning(inputs: Inputs, most: int, progress: Progress) -> tuple[list[Block], bool]:
    """The first blocks of a file, and whether they are all."""
    got: list[Block] = []
    size = 0
    for _, block, last in inputs.blocks(progress):
        got.append(block)
        size += block.size
        progress.advance(size=block.size)
        if last:
            return got, True
        if size >= most:
            break
    return got, False


def _stored(inputs: Inputs, file: SourceFile, got: Sequence[Block], read: int, total: int) -> float:
    """About how many bytes of the file, as it is stored, some of its blocks came from."""
    if isinstance(inputs.reader, ParquetReader):
        with inputs.cache.local(file) as path, pq.ParquetFile(path) as parquet:
            rows = sum(block.payload.num_rows for block in got)
            return float(file.size * rows / max(1, parquet.metadata.num_rows))
    return read * sum(other.size for other in inputs.files) / total


def _fields(config: Config, storage: Storage, blocks: Sequence[tuple[SourceFile, Block]]) -> Schema:
    """As prepare finds them, but in the sample alone."""
    data = config.data
    if data.format not in ("slots", "paddlerec"):
        return build_schema(data)
    slots: set[int] = set()
    dense = 0
    for _, block in blocks:
        if block.payload is None:
            continue
        if data.format == "slots":
            slots |= set(slots_in(block.payload))
        else:
            most, found = dense_and_slots_in(block.payload)
            dense, slots = dense or most, slots | set(found)
    chosen = (
        sorted(slots)
        if data.slot_conf is None
        else read_slot_conf(data.slot_conf, storage.read(data.slot_conf))
    )
    return build_schema(data, dict.fromkeys([*chosen, *sorted(named_slots(data.fields))]), dense)


def _keep(taken: _Taken, reader: LabelledReader, folder: Path) -> tuple[Dataset, int, int, float]:
    """The sample as a dataset, the clicks and the ids in it, and the seconds it takes to prepare as much."""

    def make(number: int, group: list[tuple[SourceFile, Block]]) -> tuple[Shard, int, int]:
        """As prepare does it: parse, encode and write in one thread, several of them side by side."""
        found = [reader.read(*item).rows for item in group]
        rows = [some for some in found if some is not None]
        name = f"train-{number:05d}.parquet"
        writer = ShardWriter(folder / name, reader.features)
        writer.write(rows)
        clicks = sum(int(some.click_B.sum()) for some in rows)
        values = sum(ids.ids_N.size for some in rows for ids in some.encoded.slots)
        return writer.close(name), clicks, values

    groups = list(_groups(taken.blocks))
    make(0, groups[0][:1])  # loads the kernels
    began = time.perf_counter()
    made = [done for _, done in map_in_order(make, groups, cores())]
    seconds = time.perf_counter() - began
    shards = tuple(shard for shard, _, _ in made)
    clicks, values = sum(c for _, c, _ in made), sum(v for _, _, v in made)
    report = {"rows": sum(shard.rows for shard in shards), "clicks": clicks, "slots": []}
    storage = Storage()
    finish_dataset(storage, str(folder), folder.name, reader.features, {}, {"train": Split(shards, report)})
    return Dataset.open(storage, str(folder)), clicks, values, seconds


def _groups(blocks: Sequence[tuple[SourceFile, Block]]) -> Iterator[list[tuple[SourceFile, Block]]]:
    """Blocks that make a shard of the sample, of one row group."""
    group: list[tuple[SourceFile, Block]] = []
    size = 0
    for item in blocks:
        group.append(item)
        size += item[1].size
        if size >= _ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
