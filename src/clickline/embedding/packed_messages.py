"""What a worker and a shard tell each other about a batch, and the kernels that write and read it.

A worker has a part of a batch and no rows; a shard has rows and no batch. Between them go the distinct ids
of the part, table after table and inside a table in the order of inner shards, and flat floats: for each of
those ids its vector, then its wide weight if the model has one. So nothing is said twice, every array is
written once, and the ids of one shard lie side by side.

Arrays that come from another process are read-only. Kernels take them by address: Numba would compile
everything once more for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, NO_ROW, RowsView, address_of
from clickline.embedding.jagged_ids import Bags, Dealt, number_distinct, room_for_numbers
from clickline.embedding.optimizers import Learning
from clickline.embedding.pooling import Columns, step_row, step_shard, sum_default, sum_shard
from clickline.embedding.raw_memory import Whole, f32_at, i64_at, prefetch, u8_at, u32_at
from clickline.embedding.row_counters import Counts
from clickline.embedding.row_layout import RowPlaces

NO_FLOATS: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
NO_MARKS: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

_AHEAD = 16


class Request(NamedTuple):
    """What one worker asks one shard for: the distinct ids of its part of a batch. Only the first two where
    nothing is to be counted; the others are empty then."""

    ids_N: NDArray[np.uint64]
    starts_T1: NDArray[np.int64]  # table t has the ids from starts_T1[t] to starts_T1[t + 1]
    slots_N: NDArray[np.uint16]  # the first of the table's slots that has the id
    shows_N: NDArray[np.uint32]
    clicks_N: NDArray[np.uint32]
    hours_N: NDArray[np.int32]  # the newest


class Reply(NamedTuple):
    """What the shard answers."""

    rows: NDArray[np.float32]  # flat: table after table, id after id
    defaults_N: NDArray[np.bool_]  # which ids have no vector of their own; empty if all have one
    default_rows: NDArray[np.float32]  # what those use, by slot: table after table; only from shard 0


class Gradients(NamedTuple):
    """What the worker's part of the batch says of the rows, summed by row."""

    rows: NDArray[np.float32]  # as in the reply; of ids without a vector of their own nobody reads it
    default_rows: NDArray[np.float32]  # only to shard 0, and only if there are any
    defaults_used_S: NDArray[np.bool_]  # which of them the part has, table after table


def starts_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each begins that has such a size, and where the last ends."""
    return np.append(0, np.cumsum(sizes))


def check_floats(array: NDArray[np.float32], size: int, what: str) -> None:
    if array.dtype != np.float32 or array.size != size or not array.flags.c_contiguous:
        raise ValueError(f"{what}: {array.size} values of {array.dtype} given, {size} of float32 expected")


# ── the worker's side ──────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True)
def number_ids(first: Whole, last: Whole, dealt: Dealt) -> None:
    """Number the distinct ids of the inner shards first … last - 1."""
    numbers = room_for_numbers(dealt.starts_H1, first, last)
    for h in range(first, last):
        number_distinct(h, dealt, numbers, numbers.ctypes.data, 0)  # there is no index to prefetch from


@njit(cache=True, nogil=True)
def write_request(
    first: Whole, last: Whole, dealt: Dealt, counts: Counts, at_H: NDArray[np.int64], request: Request
) -> None:
    """Write the distinct ids of the inner shards first … last - 1 from place at_H[h] on, with what they count if
    the request has room for that."""
    distinct_K, bag_K = u32_at(dealt.distinct_K.ctypes.data), u32_at(dealt.bag_K.ctypes.data)
    ids_N, slots_N = request.ids_N, request.slots_N
    shows_N, clicks_N, hours_N = request.shows_N, request.clicks_N, request.hours_N
    segments_HS1 = dealt.segments_HS1
    largest = 1
    for h in range(first, last):
        largest = max(largest, dealt.distinct_H[h])
    last_bag = np.empty(largest, dtype=np.int64)
    bag_of = i64_at(last_bag.ctypes.data)
    for h in range(first, last):
        begin, at, distinct = dealt.starts_H1[h], at_H[h], dealt.distinct_H[h]
        ids_N[at : at + distinct] = dealt.distinct_ids_K[begin : begin + distinct]
        if slots_N.size == 0:
            continue
        last_bag[:distinct] = -1
        shows_N[at : at + distinct] = 0
        clicks_N[at : at + distinct] = 0
        hours_N[at : at + distinct] = -1
        for s in range(segments_HS1.shape[1] - 1):
            for k in range(segments_HS1[h, s], segments_HS1[h, s + 1]):
                d = np.int64(distinct_K[k])
                bag = np.int64(bag_K[k])
                if bag_of[d] < 0:
                    slots_N[at + d] = s
                if bag_of[d] != bag:  # as `count_batch` does: an id twice in one row is shown once
                    bag_of[d] = bag
                    shows_N[at + d] += counts.show_B[bag]
                    clicks_N[at + d] += counts.click_B[bag]
                    hours_N[at + d] = max(hours_N[at + d], counts.hour_B[bag])
    last_bag[0] = 0  # Numba frees an array after its last use, and reaching it by address is none


@njit(cache=True, nogil=True)
def name_rows(
    first: Whole, last: Whole, dealt: Dealt, row_H: NDArray[np.int64], defaults_H: NDArray[np.int64]
) -> None:
    """Number the rows of a reply: those of inner shard h from row_H[h] on. `defaults_H` says at which address
    its ids without a vector are marked; 0 if there are none."""
    row_K = u32_at(dealt.row_K.ctypes.data)
    for h in range(first, last):
        begin, row, defaults = dealt.starts_H1[h], row_H[h], defaults_H[h]
        for d in range(dealt.distinct_H[h]):
            row_K[begin + d] = row + d
        if defaults != 0:
            for d in range(dealt.distinct_H[h]):
                if u8_at(defaults)[d] != 0:
                    row_K[begin + d] = NO_ROW


@njit(cache=True, nogil=True)
def sum_gradients(
    first: Whole,
    last: Whole,
    places: RowPlaces,
    bags: Bags,
    columns: Columns,
    dealt: Dealt,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    target_H: NDArray[np.int64],
) -> None:
    """Sum the gradients of the distinct ids of the inner shards first … last - 1; those of shard h lie one after
    the other from address target_H[h] on."""
    for h in range(first, last):
        wide = target_H[h] + places.wide if places.wide >= 0 else 0
        sum_shard(
            h, bags, columns, dealt, places.dim, gradient_BI, gradient_wide_B, target_H[h], places.stride, wide,
            places.stride,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def sum_default_gradients(
    places: RowPlaces,
    bags: Bags,
    columns: Columns,
    row_N: NDArray[np.uint32],
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    target: Whole,
    used_S: NDArray[np.bool_],
) -> None:
    """Sum the gradients of the slots' default rows, one after the other, from an address on."""
    for s in range(used_S.size):
        sums = target + s * places.stride
        wide = sums + places.wide if places.wide >= 0 else 0
        used_S[s] = sum_default(s, bags, columns, places.dim, row_N, gradient_BI, gradient_wide_B, sums, wide)


