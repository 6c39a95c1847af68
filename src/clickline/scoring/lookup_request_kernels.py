"""Builds the lookup requests of a call, and locates the rows in their answers.

Shapes in names: N ids of the call, slot after slot; D distinct ids of it; H shards; P parts; C entries of the cache.

A request with many candidates repeats most of its ids, so each distinct id is looked up once. Answers are not copied:
pooling only needs the address of each id's row inside the answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import mix
from clickline.embedding.serving import shards_of
from clickline.kernel_intrinsics import Int, int8_at, u64_at
from clickline.numba_cache import njit

_FOUND, _USED = 1, 2


class CallBuffers(NamedTuple):
    """The working memory of one call."""

    table: NDArray[np.int32]  # hash table: index of a distinct id + 1; a power of two, at least 2 N entries
    distinct_N: NDArray[np.int32]  # index of the distinct id
    ids_D: NDArray[np.uint64]
    part_D: NDArray[np.int32]
    shard_D: NDArray[np.int64]  # -1: the row was in the cache
    rank_D: NDArray[np.int64]  # position among the keys of its shard and part
    address_D: NDArray[np.int64]  # address of the row; 0: it has none
    frames: NDArray[np.uint64]  # the requests, shard after shard
    cached: NDArray[np.uint64]  # copies of rows from the cache
    counts_HP: NDArray[np.int64]  # keys to look up
    frame_start_H: NDArray[np.int64]  # start of a shard's request, in 8-byte words


class RowCache(NamedTuple):
    """Frequently used rows of one version. An id has one entry; a used row survives one eviction attempt."""

    ids_C: NDArray[np.uint64]
    part_C: NDArray[np.int32]  # -1: empty
    state_C: NDArray[np.uint8]
    rows_CW: NDArray[np.uint64]


@njit(cache=True, nogil=True)
def build_requests(
    ids_N: NDArray[np.uint64],
    starts_S1: NDArray[np.int64],
    part_S: NDArray[np.int64],
    header_words: Int,
    call: CallBuffers,
    cache: RowCache,
) -> tuple[Int, Int]:
    """Find the distinct ids, and write the keys of those not in the cache into one request per shard; a request begins
    with `header_words` words that the caller writes. Returns the numbers of distinct ids and of cache hits."""
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
    hits = _copy_cached_rows(distinct, call, cache)
    shard_D = call.shard_D[:distinct]
    if hits == 0:
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
        call.frame_start_H[h] = end
        end += header_words
        for p in range(parts):
            starts_HP[h, p] = end
            end += call.counts_HP[h, p]
    for d in range(distinct):
        if shard_D[d] != -1:
            call.frames[starts_HP[shard_D[d], call.part_D[d]] + call.rank_D[d]] = call.ids_D[d]
    return distinct, hits


@njit(cache=True, nogil=True)
def _copy_cached_rows(distinct: Int, call: CallBuffers, cache: RowCache) -> Int:
    """Copy the rows that are in the cache; for their ids `shard_D` becomes -1."""
    capacity = cache.ids_C.size
    if capacity == 0:
        return 0
    entry_D = call.rank_D[:distinct]
    shards_of(call.ids_D[:distinct], capacity, entry_D)
    words = cache.rows_CW.shape[1]
    hits = 0
    for d in range(distinct):
        c = entry_D[d]
        call.shard_D[d] = 0
        if cache.part_C[c] == call.part_D[d] and cache.ids_C[c] == call.ids_D[d]:
            cache.state_C[c] |= np.uint8(_USED)
            call.shard_D[d] = -1
            call.address_D[d] = 0
            if cache.state_C[c] & np.uint8(_FOUND):
                # A copy: another thread may reuse the entry while this one still pools.
                for word in range(words):
                    call.cached[hits * words + word] = cache.rows_CW[c, word]
                call.address_D[d] = call.cached.ctypes.data + 8 * hits * words
            hits += 1
    return hits


@njit(cache=True, nogil=True)
def locate_rows(
    distinct: Int,
    answer_H: NDArray[np.int64],
    width_P: NDArray[np.int64],
    call: CallBuffers,
    cache: RowCache,
    address_N: NDArray[np.int64],
) -> Int:
    """Find the address of each id's row, 0 if it has none. `answer_H`: where the rows of a shard's answer begin, 0 if
    there is no answer. Returns how many of the N ids belong to a shard without an answer."""
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
    capacity = cache.ids_C.size
    entry_D = np.empty(distinct if capacity else 0, dtype=np.int64)
    if capacity:
        shards_of(call.ids_D[:distinct], capacity, entry_D)
    for d in range(distinct):
        h, p = call.shard_D[d], call.part_D[d]
        if h == -1:
            continue
        if answer_H[h] == 0:
            call.address_D[d] = 0
            call.shard_D[d] = -2
            continue
        rank = call.rank_D[d]
        found = int8_at(found_at_HP[h, p], rank) != 0
        address = rows_at_HP[h, p] + rank * width_P[p] if found else 0
        call.address_D[d] = address
        if capacity:
            _cache_row(entry_D[d], call.ids_D[d], p, address, width_P[p] // 8, cache)
    unanswered = 0
    for n in range(address_N.size):
        d = call.distinct_N[n]
        address_N[n] = call.address_D[d]
        unanswered += call.shard_D[d] == -2
    return unanswered


@njit(cache=True, nogil=True)
def _cache_row(c: Int, id: np.uint64, part: Int, address: Int, words: Int, cache: RowCache) -> None:
    if cache.part_C[c] >= 0 and cache.state_C[c] & np.uint8(_USED):
        cache.state_C[c] &= np.uint8(_FOUND)
        return
    cache.ids_C[c], cache.part_C[c] = id, part
    cache.state_C[c] = np.uint8(_FOUND if address else 0)
    if address:
        row = u64_at(address)
        for word in range(words):
            cache.rows_CW[c, word] = row[word]
