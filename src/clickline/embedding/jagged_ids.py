"""A batch's ids, dealt to shards and looked up, each distinct id once.

Shapes in names: S slots, B rows, N ids of the batch (slot after slot), H shards. `K` marks arrays of N
places in the shards' order: shard after shard, and inside a shard in the batch's order. The distinct
ids of shard h stand from `starts_H1[h]` on, in the order in which they first occur. So every shard can
be worked on alone, and what comes out does not depend on who did it.

Inner loops reach arrays through pointers: an index that might be negative costs a check each time, and
with it the room in the processor to look ahead to the next cache misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
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
from clickline.embedding.raw_memory import Whole, i64_at, prefetch, u32_at, u64_at
from clickline.embedding.thread_pool import Workers
from clickline.records import SlotIds

_GROUP = 256  # ids whose cache lines are asked for before the first is used


class Bags(NamedTuple):
    """Which ids belong to which row of the batch."""

    ids_N: NDArray[np.uint64]
    starts_S1: NDArray[np.int64]  # slot s has the ids from starts_S1[s] to starts_S1[s + 1]
    offsets: NDArray[np.int64]  # B + 1 for each slot with several ids a row, counted in ids_N
    offsets_at_S: NDArray[np.int64]  # where a slot's offsets begin; -1 for one id a row


class Dealt(NamedTuple):
    """The ids in the shards' order, and what was found of each distinct one."""

    starts_H1: NDArray[np.int64]
    segments_HS1: NDArray[np.int64]  # inside a shard, where each slot's ids begin
    ids_K: NDArray[np.uint64]
    order_K: NDArray[np.uint32]  # place in ids_N
    bag_K: NDArray[np.uint32]  # row of the batch
    distinct_K: NDArray[np.uint32]  # number of the distinct id, counted inside the shard
    distinct_H: NDArray[np.int64]  # how many distinct ids a shard has
    missing_H: NDArray[np.int64]  # how many of them have no row
    distinct_ids_K: NDArray[np.uint64]
    row_K: NDArray[np.uint32]  # row of each distinct id

    @staticmethod
    def room_for(counts_SH: NDArray[np.int64]) -> Dealt:
        """Empty places for a batch that has so many ids of each slot in each shard."""
        slots = counts_SH.shape[0]
        ends = np.cumsum(counts_SH.T, dtype=np.int64).reshape(SHARDS, slots)
        segments_HS1 = np.zeros((SHARDS, slots + 1), dtype=np.int64)
        segments_HS1[:, 1:] = ends
        segments_HS1[1:, 0] = ends[:-1, -1]
        starts_H1 = np.append(segments_HS1[:, 0], ends[-1, -1])
        size = int(starts_H1[-1])
        return Dealt(
            starts_H1,
            segments_HS1,
            ids_K=np.empty(size, dtype=np.uint64),
            order_K=np.empty(size, dtype=np.uint32),
            bag_K=np.empty(size, dtype=np.uint32),
            distinct_K=np.empty(size, dtype=np.uint32),
            distinct_H=np.zeros(SHARDS, dtype=np.int64),
            missing_H=np.zeros(SHARDS, dtype=np.int64),
            distinct_ids_K=np.empty(size, dtype=np.uint64),
            row_K=np.empty(size, dtype=np.uint32),
        )


def bags_of(slots: Sequence[SlotIds], rows: int) -> Bags:
    """Many slots as one array of ids."""
    sizes = [ids.ids_N.size for ids in slots]
    starts_S1 = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
    offsets: list[NDArray[np.int64]] = []
    offsets_at_S = np.full(len(slots), -1, dtype=np.int64)
    for s, ids in enumerate(slots):
        if ids.offsets_B1 is None:
            if ids.ids_N.size != rows:
                raise ValueError(f"slot {s} has {ids.ids_N.size} ids for {rows} rows and no offsets")
            continue
        inside = ids.offsets_B1.size == rows + 1 and ids.offsets_B1[0] == 0
        if not inside or ids.offsets_B1[-1] != ids.ids_N.size or (np.diff(ids.offsets_B1) < 0).any():
            raise ValueError(f"slot {s}: the offsets do not cut {ids.ids_N.size} ids into {rows} rows")
        offsets_at_S[s] = len(offsets) * (rows + 1)
        offsets.append(ids.offsets_B1 + starts_S1[s])
    ids_N = np.concatenate([ids.ids_N for ids in slots]) if slots else np.zeros(0, dtype=np.uint64)
    joined = np.concatenate(offsets) if offsets else np.zeros(0, dtype=np.int64)
    return Bags(ids_N, starts_S1, joined, offsets_at_S)


