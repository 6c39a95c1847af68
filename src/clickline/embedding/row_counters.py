"""The counting step of a training batch, before any gradient: creates, counts and admits ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.admission import draw, is_admitted
from clickline.embedding.index import CANDIDATE, NO_ROW, RowsView, address_of, has_room, insert, mix, search
from clickline.embedding.jagged_ids import Partitioned, find_shard, make_dedup_table
from clickline.embedding.optimizers import OptimizerView, init_state
from clickline.embedding.row_layout import CLICKS, GENERATION, HOUR, IMPRESSIONS, SLOT, RowLayoutView
from clickline.embedding.table_view import CopyOnWriteView, RowInit, TableView, pop_row, push_row
from clickline.kernel_intrinsics import Int, f32_at, f64_at, i32_at, i64_at, prefetch, u32_at, u64_at
from clickline.numba_cache import njit

COW_BLOCK_ROWS = 256  # copies in one contiguous block

_AHEAD = 12


class BatchCounts(NamedTuple):
    """The counts that each row of a batch adds to its ids."""

    impressions_B: NDArray[np.uint32]
    clicks_B: NDArray[np.uint32]
    hours_B: NDArray[np.int32]
    slots_B: NDArray[np.uint16]  # for a batch whose rows are single ids with their slots; else empty


@njit(cache=True, nogil=True)
def init_row(
    address: Int, id: np.uint64, init: RowInit, layout: RowLayoutView, optimizer: OptimizerView
) -> None:
    """Initialize weights and optimizer state of an admitted id, from (seed, id) alone."""
    for at in range(layout.vector_state // 4, layout.vector // 4):
        f32_at(address)[at] = np.float32(0)
    vector = f32_at(address + layout.vector)
    for j in range(layout.dim):
        vector[j] = np.float32(2.0 * draw(init.seed, id, j + 1) - 1.0) * init.bound
    state, settings = f32_at(address + layout.vector_state), f32_at(optimizer.settings)
    init_state(optimizer.kind, vector, state, layout.dim, settings)
    if layout.wide >= 0:
        wide, wide_state = f32_at(address + layout.wide), f32_at(address + layout.wide_state)
        init_state(optimizer.wide_kind, wide, wide_state, 1, f32_at(optimizer.wide_settings))


class Scratch(NamedTuple):
    """Buffers for the counts that a batch adds to each distinct id of a shard."""

    impressions: NDArray[np.float64]
    clicks: NDArray[np.float64]
    hours: NDArray[np.int32]
    last_rows: NDArray[np.int64]
    slots: NDArray[np.uint32]


@njit(cache=True, nogil=True)
def count_batch(
    first: Int, last: Int, table: TableView, generation: Int, partitioned: Partitioned, counts: BatchCounts
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
    admits_all = table.init.min_impressions <= 1 and table.init.admit_probability >= 1.0
    for h in range(first, last):
        find_shard(table.id_index, table.rows, h, partitioned, numbers)
        distinct, missing = partitioned.distinct_H[h], partitioned.missing_H[h]
        if not has_room(table.id_index, h, missing):
            return h
        if i64_at(table.free.counts_H)[h] < (missing if admits_all else distinct):
            return h
        if not admits_all:
            freed = i64_at(table.free_candidates.counts_H)[h]
            if freed < missing or freed + distinct > i64_at(table.free_candidates.capacity_H)[h]:
                return h
        _count_shard(h, table, generation, partitioned, counts, scratch, admits_all)
    return last


@njit(cache=True, nogil=True)
def sum_counts(
    h: Int,
    partitioned: Partitioned,
    counts: BatchCounts,
    impressions: Any,
    clicks: Any,
    hours: Any,
    slots: Any,
    last_rows_D: NDArray[np.int64],
) -> None:
    """Sum what the batch adds to each distinct id of a shard, at four pointers; the hour is the latest, the slot the
    first that has the id. `last_rows_D` is scratch memory."""
    segments_HS1, last_rows = partitioned.segments_HS1, i64_at(last_rows_D.ctypes.data)
    distinct_K = u32_at(partitioned.distinct_K.ctypes.data)
    batch_row_K = u32_at(partitioned.batch_row_K.ctypes.data)
    impressions_at, clicks_at = u32_at(counts.impressions_B.ctypes.data), u32_at(counts.clicks_B.ctypes.data)
    hours_at, slots_B = i32_at(counts.hours_B.ctypes.data), counts.slots_B
    has_slots = slots_B.size > 0
    last_rows_D[: partitioned.distinct_H[h]] = -1
    for s in range(segments_HS1.shape[1] - 1):
        for k in range(segments_HS1[h, s], segments_HS1[h, s + 1]):
            d: Int = np.int64(distinct_K[k])
            batch_row = np.int64(batch_row_K[k])
            if last_rows[d] < 0:
                impressions[d] = 0
                clicks[d] = 0
                hours[d] = -1
                slots[d] = slots_B[batch_row] if has_slots else s
            elif has_slots:
                slots[d] = min(slots[d], np.uint32(slots_B[batch_row]))
            if last_rows[d] != batch_row:  # an id twice in one row counts once
                last_rows[d] = batch_row
                impressions[d] += impressions_at[batch_row]
                clicks[d] += clicks_at[batch_row]
                hours[d] = max(hours[d], hours_at[batch_row])


@njit(cache=True, nogil=True)
def _count_shard(
    h: Int,
    table: TableView,
    generation: Int,
    partitioned: Partitioned,
    counts: BatchCounts,
    scratch: Scratch,
    admits_all: bool,
) -> None:
    index, rows, init, layout = table.id_index, table.rows, table.init, table.layout
    ids_HS, candidates_HS = table.ids_HS, table.candidates_HS
    impressions, clicks = f64_at(scratch.impressions.ctypes.data), f64_at(scratch.clicks.ctypes.data)
    hours, slots = i32_at(scratch.hours.ctypes.data), u32_at(scratch.slots.ctypes.data)
    sum_counts(h, partitioned, counts, impressions, clicks, hours, slots, scratch.last_rows)
    row_K = u32_at(partitioned.row_K.ctypes.data)
    distinct_ids_K = u64_at(partitioned.distinct_ids_K.ctypes.data)
    begin, distinct = partitioned.starts_H1[h], partitioned.distinct_H[h]
    is_open = i64_at(table.cow.open_H)[h] != 0
    for d in range(distinct):
        if is_open and d + _AHEAD < distinct:
            coming = np.int64(row_K[begin + d + _AHEAD])
            if coming < CANDIDATE:  # the head is in the cache already; a copy needs the rest
                prefetch(address_of(rows, coming) + layout.size - 4)
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
                _save_row(rows, table.cow, h, row, address)
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
                    push_row(table.free_candidates, h, row - CANDIDATE)
                    candidates_HS[h, slot] -= 1
                row = pop_row(table.free, h)
                init_row(address_of(rows, row), id, init, layout, table.optimizer)
                ids_HS[h, slot] += 1
            elif is_new:
                row = pop_row(table.free_candidates, h) + CANDIDATE
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
