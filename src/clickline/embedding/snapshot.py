"""Tables as a file: whole, or what changed since an earlier snapshot.

    header     one line of JSON: format, kind, base, slots, optimizers, decays
    per table  default rows · count, ids of tombstones · for each shard: two counts, candidates, admitted
    trailer    SHA-256 of all that stands before it

Counts are little-endian u64, rows are the records of `layout.py`, in the index's order. So the same
content gives the same bytes, whatever order it was learned in, and a reader needs nothing but NumPy.

A delta holds the rows touched since its base and a tombstone for each id evicted since. Counters that
only faded are not in it: it lists the decays, and a load repeats them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import SHARDS
from clickline.embedding.layout import CandidateLayout, RowLayout
from clickline.embedding.optimizers import OPTIMIZERS
from clickline.embedding.pace import Pace
from clickline.embedding.table import Table
from clickline.embedding.tables import Tables
from clickline.errors import ArtifactError

__all__ = [
    "MOST_SHADOWS",
    "Saved",
    "Snapshot",
    "SnapshotReader",
    "SnapshotTable",
    "freeze",
    "load",
    "read_header",
    "save",
]

_FORMAT = 2  # 1 had the weights before the optimizers' state
_DIGEST_BYTES = 32
_READ_BYTES = 1 << 22
_READ_ROWS = 1 << 15
_WRITE_BYTES = 1 << 20
_SYNC_BYTES = 1 << 26
MOST_SHADOWS = 6  # of the tables' memory with their shadows: a fifth of it without them


@dataclass(frozen=True)
class Saved:
    """A snapshot that was written."""

    digest: str
    rows: int
    tombstones: int
    size: int  # bytes


class Snapshot:
    """One moment of the tables. Made in the training thread, written in any other while training goes on.

    Training keeps the rows it changes, as they were, until they are written. `share` is how much of one
    core the writing may take. A small one leaves training its pace; it also takes longer, so more rows are
    kept. While they need more than a fifth of the tables' own memory, the writer does not rest.
    """

    def __init__(self, tables: Tables, since: int | None, share: float) -> None:
        self._pace = Pace(share, self._is_crowded)
        self._tables = tables
        self._since = -1 if since is None else since
        self.mark = tables.parts[0].epoch
        """Names this moment: what a later delta is taken `since`."""
        self._header = _header(tables, since)
        self._defaults = [table.cut() for table in tables.parts]
        self._tombstones = [_tombstones(tables, t, since) for t in range(len(tables.parts))]
        tables.cut_open = True

    def write(self, path: Path) -> Saved:
        """Write the file, not atomically: who names it also decides when it is whole."""
        rows = size = unsynced = 0
        digest = hashlib.sha256()
        try:
            with path.open("wb") as file:
                for part, count in self._parts():
                    for first in range(0, part.nbytes, _WRITE_BYTES):
                        piece = part[first : first + _WRITE_BYTES]
                        file.write(piece)
                        digest.update(piece)
                        self._pace.rest()
                    rows += count
                    size += part.nbytes
                    unsynced += part.nbytes
                    if unsynced >= _SYNC_BYTES:  # now and then, not gigabytes at the end
                        os.fsync(file.fileno())
                        unsynced = 0
                file.write(digest.digest())
        finally:
            self.close()
        self._tables.digests[self.mark] = digest.hexdigest()
        tombstones = sum(ids.size for ids in self._tombstones)
        return Saved(digest.hexdigest(), rows, tombstones, size + _DIGEST_BYTES)

    def hurry(self) -> None:
        """Write the rest at full speed: somebody waits for it. Any thread may call this."""
        self._pace.hurry()

    def close(self) -> None:
        """Give up the snapshot if it was not written; training keeps no more shadows for it."""
        for table in self._tables.parts:
            table.close_cut()
        self._tables.cut_open = False

    def _is_crowded(self) -> bool:
        shadows = sum(table.shadow_bytes for table in self._tables.parts)
        return shadows * MOST_SHADOWS > self._tables.memory_bytes

    def _parts(self) -> Iterator[tuple[memoryview, int]]:
        """Bytes in the file's order, and how many rows they hold. A part is good until the next is asked for."""
        yield memoryview(json.dumps(self._header, sort_keys=True).encode() + b"\n"), 0
        room = np.zeros(0, dtype=np.uint8)
        for table, defaults, tombstones in zip(
            self._tables.parts, self._defaults, self._tombstones, strict=True
        ):
            yield _bytes(defaults), 0
            yield _bytes(np.array([tombstones.size], dtype="<u8")), 0
            yield _bytes(tombstones.astype("<u8")), 0
            for shard in range(SHARDS):
                candidates, admitted, room = table.copy_shard(
                    shard, self._since, self.mark, room, self._pace.rest
                )
                counts = (
                    candidates.size // CandidateLayout.record.itemsize,
                    admitted.size // table.layout.record.itemsize,
                )
                yield _bytes(np.array(counts, dtype="<u8")), 0
                yield _bytes(candidates), counts[0]
                yield _bytes(admitted), counts[1]