# ── the shard's side ───────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True)
def take_rows(first: Whole, last: Whole, dealt: Dealt, row_N: NDArray[np.uint32]) -> None:
    """Give every id of the inner shards first … last - 1 the row that was found for it."""
    order_K, distinct_K = u32_at(dealt.order_K.ctypes.data), u32_at(dealt.distinct_K.ctypes.data)
    row_K, rows_N = u32_at(dealt.row_K.ctypes.data), u32_at(row_N.ctypes.data)
    for h in range(first, last):
        begin = dealt.starts_H1[h]
        for k in range(begin, dealt.starts_H1[h + 1]):
            rows_N[order_K[k]] = row_K[begin + np.int64(distinct_K[k])]


@njit(cache=True, nogil=True)
def pack_rows(
    rows: RowsView,
    places: RowPlaces,
    row_N: NDArray[np.uint32],
    first: Whole,
    last: Whole,
    target: Whole,
    defaults: Whole,
) -> Whole:
    """Copy the weights of the rows first … last - 1 to the address `target`, one after the other. Those that have
    none get zeros and a mark at the address `defaults`; how many there are."""
    dim, wide = places.dim, places.wide
    width = dim + 1 if wide >= 0 else dim
    without = 0
    for n in range(first, last):
        if n + _AHEAD < last:
            coming = np.int64(row_N[n + _AHEAD])
            if coming < CANDIDATE:
                prefetch(address_of(rows, coming) + places.vector)
                prefetch(address_of(rows, coming) + places.size - 4)
        packed = f32_at(target + 4 * width * (n - first))
        row = np.int64(row_N[n])
        if row >= CANDIDATE:  # NO_ROW is one too
            for j in range(width):
                packed[j] = np.float32(0)
            u8_at(defaults)[n - first] = 1
            without += 1
            continue
        address = address_of(rows, row)
        vector = f32_at(address + places.vector)
        for j in range(dim):
            packed[j] = vector[j]
        if wide >= 0:
            packed[dim] = f32_at(address + wide)[0]
    return without


@njit(cache=True, nogil=True)
def apply_packed(
    rows: RowsView,
    places: RowPlaces,
    learning: Learning,
    factor: np.float32,
    first: Whole,
    last: Whole,
    dealt: Dealt,
    starts_P1: NDArray[np.int64],
    gradients_P: NDArray[np.int64],
) -> None:
    """Sum what the parts say of every distinct id of the inner shards first … last - 1, then update its row once.
    `gradients_P` are addresses."""
    order_K, distinct_K = u32_at(dealt.order_K.ctypes.data), u32_at(dealt.distinct_K.ctypes.data)
    dim = places.dim
    width = dim + 1 if places.wide >= 0 else dim
    largest = 0
    for h in range(first, last):
        largest = max(largest, dealt.distinct_H[h])
    room = np.empty(largest * width, dtype=np.float32)
    sums, stride = room.ctypes.data, 4 * width
    wide_sums = sums + 4 * dim if places.wide >= 0 else 0
    for h in range(first, last):
        room[: dealt.distinct_H[h] * width] = 0
        part = 0
        for k in range(dealt.starts_H1[h], dealt.starts_H1[h + 1]):
            n = np.int64(order_K[k])
            while n >= starts_P1[part + 1]:
                part += 1
            gradient = f32_at(gradients_P[part] + (n - starts_P1[part]) * stride)
            total = f32_at(sums + np.int64(distinct_K[k]) * stride)
            for j in range(width):
                total[j] += gradient[j]
        step_shard(h, rows, places, learning, factor, dealt, sums, stride, wide_sums, stride)
    room[:0] = 0  # keeps it alive until here


@njit(cache=True, nogil=True)
def step_defaults(
    rows: RowsView,
    places: RowPlaces,
    learning: Learning,
    factor: np.float32,
    used_S: NDArray[np.bool_],
    gradients: Whole,
) -> None:
    """Update the default rows that were used; row s belongs to slot s."""
    stride = 4 * (places.dim + 1 if places.wide >= 0 else places.dim)
    for s in range(used_S.size):
        if used_S[s]:
            at = gradients + s * stride
            step_row(address_of(rows, s), places, learning, factor, at, at + 4 * places.dim)
