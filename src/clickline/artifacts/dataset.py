"""The prepared dataset: Parquet shards and a manifest, readable by anything that reads Parquet.

    <home>/datasets/current            the id of the newest finished dataset
    <home>/datasets/<id>/manifest.json written last
                         resolved.yaml
                         train-00000.parquet …  eval-00000.parquet …
                         quarantine/train-00000.jsonl …   rows that were left out, and why
                         work/                            only while the dataset is being built

Columns: label, weight, impression, click, event_hour, then one float32 column for each dense field and one
uint64 column for each slot (a list if the slot is multi-valued). A row's address is
(shard, row group, row).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clickline.artifacts.manifest import as_json, digest, read_manifest, write_manifest
from clickline.errors import ArtifactError
from clickline.features import FeatureSpec
from clickline.records import EncodedRows, LabelledRows, SlotIds
from clickline.storage.storage import Storage
from clickline.validation import validate

DATASET_FORMAT = 4

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Shard:
    """One Parquet file of a dataset."""

    file: str
    rows: int
    row_groups: tuple[int, ...]  # rows in each
    size: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """The train or the eval split of a dataset."""

    shards: tuple[Shard, ...]
    report: Mapping[str, Any]  # rows, clicks, bad rows by reason, slots: as prepare counted them

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True)
class _DatasetManifest:
    """The required keys of a dataset's manifest."""

    id: str
    identity: dict[str, Any]
    features: dict[str, Any]
    splits: dict[str, Split]


