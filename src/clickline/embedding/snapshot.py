"""Tables as a file: whole, or what changed since an earlier snapshot.

    header     one line of JSON: format, kind, base, slots, optimizers, decays
    per table  default rows · count, ids of tombstones · for each shard: two counts, candidates, admitted
    trailer    SHA-256 of all that stands before it

Counts are little-endian u64, rows are the records of `row_layout.py`, in the index's order. So the same
content gives the same bytes, whatever order it was learned in, and a reader needs nothing but NumPy.

A delta holds the rows touched since its base and a tombstone for each id evicted since. Counters that
only faded are not in it: it lists the decays, and a load repeats them.

Tables in several places (sharded_tables.py) save a file each, with the rows of their inner shards; together they are
one whole snapshot. Part a of S holds what `inner_shards(a, S)` says, and the default rows of part 0 count. Parts
load into any number of places, or into one.
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
from clickline.embedding.tables import Tables, members_of
from clickline.embedding.throttle import Pace
from clickline.errors import ArtifactError

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

    digest: str  # of all that stands before the trailer: what a delta names as its base
    sha256: str  # of the whole file
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
                trailer = digest.digest()
                file.write(trailer)
        finally:
            self.close()
        self._tables.digests[self.mark] = trailer.hex()
        tombstones = sum(ids.size for ids in self._tombstones)
        digest.update(trailer)
        return Saved(trailer.hex(), digest.hexdigest(), rows, tombstones, size + _DIGEST_BYTES)

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


def load(tables: Tables, snapshot: Path | Sequence[Path], keep: range | None = None) -> str:
    """Read a snapshot: a whole one into empty tables, a delta on top of the one it was taken since. Its digest.

    A whole one may be several files, the parts that shards wrote, in their order. `keep` are the inner shards that
    are wanted; only parts that have some of them are read, and default rows only with inner shard 0.

    Files are checked before a row is touched. What is loaded has mark 0: a delta since 0 is what changed
    since the load."""
    parts = _parts(snapshot)
    wanted = range(SHARDS) if keep is None else keep
    chosen = {path: held for path, held in parts.items() if set(held) & set(wanted)}
    digests = {path: _verify(path) for path in chosen}
    headers = {path: _checked_header(path, tables, whole=len(parts) > 1) for path in chosen}
    for path, header in headers.items():
        with path.open("rb") as file:
            file.readline()
            for rate in header["decays"]:
                for table in tables.parts:
                    table.decay(float(rate))
            for table in tables.parts:
                _load_table(path, file, table, chosen[path], wanted)
    tables.digests = {0: _joined(list(digests.values()))}
    return tables.digests[0]


def snapshot_digest(snapshot: Path | Sequence[Path]) -> str:
    """What `load` returns, read from the files' ends: nothing is checked."""
    trailers = []
    for path in _parts(snapshot):
        with path.open("rb") as file:
            file.seek(-_DIGEST_BYTES, os.SEEK_END)
            trailers.append(file.read().hex())
    return _joined(trailers)


class SnapshotTable(NamedTuple):
    """One table of a snapshot, as far as it is small: the rows are in `SnapshotReader.rows`."""

    layout: RowLayout
    defaults_S: NDArray[np.void]  # the default row of each of its slots
    tombstones: NDArray[np.uint64]  # in the order of the ids, not of the index


