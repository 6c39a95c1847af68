"""Snapshots of the tables as files: full, or a delta to an earlier snapshot.

    header     one line of JSON: format, kind, base, slots, optimizers, decays
    per table  default rows · count, ids of tombstones · for each shard: two counts, candidates, admitted
    trailer    SHA-256 of everything before it

Counts are little-endian u64, rows are the records of `row_layout.py`, in the index's order. So the same content
gives the same bytes, whatever order it was trained in, and a reader needs nothing but NumPy.

A delta holds the rows changed since its base and a tombstone for each id evicted since. Counters that only decayed
are not in it: it lists the decays, and loading repeats them.

Sharded tables (sharded_tables.py) save one file per shard, with the rows of its inner shards; together they are one
full snapshot. Part a of S holds the inner shards `inner_shards(a, S)`; default rows are read from part 0. The parts
can be loaded into any number of shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import SHARDS
from clickline.embedding.optimizers import OPTIMIZERS
from clickline.embedding.row_layout import CandidateLayout, RowLayout
from clickline.embedding.sharded_tables import inner_shards
from clickline.embedding.table import Table
from clickline.embedding.tables import Tables, slots_by_dim
from clickline.embedding.throttle import Throttle
from clickline.errors import ArtifactError

_FORMAT = 2  # 1 had the weights before the optimizers' state
_DIGEST_BYTES = 32
_READ_BYTES = 1 << 22
_READ_ROWS = 1 << 15
_WRITE_BYTES = 1 << 20
_SYNC_BYTES = 1 << 26
COW_MEMORY_DIVISOR = 6  # copies may take 1/6 of all table memory, which is 1/5 of the tables without them


@dataclass(frozen=True)
class SnapshotFile:
    """A written snapshot file."""

    digest: str  # of everything before the trailer: a delta names it as its base
    sha256: str  # of the whole file
    rows: int
    tombstones: int
    size: int  # bytes


class Snapshot:
    """A consistent state of the tables. Created in the training thread, written in any other while training continues.

    Training copies the rows it changes until they are written. `share` is how much of one core the writer may use.
    A small share does not slow down training, but writing takes longer and more rows are copied. While the copies
    need more than a fifth of the tables' own memory, the writer does not pause.
    """

    def __init__(self, tables: Tables, since: int | None, share: float) -> None:
        self._throttle = Throttle(share, self._has_many_copies)
        self._tables = tables
        self._since = -1 if since is None else since
        self.generation = tables.parts[0].generation
        """Identifies this state: a later delta is taken `since` it."""
        self._header = _header(tables, since)
        self._defaults = [table.begin_snapshot() for table in tables.parts]
        self._tombstones = [_tombstones(tables, t, since) for t in range(len(tables.parts))]
        tables.snapshot_open = True

    def write(self, path: Path) -> SnapshotFile:
        """Write the file. Not atomic: the caller renames it once it is complete."""
        rows = size = unsynced = 0
        digest = hashlib.sha256()
        try:
            with path.open("wb") as file:
                for part, count in self._parts():
                    for first in range(0, part.nbytes, _WRITE_BYTES):
                        piece = part[first : first + _WRITE_BYTES]
                        file.write(piece)
                        digest.update(piece)
                        self._throttle.pause()
                    rows += count
                    size += part.nbytes
                    unsynced += part.nbytes
                    if unsynced >= _SYNC_BYTES:  # regularly, not gigabytes at the end
                        os.fsync(file.fileno())
                        unsynced = 0
                trailer = digest.digest()
                file.write(trailer)
        finally:
            self.close()
        self._tables.digests[self.generation] = trailer.hex()
        tombstones = sum(ids.size for ids in self._tombstones)
        digest.update(trailer)
        return SnapshotFile(trailer.hex(), digest.hexdigest(), rows, tombstones, size + _DIGEST_BYTES)

    def unthrottle(self) -> None:
        """Write the rest at full speed. Any thread may call this."""
        self._throttle.disable()

    def close(self) -> None:
        """Discard the snapshot if it is not written yet; training stops copying rows for it."""
        for table in self._tables.parts:
            table.end_snapshot()
        self._tables.snapshot_open = False

    def _has_many_copies(self) -> bool:
        copied = sum(table.copy_on_write_bytes for table in self._tables.parts)
        return copied * COW_MEMORY_DIVISOR > self._tables.memory_bytes

    def _parts(self) -> Iterator[tuple[memoryview, int]]:
        """The file's bytes in order, and how many rows they hold. A part is valid until the next one is requested."""
        yield memoryview(json.dumps(self._header, sort_keys=True).encode() + b"\n"), 0
        buffer = np.zeros(0, dtype=np.uint8)
        for table, defaults, tombstones in zip(
            self._tables.parts, self._defaults, self._tombstones, strict=True
        ):
            yield _bytes(defaults), 0
            yield _bytes(np.array([tombstones.size], dtype="<u8")), 0
            yield _bytes(tombstones.astype("<u8")), 0
            for shard in range(SHARDS):
                candidates, admitted, buffer = table.copy_shard(
                    shard, self._since, self.generation, buffer, self._throttle.pause
                )
                counts = (
                    candidates.size // CandidateLayout.record.itemsize,
                    admitted.size // table.layout.record.itemsize,
                )
                yield _bytes(np.array(counts, dtype="<u8")), 0
                yield _bytes(candidates), counts[0]
                yield _bytes(admitted), counts[1]


