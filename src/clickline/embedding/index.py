"""The index from ids to rows: one sorted hash index per shard.

    mixed = id · odd constant      shard = its top 6 bits      tag = the next 32
    entry = tag << 32 | row + 1    0 is empty                  home = tag · capacity >> 32

Entries are at or after their home, in ascending order of `mixed`. As home grows with the tag, the whole array
is sorted. This has four advantages: a miss is known at the first larger tag; growing is one pass from left to
right over both arrays; iteration order depends only on the ids, so snapshots of equal content are equal bytes;
and capacities need not be powers of two, so shards grow at different times and no step waits for all of them.

An entry holds only 32 bits of the id; the row itself holds the full id to compare.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.arena import CHUNK_BITS, CHUNK_ROWS
from clickline.embedding.raw_memory import address, allocate
from clickline.kernel_intrinsics import Int, i64_at, u64_at
from clickline.numba_cache import njit

SHARDS = 64
NO_ROW = 0xFFFFFFFF
CANDIDATE = 1 << 31  # bit set in the number of a row in the candidates' arena

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MAX_LOAD = 0.8
_GROWTH = 1.5
_FIRST_CAPACITY = 64
_SPARE = 64  # positions that always exist beyond the capacity


class IndexView(NamedTuple):
    """The index for kernels: addresses of arrays with one int64 per shard."""

    addresses_H: int
    capacities_H: int
    used_H: int
    ends_H: int  # one past the last entry: entries may be beyond the capacity
    sizes_H: int  # allocated positions, including those beyond the capacity


class RowsView(NamedTuple):
    """Both arenas for kernels: addresses of their lists of chunks."""

    chunks: int
    stride: int
    candidate_chunks: int
    candidate_stride: int


class Index:
    """The growable index entries of all shards."""

    def __init__(self) -> None:
        numbers = np.zeros((len(IndexView._fields), SHARDS), dtype=np.int64)
        self.addresses_H, self.capacities_H, self.used_H, self.ends_H, self.sizes_H = numbers
        self.view = IndexView(*map(address, numbers))
        self._entries: list[NDArray[np.uint64]] = [np.zeros(0, dtype=np.uint64)] * SHARDS
        for shard in range(SHARDS):
            self._move(shard, _first_capacity(shard), 0)

    @property
    def size(self) -> int:
        return int(self.used_H.sum())

    @property
    def memory_bytes(self) -> int:
        return sum(entries.nbytes for entries in self._entries)

    def reserve(self, shard: int, ids: int, coming: int = 0) -> None:
        """Make room for `ids` more ids in a shard now, and size it for `coming` later ones.
        Safe to call for several shards at once."""
        capacity = _capacity_for(int(self.capacities_H[shard]), int(self.used_H[shard]) + ids + coming)
        if capacity > self.capacities_H[shard] or not has_room(self.view, shard, ids):
            self._move(shard, capacity, ids)

    def _move(self, shard: int, capacity: int, inserts: int) -> None:
        """Move a shard to a new array. An insert moves the end by at most one, so `inserts` of them fit."""
        overhang = max(0, int(self.ends_H[shard] - self.capacities_H[shard]))
        size = capacity + 2 * (overhang + inserts) + _SPARE
        entries = allocate(8 * size).view(np.uint64)
        self.ends_H[shard] = _rehash(self.addresses_H[shard], self.ends_H[shard], address(entries), capacity)
        self.addresses_H[shard] = address(entries)
        self.capacities_H[shard] = capacity
        self.sizes_H[shard] = size
        self._entries[shard] = entries


def entries_for(ids: int) -> int:
    """The allocated entries of all shards once `ids` ids were added one by one."""
    return sum(_capacity_for(_first_capacity(shard), ids / SHARDS) + _SPARE for shard in range(SHARDS))


def _first_capacity(shard: int) -> int:
    return int(_FIRST_CAPACITY * _GROWTH ** (shard / SHARDS))


def _capacity_for(capacity: int, ids: float) -> int:
    """The capacity after growing step by step for `ids` ids."""
    while ids > _MAX_LOAD * capacity:
        capacity = int(capacity * _GROWTH)
    return capacity


@njit(cache=True, nogil=True, inline="always")
def mix(id: np.uint64) -> np.uint64:
    """A bijection that spreads ids which are not hashes."""
    return id * GOLDEN


@njit(cache=True, nogil=True, inline="always")
def shard_of(mixed: np.uint64) -> Int:
    return np.int64(mixed >> np.uint64(58))


@njit(cache=True, nogil=True, inline="always")
def tag_of(mixed: np.uint64) -> Int:
    return np.int64((mixed << np.uint64(6)) >> np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def home_of(tag: Int, capacity: Int) -> Int:
    return (tag * capacity) >> 32


@njit(cache=True, nogil=True, inline="always")
def tag_in(entry: np.uint64) -> Int:
    return np.int64(entry >> np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def row_in(entry: np.uint64) -> Int:
    return np.int64(entry & np.uint64(0xFFFFFFFF)) - 1


@njit(cache=True, nogil=True, inline="always")
def address_of(rows: RowsView, row: Int) -> Int:
    """The address of a row."""
    if row >= CANDIDATE:
        row -= CANDIDATE
        return (
            i64_at(rows.candidate_chunks)[row >> CHUNK_BITS]
            + (row & (CHUNK_ROWS - 1)) * rows.candidate_stride
        )
    return i64_at(rows.chunks)[row >> CHUNK_BITS] + (row & (CHUNK_ROWS - 1)) * rows.stride


@njit(cache=True, nogil=True)
def has_room(index: IndexView, shard: Int, ids: Int) -> bool:
    """Whether a shard can take `ids` more ids without growing. Each moves the end by at most one."""
    used, capacity = i64_at(index.used_H)[shard], i64_at(index.capacities_H)[shard]
    free = i64_at(index.sizes_H)[shard] - i64_at(index.ends_H)[shard]
    return bool(used + ids <= _MAX_LOAD * capacity and ids < free)


@njit(cache=True, nogil=True)
def search(index: IndexView, rows: RowsView, shard: Int, id: np.uint64) -> Int:
    """The position of the id's entry; if it has none, -1 - the position where to insert it."""
    mixed = mix(id)
    tag = tag_of(mixed)
    entries = u64_at(i64_at(index.addresses_H)[shard])
    at = home_of(tag, i64_at(index.capacities_H)[shard])
    while True:
        entry = entries[at]
        if entry == np.uint64(0) or tag_in(entry) > tag:
            return -1 - at
        if tag_in(entry) == tag:
            row_id = u64_at(address_of(rows, row_in(entry)))[0]
            if row_id == id:
                return at
            if mix(row_id) > mixed:
                return -1 - at
        at += 1


