"""Rows on their way into a table: from a snapshot, from other tables, or only what changed since a parent.

All of it streams: what is held at a time is a piece of some ten thousand rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.snapshot import SnapshotReader
from clickline.frozen.format import Piece
from clickline.frozen.overlay import merge
from clickline.frozen.rows import PartShape, RowBlock, mixed, pack, unpack
from clickline.frozen.tables import FrozenTables

__all__ = ["difference", "merged", "snapshot_blocks", "snapshot_parts"]

_GONE_ROWS = 1 << 15  # tombstones in one block


def snapshot_parts(snapshot: SnapshotReader) -> tuple[PartShape, ...]:
    """The parts that a snapshot's tables become."""
    return tuple(
        PartShape(table.layout.dim, table.layout.wide_optimizer is not None) for table in snapshot.tables
    )


def snapshot_blocks(snapshot: Path | SnapshotReader) -> Iterator[RowBlock]:
    """The admitted rows of a snapshot; those of a delta with tombstones for the ids that were evicted since its base
    and are not back. The file is checked before the first row comes."""
    reader = SnapshotReader(snapshot) if isinstance(snapshot, Path) else snapshot
    for part, shape in enumerate(snapshot_parts(reader)):
        gone_K = reader.tables[part].tombstones.astype(np.uint64)
        gone_K = gone_K[np.argsort(mixed(gone_K))]
        mixed_K = mixed(gone_K)
        used = 0
        for records in reader.rows(part):
            stop = int(np.searchsorted(mixed_K, mixed(records["id"][-1:])[0], side="right"))
            coming, used = gone_K[used:stop], stop
            present = RowBlock(
                part,
                records["id"].astype(np.uint64),
                records["wide"].astype(np.float32) if shape.wide else None,
                records["vector"].astype(np.float32),
                np.zeros(records.size, dtype=np.bool_),
            )
            yield _with_gone(present, coming[~np.isin(coming, present.ids_N)])
        yield from _gone_blocks(part, shape, gone_K[used:])


def merged(tables: FrozenTables) -> Iterator[RowBlock]:
    """All rows of a base and its deltas: what a new base is made of."""
    _need_all_shards(tables)
    for piece in merge(tables.levels, keep_gone=False):
        yield unpack(piece.part, piece.packed_N)


def difference(parent: FrozenTables, blocks: Iterable[RowBlock]) -> Iterator[RowBlock]:
    """The delta that makes of `parent` what `blocks` hold: rows that are new or differ when they are packed as the
    parent's are, and tombstones for ids that are no longer there."""
    _need_all_shards(parent)
    old = _Rows(merge(parent.levels, keep_gone=False))
    part = 0
    for block in blocks:
        while part < block.part:
            yield from _gone_blocks(part, parent.parts[part], old.rest(part))
            part += 1
        if not block.ids_N.size:
            continue
        old_K = old.until(part, mixed(block.ids_N)[-1])
        present = block.select(~block.gone_N)
        new_N = pack(present, parent.parts[part], parent.precision)
        changed_N, gone_K = _compare(old_K, new_N)
        delta = _with_gone(present.select(changed_N), old_K["id"][gone_K].astype(np.uint64))
        if delta.ids_N.size:
            yield delta
    while part < len(parent.parts):
        yield from _gone_blocks(part, parent.parts[part], old.rest(part))
        part += 1


class _Rows:
    """Packed rows that are taken in order, up to a bound at a time."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._ahead: Piece | None = None
        self._take()

    def until(self, part: int, bound: np.uint64) -> NDArray[np.void]:
        """The rows of a part up to `mix(id)` = bound."""
        taken = []
        while self._ahead is not None and self._ahead.part == part:
            packed_N = self._ahead.packed_N
            cut = int(np.searchsorted(mixed(packed_N["id"]), bound, side="right"))
            taken.append(packed_N[:cut].copy())
            if cut < packed_N.size:
                self._ahead = self._ahead._replace(packed_N=packed_N[cut:])
                break
            self._take()
        return np.concatenate(taken) if taken else np.zeros(0, dtype=[("id", "<u8")])

    def rest(self, part: int) -> Iterator[NDArray[np.uint64]]:
        """The ids of a part that are left."""
        while self._ahead is not None and self._ahead.part == part:
            yield self._ahead.packed_N["id"].astype(np.uint64)
            self._take()

    def _take(self) -> None:
        self._ahead = next(self._pieces, None)


def _compare(old_K: NDArray[np.void], new_N: NDArray[np.void]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which new rows differ from the old ones or were not there, and which old ones are no longer there."""
    if not old_K.size:
        return np.ones(new_N.size, dtype=np.bool_), np.zeros(0, dtype=np.bool_)
    at_N = np.minimum(np.searchsorted(mixed(old_K["id"]), mixed(new_N["id"])), old_K.size - 1)
    was_N = old_K["id"][at_N] == new_N["id"]
    width = new_N.dtype.itemsize
    bytes_N, old_bytes_N = (
        rows.view(np.uint64).reshape(rows.size, width // 8) for rows in (new_N, old_K[at_N])
    )
    gone_K = np.ones(old_K.size, dtype=np.bool_)
    gone_K[at_N[was_N]] = False
    return ~(was_N & (bytes_N == old_bytes_N).all(axis=1)), gone_K


def _with_gone(block: RowBlock, gone_K: NDArray[np.uint64]) -> RowBlock:
    """The block with tombstones put in where they belong."""
    if not gone_K.size:
        return block
    rows = block.ids_N.size
    ids = np.concatenate([block.ids_N, gone_K])
    order = np.argsort(mixed(ids))
    vector = np.zeros((ids.size, block.vector_ND.shape[1]), dtype=np.float32)
    vector[:rows] = block.vector_ND
    wide = None
    if block.wide_N is not None:
        wide = np.concatenate([block.wide_N, np.zeros(gone_K.size, dtype=np.float32)])[order]
    gone = np.concatenate([block.gone_N, np.ones(gone_K.size, dtype=np.bool_)])
    return RowBlock(block.part, ids[order], wide, vector[order], gone[order])


def _gone_blocks(
    part: int, shape: PartShape, gone: NDArray[np.uint64] | Iterable[NDArray[np.uint64]]
) -> Iterator[RowBlock]:
    """Tombstones alone, in order."""
    for ids_K in [gone] if isinstance(gone, np.ndarray) else gone:
        for first in range(0, ids_K.size, _GONE_ROWS):
            ids_N = ids_K[first : first + _GONE_ROWS]
            wide_N = np.zeros(ids_N.size, dtype=np.float32) if shape.wide else None
            vector_ND = np.zeros((ids_N.size, shape.dim), dtype=np.float32)
            yield RowBlock(part, ids_N, wide_N, vector_ND, np.ones(ids_N.size, dtype=np.bool_))


def _need_all_shards(tables: FrozenTables) -> None:
    if len(tables.open_shards) != tables.shards:
        raise ValueError(f"shards {tables.open_shards} of {tables.shards} are open; all are needed")