@njit(cache=True, nogil=True)
def count_shards(bags: Bags, first: Whole, last: Whole, counts_SH: NDArray[np.int64]) -> None:
    """How many ids of the slots first … last - 1 belong to each shard."""
    ids_N, starts_S1 = bags.ids_N, bags.starts_S1
    for s in range(first, last):
        for n in range(starts_S1[s], starts_S1[s + 1]):
            counts_SH[s, shard_of(mix(ids_N[n]))] += 1


@njit(cache=True, nogil=True)
def deal(
    bags: Bags,
    first: Whole,
    last: Whole,
    dealt: Dealt,
) -> None:
    """Put the ids of the slots first … last - 1 where their shard wants them."""
    starts_S1 = bags.starts_S1
    ids_N, offsets = u64_at(bags.ids_N.ctypes.data), i64_at(bags.offsets.ctypes.data)
    ids_K, order_K = u64_at(dealt.ids_K.ctypes.data), u32_at(dealt.order_K.ctypes.data)
    bag_K = u32_at(dealt.bag_K.ctypes.data)
    room_H = np.empty(SHARDS, dtype=np.int64)
    next_H = i64_at(room_H.ctypes.data)
    for s in range(first, last):
        for h in range(SHARDS):
            next_H[h] = dealt.segments_HS1[h, s]
        start = starts_S1[s]
        offset = bags.offsets_at_S[s]
        bag = 0
        for n in range(start, starts_S1[s + 1]):
            if offset < 0:
                bag = n - start
            else:
                while offsets[offset + bag + 1] <= n:
                    bag += 1
            id = ids_N[n]
            h = shard_of(mix(id))
            k = next_H[h]
            next_H[h] = k + 1
            ids_K[k] = id
            order_K[k] = n
            bag_K[k] = bag
    room_H[0] = 0  # Numba frees an array after its last use, and reaching it by address is none


def deal_all(workers: Workers, bags: Bags) -> Dealt:
    """All ids of a batch, dealt to the shards."""
    slots = bags.offsets_at_S.size
    counts_SH = np.zeros((slots, SHARDS), dtype=np.int64)
    workers.each(slots, lambda first, last: count_shards(bags, first, last, counts_SH))
    dealt = Dealt.room_for(counts_SH)
    workers.each(slots, lambda first, last: deal(bags, first, last, dealt))
    return dealt


@njit(cache=True, nogil=True)
def find_rows(index: IndexView, rows: RowsView, first: Whole, last: Whole, dealt: Dealt) -> None:
    """Number the distinct ids of the shards first … last - 1 and look each of them up."""
    numbers = room_for_numbers(dealt.starts_H1, first, last)
    for h in range(first, last):
        find_shard(index, rows, h, dealt, numbers)


@njit(cache=True, nogil=True)
def room_for_numbers(starts_H1: NDArray[np.int64], first: Whole, last: Whole) -> NDArray[np.uint32]:
    """A small hash table, at most half full, that is large enough for each of the shards."""
    largest = 8
    for h in range(first, last):
        largest = max(largest, starts_H1[h + 1] - starts_H1[h])
    places = 16
    while places < 2 * largest:
        places *= 2
    return np.zeros(places, dtype=np.uint32)


