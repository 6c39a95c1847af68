"""Restores rows from the records of a snapshot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import (
    CANDIDATE,
    IndexView,
    RowsView,
    address_of,
    erase_at,
    insert,
    mix,
    row_in,
    search,
    shard_of,
)
from clickline.embedding.raw_memory import Int, i64_at, u32_at, u64_at
from clickline.embedding.row_counters import FreeRows, pop_row, push_row
from clickline.embedding.row_layout import GENERATION, HEAD, SLOT
from clickline.numba_cache import njit


@njit(cache=True, nogil=True)
def restore_records(
    index: IndexView,
    rows: RowsView,
    free: FreeRows,
    free_candidates: FreeRows,
    records: NDArray[np.uint32],
    size: Int,
    candidates: bool,
    ids_HS: NDArray[np.int64],
    candidates_HS: NDArray[np.int64],
) -> None:
    """Create rows from records of `size` bytes; an existing row of the same id is replaced."""
    words = (size - 4) // 4
    for first in range(0, records.size, words):
        id = np.uint64(records[first]) | (np.uint64(records[first + 1]) << np.uint64(32))
        h = shard_of(mix(id))
        at = search(index, rows, h, id)
        if at >= 0:
            _release(index, rows, free, free_candidates, h, at, ids_HS, candidates_HS)
            at = -1 - search(index, rows, h, id)
        else:
            at = -1 - at
        if candidates:
            row = pop_row(free_candidates, h) + CANDIDATE
        else:
            row = pop_row(free, h)
        address = address_of(rows, row)
        target = u32_at(address)
        for word in range(GENERATION // 4):
            target[word] = records[first + word]
        target[GENERATION // 4] = 0
        for word in range(HEAD // 4, size // 4):
            target[word] = records[first + word - 1]
        insert(index, h, at, id, row)
        slot = np.int64(u32_at(address + SLOT)[0])
        if candidates:
            candidates_HS[h, slot] += 1
        else:
            ids_HS[h, slot] += 1


@njit(cache=True, nogil=True)
def remove_ids(
    index: IndexView,
    rows: RowsView,
    free: FreeRows,
    free_candidates: FreeRows,
    ids: NDArray[np.uint64],
    ids_HS: NDArray[np.int64],
    candidates_HS: NDArray[np.int64],
) -> None:
    """Remove ids; those without a row are ignored."""
    for n in range(ids.size):
        h = shard_of(mix(ids[n]))
        at = search(index, rows, h, ids[n])
        if at >= 0:
            _release(index, rows, free, free_candidates, h, at, ids_HS, candidates_HS)


@njit(cache=True, nogil=True)
def _release(
    index: IndexView,
    rows: RowsView,
    free: FreeRows,
    free_candidates: FreeRows,
    shard: Int,
    at: Int,
    ids_HS: NDArray[np.int64],
    candidates_HS: NDArray[np.int64],
) -> None:
    row = row_in(u64_at(i64_at(index.addresses_H)[shard])[at])
    slot = np.int64(u32_at(address_of(rows, row) + SLOT)[0])
    erase_at(index, shard, at)
    if row >= CANDIDATE:
        push_row(free_candidates, shard, row - CANDIDATE)
        candidates_HS[shard, slot] -= 1
    else:
        push_row(free, shard, row)
        ids_HS[shard, slot] -= 1
