"""What a training batch does to the rows it finds, before any gradient: create, count, admit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
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
from clickline.embedding.jagged_ids import Dealt, find_shard, room_for_numbers
from clickline.embedding.optimizers import Learning, start_state
from clickline.embedding.raw_memory import Whole, f32_at, f64_at, i32_at, i64_at, prefetch, u32_at, u64_at
from clickline.embedding.row_layout import CLICK, HOUR, SHOW, SLOT, TOUCHED, RowPlaces

SHADOW_BLOCK = 256  # shadows that lie side by side

_AHEAD = 12


class FreeRows(NamedTuple):
    """Each shard's stack of free rows: addresses of arrays with one int64 for each shard."""

    addresses_H: int
    counts_H: int
    room_H: int


class NewRows(NamedTuple):
    """What a new row starts with, and when an id gets one."""

    seed: np.uint64
    bound: np.float32  # components start uniform between -bound and bound
    places: RowPlaces
    learning: Learning
    admit_shows: int
    admit_probability: float


class Counts(NamedTuple):
    """What each row of a batch adds to its ids."""

    show_B: NDArray[np.uint32]
    click_B: NDArray[np.uint32]
    hour_B: NDArray[np.int32]
    slot_B: NDArray[np.uint16]  # of a batch whose rows are ids with their slots; else empty


class ShadowView(NamedTuple):
    """Where rows go, as they were, before their first change since an open snapshot's cut: addresses of
    arrays with one int64 for each shard."""

    open_H: int  # 1 for the shards that the snapshot has not copied yet
    blocks_H: int  # addresses of the lists of a shard's blocks
    mixed_H: int  # addresses of the lists of ids, mixed
    rows_H: int  # addresses of the lists of row numbers
    used_H: int
    room_H: int


@njit(cache=True, nogil=True, inline="always")
def pop_row(free: FreeRows, shard: Whole) -> Whole:
    i64_at(free.counts_H)[shard] -= 1
    return np.int64(u32_at(i64_at(free.addresses_H)[shard])[i64_at(free.counts_H)[shard]])


@njit(cache=True, nogil=True, inline="always")
def push_row(free: FreeRows, shard: Whole, row: Whole) -> None:
    u32_at(i64_at(free.addresses_H)[shard])[i64_at(free.counts_H)[shard]] = row
    i64_at(free.counts_H)[shard] += 1