def begin_snapshot(tables: Tables, since: int | None = None, *, share: float = 1.0) -> Snapshot:
    """Begin a snapshot between two training steps: full, or a delta since the generation of another snapshot.

    This is instant; the copying is done by `Snapshot.write`, which may run in another thread with `share` of one core.
    No batch may be in flight (found but not applied): do not find ahead before a snapshot."""
    tables.require_no_snapshot("snapshot")
    if tables.in_flight:
        raise RuntimeError(
            f"snapshot with {tables.in_flight} batches in flight, counted but not trained: apply them first"
        )
    if since is not None and since not in tables.digests:
        raise ValueError(f"no snapshot of generation {since} was written; known: {sorted(tables.digests)}")
    return Snapshot(tables, since, share)


def save_snapshot(tables: Tables, path: Path, since: int | None = None) -> SnapshotFile:
    """Begin a snapshot and write it at once."""
    return begin_snapshot(tables, since).write(path)


def load_snapshot(tables: Tables, snapshot: Path | Sequence[Path], keep: range | None = None) -> str:
    """Load a snapshot, a full one into empty tables or a delta on top of its base, and return its digest.

    A full one may be several files: the parts that shards wrote, in order. `keep` selects the inner shards to load;
    only parts with some of them are read, and default rows only with inner shard 0.

    Files are verified before a row is changed. What is loaded has generation 0: a delta since 0 holds what changed
    since the load."""
    parts = _parts(snapshot)
    wanted = range(SHARDS) if keep is None else keep
    chosen = {path: held for path, held in parts.items() if set(held) & set(wanted)}
    digests = {path: _verify(path) for path in chosen}
    headers = {path: _checked_header(path, tables, require_full=len(parts) > 1) for path in chosen}
    for path, header in headers.items():
        for rate in header["decays"]:
            for table in tables.parts:
                table.decay(float(rate))
        layouts = [(table.layout, table.ids_HS.shape[1]) for table in tables.parts]
        with_defaults = 0 in chosen[path] and 0 in wanted
        for table, stored in zip(tables.parts, _scan(path, layouts, chosen[path]), strict=True):
            if with_defaults:
                table.restore_defaults(stored.defaults_S)
            table.remove(stored.tombstones)
            _load_rows(path, table, stored, wanted)
    tables.digests = {0: _joined(list(digests.values()))}
    return tables.digests[0]


def snapshot_digest(snapshot: Path | Sequence[Path]) -> str:
    """The digest that `load_snapshot` returns, read from the files' ends without verification."""
    trailers = []
    for path in _parts(snapshot):
        with path.open("rb") as file:
            file.seek(-_DIGEST_BYTES, os.SEEK_END)
            trailers.append(file.read().hex())
    return _joined(trailers)


