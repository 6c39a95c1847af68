"""A table as kernels see it: addresses of its index, its rows, its free lists and the copies of an open snapshot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, IndexView, RowsView, address_of, erase_at, row_in
from clickline.embedding.optimizers import OptimizerView
from clickline.embedding.row_layout import SLOT, RowLayoutView
from clickline.kernel_intrinsics import Int, i64_at, u32_at, u64_at
from clickline.numba_cache import njit


class FreeRows(NamedTuple):
    """The free lists for kernels: addresses of arrays with one int64 per shard."""

    addresses_H: int
    counts_H: int
    capacity_H: int


class RowInit(NamedTuple):
    """The initial values of a new row, and the admission rule."""

    seed: np.uint64
    bound: np.float32  # components start uniform in ±bound
    min_impressions: int
    admit_probability: float


class CopyOnWriteView(NamedTuple):
    """The copy-on-write rows of an open snapshot for kernels: addresses of arrays with one int64 per shard."""

    open_H: int  # 1 for shards that the snapshot has not written yet
    blocks_H: int  # addresses of the lists of a shard's blocks
    mixed_H: int  # addresses of the lists of ids, mixed
    rows_H: int  # addresses of the lists of row numbers
    used_H: int
    capacity_H: int


class TableView(NamedTuple):
    """All of a table that kernels use. Inner loops take only the part they need."""

    id_index: IndexView
    rows: RowsView
    free: FreeRows
    free_candidates: FreeRows
    cow: CopyOnWriteView
    layout: RowLayoutView
    optimizer: OptimizerView
    init: RowInit
    ids_HS: NDArray[np.int64]  # admitted ids of each shard and slot
    candidates_HS: NDArray[np.int64]


@njit(cache=True, nogil=True, inline="always")
def pop_row(free: FreeRows, shard: Int) -> Int:
    i64_at(free.counts_H)[shard] -= 1
    return np.int64(u32_at(i64_at(free.addresses_H)[shard])[i64_at(free.counts_H)[shard]])


@njit(cache=True, nogil=True, inline="always")
def push_row(free: FreeRows, shard: Int, row: Int) -> None:
    u32_at(i64_at(free.addresses_H)[shard])[i64_at(free.counts_H)[shard]] = row
    i64_at(free.counts_H)[shard] += 1


@njit(cache=True, nogil=True)
def remove_entry(table: TableView, shard: Int, at: Int) -> None:
    """Remove the id whose entry is at this position of a shard's index, and free its row."""
    row = row_in(u64_at(i64_at(table.id_index.addresses_H)[shard])[at])
    slot = np.int64(u32_at(address_of(table.rows, row) + SLOT)[0])
    erase_at(table.id_index, shard, at)
    if row >= CANDIDATE:
        push_row(table.free_candidates, shard, row - CANDIDATE)
        table.candidates_HS[shard, slot] -= 1
    else:
        push_row(table.free, shard, row)
        table.ids_HS[shard, slot] -= 1