@njit(cache=True, nogil=True)
def fill_row(address: Whole, id: np.uint64, new: NewRows) -> None:
    """First weights and optimizer state of an admitted id, from (seed, id) alone."""
    places = new.places
    for at in range(places.vector_state // 4, places.vector // 4):
        f32_at(address)[at] = np.float32(0)
    vector = f32_at(address + places.vector)
    for j in range(places.dim):
        vector[j] = np.float32(2.0 * draw(new.seed, id, j + 1) - 1.0) * new.bound
    learning = new.learning
    start_state(
        learning.kind, vector, f32_at(address + places.vector_state), places.dim, f32_at(learning.settings)
    )
    if places.wide >= 0:
        start_state(
            learning.wide_kind,
            f32_at(address + places.wide),
            f32_at(address + places.wide_state),
            1,
            f32_at(learning.wide_settings),
        )


class Scratch(NamedTuple):
    """What a batch adds to each distinct id of a shard."""

    shows: NDArray[np.float64]
    clicks: NDArray[np.float64]
    hours: NDArray[np.int32]
    bags: NDArray[np.int64]
    slots: NDArray[np.uint32]


@njit(cache=True, nogil=True)
def count_batch(
    index: IndexView,
    rows: RowsView,
    free: FreeRows,
    free_candidates: FreeRows,
    new: NewRows,
    shadow: ShadowView,
    epoch: Whole,
    first: Whole,
    last: Whole,
    dealt: Dealt,
    counts: Counts,
    ids_HS: NDArray[np.int64],
    candidates_HS: NDArray[np.int64],
) -> Whole:
    """Find and count the batch in the shards first … last - 1, and make the rows that are missing. Open
    shards have room for the shadows of all the batch's ids.

    Stops at a shard without room for them, and returns it; `last` when all is done."""
    numbers = room_for_numbers(dealt.starts_H1, first, last)
    size = numbers.size // 2
    scratch = Scratch(
        np.empty(size, dtype=np.float64),
        np.empty(size, dtype=np.float64),
        np.empty(size, dtype=np.int32),
        np.empty(size, dtype=np.int64),
        np.empty(size, dtype=np.uint32),
    )
    admits_all = new.admit_shows <= 1 and new.admit_probability >= 1.0
    for h in range(first, last):
        find_shard(index, rows, h, dealt, numbers)
        distinct, missing = dealt.distinct_H[h], dealt.missing_H[h]
        if not has_room(index, h, missing):
            return h
        if i64_at(free.counts_H)[h] < (missing if admits_all else distinct):
            return h
        if not admits_all:
            freed = i64_at(free_candidates.counts_H)[h]
            if freed < missing or freed + distinct > i64_at(free_candidates.room_H)[h]:
                return h
        _count_shard(
            index, rows, free, free_candidates, new, shadow, epoch, h, dealt, counts,
            scratch, ids_HS, candidates_HS, admits_all,
        )  # fmt: skip
    return last


@njit(cache=True, nogil=True)
def _count_shard(
    index: IndexView,
    rows: RowsView,
    free: FreeRows,
    free_candidates: FreeRows,
    new: NewRows,
    shadow: ShadowView,
    epoch: Whole,
    h: Whole,
    dealt: Dealt,
    counts: Counts,
    scratch: Scratch,
    ids_HS: NDArray[np.int64],
    candidates_HS: NDArray[np.int64],
    admits_all: bool,
) -> None:
    shows, clicks = f64_at(scratch.shows.ctypes.data), f64_at(scratch.clicks.ctypes.data)
    hours, slots = i32_at(scratch.hours.ctypes.data), u32_at(scratch.slots.ctypes.data)
    bags = i64_at(scratch.bags.ctypes.data)
    segments_HS1, row_K = dealt.segments_HS1, u32_at(dealt.row_K.ctypes.data)
    distinct_K, bag_K = u32_at(dealt.distinct_K.ctypes.data), u32_at(dealt.bag_K.ctypes.data)
    distinct_ids_K = u64_at(dealt.distinct_ids_K.ctypes.data)
    show_at, click_at = u32_at(counts.show_B.ctypes.data), u32_at(counts.click_B.ctypes.data)
    hour_at, slot_B = i32_at(counts.hour_B.ctypes.data), counts.slot_B
    has_slots = slot_B.size > 0
    distinct = dealt.distinct_H[h]
    begin = dealt.starts_H1[h]
    is_open = i64_at(shadow.open_H)[h] != 0
    scratch.bags[:distinct] = -1
    for s in range(segments_HS1.shape[1] - 1):
        for k in range(segments_HS1[h, s], segments_HS1[h, s + 1]):
            d: Whole = np.int64(distinct_K[k])
            bag = np.int64(bag_K[k])
            if bags[d] < 0:
                shows[d] = 0.0
                clicks[d] = 0.0
                hours[d] = -1
                slots[d] = slot_B[bag] if has_slots else s
            elif has_slots:  # the first slot that has the id is the one it belongs to
                slots[d] = min(slots[d], np.uint32(slot_B[bag]))
            if bags[d] != bag:  # an id twice in one row is shown once
                bags[d] = bag
                shows[d] += show_at[bag]
                clicks[d] += click_at[bag]
                hours[d] = max(hours[d], hour_at[bag])
    for d in range(distinct):
        if is_open and d + _AHEAD < distinct:
            coming = np.int64(row_K[begin + d + _AHEAD])
            if coming < CANDIDATE:  # the head is here since it was found; a shadow needs the rest
                prefetch(address_of(rows, coming) + new.places.size - 4)
        id = distinct_ids_K[begin + d]
        row: Whole = np.int64(row_K[begin + d])
        slot = np.int64(slots[d])
        show, click, hour = shows[d], clicks[d], np.int64(hours[d])
        is_new = row == NO_ROW
        at = np.int64(-1)
        if is_new:
            at = -1 - search(index, rows, h, id)
        else:
            address = address_of(rows, row)
            if is_open and u32_at(address + TOUCHED)[0] < epoch:
                _keep_shadow(rows, shadow, h, row, address)
            show += f64_at(address + SHOW)[0]
            click += f64_at(address + CLICK)[0]
            hour = max(hour, np.int64(i32_at(address + HOUR)[0]))
            slot = np.int64(u32_at(address + SLOT)[0])
        if is_new or row >= CANDIDATE:
            admitted = admits_all or is_admitted(new.seed, id, show, new.admit_shows, new.admit_probability)
            if admitted:
                if not is_new:
                    at = search(index, rows, h, id)
                    push_row(free_candidates, h, row - CANDIDATE)
                    candidates_HS[h, slot] -= 1
                row = pop_row(free, h)
                fill_row(address_of(rows, row), id, new)
                ids_HS[h, slot] += 1
            elif is_new:
                row = pop_row(free_candidates, h) + CANDIDATE
                candidates_HS[h, slot] += 1
            address = address_of(rows, row)
            u64_at(address)[0] = id
            u32_at(address + SLOT)[0] = slot
            if is_new:
                insert(index, h, at, id, row)
            elif admitted:  # the entry stays, and names the new row
                tag = u64_at(i64_at(index.addresses_H)[h])[at] & np.uint64(0xFFFFFFFF00000000)
                u64_at(i64_at(index.addresses_H)[h])[at] = tag | np.uint64(row + 1)
            row_K[begin + d] = row
        address = address_of(rows, row)
        f64_at(address + SHOW)[0] = show
        f64_at(address + CLICK)[0] = click
        i32_at(address + HOUR)[0] = hour
        u32_at(address + TOUCHED)[0] = epoch


@njit(cache=True, nogil=True, inline="always")
def shadow_at(shadow: ShadowView, rows: RowsView, shard: Whole, number: Whole) -> Whole:
    """Where a shard's shadow of that number lies."""
    block = i64_at(i64_at(shadow.blocks_H)[shard])[number // SHADOW_BLOCK]
    return block + (number % SHADOW_BLOCK) * rows.stride


@njit(cache=True, nogil=True)
def _keep_shadow(rows: RowsView, shadow: ShadowView, shard: Whole, row: Whole, address: Whole) -> None:
    number = i64_at(shadow.used_H)[shard]
    i64_at(shadow.used_H)[shard] = number + 1
    u32_at(i64_at(shadow.rows_H)[shard])[number] = row
    source = u64_at(address)
    u64_at(i64_at(shadow.mixed_H)[shard])[number] = mix(source[0])
    target = u64_at(shadow_at(shadow, rows, shard, number))
    words = (rows.candidate_stride if row >= CANDIDATE else rows.stride) // 8
    for at in range(words):
        target[at] = source[at]