class SnapshotTable(NamedTuple):
    """One table of a snapshot file, and where its rows are."""

    layout: RowLayout
    defaults_S: NDArray[np.void]  # the default row of each of its slots
    tombstones: NDArray[np.uint64]  # in the order of the ids, not of the index
    shards: tuple[tuple[int, int, int], ...]  # of each inner shard: offset, candidates, then admitted ids


class SnapshotReader:
    """Reads the admitted rows of a snapshot without loading tables. The files (one, or the parts of a full snapshot in
    order) are verified when they are opened; rows are then read in pieces, so memory does not grow with them."""

    def __init__(self, snapshot: Path | Sequence[Path]) -> None:
        parts = _parts(snapshot)
        self.digest = _joined([_verify(path) for path in parts])
        headers = [_read_header(path) for path in parts]
        self.header = headers[0]
        for path, header in zip(parts, headers, strict=True):
            if header != self.header or (len(parts) > 1 and header["kind"] != "full"):
                raise ArtifactError(
                    f"{path} is not a part of the same snapshot as {next(iter(parts))}. Write the snapshot again."
                )
        self._files = [(path, tuple(_scan(path, self._layouts(), held))) for path, held in parts.items()]
        self.tables = self._files[0][1]

    def rows(self, table: int) -> Iterator[NDArray[np.void]]:
        """The records of a table's admitted ids, in ascending order of `mix(id)`."""
        record = self.tables[table].layout.record
        for path, tables in self._files:
            with path.open("rb") as file:
                for offset, candidates, admitted in tables[table].shards:
                    file.seek(offset + candidates * CandidateLayout.record.itemsize)
                    for first in range(0, admitted, _READ_ROWS):
                        yield _read(path, file, record, min(_READ_ROWS, admitted - first))

    @property
    def slots_by_table(self) -> list[list[int]]:
        """The slots of each table; as `Tables.slots_by_table`."""
        return slots_by_dim([slot["dim"] for slot in self.header["slots"]])

    def _layouts(self) -> list[tuple[RowLayout, int]]:
        slots, wide = self.header["slots"], self.header["wide_optimizer"]
        vectors = OPTIMIZERS[self.header["embedding_optimizer"]]()
        weights = None if wide is None else OPTIMIZERS[wide]()
        return [
            (RowLayout(slots[slot_numbers[0]]["dim"], vectors, weights), len(slot_numbers))
            for slot_numbers in self.slots_by_table
        ]


def _scan(path: Path, layouts: Sequence[tuple[RowLayout, int]], held: range) -> Iterator[SnapshotTable]:
    """The tables of a file that may hold the inner shards `held`, given their layouts and numbers of slots."""
    with path.open("rb") as file:
        file.readline()
        for layout, slots in layouts:
            defaults_S = _read(path, file, layout.record, slots)
            (count,) = _read(path, file, np.dtype("<u8"), 1).tolist()
            tombstones = _read(path, file, np.dtype("<u8"), count)
            shards = []
            for shard in range(SHARDS):
                candidates, admitted = _read(path, file, np.dtype("<u8"), 2).tolist()
                if candidates + admitted and shard not in held:
                    raise ArtifactError(
                        f"{path} has rows of inner shard {shard}, expected {held.start} to {held.stop - 1}: "
                        "parts of the snapshot are missing or out of order."
                    )
                shards.append((file.tell(), candidates, admitted))
                rows = candidates * CandidateLayout.record.itemsize + admitted * layout.record.itemsize
                file.seek(min(rows, path.stat().st_size), os.SEEK_CUR)  # beyond the end: the next read fails
            yield SnapshotTable(layout, defaults_S, tombstones, tuple(shards))


def read_header(path: Path) -> dict[str, Any]:
    """The header of a snapshot file, after its checksum was verified."""
    _verify(path)
    return _read_header(path)


def _parts(snapshot: Path | Sequence[Path]) -> dict[Path, range]:
    """The files of a snapshot, with the inner shards that each may hold."""
    paths = [snapshot] if isinstance(snapshot, Path) else list(snapshot)
    return {path: inner_shards(part, len(paths)) for part, path in enumerate(paths)}


