"""Restores rows from the records of a snapshot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, address_of, insert, mix, search, shard_of
from clickline.embedding.row_layout import GENERATION, HEAD, SLOT
from clickline.embedding.table_view import TableView, pop_row, remove_entry
from clickline.kernel_intrinsics import Int, u32_at
from clickline.numba_cache import njit


@njit(cache=True, nogil=True)
def restore_records(table: TableView, records: NDArray[np.uint32], size: Int, candidates: bool) -> None:
    """Create rows from records of `size` bytes; an existing row of the same id is replaced."""
    words = (size - 4) // 4
    for first in range(0, records.size, words):
        id = np.uint64(records[first]) | (np.uint64(records[first + 1]) << np.uint64(32))
        h = shard_of(mix(id))
        at = search(table.id_index, table.rows, h, id)
        if at >= 0:
            remove_entry(table, h, at)
            at = search(table.id_index, table.rows, h, id)
        if candidates:
            row = pop_row(table.free_candidates, h) + CANDIDATE
        else:
            row = pop_row(table.free, h)
        address = address_of(table.rows, row)
        target = u32_at(address)
        for word in range(GENERATION // 4):
            target[word] = records[first + word]
        target[GENERATION // 4] = 0
        for word in range(HEAD // 4, size // 4):
            target[word] = records[first + word - 1]
        insert(table.id_index, h, -1 - at, id, row)
        slot = np.int64(u32_at(address + SLOT)[0])
        if candidates:
            table.candidates_HS[h, slot] += 1
        else:
            table.ids_HS[h, slot] += 1


@njit(cache=True, nogil=True)
def remove_ids(table: TableView, ids: NDArray[np.uint64]) -> None:
    """Remove ids; those without a row are ignored."""
    for n in range(ids.size):
        h = shard_of(mix(ids[n]))
        at = search(table.id_index, table.rows, h, ids[n])
        if at >= 0:
            remove_entry(table, h, at)