def freeze(tables: Tables, since: int | None = None, *, share: float = 1.0) -> Snapshot:
    """Cut a snapshot, between two training steps: whole, or a delta of what changed since the mark of another.

    It takes no time; the copying is done by `Snapshot.write`, which may run in another thread and takes
    `share` of one core. No batch may be found and not applied: who finds ahead leaves it out before a cut."""
    tables.refuse_while_cut("freeze")
    if tables.in_flight:
        raise RuntimeError(
            f"freeze with {tables.in_flight} batches found and not applied: they would be counted but not learned"
        )
    if since is not None and since not in tables.digests:
        raise ValueError(f"no snapshot with mark {since} was written; known: {sorted(tables.digests)}")
    return Snapshot(tables, since, share)


def save(tables: Tables, path: Path, since: int | None = None) -> Saved:
    """Freeze and write at once."""
    return freeze(tables, since).write(path)


def load(tables: Tables, path: Path) -> str:
    """Read a snapshot: a whole one into empty tables, a delta on top of the one it was taken since. Its digest.

    The file is checked before a row is touched. What is loaded has mark 0: a delta since 0 is what changed
    since the load."""
    digest = _verify(path)
    with path.open("rb") as file:
        header = _parse_header(path, file.readline())
        expected = _header(tables, None)
        for key in ("slots", "embedding_optimizer", "wide_optimizer"):
            if header.get(key) != expected[key]:
                raise ArtifactError(
                    f"{path} holds {key} {header.get(key)}, the model has {expected[key]}. "
                    "Load it with the config it was trained with, or train from the start."
                )
        if tables.trained or (header["kind"] == "full" and tables.size):
            raise ValueError("a snapshot is loaded into new tables, before any training")
        if header["kind"] == "delta" and header["base"] != tables.digests.get(0):
            raise ArtifactError(
                f"{path} is a delta of snapshot {header['base']}, but loaded is {tables.digests.get(0)}. "
                "Load the whole snapshot first, then its deltas in order."
            )
        for rate in header["decays"]:
            for table in tables.parts:
                table.decay(float(rate))
        for table in tables.parts:
            _load_table(path, file, table)
    tables.digests = {0: digest}
    return digest


class SnapshotTable(NamedTuple):
    """One table of a snapshot, as far as it is small: the rows are in `SnapshotReader.rows`."""

    layout: RowLayout
    defaults_S: NDArray[np.void]  # the default row of each of its slots
    tombstones: NDArray[np.uint64]  # in the order of the ids, not of the index


