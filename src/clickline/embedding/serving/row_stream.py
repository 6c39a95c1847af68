"""Rows on their way into a table: from a snapshot, from other tables, or only what changed since a parent.

All of it streams: what is held at a time is a piece of some ten thousand rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.serving.delta_merge import merge
from clickline.embedding.serving.file_format import Piece
from clickline.embedding.serving.packed_rows import PartShape, RowBlock, mixed, pack, unpack
from clickline.embedding.serving.serving_table import FrozenTables
from clickline.embedding.snapshot import SnapshotReader

_GONE_ROWS = 1 << 15  # tombstones in one block


def snapshot_parts(snapshot: SnapshotReader) -> tuple[PartShape, ...]:
    """The parts that a snapshot's tables become."""
    return tuple(
        PartShape(table.layout.dim, table.layout.wide_optimizer is not None) for table in snapshot.tables
    )


def snapshot_blocks(snapshot: Path | Sequence[Path] | SnapshotReader) -> Iterator[RowBlock]:
    """The admitted rows of a snapshot; those of a delta with tombstones for the ids that were evicted since its base
    and are not back. The file, or the parts of a whole snapshot, are checked before the first row comes."""
    reader = snapshot if isinstance(snapshot, SnapshotReader) else SnapshotReader(snapshot)
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
        present = block.select(~block.gone_N)
        new_NW = _words(pack(present, parent.parts[part], parent.precision))
        old_KW = old.until(part, mixed(block.ids_N)[-1], new_NW.shape[1])
        changed_N, gone_K = _compare(old_KW, new_NW)
        delta = _with_gone(present.select(changed_N), old_KW[gone_K, 0])
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

    def until(self, part: int, bound: np.uint64, width: int) -> NDArray[np.uint64]:
        """The rows of a part up to `mix(id)` = bound, each as words."""
        taken = [np.zeros((0, width), dtype=np.uint64)]
        while self._ahead is not None and self._ahead.part == part:
            packed_N = self._ahead.packed_N
            cut = int(np.searchsorted(mixed(packed_N["id"]), bound, side="right"))
            taken.append(_words(packed_N[:cut]).copy())
            if cut < packed_N.size:
                self._ahead = self._ahead._replace(packed_N=packed_N[cut:])
                break
            self._take()
        return np.concatenate(taken)

    def rest(self, part: int) -> Iterator[NDArray[np.uint64]]:
        """The ids of a part that are left."""
        while self._ahead is not None and self._ahead.part == part:
            yield self._ahead.packed_N["id"].astype(np.uint64)
            self._take()

    def _take(self) -> None:
        self._ahead = next(self._pieces, None)


def _words(packed_N: NDArray[np.void]) -> NDArray[np.uint64]:
    """Records as words of 8 bytes, the id first: NumPy may drop what fills a record when it copies one."""
    return packed_N.view(np.uint64).reshape(packed_N.size, packed_N.dtype.itemsize // 8)


def _compare(
    old_KW: NDArray[np.uint64], new_NW: NDArray[np.uint64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which new rows differ from the old ones or were not there, and which old ones are no longer there."""
    gone_K = np.ones(len(old_KW), dtype=np.bool_)
    if not gone_K.size:
        return np.ones(len(new_NW), dtype=np.bool_), gone_K
    at_N = np.minimum(np.searchsorted(mixed(old_KW[:, 0]), mixed(new_NW[:, 0])), gone_K.size - 1)
    gone_K[at_N[old_KW[at_N, 0] == new_NW[:, 0]]] = False
    return (old_KW[at_N] != new_NW).any(axis=1), gone_K


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
