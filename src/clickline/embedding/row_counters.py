"""The counting step of a training batch, before any gradient: creates, counts and admits ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.admission import draw, is_admitted
from clickline.embedding.index import (
    CANDIDATE,
    NO_ROW,
    IndexView,
    RowsView,
    address_of,
    has_room,
    insert,
    mix,
    search,
)
from clickline.embedding.jagged_ids import Partitioned, find_shard, make_dedup_table
from clickline.embedding.optimizers import OptimizerView, init_state
from clickline.embedding.raw_memory import Int, f32_at, f64_at, i32_at, i64_at, prefetch, u32_at, u64_at
from clickline.embedding.row_layout import CLICKS, GENERATION, HOUR, IMPRESSIONS, SLOT, RowLayoutView
from clickline.numba_cache import njit

COW_BLOCK_ROWS = 256  # copies in one contiguous block

_AHEAD = 12


class FreeRows(NamedTuple):
    """The free lists for kernels: addresses of arrays with one int64 per shard."""

    addresses_H: int
    counts_H: int
    capacity_H: int


class RowInit(NamedTuple):
    """The initial values of a new row, and the admission rule."""

    seed: np.uint64
    bound: np.float32  # components start uniform in ±bound
    layout: RowLayoutView
    optimizer: OptimizerView
    min_impressions: int
    admit_probability: float


class BatchCounts(NamedTuple):
    """The counts that each row of a batch adds to its ids."""

    impressions_B: NDArray[np.uint32]
    clicks_B: NDArray[np.uint32]
    hours_B: NDArray[np.int32]
    slots_B: NDArray[np.uint16]  # for a batch whose rows are single ids with their slots; else empty


class CopyOnWriteView(NamedTuple):
    """The copy-on-write rows of an open snapshot for kernels: addresses of arrays with one int64 per shard."""

    open_H: int  # 1 for shards that the snapshot has not written yet
    blocks_H: int  # addresses of the lists of a shard's blocks
    mixed_H: int  # addresses of the lists of ids, mixed
    rows_H: int  # addresses of the lists of row numbers
    used_H: int
    capacity_H: int


@njit(cache=True, nogil=True, inline="always")
def pop_row(free: FreeRows, shard: Int) -> Int:
    i64_at(free.counts_H)[shard] -= 1
    return np.int64(u32_at(i64_at(free.addresses_H)[shard])[i64_at(free.counts_H)[shard]])


@njit(cache=True, nogil=True, inline="always")
def push_row(free: FreeRows, shard: Int, row: Int) -> None:
    u32_at(i64_at(free.addresses_H)[shard])[i64_at(free.counts_H)[shard]] = row
    i64_at(free.counts_H)[shard] += 1


@njit(cache=True, nogil=True)
def init_row(address: Int, id: np.uint64, init: RowInit) -> None:
    """Initialize weights and optimizer state of an admitted id, from (seed, id) alone."""
    layout = init.layout
    for at in range(layout.vector_state // 4, layout.vector // 4):
        f32_at(address)[at] = np.float32(0)
    vector = f32_at(address + layout.vector)
    for j in range(layout.dim):
        vector[j] = np.float32(2.0 * draw(init.seed, id, j + 1) - 1.0) * init.bound
    optimizer = init.optimizer
    init_state(
        optimizer.kind, vector, f32_at(address + layout.vector_state), layout.dim, f32_at(optimizer.settings)
    )
    if layout.wide >= 0:
        init_state(
            optimizer.wide_kind,
            f32_at(address + layout.wide),
            f32_at(address + layout.wide_state),
            1,
            f32_at(optimizer.wide_settings),
        )


class Scratch(NamedTuple):
    """Buffers for the counts that a batch adds to each distinct id of a shard."""

    impressions: NDArray[np.float64]
    clicks: NDArray[np.float64]
    hours: NDArray[np.int32]
    last_rows: NDArray[np.int64]
    slots: NDArray[np.uint32]


@njit(cache=True, nogil=True)
def count_batch(
    index: IndexView,
    rows: RowsView,
    free: FreeRows,
    free_candidates: FreeRows,
    init: RowInit,
    cow: CopyOnWriteView,
    generation: Int,
    first: Int,
    last: Int,
    partitioned: Partitioned,
    counts: BatchCounts,
    ids_HS: NDArray[np.int64],
    candidates_HS: NDArray[np.int64],
) -> Int:
    """Find and count the batch in the shards first … last - 1, and create missing rows. Open shards must have room
    for copies of all rows of the batch.

    Stops at the first shard without room for new rows, and returns it; `last` when all are done."""
    numbers = make_dedup_table(partitioned.starts_H1, first, last)
    size = numbers.size // 2
    scratch = Scratch(
        np.empty(size, dtype=np.float64),
        np.empty(size, dtype=np.float64),
        np.empty(size, dtype=np.int32),
        np.empty(size, dtype=np.int64),
        np.empty(size, dtype=np.uint32),
    )
    admits_all = init.min_impressions <= 1 and init.admit_probability >= 1.0
    for h in range(first, last):
        find_shard(index, rows, h, partitioned, numbers)
        distinct, missing = partitioned.distinct_H[h], partitioned.missing_H[h]
        if not has_room(index, h, missing):
            return h
        if i64_at(free.counts_H)[h] < (missing if admits_all else distinct):
            return h
        if not admits_all:
            freed = i64_at(free_candidates.counts_H)[h]
            if freed < missing or freed + distinct > i64_at(free_candidates.capacity_H)[h]:
                return h
        _count_shard(
            index, rows, free, free_candidates, init, cow, generation, h, partitioned, counts,
            scratch, ids_HS, candidates_HS, admits_all,
        )  # fmt: skip
    return last


@njit(cache=True, nogil=True)
def _count_shard(
    index: IndexView,
    rows: RowsView,
    free: FreeRows,
    free_candidates: FreeRows,
    init: RowInit,
    cow: CopyOnWriteView,
    generation: Int,
    h: Int,
    partitioned: Partitioned,
    counts: BatchCounts,
    scratch: Scratch,
    ids_HS: NDArray[np.int64],
    candidates_HS: NDArray[np.int64],
    admits_all: bool,
) -> None:
    impressions, clicks = f64_at(scratch.impressions.ctypes.data), f64_at(scratch.clicks.ctypes.data)
    hours, slots = i32_at(scratch.hours.ctypes.data), u32_at(scratch.slots.ctypes.data)
    last_rows = i64_at(scratch.last_rows.ctypes.data)
    segments_HS1, row_K = partitioned.segments_HS1, u32_at(partitioned.row_K.ctypes.data)
    distinct_K = u32_at(partitioned.distinct_K.ctypes.data)
    batch_row_K = u32_at(partitioned.batch_row_K.ctypes.data)
    distinct_ids_K = u64_at(partitioned.distinct_ids_K.ctypes.data)
    impressions_at, clicks_at = u32_at(counts.impressions_B.ctypes.data), u32_at(counts.clicks_B.ctypes.data)
    hours_at, slots_B = i32_at(counts.hours_B.ctypes.data), counts.slots_B
    has_slots = slots_B.size > 0
    distinct = partitioned.distinct_H[h]
    begin = partitioned.starts_H1[h]
    is_open = i64_at(cow.open_H)[h] != 0
    scratch.last_rows[:distinct] = -1
    for s in range(segments_HS1.shape[1] - 1):
        for k in range(segments_HS1[h, s], segments_HS1[h, s + 1]):
            d: Int = np.int64(distinct_K[k])
            batch_row = np.int64(batch_row_K[k])
            if last_rows[d] < 0:
                impressions[d] = 0.0
                clicks[d] = 0.0
                hours[d] = -1
                slots[d] = slots_B[batch_row] if has_slots else s
            elif has_slots:  # an id belongs to the first slot that has it
                slots[d] = min(slots[d], np.uint32(slots_B[batch_row]))
            if last_rows[d] != batch_row:  # an id twice in one row counts once
                last_rows[d] = batch_row
                impressions[d] += impressions_at[batch_row]
                clicks[d] += clicks_at[batch_row]
                hours[d] = max(hours[d], hours_at[batch_row])
    for d in range(distinct):
        if is_open and d + _AHEAD < distinct:
            coming = np.int64(row_K[begin + d + _AHEAD])
            if coming < CANDIDATE:  # the head is in the cache already; a copy needs the rest
                prefetch(address_of(rows, coming) + init.layout.size - 4)
        id = distinct_ids_K[begin + d]
        row: Int = np.int64(row_K[begin + d])
        slot = np.int64(slots[d])
        n_impressions, n_clicks, hour = impressions[d], clicks[d], np.int64(hours[d])
        is_new = row == NO_ROW
        at = np.int64(-1)
        if is_new:
            at = -1 - search(index, rows, h, id)
        else:
            address = address_of(rows, row)
            if is_open and u32_at(address + GENERATION)[0] < generation:
                _save_row(rows, cow, h, row, address)
            n_impressions += f64_at(address + IMPRESSIONS)[0]
            n_clicks += f64_at(address + CLICKS)[0]
            hour = max(hour, np.int64(i32_at(address + HOUR)[0]))
            slot = np.int64(u32_at(address + SLOT)[0])
        if is_new or row >= CANDIDATE:
            admitted = admits_all or is_admitted(
                init.seed, id, n_impressions, init.min_impressions, init.admit_probability
            )
            if admitted:
                if not is_new:
                    at = search(index, rows, h, id)
                    push_row(free_candidates, h, row - CANDIDATE)
                    candidates_HS[h, slot] -= 1
                row = pop_row(free, h)
                init_row(address_of(rows, row), id, init)
                ids_HS[h, slot] += 1
            elif is_new:
                row = pop_row(free_candidates, h) + CANDIDATE
                candidates_HS[h, slot] += 1
            address = address_of(rows, row)
            u64_at(address)[0] = id
            u32_at(address + SLOT)[0] = slot
            if is_new:
                insert(index, h, at, id, row)
            elif admitted:  # the entry stays and now refers to the new row
                tag = u64_at(i64_at(index.addresses_H)[h])[at] & np.uint64(0xFFFFFFFF00000000)
                u64_at(i64_at(index.addresses_H)[h])[at] = tag | np.uint64(row + 1)
            row_K[begin + d] = row
        address = address_of(rows, row)
        f64_at(address + IMPRESSIONS)[0] = n_impressions
        f64_at(address + CLICKS)[0] = n_clicks
        i32_at(address + HOUR)[0] = hour
        u32_at(address + GENERATION)[0] = generation


@njit(cache=True, nogil=True, inline="always")
def saved_row_at(cow: CopyOnWriteView, rows: RowsView, shard: Int, number: Int) -> Int:
    """The address of a shard's copy number `number`."""
    block = i64_at(i64_at(cow.blocks_H)[shard])[number // COW_BLOCK_ROWS]
    return block + (number % COW_BLOCK_ROWS) * rows.stride


@njit(cache=True, nogil=True)
def _save_row(rows: RowsView, cow: CopyOnWriteView, shard: Int, row: Int, address: Int) -> None:
    number = i64_at(cow.used_H)[shard]
    i64_at(cow.used_H)[shard] = number + 1
    u32_at(i64_at(cow.rows_H)[shard])[number] = row
    source = u64_at(address)
    u64_at(i64_at(cow.mixed_H)[shard])[number] = mix(source[0])
    target = u64_at(saved_row_at(cow, rows, shard, number))
    words = (rows.candidate_stride if row >= CANDIDATE else rows.stride) // 8
    for at in range(words):
        target[at] = source[at]