@njit(cache=True, nogil=True)
def find_shard(
    index: IndexView, rows: RowsView, shard: Whole, dealt: Dealt, numbers: NDArray[np.uint32]
) -> None:
    """Number the distinct ids of a shard and look each of them up."""
    entries, capacity = i64_at(index.addresses_H)[shard], i64_at(index.capacities_H)[shard]
    distinct = number_distinct(shard, dealt, numbers, entries, capacity)
    begin = dealt.starts_H1[shard]
    missing = 0
    for group in range(begin, begin + distinct, _GROUP):
        stop = min(group + _GROUP, begin + distinct)
        missing += _find_group(index, rows, shard, dealt, group, stop)
    dealt.missing_H[shard] = missing


@njit(cache=True, nogil=True)
def number_distinct(
    shard: Whole, dealt: Dealt, numbers: NDArray[np.uint32], entries: Whole, capacity: Whole
) -> Whole:
    """Number the distinct ids of a shard, through a hash table small enough for the cache, and ask for the
    index's cache line of each: `entries` is the address of the shard's index."""
    begin, end = dealt.starts_H1[shard], dealt.starts_H1[shard + 1]
    places = 16
    while places < 2 * (end - begin):
        places *= 2
    numbers[:places] = 0
    mask = places - 1
    ids_K, distinct_ids_K = u64_at(dealt.ids_K.ctypes.data), u64_at(dealt.distinct_ids_K.ctypes.data)
    distinct_K, number_at = u32_at(dealt.distinct_K.ctypes.data), u32_at(numbers.ctypes.data)
    distinct = 0
    for k in range(begin, end):
        id = ids_K[k]
        place = np.int64(mix(id) >> np.uint64(24)) & mask
        while True:
            number = np.int64(number_at[place])
            if number == 0:
                distinct_ids_K[begin + distinct] = id
                distinct_K[k] = distinct
                distinct += 1
                number_at[place] = distinct
                prefetch(entries + 8 * home_of(tag_of(mix(id)), capacity))
                break
            if distinct_ids_K[begin + number - 1] == id:
                distinct_K[k] = number - 1
                break
            place = (place + 1) & mask
    dealt.distinct_H[shard] = distinct
    return distinct


@njit(cache=True, nogil=True)
def _find_group(
    index: IndexView,
    rows: RowsView,
    shard: Whole,
    dealt: Dealt,
    begin: Whole,
    end: Whole,
) -> Whole:
    """Rows of some distinct ids, with the cache misses of all under way at once; how many have none."""
    ids_K, row_K = u64_at(dealt.distinct_ids_K.ctypes.data), u32_at(dealt.row_K.ctypes.data)
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
        row: Whole = np.int64(row_K[k])
        if row != NO_ROW and u64_at(address_of(rows, row))[0] != ids_K[k]:
            at = search(index, rows, shard, ids_K[k])  # another id with the same tag stands first
            row_K[k] = row_in(entries[at]) if at >= 0 else NO_ROW
        missing += row_K[k] == NO_ROW
    return missing


@njit(cache=True, nogil=True)
def spread_rows(
    first: Whole, last: Whole, dealt: Dealt, row_N: NDArray[np.uint32], defaults_H: NDArray[np.int64]
) -> None:
    """Give every id of the batch its row; one without a vector gets the default row, whose number is the slot's."""
    segments_HS1 = dealt.segments_HS1
    order_K, distinct_K = u32_at(dealt.order_K.ctypes.data), u32_at(dealt.distinct_K.ctypes.data)
    row_K, rows_N = u32_at(dealt.row_K.ctypes.data), u32_at(row_N.ctypes.data)
    for h in range(first, last):
        begin = dealt.starts_H1[h]
        defaults = 0
        for s in range(segments_HS1.shape[1] - 1):
            for k in range(segments_HS1[h, s], segments_HS1[h, s + 1]):
                row: Whole = np.int64(row_K[begin + np.int64(distinct_K[k])])
                if row >= CANDIDATE:  # NO_ROW is one too
                    row = s
                    defaults += 1
                rows_N[order_K[k]] = row
        defaults_H[h] = defaults