@dataclass(frozen=True)
class Dataset:
    """A finished dataset, opened for reading."""

    folder: str
    id: str
    features: FeatureSpec
    identity: Mapping[str, Any]  # its sources and settings: the same identity gives the same bytes
    splits: Mapping[str, Split]

    @classmethod
    def open(cls, storage: Storage, folder: str) -> Dataset:
        """Open a finished dataset; every shard must exist with the size in the manifest."""
        document = read_manifest(storage, folder, "dataset", DATASET_FORMAT)
        manifest = validate(_DatasetManifest, document, f"the manifest of {folder}")
        splits = manifest.splits
        dataset = cls(
            folder, manifest.id, FeatureSpec.from_json(manifest.features), manifest.identity, splits
        )
        sizes = storage.sizes(folder, "*.parquet")
        for shard in (shard for split in splits.values() for shard in split.shards):
            if min(shard.row_groups, default=0) < 0 or sum(shard.row_groups) != shard.rows:
                raise ArtifactError(
                    f"the manifest of {folder} says {shard.rows} rows of {shard.file!r} and {shard.row_groups} in its "
                    f"row groups. Remove {folder} and run `clickline prepare` again."
                )
            if sizes.get(shard.file) != shard.size:
                state = f"has {sizes[shard.file]:,} bytes" if shard.file in sizes else "is missing"
                raise ArtifactError(
                    f"{Storage.join(folder, shard.file)} {state}; the manifest says {shard.size:,}. "
                    f"Remove {folder} and run `clickline prepare` again."
                )
        return dataset

    @classmethod
    def current(cls, storage: Storage, home: str) -> Dataset:
        """The newest finished dataset of a home."""
        name = current_id(storage, home)
        if name is None:
            raise ArtifactError(f"{home} has no prepared dataset. Run `clickline prepare` first.")
        return cls.open(storage, dataset_folder(home, name))

    def make_current(self, storage: Storage, home: str) -> None:
        storage.put(Storage.join(home, "datasets", "current"), f"{self.id}\n".encode())

    def read(self, path: Path, row_groups: Sequence[int]) -> LabelledRows:
        """Row groups of a shard that is on local disk at `path`, one after the other."""
        try:
            with pq.ParquetFile(path) as file:
                if file.schema_arrow == schema(self.features):
                    table = file.read_row_groups(list(row_groups), use_threads=False)
                    return from_table(table, self.features)
            problem = "its columns are not those of the dataset's features"
        except (pa.ArrowException, OSError, IndexError, UnicodeEncodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # a disk failure, not bad content
                raise
            problem = str(error).rstrip(".")
        raise ArtifactError(f"{path} is damaged: {problem}. Run `clickline prepare` again.")

    def read_group(self, split: str, shard: int, group: int) -> LabelledRows:
        """One row group of a dataset that is on local disk."""
        return self.read(Path(self.folder, self.splits[split].shards[shard].file), [group])

    def read_split(self, split: str) -> Iterator[LabelledRows]:
        """All row groups of a split that is on local disk, in order."""
        for shard, group, _ in self.row_groups(split):
            yield self.read_group(split, shard, group)

    def row_groups(self, split: str) -> Iterator[tuple[int, int, int]]:
        """(shard, row group, rows) of a split, in order."""
        for number, shard in enumerate(self.splits[split].shards):
            for group, rows in enumerate(shard.row_groups):
                yield number, group, rows


def current_id(storage: Storage, home: str) -> str | None:
    """The id of the newest finished dataset of a home; None if there is none yet."""
    pointer = Storage.join(home, "datasets", "current")
    if not storage.describe(pointer):
        return None
    name = storage.read(pointer).decode("utf-8", "replace").strip()
    if not _ID.fullmatch(name):  # it must not lead out of the home
        raise ArtifactError(
            f"{pointer} names {name[:80]!r}, which is not a dataset id. Run `clickline prepare` again."
        )
    return name


def data_identity(data: Mapping[str, Any]) -> dict[str, Any]:
    """The `data` section as part of an identity: the fields, up to 10,000, only as a digest. The features and
    resolved.yaml contain them in full."""
    return {**data, "fields": hashlib.sha256(as_json(data["fields"])).hexdigest()}


def dataset_folder(home: str, name: str) -> str:
    return Storage.join(home, "datasets", name)


def finish_dataset(
    storage: Storage,
    folder: str,
    name: str,
    features: FeatureSpec,
    identity: Mapping[str, Any],
    splits: Mapping[str, Split],
) -> None:
    """Write the manifest; from then on the dataset exists."""
    manifest = _DatasetManifest(name, dict(identity), features.to_json(), dict(splits))
    write_manifest(storage, folder, "dataset", DATASET_FORMAT, manifest)


# ── rows and tables ────────────────────────────────────────────────────────────────────────────


_TARGETS = {
    "label": pa.float32(),
    "weight": pa.float32(),
    "impression": pa.uint32(),
    "click": pa.uint32(),
    "event_hour": pa.int32(),
}


def schema(features: FeatureSpec) -> pa.Schema:
    """The columns of every shard."""
    columns = [*_TARGETS.items()]
    columns += [(field.name, pa.float32()) for field in features.dense]
    item = pa.field("item", pa.uint64(), nullable=False)
    columns += [(slot.name, pa.list_(item) if slot.multi else pa.uint64()) for slot in features.slots]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def to_table(batches: Sequence[LabelledRows], features: FeatureSpec) -> pa.Table:
    """Batches of rows as one Arrow table, in order."""
    rows, kinds = concat_rows(batches), schema(features)
    columns = [pa.array(getattr(rows, f"{name}_B")) for name in _TARGETS]
    columns += [pa.array(values_B) for values_B in rows.encoded.dense_DB]
    for slot, ids in zip(features.slots, rows.encoded.slots, strict=True):
        column = pa.array(ids.ids_N)
        if slot.multi:
            offsets_B1 = pa.array(_offsets(ids).astype(np.int32))
            column = pa.ListArray.from_arrays(offsets_B1, column, type=kinds.field(slot.name).type)
        columns.append(column)
    return pa.table(columns, schema=kinds)


def from_table(table: pa.Table, features: FeatureSpec) -> LabelledRows:
    """The rows of a table that `to_table` built, read back from Parquet."""

    def column(name: str) -> np.ndarray[Any, Any]:
        return table.column(name).to_numpy()  # type: ignore[no-any-return]

    dense_DB = np.empty((len(features.dense), table.num_rows), dtype=np.float32)
    for d, field in enumerate(features.dense):
        dense_DB[d] = column(field.name)
    slots = []
    for slot in features.slots:
        if not slot.multi:
            slots.append(SlotIds(column(slot.name)))
            continue
        lists = table.column(slot.name).combine_chunks()
        lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
        offsets_B1 = lists.offsets.to_numpy().astype(np.int64)
        slots.append(
            SlotIds(lists.values.to_numpy()[offsets_B1[0] : offsets_B1[-1]], offsets_B1 - offsets_B1[0])
        )
    encoded = EncodedRows(table.num_rows, dense_DB, tuple(slots))
    return LabelledRows(**{f"{name}_B": column(name) for name in _TARGETS}, encoded=encoded)


def concat_rows(parts: Sequence[LabelledRows]) -> LabelledRows:
    """Concatenate rows."""
    if len(parts) == 1:
        return parts[0]
    slots = []
    for pieces in zip(*(part.encoded.slots for part in parts), strict=True):
        ids_N = np.concatenate([slot.ids_N for slot in pieces])
        if pieces[0].offsets_B1 is None:
            slots.append(SlotIds(ids_N))
        else:
            counts = np.concatenate([np.diff(_offsets(slot)) for slot in pieces])
            slots.append(SlotIds(ids_N, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])))
    rows = sum(part.rows for part in parts)
    dense_DB = np.concatenate([part.encoded.dense_DB for part in parts], axis=1)
    targets = {
        f"{name}_B": np.concatenate([getattr(part, f"{name}_B") for part in parts]) for name in _TARGETS
    }
    return LabelledRows(**targets, encoded=EncodedRows(rows, dense_DB, tuple(slots)))


def _offsets(ids: SlotIds) -> np.ndarray[Any, Any]:
    if ids.offsets_B1 is None:
        raise ValueError("a multi-valued slot has no offsets")
    return ids.offsets_B1


class ShardWriter:
    """Writes one shard row group by row group to a local file."""

    def __init__(self, path: Path, features: FeatureSpec) -> None:
        self._path = path
        self._features = features
        self._groups: list[int] = []
        # Dictionary encoding makes ids four times smaller. lz4 writes 20 % faster than zstd for 10 % more bytes. Page
        # statistics of hashed ids are of no use to a reader.
        self._writer = pq.ParquetWriter(
            path, schema(features), compression="lz4", use_dictionary=True, write_statistics=False
        )

    def write(self, batches: Sequence[LabelledRows]) -> None:
        """Append the batches as one row group, unless they have no rows."""
        rows = sum(batch.rows for batch in batches)
        if rows:
            self._writer.write_table(to_table(batches, self._features), row_group_size=rows)
            self._groups.append(rows)

    def close(self, file: str) -> Shard:
        """Finish the file and describe it under the name it will have in the dataset."""
        self._writer.close()
        return Shard(
            file, sum(self._groups), tuple(self._groups), self._path.stat().st_size, digest(self._path)
        )

    def abandon(self) -> None:
        """Remove the file; the disk may be full."""
        with suppress(OSError):
            self._writer.close()
        self._path.unlink(missing_ok=True)