class SnapshotReader:
    """The admitted rows of a snapshot without tables to hold them. The file is checked when it is opened; then
    rows come piece by piece, so memory does not grow with them."""

    def __init__(self, path: Path) -> None:
        self.digest = _verify(path)
        self._path = path
        self._rows_at: list[list[tuple[int, int]]] = []  # for each table and shard, where and how many
        with path.open("rb") as file:
            self.header = _parse_header(path, file.readline())
            self.tables = tuple(self._read_table(file, layout, slots) for layout, slots in self._layouts())

    def rows(self, table: int) -> Iterator[NDArray[np.void]]:
        """The records of a table's admitted ids, rising in `mix(id)`."""
        record = self.tables[table].layout.record
        with self._path.open("rb") as file:
            for at, count in self._rows_at[table]:
                file.seek(at)
                for first in range(0, count, _READ_ROWS):
                    yield _read(self._path, file, record, min(_READ_ROWS, count - first))

    @property
    def members(self) -> list[list[int]]:
        """For each table, which slots it serves; as `Tables.members`."""
        dims = [slot["dim"] for slot in self.header["slots"]]
        return [[s for s, dim in enumerate(dims) if dim == wanted] for wanted in dict.fromkeys(dims)]

    def _layouts(self) -> list[tuple[RowLayout, int]]:
        slots, wide = self.header["slots"], self.header["wide_optimizer"]
        vectors = OPTIMIZERS[self.header["embedding_optimizer"]]()
        weights = None if wide is None else OPTIMIZERS[wide]()
        return [(RowLayout(slots[mine[0]]["dim"], vectors, weights), len(mine)) for mine in self.members]

    def _read_table(self, file: IO[bytes], layout: RowLayout, slots: int) -> SnapshotTable:
        defaults_S = _read(self._path, file, layout.record, slots)
        (count,) = _read(self._path, file, np.dtype("<u8"), 1)
        tombstones = _read(self._path, file, np.dtype("<u8"), int(count))
        rows_at = []
        for _ in range(SHARDS):
            candidates, admitted = _read(self._path, file, np.dtype("<u8"), 2).tolist()
            at = file.seek(candidates * CandidateLayout.record.itemsize, os.SEEK_CUR)
            rows_at.append((at, admitted))
            file.seek(admitted * layout.record.itemsize, os.SEEK_CUR)
        self._rows_at.append(rows_at)
        return SnapshotTable(layout, defaults_S, tombstones)


def read_header(path: Path) -> dict[str, Any]:
    """What a snapshot says about itself, once its bytes are known to be right."""
    _verify(path)
    with path.open("rb") as file:
        return _parse_header(path, file.readline())


def _load_table(path: Path, file: IO[bytes], table: Table) -> None:
    slots = table.ids_HS.shape[1]
    table.place_defaults(_read(path, file, table.layout.record, slots))
    (tombstones,) = _read(path, file, np.dtype("<u8"), 1)
    table.remove(_read(path, file, np.dtype("<u8"), int(tombstones)))
    for _ in range(SHARDS):
        counts = _read(path, file, np.dtype("<u8"), 2)
        for candidates, record in ((True, CandidateLayout.record), (False, table.layout.record)):
            records = _read(path, file, record, int(counts[0 if candidates else 1]))
            if records.size and int(records["slot"].max()) >= slots:
                raise ArtifactError(f"{path} names slot {records['slot'].max()} of {slots}. Make it again.")
            table.place(records, candidates=candidates)


def _read(path: Path, file: IO[bytes], dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    size = count * dtype.itemsize
    payload = file.read(size) if size <= path.stat().st_size else b""
    if len(payload) != size:
        raise ArtifactError(f"{path} ends in the middle of its rows. Make it again.")
    return np.frombuffer(payload, dtype=dtype)


def _verify(path: Path) -> str:
    """The digest of a file whose trailer is right."""
    try:
        left = path.stat().st_size - _DIGEST_BYTES
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while left > 0:
                piece = file.read(min(left, _READ_BYTES))
                if not piece:
                    break
                digest.update(piece)
                left -= len(piece)
            trailer = file.read()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    if left != 0 or trailer != digest.digest():
        raise ArtifactError(
            f"{path} is torn or was changed: its checksum does not fit its content. "
            "Remove it and use an earlier snapshot."
        )
    return digest.hexdigest()


def _parse_header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError as error:
        raise ArtifactError(f"{path} is not a snapshot of tables: {error}") from error
    found = header.get("format") if isinstance(header, dict) else None
    if found != _FORMAT:
        raise ArtifactError(f"{path} has format {found!r}; this release reads {_FORMAT}. Make it again.")
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
        "decays": [] if since is None else [rate for epoch, rate in tables.decays if epoch > since],
    }


def _tombstones(tables: Tables, part: int, since: int | None) -> NDArray[np.uint64]:
    gone = [np.zeros(0, dtype=np.uint64)]
    if since is not None:
        gone += [ids[part] for epoch, ids in tables.tombstones if epoch > since]
    return np.unique(np.concatenate(gone))


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
