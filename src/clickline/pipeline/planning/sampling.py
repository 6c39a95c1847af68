"""The data that a plan is based on: the prepared dataset if it matches the config, else a sample of the raw logs.

The sample is written as a small dataset, so that the following steps see no difference.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from clickline.data.readers.slot_lines import read_slot_conf
from clickline.data.schema import Schema, build_schema, named_slots
from clickline.data.slot_discovery import slots_in_block
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
_SPREAD_LOCAL, _SPREAD_REMOTE = 8, 2  # files that are sampled; remote ones are fetched completely
_ROW_GROUP_BYTES = 8 << 20  # of input, about as in `prepare`


@dataclass(frozen=True)
class DataSample:
    """The data that a plan is based on, and what is known of all rows and ids."""

    basis: str  # a description of the source
    dataset: Dataset  # the prepared one, or the sample
    train_rows: int
    eval_rows: int
    clicks: int  # in the training rows
    distinct: tuple[int, ...] | None  # ids of each slot in all training rows, if known
    values_per_row: float  # ids over all slots
    prepare_seconds: float | None  # None: already prepared
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> FeatureSpec:
        return self.dataset.features

    @property
    def exact(self) -> bool:
        """Whether the sample has all rows."""
        return self.dataset.splits["train"].rows >= self.train_rows


def sample_data(
    config: Config, scratch: Path, progress: Progress, sample_bytes: int = SAMPLE_BYTES
) -> DataSample:
    """The prepared dataset if it is up to date with the config and the logs; else a sample of the logs."""
    storage = storage_of(config)
    dataset = _current_dataset(storage, config.home)
    try:
        sources = _sources(config, storage, progress)
    except DataError as error:
        if dataset is not None:
            return _dataset_sample(dataset, (f"the raw logs were not read: {error}",))
        raise _no_data_error(config, error) from error
    if dataset is not None and _is_up_to_date(dataset, config, storage, sources):
        return _dataset_sample(dataset)
    sample = _sample_logs(config, storage, sources, scratch, progress, sample_bytes)
    if dataset is None:
        return sample
    note = f"dataset {dataset.id} was prepared from other logs or with other settings, so it was not used"
    return replace(sample, notes=(*sample.notes, note))


def sample_rows(dataset: Dataset) -> LabelledRows:
    """A sample of the training rows from the whole dataset, in order."""
    groups = list(dataset.row_groups("train"))
    total = sum(rows for _, _, rows in groups)
    sample_count = min(len(groups), max(1, len(groups) * _SAMPLED_ROWS // max(1, total)))
    indices = np.unique(np.linspace(0, len(groups) - 1, sample_count).astype(int)).tolist()
    return concat_rows([dataset.read_group("train", *groups[index][:2]) for index in indices])


# ── a dataset ──────────────────────────────────────────────────────────────────────────────────


def _current_dataset(storage: Storage, home: str) -> Dataset | None:
    try:
        name = current_id(storage, home)
        dataset = None if name is None else Dataset.open(storage, dataset_folder(home, name))
    except ArtifactError:  # damaged or from another release: `prepare` reports it
        return None
    return dataset if dataset is not None and Storage.is_local(dataset.folder) else None


def _is_up_to_date(
    dataset: Dataset, config: Config, storage: Storage, sources: Mapping[str, Sequence[SourceFile]]
) -> bool:
    """Whether `prepare` would reuse the dataset."""
    identity, data = dataset.identity, config.data
    now = data_identity(data.model_dump(mode="json", include=set(identity["data"])))
    for key, uri in (("slot_conf", data.slot_conf), ("reader", data.reader)):
        content = None if uri is None else hashlib.sha256(storage.read(uri)).hexdigest()
        if identity.get(key) != content:
            return False
    inputs = {
        split: [asdict(file) | {"uri": redacted(file.uri)} for file in files]
        for split, files in sources.items()
    }
    return (
        identity["encoder_format"] == ENCODER_FORMAT
        and as_json(identity["data"]) == as_json(now)
        and as_json(identity["inputs"]) == as_json(inputs)
    )


def _dataset_sample(dataset: Dataset, notes: tuple[str, ...] = ()) -> DataSample:
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
    """The files of each split that `prepare` would read, without waiting for missing hours."""
    data = config.data
    patterns_by_split = {"train": (data.train, data.dates)}
    if data.eval is not None:
        patterns_by_split["eval"] = (data.eval, data.eval_dates)
    return {
        split: resolve_files(
            storage,
            list(patterns),
            None if dates is None else DateRange(dates.first, dates.last),
            data.donefile,
            0,
            progress,
        )
        for split, (patterns, dates) in patterns_by_split.items()
    }


def _no_data_error(config: Config, error: DataError) -> DataError:
    patterns = ", ".join(config.data.train)
    return type(error)(
        f"there is no data to plan from: {config.home} has no prepared dataset, and the logs of data.train "
        f"({patterns}) cannot be sampled: {error} Provide some logs, or generate synthetic ones with "
        "`clickline sample`; then run `clickline plan` again."
    )


@dataclass(frozen=True)
class _SampledBlocks:
    """Sampled blocks of files, not parsed yet."""

    blocks: list[tuple[SourceFile, Block]]
    share: float  # of all bytes


def _sample_logs(
    config: Config,
    storage: Storage,
    sources: Mapping[str, list[SourceFile]],
    scratch: Path,
    progress: Progress,
    sample_bytes: int,
) -> DataSample:
    cache = FileCache(Path(config.cache.dir), config.cache.size, storage)
    train = sources["train"]
    block_reader = _block_reader(config)
    progress.begin("sample the logs", total_bytes=sample_bytes)
    sampled = _sample_blocks(Inputs(train, block_reader, cache, storage), sample_bytes, progress)
    schema = _sampled_schema(config, storage, sampled.blocks)
    features = schema.features.with_statistics(
        {field.name: _any_statistics(field) for field in schema.features.fields if field.needs_statistics}
    )
    reader = LabelledReader(reader_from_config(config.data, schema), features, schema.targets, time.time())
    dataset, clicks, values, seconds = _write_sample(sampled, reader, scratch)
    progress.end()
    rows = dataset.splits["train"].rows
    if not rows:
        raise DataError(
            f"no row of {redacted(train[0].uri)} could be used, so there is no data to plan from. "
            "Check data.format and data.fields; `clickline prepare` lists the errors of each row."
        )
    ratio = sum(file.size for file in sources.get("eval", ())) / max(1, sum(file.size for file in train))
    size = sum(block.size for _, block in sampled.blocks)
    read = human_size(size)
    complete = sampled.share >= 1
    return DataSample(
        f"all of the raw logs, {read}"
        if complete
        else f"a sample of the raw logs, {read}, {sampled.share:.1%} of them",
        dataset,
        rows if complete else round(rows / sampled.share),
        round(rows / sampled.share * ratio),
        round(clicks / sampled.share),
        None,
        values / rows,
        _prepare_seconds(config, features, size / sampled.share, ratio, seconds / size),
    )


def _prepare_seconds(
    config: Config, features: FeatureSpec, size: float, eval_ratio: float, rate: float
) -> float:
    """Seconds of `prepare`, from the seconds per byte on all cores. Each shard is written by a single core."""
    data, total = config.data, 0.0
    for part in (size, size * eval_ratio):
        shards = max(1, math.ceil(part / data.shard_size))
        total += part * rate * cores() / min(cores(), shards)
    # Fields with statistics and slot discovery each need an extra pass over the training logs.
    passes = bool(features.measured_columns) + (
        data.format in ("slots", "paddlerec") and data.slot_conf is None
    )
    return total + passes * size * rate


def _any_statistics(field: DenseField | SlotField) -> FieldStatistics:
    """Placeholder statistics: they change the values, but not the number of rows or ids."""
    buckets = field.buckets if isinstance(field, SlotField) else 0
    return FieldStatistics(2, 0.0, 1.0, 0.5, 0.5, tuple(float(edge) for edge in range(1, buckets)), 0.5, 0.5)


def _block_reader(config: Config) -> Reader:
    """A reader that splits files into blocks; the slots of slots and paddlerec logs are not known yet."""
    if config.data.format in ("slots", "paddlerec"):
        return reader_of(config.data.format, ())
    return reader_from_config(config.data, build_schema(config.data))


def _sample_blocks(inputs: Inputs, limit: int, progress: Progress) -> _SampledBlocks:
    """Blocks from the heads of evenly spaced files; all blocks if there are few bytes."""
    files, storage = inputs.files, inputs.storage
    total = inputs.uncompressed_bytes(progress) or sum(file.size for file in files)
    sample_count = len(files)
    if total > limit:
        spread = _SPREAD_LOCAL if all(storage.is_local(file.uri) for file in files) else _SPREAD_REMOTE
        sample_count = min(spread, len(files))
    indices = np.unique(np.linspace(0, len(files) - 1, sample_count).astype(int)).tolist()
    blocks: list[tuple[SourceFile, Block]] = []
    covered = 0.0  # stored bytes that the blocks stand for
    for index in indices:
        file = files[index]
        blocks_read, ended = _read_head(
            Inputs([file], inputs.reader, inputs.cache, storage), limit // len(indices), progress
        )
        blocks += [(file, block) for block in blocks_read]
        read = sum(block.size for block in blocks_read)
        covered += (
            file.size if ended else min(file.size, _stored_bytes(inputs, file, blocks_read, read, total))
        )
    stored = sum(file.size for file in files)
    return _SampledBlocks(blocks, min(1.0, covered / stored) if stored else 1.0)


def _read_head(inputs: Inputs, limit: int, progress: Progress) -> tuple[list[Block], bool]:
    """The first blocks of a file, and whether these are all of them."""
    blocks_read: list[Block] = []
    size = 0
    for _, block, last in inputs.blocks(progress):
        blocks_read.append(block)
        size += block.size
        progress.advance(size=block.size)
        if last:
            return blocks_read, True
        if size >= limit:
            break
    return blocks_read, False


def _stored_bytes(
    inputs: Inputs, file: SourceFile, blocks_read: Sequence[Block], read: int, total: int
) -> float:
    """Approximate number of stored bytes of the file that its blocks stand for."""
    if isinstance(inputs.reader, ParquetReader):
        with inputs.cache.local(file) as path, pq.ParquetFile(path) as parquet:
            rows = sum(block.payload.num_rows for block in blocks_read)
            return float(file.size * rows / max(1, parquet.metadata.num_rows))
    return read * sum(other.size for other in inputs.files) / total


def _sampled_schema(config: Config, storage: Storage, blocks: Sequence[tuple[SourceFile, Block]]) -> Schema:
    """The schema as `prepare` would find it, but from the sample alone."""
    data = config.data
    if data.format not in ("slots", "paddlerec"):
        return build_schema(data)
    slots: set[int] = set()
    dense = 0
    for _, block in blocks:
        if block.payload is None:
            continue
        found = slots_in_block(data, block.payload)
        dense, slots = dense or found.dense, slots | set(found.slots)
    chosen = (
        sorted(slots)
        if data.slot_conf is None
        else read_slot_conf(data.slot_conf, storage.read(data.slot_conf))
    )
    return build_schema(data, dict.fromkeys([*chosen, *sorted(named_slots(data.fields))]), dense)


def _write_sample(
    sampled: _SampledBlocks, reader: LabelledReader, folder: Path
) -> tuple[Dataset, int, int, float]:
    """Write the sample as a dataset; returns it with its clicks, its ids and the seconds taken to prepare it."""

    def make(number: int, group: list[tuple[SourceFile, Block]]) -> tuple[Shard, int, int]:
        """Parse, encode and write a shard in one thread, like `prepare`."""
        parsed = [reader.read(*item).rows for item in group]
        rows = [part for part in parsed if part is not None]
        name = f"train-{number:05d}.parquet"
        writer = ShardWriter(folder / name, reader.features)
        writer.write(rows)
        clicks = sum(int(part.click_B.sum()) for part in rows)
        values = sum(ids.ids_N.size for part in rows for ids in part.encoded.slots)
        return writer.close(name), clicks, values

    groups = list(_groups(sampled.blocks))
    make(0, groups[0][:1])  # loads the kernels
    began = time.perf_counter()
    written = [done for _, done in map_in_order(make, groups, cores())]
    seconds = time.perf_counter() - began
    shards = tuple(shard for shard, _, _ in written)
    clicks, values = sum(c for _, c, _ in written), sum(v for _, _, v in written)
    report = {"rows": sum(shard.rows for shard in shards), "clicks": clicks, "slots": []}
    storage = Storage()
    finish_dataset(storage, str(folder), folder.name, reader.features, {}, {"train": Split(shards, report)})
    return Dataset.open(storage, str(folder)), clicks, values, seconds


def _groups(blocks: Sequence[tuple[SourceFile, Block]]) -> Iterator[list[tuple[SourceFile, Block]]]:
    """Group blocks into shards of one row group each."""
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