class SnapshotReader:
    """The admitted rows of a snapshot without tables to hold them. The files, one or the parts of a whole snapshot in
    their order, are checked when they are opened; then rows come piece by piece, so memory does not grow with
    them."""

    def __init__(self, snapshot: Path | Sequence[Path]) -> None:
        parts = _parts(snapshot)
        self.digest = _joined([_verify(path) for path in parts])
        headers = [_read_header(path) for path in parts]
        self.header = headers[0]
        for path, header in zip(parts, headers, strict=True):
            if header != self.header or (len(parts) > 1 and header["kind"] != "full"):
                raise ArtifactError(
                    f"{path} is no part of the same snapshot as {next(iter(parts))}. Make it again."
                )
        self._rows_at: list[list[tuple[Path, int, int]]] = []  # by table and shard: where, and how many
        tables = [self._read_tables(path, held) for path, held in parts.items()]
        self.tables = tables[0]

    def rows(self, table: int) -> Iterator[NDArray[np.void]]:
        """The records of a table's admitted ids, rising in `mix(id)`."""
        record = self.tables[table].layout.record
        for path, at, count in self._rows_at[table]:
            with path.open("rb") as file:
                file.seek(at)
                for first in range(0, count, _READ_ROWS):
                    yield _read(path, file, record, min(_READ_ROWS, count - first))

    @property
    def members(self) -> list[list[int]]:
        """For each table, which slots it serves; as `Tables.members`."""
        return members_of([slot["dim"] for slot in self.header["slots"]])

    def _layouts(self) -> list[tuple[RowLayout, int]]:
        slots, wide = self.header["slots"], self.header["wide_optimizer"]
        vectors = OPTIMIZERS[self.header["embedding_optimizer"]]()
        weights = None if wide is None else OPTIMIZERS[wide]()
        return [(RowLayout(slots[mine[0]]["dim"], vectors, weights), len(mine)) for mine in self.members]

    def _read_tables(self, path: Path, held: range) -> tuple[SnapshotTable, ...]:
        tables = []
        with path.open("rb") as file:
            file.readline()
            for t, (layout, slots) in enumerate(self._layouts()):
                defaults_S = _read(path, file, layout.record, slots)
                (count,) = _read(path, file, np.dtype("<u8"), 1)
                tables.append(
                    SnapshotTable(layout, defaults_S, _read(path, file, np.dtype("<u8"), int(count)))
                )
                if len(self._rows_at) == t:
                    self._rows_at.append([])
                for shard in range(SHARDS):
                    candidates, admitted = _read_counts(path, file, shard, held)
                    at = file.seek(candidates * CandidateLayout.record.itemsize, os.SEEK_CUR)
                    if admitted:
                        self._rows_at[t].append((path, at, admitted))
                    file.seek(admitted * layout.record.itemsize, os.SEEK_CUR)
        return tuple(tables)


def read_header(path: Path) -> dict[str, Any]:
    """What a snapshot says about itself, once its bytes are known to be right."""
    _verify(path)
    return _read_header(path)


def _parts(snapshot: Path | Sequence[Path]) -> dict[Path, range]:
    """The files of a snapshot, each with the inner shards it may hold."""
    paths = [snapshot] if isinstance(snapshot, Path) else list(snapshot)
    return {path: inner_shards(part, len(paths)) for part, path in enumerate(paths)}


def _joined(digests: Sequence[str]) -> str:
    """One digest for all parts: that of a single one as it is."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _checked_header(path: Path, tables: Tables, *, whole: bool) -> dict[str, Any]:
    """The header of a file that fits the tables as they are."""
    header = _read_header(path)
    expected = _header(tables, None)
    for key in ("slots", "embedding_optimizer", "wide_optimizer"):
        if header.get(key) != expected[key]:
            raise ArtifactError(
                f"{path} holds {key} {header.get(key)}, the model has {expected[key]}. "
                "Load it with the config it was trained with, or train from the start."
            )
    if tables.trained or (header["kind"] == "full" and tables.size):
        raise ValueError("a snapshot is loaded into new tables, before any training")
    if whole and header["kind"] != "full":
        raise ArtifactError(f"{path} is a delta: only a whole snapshot has parts. Load deltas one by one.")
    if header["kind"] == "delta" and header["base"] != tables.digests.get(0):
        raise ArtifactError(
            f"{path} is a delta of snapshot {header['base']}, but loaded is {tables.digests.get(0)}. "
            "Load the whole snapshot first, then its deltas in order."
        )
    return header


def _load_table(path: Path, file: IO[bytes], table: Table, held: range, wanted: range) -> None:
    """Read a table's rows of the inner shards that are wanted; the file is one that may hold `held`."""
    slots = table.ids_HS.shape[1]
    defaults_S = _read(path, file, table.layout.record, slots)
    if 0 in held and 0 in wanted:
        table.place_defaults(defaults_S)
    (tombstones,) = _read(path, file, np.dtype("<u8"), 1)
    table.remove(_read(path, file, np.dtype("<u8"), int(tombstones)))
    for shard in range(SHARDS):
        counts = _read_counts(path, file, shard, held)
        for candidates, record in ((True, CandidateLayout.record), (False, table.layout.record)):
            count = counts[0 if candidates else 1]
            if shard not in wanted:
                file.seek(count * record.itemsize, os.SEEK_CUR)
                continue
            records = _read(path, file, record, count)
            if records.size and int(records["slot"].max()) >= slots:
                raise ArtifactError(f"{path} names slot {records['slot'].max()} of {slots}. Make it again.")
            table.place(records, candidates=candidates)


def _read_counts(path: Path, file: IO[bytes], shard: int, held: range) -> tuple[int, int]:
    """How many candidates and admitted ids of an inner shard follow."""
    candidates, admitted = _read(path, file, np.dtype("<u8"), 2).tolist()
    if candidates + admitted and shard not in held:
        raise ArtifactError(
            f"{path} holds rows of inner shard {shard}, where {held.start} to {held.stop - 1} are expected: "
            "the parts of the snapshot are not all given, or not in their order."
        )
    return candidates, admitted


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


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        line = file.readline()
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
