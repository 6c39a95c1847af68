"""What a call asks lookup servers for, and where the rows in their answers belong.

Shapes in names: N ids of the call, slot after slot; D distinct ids of it; H shards; P parts; C places in the cache.

A request of many candidates repeats most of its ids, so each distinct one is asked for once. Answers are not copied:
the address of each id's row inside the answer is all that pooling needs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.index import mix
from clickline.embedding.raw_memory import Whole, u64_at
from clickline.embedding.serving import shards_of
from clickline.embedding.serving.low_precision import tiny_at

_FOUND, _USED = 1, 2


class CallView(NamedTuple):
    """Memory of one call."""

    table: NDArray[np.int32]  # hash table: number of a distinct id + 1; a power of two, at least 2 N places
    distinct_N: NDArray[np.int32]  # which distinct id it is
    ids_D: NDArray[np.uint64]
    part_D: NDArray[np.int32]
    shard_D: NDArray[np.int64]  # -1: the row came out of the cache
    rank_D: NDArray[np.int64]  # place among the keys of its shard and part
    place_D: NDArray[np.int64]  # address of the row; 0: there is none
    frames: NDArray[np.uint64]  # requests, shard after shard
    hot: NDArray[np.uint64]  # rows out of the cache
    counts_HP: NDArray[np.int64]  # keys to ask for
    frame_H: NDArray[np.int64]  # where a shard's request begins, in words


class CacheView(NamedTuple):
    """Hot rows of one version. An id has one place; a row that was used is spared once when another wants it."""

    ids_C: NDArray[np.uint64]
    part_C: NDArray[np.int32]  # -1: empty
    state_C: NDArray[np.uint8]
    rows_CW: NDArray[np.uint64]


@njit(cache=True, nogil=True)
def deal(
    ids_N: NDArray[np.uint64],
    starts_S1: NDArray[np.int64],
    part_S: NDArray[np.int64],
    head: Whole,
    call: CallView,
    cache: CacheView,
) -> tuple[Whole, Whole]:
    """Find the distinct ids and write the keys of those that the cache does not have into one request a shard; a
    request begins with `head` words that the caller writes. How many are distinct, and how many came from the cache."""
    shards, parts = call.counts_HP.shape
    bits = 1
    while (1 << bits) < 2 * ids_N.size:
        bits += 1
    mask, shift = (1 << bits) - 1, np.uint64(64 - bits)
    call.table[: mask + 1] = 0
    distinct = 0
    for s in range(part_S.size):
        part = part_S[s]
        for n in range(starts_S1[s], starts_S1[s + 1]):
            id = ids_N[n]
            at = np.int64(mix(id) >> shift)
            while True:
                d = call.table[at] - 1
                if d < 0:
                    d = distinct
                    call.table[at] = d + 1
                    call.ids_D[d] = id
                    call.part_D[d] = part
                    distinct += 1
                    break
                if call.ids_D[d] == id and call.part_D[d] == part:
                    break
                at = (at + 1) & mask
            call.distinct_N[n] = d
    recalled = _recall(distinct, call, cache)
    shard_D = call.shard_D[:distinct]
    if recalled == 0:
        shards_of(call.ids_D[:distinct], shards, shard_D)
    else:
        shards_of(call.ids_D[:distinct], shards, call.rank_D[:distinct])
        for d in range(distinct):
            if shard_D[d] != -1:
                shard_D[d] = call.rank_D[d]
    call.counts_HP[:] = 0
    for d in range(distinct):
        if shard_D[d] != -1:
            call.rank_D[d] = call.counts_HP[shard_D[d], call.part_D[d]]
            call.counts_HP[shard_D[d], call.part_D[d]] += 1
    starts_HP = np.empty((shards, parts), dtype=np.int64)
    end = 0
    for h in range(shards):
        call.frame_H[h] = end
        end += head
        for p in range(parts):
            starts_HP[h, p] = end
            end += call.counts_HP[h, p]
    for d in range(distinct):
        if shard_D[d] != -1:
            call.frames[starts_HP[shard_D[d], call.part_D[d]] + call.rank_D[d]] = call.ids_D[d]
    return distinct, recalled


@njit(cache=True, nogil=True)
def _recall(distinct: Whole, call: CallView, cache: CacheView) -> Whole:
    """Copy rows that the cache has; of those ids `shard_D` becomes -1."""
    places = cache.ids_C.size
    if places == 0:
        return 0
    home_D = call.rank_D[:distinct]
    shards_of(call.ids_D[:distinct], places, home_D)
    words = cache.rows_CW.shape[1]
    recalled = 0
    for d in range(distinct):
        c = home_D[d]
        call.shard_D[d] = 0
        if cache.part_C[c] == call.part_D[d] and cache.ids_C[c] == call.ids_D[d]:
            cache.state_C[c] |= np.uint8(_USED)
            call.shard_D[d] = -1
            call.place_D[d] = 0
            if cache.state_C[c] & np.uint8(_FOUND):
                # A copy: another thread may want the place while this one still pools.
                for word in range(words):
                    call.hot[recalled * words + word] = cache.rows_CW[c, word]
                call.place_D[d] = call.hot.ctypes.data + 8 * recalled * words
            recalled += 1
    return recalled


@njit(cache=True, nogil=True)
def settle(
    distinct: Whole,
    answer_H: NDArray[np.int64],
    width_P: NDArray[np.int64],
    call: CallView,
    cache: CacheView,
    place_N: NDArray[np.int64],
) -> Whole:
    """The address of each id's row, 0 where it has none. `answer_H`: where the rows of a shard's answer begin, 0 when
    there is no answer. How many of the N ids are of a shard without one."""
    shards, parts = call.counts_HP.shape
    rows_at_HP = np.empty((shards, parts), dtype=np.int64)
    found_at_HP = np.empty((shards, parts), dtype=np.int64)
    for h in range(shards):
        end = answer_H[h]
        for p in range(parts):
            rows_at_HP[h, p] = end
            end += call.counts_HP[h, p] * width_P[p]
        for p in range(parts):
            found_at_HP[h, p] = end
            end += call.counts_HP[h, p]
    places = cache.ids_C.size
    home_D = np.empty(distinct if places else 0, dtype=np.int64)
    if places:
        shards_of(call.ids_D[:distinct], places, home_D)
    for d in range(distinct):
        h, p = call.shard_D[d], call.part_D[d]
        if h == -1:
            continue
        if answer_H[h] == 0:
            call.place_D[d] = 0
            call.shard_D[d] = -2
            continue
        rank = call.rank_D[d]
        found = tiny_at(found_at_HP[h, p], rank) != 0
        place = rows_at_HP[h, p] + rank * width_P[p] if found else 0
        call.place_D[d] = place
        if places:
            _remember(home_D[d], call.ids_D[d], p, place, width_P[p] // 8, cache)
    lost = 0
    for n in range(place_N.size):
        d = call.distinct_N[n]
        place_N[n] = call.place_D[d]
        lost += call.shard_D[d] == -2
    return lost


@njit(cache=True, nogil=True)
def _remember(c: Whole, id: np.uint64, part: Whole, place: Whole, words: Whole, cache: CacheView) -> None:
    if cache.part_C[c] >= 0 and cache.state_C[c] & np.uint8(_USED):
        cache.state_C[c] &= np.uint8(_FOUND)
        return
    cache.ids_C[c], cache.part_C[c] = id, part
    cache.state_C[c] = np.uint8(_FOUND if place else 0)
    if place:
        row = u64_at(place)
        for word in range(words):
            cache.rows_CW[c, word] = row[word]
