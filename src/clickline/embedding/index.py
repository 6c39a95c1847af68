"""From an id to its row: one sorted hash index for each shard.

    mixed = id · odd constant      shard = its top 6 bits      tag = the next 32
    entry = tag << 32 | row + 1    0 is empty                  home = tag · capacity >> 32

Entries stand at or after their home, in ascending order of `mixed`. As home grows with the tag, the
whole array is sorted. That buys four things: a miss is known at the first larger tag; growing is one
pass from left to right over both arrays; walking the index visits ids in an order that depends on
nothing but the ids, so snapshots of equal content are equal bytes; and capacities need not be powers
of two, so every shard grows at another moment and no step waits for all of them.

Only 32 bits of the id stand in the entry; whether it is the right row, the row itself says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.arena import CHUNK_BITS, CHUNK_ROWS
from clickline.embedding.raw_memory import Whole, address, allocate, i64_at, u64_at

SHARDS = 64
NO_ROW = 0xFFFFFFFF
CANDIDATE = 1 << 31  # set in the number of a row that lies in the candidates' arena

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MAX_LOAD = 0.8
_GROWTH = 1.5
_FIRST_CAPACITY = 64
_SPARE = 64  # places beyond the capacity that are always there


class IndexView(NamedTuple):
    """The index as kernels take it: addresses of arrays with one int64 for each shard."""

    addresses_H: int
    capacities_H: int
    used_H: int
    ends_H: int  # one past the last entry: entries may stand beyond the capacity
    sizes_H: int  # places there are, those beyond the capacity included


class RowsView(NamedTuple):
    """Both arenas as kernels take them: addresses of their lists of chunks."""

    chunks: int
    stride: int
    candidate_chunks: int
    candidate_stride: int


class Index:
    """The entries of all shards, and their growth."""

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
        """Make room for so many more ids in a shard, of which `coming` are only known to come later.
        Shards may ask at the same time."""
        capacity = _grown(int(self.capacities_H[shard]), int(self.used_H[shard]) + ids + coming)
        if capacity > self.capacities_H[shard] or not has_room(self.view, shard, ids):
            self._move(shard, capacity, ids)

    def _move(self, shard: int, capacity: int, wanted: int) -> None:
        """Into a new array. An insert moves the end by at most one, so `wanted` of them stay inside."""
        overhang = max(0, int(self.ends_H[shard] - self.capacities_H[shard]))
        size = capacity + 2 * (overhang + wanted) + _SPARE
        entries = allocate(8 * size).view(np.uint64)
        self.ends_H[shard] = _spread(self.addresses_H[shard], self.ends_H[shard], address(entries), capacity)
        self.addresses_H[shard] = address(entries)
        self.capacities_H[shard] = capacity
        self.sizes_H[shard] = size
        self._entries[shard] = entries


def entries_for(ids: int) -> int:
    """Places that the shards have once so many ids came one after the other."""
    return sum(_grown(_first_capacity(shard), ids / SHARDS) + _SPARE for shard in range(SHARDS))


def _first_capacity(shard: int) -> int:
    return int(_FIRST_CAPACITY * _GROWTH ** (shard / SHARDS))


def _grown(capacity: int, ids: float) -> int:
    """The capacity after it has grown, step by step, for so many ids."""
    while ids > _MAX_LOAD * capacity:
        capacity = int(capacity * _GROWTH)
    return capacity


@njit(cache=True, nogil=True, inline="always")
def mix(id: np.uint64) -> np.uint64:
    """Spread ids that are not hashes already; a bijection."""
    return id * GOLDEN


@njit(cache=True, nogil=True, inline="always")
def shard_of(mixed: np.uint64) -> Whole:
    return np.int64(mixed >> np.uint64(58))


@njit(cache=True, nogil=True, inline="always")
def tag_of(mixed: np.uint64) -> Whole:
    return np.int64((mixed << np.uint64(6)) >> np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def home_of(tag: Whole, capacity: Whole) -> Whole:
    return (tag * capacity) >> 32


@njit(cache=True, nogil=True, inline="always")
def tag_in(entry: np.uint64) -> Whole:
    return np.int64(entry >> np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def row_in(entry: np.uint64) -> Whole:
    return np.int64(entry & np.uint64(0xFFFFFFFF)) - 1


@njit(cache=True, nogil=True, inline="always")
def address_of(rows: RowsView, row: Whole) -> Whole:
    """Where a row lies."""
    if row >= CANDIDATE:
        row -= CANDIDATE
        return (
            i64_at(rows.candidate_chunks)[row >> CHUNK_BITS]
            + (row & (CHUNK_ROWS - 1)) * rows.candidate_stride
        )
    return i64_at(rows.chunks)[row >> CHUNK_BITS] + (row & (CHUNK_ROWS - 1)) * rows.stride


@njit(cache=True, nogil=True)
def has_room(index: IndexView, shard: Whole, ids: Whole) -> bool:
    """Whether a shard can take so many more ids as it is. Each moves the end by one place at most."""
    used, capacity = i64_at(index.used_H)[shard], i64_at(index.capacities_H)[shard]
    free = i64_at(index.sizes_H)[shard] - i64_at(index.ends_H)[shard]
    return bool(used + ids <= _MAX_LOAD * capacity and ids < free)


@njit(cache=True, nogil=True)
def search(index: IndexView, rows: RowsView, shard: Whole, id: np.uint64) -> Whole:
    """Where the id's entry stands; -1 - place where it would have to stand if it is not there."""
    mixed = mix(id)
    tag = tag_of(mixed)
    entries = u64_at(i64_at(index.addresses_H)[shard])
    at = home_of(tag, i64_at(index.capacities_H)[shard])
    while True:
        entry = entries[at]
        if entry == np.uint64(0) or tag_in(entry) > tag:
            return -1 - at
        if tag_in(entry) == tag:
            found = u64_at(address_of(rows, row_in(entry)))[0]
            if found == id:
                return at
            if mix(found) > mixed:
                return -1 - at
        at += 1


@njit(cache=True, nogil=True)
def insert(index: IndexView, shard: Whole, at: Whole, id: np.uint64, row: Whole) -> None:
    """Put an entry at the place `search` named; those that stand there move up by one."""
    entries = u64_at(i64_at(index.addresses_H)[shard])
    entry = (np.uint64(tag_of(mix(id))) << np.uint64(32)) | np.uint64(row + 1)
    while entry != np.uint64(0):
        entry, entries[at] = entries[at], entry
        at += 1
    i64_at(index.used_H)[shard] += 1
    if at > i64_at(index.ends_H)[shard]:
        i64_at(index.ends_H)[shard] = at


@njit(cache=True, nogil=True)
def erase_at(index: IndexView, shard: Whole, at: Whole) -> None:
    """Take an entry out; those behind it that are not at home move down by one."""
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
def _spread(source: Whole, end: Whole, target: Whole, capacity: Whole) -> Whole:
    """Copy entries into an empty array of another capacity; the new end."""
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
