"""A consistent snapshot of a table while training continues: copy on write, row by row.

A snapshot starts a new generation. From then on a training batch saves a copy of each row before it first changes
it, unless the row's shard is already written. `copy_slice` merges current and saved rows into records in the
index's order. The table is locked only while one slice of a shard is copied, a few hundred microseconds, and
memory grows only by the rows that training changes in the meantime.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, SHARDS, address_of, home_of, mix, row_in, tag_in
from clickline.embedding.raw_memory import address, allocate, grown
from clickline.embedding.row_counters import COW_BLOCK_ROWS, saved_row_at
from clickline.embedding.row_layout import GENERATION, HEAD
from clickline.embedding.table_view import CopyOnWriteView, TableView
from clickline.kernel_intrinsics import Int, i64_at, prefetch, u32_at, u64_at
from clickline.numba_cache import njit

TAGS = 1 << 32  # number of different tags in a shard's index

_AHEAD = 16
_CHUNK_BLOCKS = 128


class CopyOnWriteRows:
    """Copies of rows as they were when the snapshot began, for each shard that is not written yet.

    They are stored in blocks that never move and are reused by other shards; all are freed with the last shard.
    """

    def __init__(self, stride: int) -> None:
        numbers = np.zeros((len(CopyOnWriteView._fields), SHARDS), dtype=np.int64)
        self.open_H, blocks_H, mixed_H, rows_H, self._used_H, self._capacity_H = numbers
        self.view = CopyOnWriteView(*map(address, numbers))
        self._block_bytes = COW_BLOCK_ROWS * stride
        self._lock = threading.Lock()  # several shards may reserve at once
        self._chunks: list[NDArray[np.uint8]] = []
        self._free_blocks: list[int] = []
        self._blocks: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * SHARDS
        self._mixed: list[NDArray[np.uint64]] = [np.zeros(0, dtype=np.uint64)] * SHARDS
        rows: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)] * SHARDS
        # Each of a shard's lists, and where kernels find its address.
        self._lists: list[tuple[list[NDArray[Any]], NDArray[np.int64]]] = [
            (self._blocks, blocks_H),
            (self._mixed, mixed_H),
            (rows, rows_H),
        ]

    @property
    def memory_bytes(self) -> int:
        """Memory allocated for copies, including blocks that no shard uses."""
        return len(self._chunks) * _CHUNK_BLOCKS * self._block_bytes

    @property
    def used_bytes(self) -> int:
        return self.memory_bytes - len(self._free_blocks) * self._block_bytes

    def open(self) -> None:
        self.open_H[:] = 1

    def close(self, shard: int) -> None:
        """Release a shard's copies; its rows are no longer saved."""
        self.open_H[shard] = 0
        self._free_blocks += self._blocks[shard][: int(self._capacity_H[shard]) // COW_BLOCK_ROWS].tolist()
        self._used_H[shard] = self._capacity_H[shard] = 0
        for lists, _ in self._lists:
            lists[shard] = lists[shard][:0].copy()
        if not self.open_H.any():
            self._free_blocks, self._chunks = [], []

    def reserve(self, shard: int, rows: int) -> None:
        """Make room for `rows` more copies in a shard."""
        used, room = int(self._used_H[shard]), int(self._capacity_H[shard])
        if used + rows <= room:
            return
        blocks = -(-(used + rows - room) // COW_BLOCK_ROWS)
        n_blocks = room // COW_BLOCK_ROWS
        if n_blocks + blocks > self._blocks[shard].size:
            for lists, addresses_H in self._lists:
                per_block = 1 if lists is self._blocks else COW_BLOCK_ROWS
                lists[shard] = grown(lists[shard], 2 * (n_blocks + blocks) * per_block)
                addresses_H[shard] = address(lists[shard])
        with self._lock:
            while len(self._free_blocks) < blocks:
                chunk = allocate(_CHUNK_BLOCKS * self._block_bytes)
                self._chunks.append(chunk)
                self._free_blocks += [address(chunk) + b * self._block_bytes for b in range(_CHUNK_BLOCKS)]
            taken = [self._free_blocks.pop() for _ in range(blocks)]
        self._blocks[shard][n_blocks : n_blocks + blocks] = taken
        self._capacity_H[shard] = room + blocks * COW_BLOCK_ROWS

    def order(self, shard: int, first_tag: int, last_tag: int) -> NDArray[np.int64]:
        """Numbers of a shard's copies with tags from `first_tag` to `last_tag` - 1, in the index's order."""
        mixed = self._mixed[shard][: int(self._used_H[shard])]
        tags = (mixed << np.uint64(6)) >> np.uint64(32)
        selected = np.flatnonzero((tags >= np.uint64(first_tag)) & (tags < np.uint64(last_tag)))
        return selected[np.argsort(mixed[selected])]


@njit(cache=True, nogil=True)
def _record_from(address: Int, size: Int, target: Int) -> Int:
    """Write a row as a record, which has no `generation`, and return the address of the next record."""
    source, record = u32_at(address), u32_at(target)
    words = GENERATION // 4
    for at in range(words):
        record[at] = source[at]
    for at in range(HEAD // 4, size // 4):
        record[at - 1] = source[at]
    return target + size - 4


@njit(cache=True, nogil=True)
def copy_slice(
    table: TableView,
    order: NDArray[np.int64],
    shard: Int,
    first_tag: Int,
    last_tag: Int,
    since: Int,
    generation: Int,
    target: Int,
    candidates_target: Int,
) -> tuple[int, int]:
    """Copy the shard's rows with tags from `first_tag` to `last_tag` - 1 that changed after generation `since`, as
    they were in `generation`. Returns the addresses of the next records."""
    rows = table.rows
    entries = u64_at(i64_at(table.id_index.addresses_H)[shard])
    end = i64_at(table.id_index.ends_H)[shard]
    saved = 0
    at = home_of(first_tag, i64_at(table.id_index.capacities_H)[shard])
    while at < end or saved < order.size:
        address = row = np.int64(-1)
        if at < end:
            if at + _AHEAD < end and entries[at + _AHEAD] != np.uint64(0):
                coming = address_of(rows, row_in(entries[at + _AHEAD]))
                prefetch(coming)
                prefetch(coming + 64)
            if entries[at] != np.uint64(0) and tag_in(entries[at]) >= last_tag:
                end = at  # belongs to the next slice
                continue
            if entries[at] != np.uint64(0) and tag_in(entries[at]) >= first_tag:
                row = row_in(entries[at])
                address = address_of(rows, row)
                if np.int64(u32_at(address + GENERATION)[0]) > generation:
                    address = np.int64(-1)
            if address < 0:
                at += 1
                continue
        if saved < order.size:
            saved_row = saved_row_at(table.cow, rows, shard, order[saved])
            if address < 0 or mix(u64_at(saved_row)[0]) < mix(u64_at(address)[0]):
                address = saved_row
                row = np.int64(u32_at(i64_at(table.cow.rows_H)[shard])[order[saved]])
                saved += 1
            else:
                at += 1
        else:
            at += 1
        if np.int64(u32_at(address + GENERATION)[0]) > since:
            if row >= CANDIDATE:
                candidates_target = _record_from(address, HEAD, candidates_target)
            else:
                target = _record_from(address, table.layout.size, target)
    return target, candidates_target