@njit(cache=True, nogil=True)
def insert(index: IndexView, shard: Int, at: Int, id: np.uint64, row: Int) -> None:
    """Insert an entry at the position found by `search`; the following ones move up by one."""
    entries = u64_at(i64_at(index.addresses_H)[shard])
    entry = (np.uint64(tag_of(mix(id))) << np.uint64(32)) | np.uint64(row + 1)
    while entry != np.uint64(0):
        entry, entries[at] = entries[at], entry
        at += 1
    i64_at(index.used_H)[shard] += 1
    if at > i64_at(index.ends_H)[shard]:
        i64_at(index.ends_H)[shard] = at


@njit(cache=True, nogil=True)
def erase_at(index: IndexView, shard: Int, at: Int) -> None:
    """Remove an entry; following ones that are not at their home move down by one."""
    entries = u64_at(i64_at(index.addresses_H)[shard])
    capacity = i64_at(index.capacities_H)[shard]
    end = i64_at(index.ends_H)[shard]
    while at + 1 < end:
        entry = entries[at + 1]
        if entry == np.uint64(0) or home_of(tag_in(entry), capacity) == at + 1:
            break
        entries[at] = entry
        at += 1
    entries[at] = np.uint64(0)
    i64_at(index.used_H)[shard] -= 1


@njit(cache=True, nogil=True)
def _rehash(source: Int, end: Int, target: Int, capacity: Int) -> Int:
    """Copy entries into an empty array of another capacity; returns the new end."""
    old = u64_at(source)
    new = u64_at(target)
    free = 0
    for at in range(end):
        entry = old[at]
        if entry != np.uint64(0):
            home = home_of(tag_in(entry), capacity)
            if home > free:
                free = home
            new[free] = entry
            free += 1
    return free
