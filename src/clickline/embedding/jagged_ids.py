"""The jagged ids of a batch, partitioned by shard and looked up, each distinct id once.

Shapes in names: S slots, B rows, N ids of the batch (slot after slot), H shards. `K` marks arrays of length N in
shard order: shard after shard, and inside a shard in the batch's order. The distinct ids of shard h start at
`starts_H1[h]`, in the order in which they first occur. So each shard can be processed independently, and the
result does not depend on the thread that did it.

Inner loops access arrays through pointers: an index that might be negative costs a check each time, which also
keeps the processor from running ahead to the next cache misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import (
    CANDIDATE,
    NO_ROW,
    SHARDS,
    IndexView,
    RowsView,
    address_of,
    home_of,
    mix,
    row_in,
    search,
    shard_of,
    tag_in,
    tag_of,
)
from clickline.embedding.table_view import TableView
from clickline.embedding.thread_pool import ThreadPool
from clickline.kernel_intrinsics import Int, i64_at, prefetch, u32_at, u64_at
from clickline.numba_cache import njit
from clickline.records import SlotIds

_GROUP = 256  # ids whose cache lines are prefetched before the first is used


class JaggedIds(NamedTuple):
    """The ids of all slots, and which row of the batch each belongs to (TorchRec: KeyedJaggedTensor)."""

    ids_N: NDArray[np.uint64]
    starts_S1: NDArray[np.int64]  # slot s has the ids from starts_S1[s] to starts_S1[s + 1]
    offsets: NDArray[np.int64]  # B + 1 positions in ids_N for each slot with several ids per row
    offsets_at_S: NDArray[np.int64]  # where a slot's offsets begin; -1: one id per row


class Partitioned(NamedTuple):
    """The ids partitioned by shard, and the row of each distinct id."""

    starts_H1: NDArray[np.int64]
    segments_HS1: NDArray[np.int64]  # where each slot's ids begin inside a shard
    ids_K: NDArray[np.uint64]
    order_K: NDArray[np.uint32]  # position in ids_N
    batch_row_K: NDArray[np.uint32]  # row of the batch
    distinct_K: NDArray[np.uint32]  # number of the distinct id, counted inside the shard
    distinct_H: NDArray[np.int64]  # number of distinct ids per shard
    missing_H: NDArray[np.int64]  # number of those without a row
    distinct_ids_K: NDArray[np.uint64]
    row_K: NDArray[np.uint32]  # row of each distinct id

    @staticmethod
    def allocate(counts_SH: NDArray[np.int64]) -> Partitioned:
        """Uninitialized arrays for a batch with `counts_SH` ids of each slot in each shard."""
        slots = counts_SH.shape[0]
        ends = np.cumsum(counts_SH.T, dtype=np.int64).reshape(SHARDS, slots)
        segments_HS1 = np.zeros((SHARDS, slots + 1), dtype=np.int64)
        segments_HS1[:, 1:] = ends
        segments_HS1[1:, 0] = ends[:-1, -1]
        starts_H1 = np.append(segments_HS1[:, 0], ends[-1, -1])
        size = int(starts_H1[-1])
        return Partitioned(
            starts_H1,
            segments_HS1,
            ids_K=np.empty(size, dtype=np.uint64),
            order_K=np.empty(size, dtype=np.uint32),
            batch_row_K=np.empty(size, dtype=np.uint32),
            distinct_K=np.empty(size, dtype=np.uint32),
            distinct_H=np.zeros(SHARDS, dtype=np.int64),
            missing_H=np.zeros(SHARDS, dtype=np.int64),
            distinct_ids_K=np.empty(size, dtype=np.uint64),
            row_K=np.empty(size, dtype=np.uint32),
        )


def to_jagged(slots: Sequence[SlotIds], rows: int) -> JaggedIds:
    """Concatenate the ids of all slots; checks the offsets."""
    sizes = [ids.ids_N.size for ids in slots]
    starts_S1 = np.cumsum([0, *sizes], dtype=np.int64)
    offsets: list[NDArray[np.int64]] = []
    offsets_at_S = np.full(len(slots), -1, dtype=np.int64)
    for s, ids in enumerate(slots):
        if ids.offsets_B1 is None:
            if ids.ids_N.size != rows:
                raise ValueError(f"slot {s} has {ids.ids_N.size} ids for {rows} rows and no offsets")
            continue
        valid = ids.offsets_B1.size == rows + 1 and ids.offsets_B1[0] == 0
        if not valid or ids.offsets_B1[-1] != ids.ids_N.size or (np.diff(ids.offsets_B1) < 0).any():
            raise ValueError(f"slot {s}: the offsets do not split {ids.ids_N.size} ids into {rows} rows")
        offsets_at_S[s] = len(offsets) * (rows + 1)
        offsets.append(ids.offsets_B1 + starts_S1[s])
    ids_N = np.concatenate([ids.ids_N for ids in slots]) if slots else np.zeros(0, dtype=np.uint64)
    joined = np.concatenate(offsets) if offsets else np.zeros(0, dtype=np.int64)
    return JaggedIds(ids_N, starts_S1, joined, offsets_at_S)


@njit(cache=True, nogil=True)
def count_shards(first: Int, last: Int, jagged: JaggedIds, counts_SH: NDArray[np.int64]) -> None:
    """Count the ids of the slots first … last - 1 in each shard."""
    ids_N, starts_S1 = jagged.ids_N, jagged.starts_S1
    for s in range(first, last):
        for n in range(starts_S1[s], starts_S1[s + 1]):
            counts_SH[s, shard_of(mix(ids_N[n]))] += 1


@njit(cache=True, nogil=True)
def partition(first: Int, last: Int, jagged: JaggedIds, partitioned: Partitioned) -> None:
    """Copy the ids of the slots first … last - 1 to the segments of their shards."""
    starts_S1 = jagged.starts_S1
    ids_N, offsets = u64_at(jagged.ids_N.ctypes.data), i64_at(jagged.offsets.ctypes.data)
    ids_K, order_K = u64_at(partitioned.ids_K.ctypes.data), u32_at(partitioned.order_K.ctypes.data)
    batch_row_K = u32_at(partitioned.batch_row_K.ctypes.data)
    buffer_H = np.empty(SHARDS, dtype=np.int64)
    next_H = i64_at(buffer_H.ctypes.data)
    for s in range(first, last):
        for h in range(SHARDS):
            next_H[h] = partitioned.segments_HS1[h, s]
        start = starts_S1[s]
        offset = jagged.offsets_at_S[s]
        batch_row = 0
        for n in range(start, starts_S1[s + 1]):
            if offset < 0:
                batch_row = n - start
            else:
                while offsets[offset + batch_row + 1] <= n:
                    batch_row += 1
            id = ids_N[n]
            h = shard_of(mix(id))
            k = next_H[h]
            next_H[h] = k + 1
            ids_K[k] = id
            order_K[k] = n
            batch_row_K[k] = batch_row
    buffer_H[0] = 0  # keeps it alive: Numba frees an array after its last use, and access by address is none


def partition_batch(thread_pool: ThreadPool, jagged: JaggedIds) -> Partitioned:
    """Partition all ids of a batch by shard."""
    slots = jagged.offsets_at_S.size
    counts_SH = np.zeros((slots, SHARDS), dtype=np.int64)
    thread_pool.parallel_for(slots, count_shards, jagged, counts_SH)
    partitioned = Partitioned.allocate(counts_SH)
    thread_pool.parallel_for(slots, partition, jagged, partitioned)
    return partitioned


@njit(cache=True, nogil=True)
def find_rows(first: Int, last: Int, table: TableView, partitioned: Partitioned) -> None:
    """Number the distinct ids of the shards first … last - 1 and look each of them up."""
    numbers = make_dedup_table(partitioned.starts_H1, first, last)
    for h in range(first, last):
        find_shard(table.id_index, table.rows, h, partitioned, numbers)


@njit(cache=True, nogil=True)
def make_dedup_table(starts_H1: NDArray[np.int64], first: Int, last: Int) -> NDArray[np.uint32]:
    """A hash table from ids to numbers, at most half full, large enough for any of these shards."""
    largest = 8
    for h in range(first, last):
        largest = max(largest, starts_H1[h + 1] - starts_H1[h])
    size = 16
    while size < 2 * largest:
        size *= 2
    return np.zeros(size, dtype=np.uint32)


@njit(cache=True, nogil=True)
def find_shard(
    index: IndexView, rows: RowsView, shard: Int, partitioned: Partitioned, numbers: NDArray[np.uint32]
) -> None:
    """Number the distinct ids of a shard and look each of them up."""
    entries, capacity = i64_at(index.addresses_H)[shard], i64_at(index.capacities_H)[shard]
    distinct = number_distinct(shard, partitioned, numbers, entries, capacity)
    begin = partitioned.starts_H1[shard]
    missing = 0
    for group in range(begin, begin + distinct, _GROUP):
        stop = min(group + _GROUP, begin + distinct)
        missing += _find_group(index, rows, shard, partitioned, group, stop)
    partitioned.missing_H[shard] = missing


@njit(cache=True, nogil=True)
def number_distinct(
    shard: Int, partitioned: Partitioned, numbers: NDArray[np.uint32], entries: Int, capacity: Int
) -> Int:
    """Number the distinct ids of a shard, through a hash table small enough for the cache, and prefetch the index's
    cache line of each: `entries` is the address of the shard's index. Returns how many there are."""
    begin, end = partitioned.starts_H1[shard], partitioned.starts_H1[shard + 1]
    size = 16
    while size < 2 * (end - begin):
        size *= 2
    numbers[:size] = 0
    mask = size - 1
    ids_K = u64_at(partitioned.ids_K.ctypes.data)
    distinct_ids_K = u64_at(partitioned.distinct_ids_K.ctypes.data)
    distinct_K, number_at = u32_at(partitioned.distinct_K.ctypes.data), u32_at(numbers.ctypes.data)
    distinct = 0
    for k in range(begin, end):
        id = ids_K[k]
        slot_at = np.int64(mix(id) >> np.uint64(24)) & mask
        while True:
            number = np.int64(number_at[slot_at])
            if number == 0:
                distinct_ids_K[begin + distinct] = id
                distinct_K[k] = distinct
                distinct += 1
                number_at[slot_at] = distinct
                prefetch(entries + 8 * home_of(tag_of(mix(id)), capacity))
                break
            if distinct_ids_K[begin + number - 1] == id:
                distinct_K[k] = number - 1
                break
            slot_at = (slot_at + 1) & mask
    partitioned.distinct_H[shard] = distinct
    return distinct