def _joined(digests: Sequence[str]) -> str:
    """One digest for all parts: that of a single part unchanged."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _checked_header(path: Path, tables: Tables, *, require_full: bool) -> dict[str, Any]:
    """The header of a file, checked against the tables."""
    header = _read_header(path)
    expected = _header(tables, None)
    for key in ("slots", "embedding_optimizer", "wide_optimizer"):
        if header.get(key) != expected[key]:
            raise ArtifactError(
                f"{path} holds {key} {header.get(key)}, the model has {expected[key]}. "
                "Load it with the config it was trained with, or train from the start."
            )
    if tables.trained or (header["kind"] == "full" and tables.size):
        raise ValueError("a snapshot can be loaded only into new tables, before any training")
    if require_full and header["kind"] != "full":
        raise ArtifactError(f"{path} is a delta: only a full snapshot has parts. Load deltas one by one.")
    if header["kind"] == "delta" and header["base"] != tables.digests.get(0):
        raise ArtifactError(
            f"{path} is a delta to snapshot {header['base']}, but {tables.digests.get(0)} is loaded. "
            "Load the full snapshot first, then its deltas in order."
        )
    return header


def _load_rows(path: Path, table: Table, stored: SnapshotTable, wanted: range) -> None:
    """Restore a table's rows of the inner shards `wanted`."""
    slots = table.ids_HS.shape[1]
    with path.open("rb") as file:
        for offset, *counts in (stored.shards[shard] for shard in wanted):
            file.seek(offset)
            for count, record in zip(counts, (CandidateLayout.record, table.layout.record), strict=True):
                records = _read(path, file, record, count)
                if records.size and int(records["slot"].max()) >= slots:
                    raise ArtifactError(
                        f"{path} has slot {records['slot'].max()} of {slots}. Write the snapshot again."
                    )
                table.restore(records, candidates=record is CandidateLayout.record)


def _read(path: Path, file: IO[bytes], dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    size = count * dtype.itemsize
    payload = file.read(size) if size <= path.stat().st_size else b""
    if len(payload) != size:
        raise ArtifactError(f"{path} is truncated. Write the snapshot again.")
    return np.frombuffer(payload, dtype=dtype)


def _verify(path: Path) -> str:
    """Verify a file's checksum, and return its digest."""
    try:
        remaining = path.stat().st_size - _DIGEST_BYTES
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while remaining > 0:
                piece = file.read(min(remaining, _READ_BYTES))
                if not piece:
                    break
                digest.update(piece)
                remaining -= len(piece)
            trailer = file.read()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    if remaining != 0 or trailer != digest.digest():
        raise ArtifactError(
            f"{path} is damaged: its checksum does not match its content. "
            "Remove it and use an earlier snapshot."
        )
    return digest.hexdigest()


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        line = file.readline()
    try:
        header = json.loads(line)
    except ValueError as error:
        raise ArtifactError(f"{path} is not a snapshot of tables: {error}") from error
    found = header.get("format") if isinstance(header, dict) else None
    if found != _FORMAT:
        raise ArtifactError(
            f"{path} has format {found!r}; this release reads {_FORMAT}. Write the snapshot again."
        )
    return dict(header)


def _header(tables: Tables, since: int | None) -> dict[str, Any]:
    wide = tables.wide_optimizer
    return {
        "format": _FORMAT,
        "kind": "full" if since is None else "delta",
        "base": None if since is None else tables.digests[since],
        "slots": [{"name": slot.name, "dim": slot.dim} for slot in tables.slots],
        "embedding_optimizer": tables.embedding_optimizer.name,
        "wide_optimizer": None if wide is None else wide.name,
        "decays": [] if since is None else [rate for generation, rate in tables.decays if generation > since],
    }


def _tombstones(tables: Tables, part: int, since: int | None) -> NDArray[np.uint64]:
    evicted = [np.zeros(0, dtype=np.uint64)]
    if since is not None:
        evicted += [ids[part] for generation, ids in tables.tombstones if generation > since]
    return np.unique(np.concatenate(evicted))


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
