"""Streams of rows for a new serving table: from a snapshot, from a chain, or only the changes to a parent.

Only a piece of some ten thousand rows is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.serving.delta_merge import merge
from clickline.embedding.serving.file_format import PackedPiece
from clickline.embedding.serving.packed_rows import RowBlock, mix_ids, pack, unpack
from clickline.embedding.serving.serving_table import ServingTable
from clickline.embedding.snapshot import SnapshotReader
from clickline.records import PartShape

_TOMBSTONE_BLOCK_ROWS = 1 << 15  # tombstones in one block


def snapshot_parts(snapshot: SnapshotReader) -> tuple[PartShape, ...]:
    """The parts of a serving table made from a snapshot."""
    return tuple(
        PartShape(table.layout.dim, table.layout.wide_optimizer is not None) for table in snapshot.tables
    )


def snapshot_blocks(snapshot: Path | Sequence[Path] | SnapshotReader) -> Iterator[RowBlock]:
    """The admitted rows of a snapshot; for a delta also tombstones of the ids that were evicted since its base and have
    not come back. The file, or the parts of a full snapshot, are verified before the first row is read."""
    reader = snapshot if isinstance(snapshot, SnapshotReader) else SnapshotReader(snapshot)
    for part, shape in enumerate(snapshot_parts(reader)):
        removed_K = reader.tables[part].tombstones.astype(np.uint64)
        removed_K = removed_K[np.argsort(mix_ids(removed_K))]
        mixed_K = mix_ids(removed_K)
        used = 0
        for records in reader.rows(part):
            stop = int(np.searchsorted(mixed_K, mix_ids(records["id"][-1:])[0], side="right"))
            coming, used = removed_K[used:stop], stop
            present = RowBlock(
                part,
                records["id"].astype(np.uint64),
                records["wide"].astype(np.float32) if shape.wide else None,
                records["vector"].astype(np.float32),
                np.zeros(records.size, dtype=np.bool_),
            )
            yield _with_tombstones(present, coming[~np.isin(coming, present.ids_N)])
        yield from _tombstone_blocks(part, shape, [removed_K[used:]])


def merged_blocks(tables: ServingTable) -> Iterator[RowBlock]:
    """All rows of a base and its deltas, for a new base."""
    _require_all_shards(tables)
    for piece in merge(tables.levels, keep_tombstones=False):
        yield unpack(piece.part, piece.packed_N)


def delta_blocks(parent: ServingTable, blocks: Iterable[RowBlock]) -> Iterator[RowBlock]:
    """The delta from `parent` to `blocks`: rows that are new or differ when packed like the parent's, and
    tombstones for ids that no longer exist."""
    _require_all_shards(parent)
    old = _RowCursor(merge(parent.levels, keep_tombstones=False))
    part = 0
    for block in blocks:
        while part < block.part:
            yield from _tombstone_blocks(part, parent.parts[part], old.remaining_ids(part))
            part += 1
        if not block.ids_N.size:
            continue
        present = block.select(~block.tombstone_N)
        new_NW = _words(pack(present, parent.parts[part], parent.precision))
        old_KW = old.take_until(part, mix_ids(block.ids_N)[-1], new_NW.shape[1])
        changed_N, removed_K = _compare(old_KW, new_NW)
        delta = _with_tombstones(present.select(changed_N), old_KW[removed_K, 0])
        if delta.ids_N.size:
            yield delta
    while part < len(parent.parts):
        yield from _tombstone_blocks(part, parent.parts[part], old.remaining_ids(part))
        part += 1


class _RowCursor:
    """A cursor over packed rows that are consumed in order, up to a bound at a time."""

    def __init__(self, pieces: Iterator[PackedPiece]) -> None:
        self._pieces = pieces
        self._next: PackedPiece | None = None
        self._advance()

    def take_until(self, part: int, bound: np.uint64, width: int) -> NDArray[np.uint64]:
        """The rows of a part up to `mix(id)` = bound, each as words."""
        taken = [np.zeros((0, width), dtype=np.uint64)]
        while self._next is not None and self._next.part == part:
            packed_N = self._next.packed_N
            split = int(np.searchsorted(mix_ids(packed_N["id"]), bound, side="right"))
            taken.append(_words(packed_N[:split]).copy())
            if split < packed_N.size:
                self._next = self._next._replace(packed_N=packed_N[split:])
                break
            self._advance()
        return np.concatenate(taken)

    def remaining_ids(self, part: int) -> Iterator[NDArray[np.uint64]]:
        """The remaining ids of a part."""
        while self._next is not None and self._next.part == part:
            yield self._next.packed_N["id"].astype(np.uint64)
            self._advance()

    def _advance(self) -> None:
        self._next = next(self._pieces, None)


def _words(packed_N: NDArray[np.void]) -> NDArray[np.uint64]:
    """Records as 8-byte words, the id first: NumPy may drop padding when it copies records."""
    return packed_N.view(np.uint64).reshape(packed_N.size, packed_N.dtype.itemsize // 8)


def _compare(
    old_KW: NDArray[np.uint64], new_NW: NDArray[np.uint64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which new rows differ from the old ones or are added, and which old ones are removed."""
    removed_K = np.ones(len(old_KW), dtype=np.bool_)
    if not removed_K.size:
        return np.ones(len(new_NW), dtype=np.bool_), removed_K
    at_N = np.minimum(np.searchsorted(mix_ids(old_KW[:, 0]), mix_ids(new_NW[:, 0])), removed_K.size - 1)
    removed_K[at_N[old_KW[at_N, 0] == new_NW[:, 0]]] = False
    return (old_KW[at_N] != new_NW).any(axis=1), removed_K


def _with_tombstones(block: RowBlock, removed_K: NDArray[np.uint64]) -> RowBlock:
    """The block with tombstones inserted in order."""
    if not removed_K.size:
        return block
    rows = block.ids_N.size
    ids = np.concatenate([block.ids_N, removed_K])
    order = np.argsort(mix_ids(ids))
    vector = np.zeros((ids.size, block.vector_ND.shape[1]), dtype=np.float32)
    vector[:rows] = block.vector_ND
    wide = None
    if block.wide_N is not None:
        wide = np.concatenate([block.wide_N, np.zeros(removed_K.size, dtype=np.float32)])[order]
    tombstone = np.concatenate([block.tombstone_N, np.ones(removed_K.size, dtype=np.bool_)])
    return RowBlock(block.part, ids[order], wide, vector[order], tombstone[order])


def _tombstone_blocks(
    part: int, shape: PartShape, tombstones: Iterable[NDArray[np.uint64]]
) -> Iterator[RowBlock]:
    """Blocks of tombstones only, in order."""
    none = np.zeros(0, dtype=np.float32)
    empty = RowBlock(
        part,
        none.astype(np.uint64),
        none if shape.wide else None,
        none.reshape(0, shape.dim),
        none.astype(np.bool_),
    )
    for ids_K in tombstones:
        for first in range(0, ids_K.size, _TOMBSTONE_BLOCK_ROWS):
            yield _with_tombstones(empty, ids_K[first : first + _TOMBSTONE_BLOCK_ROWS])


def _require_all_shards(tables: ServingTable) -> None:
    if len(tables.open_shards) != tables.shards:
        raise ValueError(f"shards {tables.open_shards} of {tables.shards} are open; all are required")