@njit(cache=True, nogil=True)
def _find_group(
    index: IndexView, rows: RowsView, shard: Int, partitioned: Partitioned, begin: Int, end: Int
) -> Int:
    """Look up some distinct ids with all their cache misses in flight at once; returns how many have no row."""
    ids_K, row_K = u64_at(partitioned.distinct_ids_K.ctypes.data), u32_at(partitioned.row_K.ctypes.data)
    capacity = i64_at(index.capacities_H)[shard]
    entries = u64_at(i64_at(index.addresses_H)[shard])
    for k in range(begin, end):
        tag = tag_of(mix(ids_K[k]))
        at = home_of(tag, capacity)
        entry = entries[at]
        while entry != np.uint64(0) and tag_in(entry) < tag:
            at += 1
            entry = entries[at]
        if entry != np.uint64(0) and tag_in(entry) == tag:
            row_K[k] = row_in(entry)
            prefetch(address_of(rows, row_in(entry)))
        else:
            row_K[k] = NO_ROW
    missing = 0
    for k in range(begin, end):
        row: Int = np.int64(row_K[k])
        if row != NO_ROW and u64_at(address_of(rows, row))[0] != ids_K[k]:
            at = search(index, rows, shard, ids_K[k])  # another id with the same tag comes first
            row_K[k] = row_in(entries[at]) if at >= 0 else NO_ROW
        missing += row_K[k] == NO_ROW
    return missing


@njit(cache=True, nogil=True)
def scatter_rows(
    first: Int,
    last: Int,
    partitioned: Partitioned,
    row_N: NDArray[np.uint32],
    defaults_H: NDArray[np.int64],
    use_defaults: bool,
) -> None:
    """Give every id of the batch its row. Ids without a vector are counted; with `use_defaults` they get the default
    row, numbered as the slot."""
    segments_HS1 = partitioned.segments_HS1
    order_K, distinct_K = u32_at(partitioned.order_K.ctypes.data), u32_at(partitioned.distinct_K.ctypes.data)
    row_K, rows_N = u32_at(partitioned.row_K.ctypes.data), u32_at(row_N.ctypes.data)
    for h in range(first, last):
        begin = partitioned.starts_H1[h]
        defaults = 0
        for s in range(segments_HS1.shape[1] - 1):
            for k in range(segments_HS1[h, s], segments_HS1[h, s + 1]):
                row: Int = np.int64(row_K[begin + np.int64(distinct_K[k])])
                if row >= CANDIDATE:  # includes NO_ROW
                    row = s if use_defaults else row
                    defaults += 1
                rows_N[order_K[k]] = row
        defaults_H[h] = defaults
