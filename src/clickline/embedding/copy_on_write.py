"""A consistent view of a table while training goes on: copy on write, row by row.

A cut marks a moment. From then on a training batch keeps a row as it was (its shadow) before it first
changes it, unless the row's shard was copied already. `copy_slice` merges rows and shadows into records
in the index's order. The table is held only while one slice of a shard is copied, some hundred
microseconds, and memory grows only by the rows that training touches meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.index import (
    CANDIDATE,
    SHARDS,
    IndexView,
    RowsView,
    address_of,
    home_of,
    mix,
    row_in,
    tag_in,
)
from clickline.embedding.raw_memory import Whole, address, allocate, i64_at, prefetch, u32_at, u64_at
from clickline.embedding.row_counters import SHADOW_BLOCK, ShadowView, shadow_at
from clickline.embedding.row_layout import HEAD, TOUCHED

TAGS = 1 << 32  # how many different tags a shard's index can hold

_AHEAD = 16
_CHUNK_BLOCKS = 128


class Shadows:
    """Rows as they were at the cut, for each shard that is not copied yet.

    They live in blocks that never move and pass from shard to shard; all are given back with the last shard.
    """

    def __init__(self, stride: int) -> None:
        numbers = np.zeros((len(ShadowView._fields), SHARDS), dtype=np.int64)
        self.open_H, self._blocks_H, self._mixed_H, self._rows_H, self._used_H, self._room_H = numbers
        self.view = ShadowView(*map(address, numbers))
        self._block_bytes = SHADOW_BLOCK * stride
        self._lock = threading.Lock()  # shards reserve at the same time
        self._chunks: list[NDArray[np.uint8]] = []
        self._free_blocks: list[int] = []
        self._blocks: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * SHARDS
        self._mixed: list[NDArray[np.uint64]] = [np.zeros(0, dtype=np.uint64)] * SHARDS
        self._rows: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)] * SHARDS

    @property
    def memory_bytes(self) -> int:
        """What is there for shadows, blocks that no shard uses included."""
        return len(self._chunks) * _CHUNK_BLOCKS * self._block_bytes

    @property
    def used_bytes(self) -> int:
        return self.memory_bytes - len(self._free_blocks) * self._block_bytes

    def open(self) -> None:
        self.open_H[:] = 1

    def close(self, shard: int) -> None:
        """Forget a shard's shadows; its rows are kept no longer."""
        self.open_H[shard] = 0
        self._free_blocks += self._blocks[shard][: int(self._room_H[shard]) // SHADOW_BLOCK].tolist()
        self._used_H[shard] = self._room_H[shard] = 0
        self._blocks[shard] = np.zeros(0, dtype=np.int64)
        self._mixed[shard] = np.zeros(0, dtype=np.uint64)
        self._rows[shard] = np.zeros(0, dtype=np.uint32)
        if not self.open_H.any():
            self._free_blocks, self._chunks = [], []

    def reserve(self, shard: int, rows: int) -> None:
        """Make room for so many more shadows in a shard."""
        used, room = int(self._used_H[shard]), int(self._room_H[shard])
        if used + rows <= room:
            return
        blocks = -(-(used + rows - room) // SHADOW_BLOCK)
        have = room // SHADOW_BLOCK
        if have + blocks > self._blocks[shard].size:
            places = 2 * (have + blocks)
            self._blocks[shard] = _wider(self._blocks[shard], places)
            self._mixed[shard] = _wider(self._mixed[shard], places * SHADOW_BLOCK)
            self._rows[shard] = _wider(self._rows[shard], places * SHADOW_BLOCK)
            self._blocks_H[shard] = address(self._blocks[shard])
            self._mixed_H[shard] = address(self._mixed[shard])
            self._rows_H[shard] = address(self._rows[shard])
        with self._lock:
            while len(self._free_blocks) < blocks:
                chunk = allocate(_CHUNK_BLOCKS * self._block_bytes)
                self._chunks.append(chunk)
                self._free_blocks += [address(chunk) + b * self._block_bytes for b in range(_CHUNK_BLOCKS)]
            taken = [self._free_blocks.pop() for _ in range(blocks)]
        self._blocks[shard][have : have + blocks] = taken
        self._room_H[shard] = room + blocks * SHADOW_BLOCK

    def order(self, shard: int, first_tag: int, last_tag: int) -> NDArray[np.int64]:
        """The shadows of a shard with tags from `first_tag` to `last_tag` - 1, in the index's order."""
        mixed = self._mixed[shard][: int(self._used_H[shard])]
        tags = (mixed << np.uint64(6)) >> np.uint64(32)
        chosen = np.flatnonzero((tags >= np.uint64(first_tag)) & (tags < np.uint64(last_tag)))
        return chosen[np.argsort(mixed[chosen])]


def _wider(array: NDArray[Any], size: int) -> NDArray[Any]:
    wider = np.zeros(size, dtype=array.dtype)
    wider[: array.size] = array
    return wider


@njit(cache=True, nogil=True)
def _record_from(address: Whole, size: Whole, target: Whole) -> Whole:
    """Write a row as a record, which leaves out `touched`; where the next record goes."""
    source, record = u32_at(address), u32_at(target)
    words = TOUCHED // 4
    for at in range(words):
        record[at] = source[at]
    for at in range(HEAD // 4, size // 4):
        record[at - 1] = source[at]
    return target + size - 4


@njit(cache=True, nogil=True)
def copy_slice(
    index: IndexView,
    rows: RowsView,
    shadow: ShadowView,
    order: NDArray[np.int64],
    shard: Whole,
    first_tag: Whole,
    last_tag: Whole,
    size: Whole,
    since: Whole,
    mark: Whole,
    target: Whole,
    candidates_target: Whole,
) -> tuple[int, int]:
    """Copy the shard's rows with tags from `first_tag` to `last_tag` - 1 that changed after `since`, as they
    were at `mark`; where the next records go."""
    entries = u64_at(i64_at(index.addresses_H)[shard])
    end = i64_at(index.ends_H)[shard]
    kept = 0
    at = home_of(first_tag, i64_at(index.capacities_H)[shard])
    while at < end or kept < order.size:
        address = row = np.int64(-1)
        if at < end:
            if at + _AHEAD < end and entries[at + _AHEAD] != np.uint64(0):
                coming = address_of(rows, row_in(entries[at + _AHEAD]))
                prefetch(coming)
                prefetch(coming + 64)
            if entries[at] != np.uint64(0) and tag_in(entries[at]) >= last_tag:
                end = at  # the next slice's
                continue
            if entries[at] != np.uint64(0) and tag_in(entries[at]) >= first_tag:
                row = row_in(entries[at])
                address = address_of(rows, row)
                if np.int64(u32_at(address + TOUCHED)[0]) > mark:
                    address = np.int64(-1)
            if address < 0:
                at += 1
                continue
        if kept < order.size:
            image = shadow_at(shadow, rows, shard, order[kept])
            if address < 0 or mix(u64_at(image)[0]) < mix(u64_at(address)[0]):
                address = image
                row = np.int64(u32_at(i64_at(shadow.rows_H)[shard])[order[kept]])
                kept += 1
            else:
                at += 1
        else:
            at += 1
        if np.int64(u32_at(address + TOUCHED)[0]) > since:
            if row >= CANDIDATE:
                candidates_target = _record_from(address, HEAD, candidates_target)
            else:
                target = _record_from(address, size, target)
    return target, candidates_target
