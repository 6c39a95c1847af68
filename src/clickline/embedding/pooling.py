"""From rows to the network's input and back: pooling, and the sum of gradients by id.

Forward, each row of the batch is one thread's; backward, each shard is. Sums run in the batch's order
either way, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, RowsView, address_of
from clickline.embedding.jagged_ids import Bags, Dealt
from clickline.embedding.optimizers import Learning, update
from clickline.embedding.raw_memory import Whole, f32_at, prefetch, u32_at
from clickline.embedding.row_layout import RowPlaces

SUM, MEAN, MAX = 0, 1, 2
POOLINGS = {"sum": SUM, "mean": MEAN, "max": MAX}

_AHEAD = 24


class Columns(NamedTuple):
    """Where each slot's pooled vector stands in the network's input, and how it is pooled."""

    poolings_S: NDArray[np.int64]
    columns_S: NDArray[np.int64]
    winners_at_S: NDArray[np.int64]  # where the B · dim winners of a slot that is pooled by max begin
    winners: NDArray[np.int32]  # which id of the bag gave each component


def lay_out(
    poolings_S: NDArray[np.int64], columns_S: NDArray[np.int64], dim: int, bags: Bags, rows: int
) -> Columns:
    """The columns of a batch, with room for the winners of slots that are pooled by max."""
    needed_S = (poolings_S == MAX) & (bags.offsets_at_S >= 0)
    sizes_S = needed_S * rows * dim
    winners = np.full(int(sizes_S.sum()), -1, dtype=np.int32)
    return Columns(poolings_S, columns_S, np.cumsum(sizes_S) - sizes_S, winners)


@njit(cache=True, nogil=True)
def pool_rows(
    rows: RowsView,
    places: RowPlaces,
    bags: Bags,
    columns: Columns,
    row_N: NDArray[np.uint32],
    first: Whole,
    last: Whole,
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
) -> None:
    """Pool the vectors of the batch's rows first … last - 1 into `inputs_BI`, add wide weights to `wide_B`."""
    dim = places.dim
    starts_S1, offsets, offsets_at_S = bags.starts_S1, bags.offsets, bags.offsets_at_S
    poolings_S, columns_S = columns.poolings_S, columns.columns_S
    winners_at_S, winners = columns.winners_at_S, columns.winners
    for b in range(first, last):
        wide = wide_B[b]
        for s in range(poolings_S.size):
            start, offset = starts_S1[s], offsets_at_S[s]
            pooled = f32_at(inputs_BI.ctypes.data + 4 * (b * inputs_BI.shape[1] + columns_S[s]))
            if offset < 0:
                if b + 2 < last:
                    coming = address_of(rows, np.int64(row_N[start + b + 2]))
                    prefetch(coming + places.vector)
                    prefetch(coming + places.size - 4)
                address = address_of(rows, np.int64(row_N[start + b]))
                vector = f32_at(address + places.vector)
                for j in range(dim):
                    pooled[j] = vector[j]
                if places.wide >= 0:
                    wide += f32_at(address + places.wide)[0]
                continue
            begin, end = offsets[offset + b], offsets[offset + b + 1]
            for j in range(dim):
                pooled[j] = 0
            for n in range(begin, end):
                if n + _AHEAD < starts_S1[s + 1]:
                    prefetch(address_of(rows, np.int64(row_N[n + _AHEAD])) + places.vector)
                address = address_of(rows, np.int64(row_N[n]))
                vector = f32_at(address + places.vector)
                if poolings_S[s] == MAX:
                    winner = winners_at_S[s] + b * dim
                    for j in range(dim):
                        if n == begin or vector[j] > pooled[j]:
                            pooled[j] = vector[j]
                            winners[winner + j] = n - begin
                else:
                    for j in range(dim):
                        pooled[j] += vector[j]
                if places.wide >= 0:
                    wide += f32_at(address + places.wide)[0]
            if poolings_S[s] == MEAN and end > begin:
                for j in range(dim):
                    pooled[j] /= np.float32(end - begin)
        wide_B[b] = wide


@njit(cache=True, nogil=True, inline="always")
def _add_gradient(
    offsets: NDArray[np.int64],
    offset: Whole,
    pooling: Whole,
    winners: NDArray[np.int32],
    winners_at: Whole,
    dim: Whole,
    bag: Whole,
    n: Whole,
    gradient: Any,
    sums: Any,
) -> None:
    """Add to `sums` what one id of a bag gets of the bag's gradient."""
    if offset < 0 or pooling == SUM:
        for j in range(dim):
            sums[j] += gradient[j]
    elif pooling == MEAN:
        size = np.float32(offsets[offset + bag + 1] - offsets[offset + bag])
        for j in range(dim):
            sums[j] += gradient[j] / size
    else:
        winner = winners_at + bag * dim
        mine = n - offsets[offset + bag]
        for j in range(dim):
            if winners[winner + j] == mine:
                sums[j] += gradient[j]


@njit(cache=True, nogil=True, inline="always")
def step_row(
    address: Whole,
    places: RowPlaces,
    learning: Learning,
    factor: np.float32,
    gradient: Whole,
    wide_gradient: Whole,
) -> None:
    """One optimizer step of one row, from gradients at two addresses."""
    vector = f32_at(address + places.vector)
    vector_gradient = f32_at(gradient)
    if learning.l2 != np.float32(0):
        for j in range(places.dim):
            vector_gradient[j] += learning.l2 * vector[j]
    state = f32_at(address + places.vector_state)
    update(learning.kind, vector, state, vector_gradient, places.dim, f32_at(learning.settings), factor)
    if places.wide >= 0:
        wide = f32_at(address + places.wide)
        wide_state = f32_at(address + places.wide_state)
        update(
            learning.wide_kind,
            wide,
            wide_state,
            f32_at(wide_gradient),
            1,
            f32_at(learning.wide_settings),
            factor,
        )


@njit(cache=True, nogil=True)
def sum_shard(
    h: Whole,
    bags: Bags,
    columns: Columns,
    dealt: Dealt,
    dim: Whole,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    sums: Whole,
    stride: Whole,
    wide_sums: Whole,
    wide_stride: Whole,
) -> None:
    """Sum the gradients of every distinct id of a shard. Number d has its sum at `sums` + d · stride, and that
    of its wide weight at `wide_sums` + d · wide_stride; without a wide weight the latter is 0."""
    offsets, winners = bags.offsets, columns.winners
    order_K, bag_K = u32_at(dealt.order_K.ctypes.data), u32_at(dealt.bag_K.ctypes.data)
    distinct_K = u32_at(dealt.distinct_K.ctypes.data)
    gradients_wide = f32_at(gradient_wide_B.ctypes.data)
    segments_HS1 = dealt.segments_HS1
    slots, width = columns.poolings_S.size, gradient_BI.shape[1]
    for number in range(dealt.distinct_H[h]):
        for j in range(dim):
            f32_at(sums + number * stride)[j] = np.float32(0)
        if wide_sums != 0:
            f32_at(wide_sums + number * wide_stride)[0] = np.float32(0)
    coming_slot = 0
    for s in range(slots):
        offset, pooling = bags.offsets_at_S[s], columns.poolings_S[s]
        winners_at = columns.winners_at_S[s]
        slot_gradient = gradient_BI.ctypes.data + 4 * columns.columns_S[s]
        for k in range(segments_HS1[h, s], segments_HS1[h, s + 1]):
            if k + _AHEAD < segments_HS1[h, slots]:
                while k + _AHEAD >= segments_HS1[h, coming_slot + 1]:
                    coming_slot += 1
                coming_column = np.int64(bag_K[k + _AHEAD]) * width + columns.columns_S[coming_slot]
                coming = gradient_BI.ctypes.data + 4 * coming_column
                prefetch(coming)
                prefetch(coming + 4 * dim - 4)
            d = np.int64(distinct_K[k])
            bag = np.int64(bag_K[k])
            _add_gradient(
                offsets,
                offset,
                pooling,
                winners,
                winners_at,
                dim,
                bag,
                np.int64(order_K[k]),
                f32_at(slot_gradient + 4 * bag * width),
                f32_at(sums + d * stride),
            )
            if wide_sums != 0:
                f32_at(wide_sums + d * wide_stride)[0] += gradients_wide[bag]


@njit(cache=True, nogil=True)
def step_shard(
    h: Whole,
    rows: RowsView,
    places: RowPlaces,
    learning: Learning,
    factor: np.float32,
    dealt: Dealt,
    sums: Whole,
    stride: Whole,
    wide_sums: Whole,
    wide_stride: Whole,
) -> None:
    """Update the row of every distinct id of a shard once, from sums that lie as `sum_shard` leaves them."""
    row_K = u32_at(dealt.row_K.ctypes.data)
    begin, distinct = dealt.starts_H1[h], dealt.distinct_H[h]
    for number in range(distinct):
        if number + _AHEAD < distinct:
            coming = address_of(rows, np.int64(row_K[begin + number + _AHEAD]))
            prefetch(coming + places.vector_state)
            prefetch(coming + places.size - 4)
        row = np.int64(row_K[begin + number])
        if row >= CANDIDATE:
            continue
        step_row(
            address_of(rows, row),
            places,
            learning,
            factor,
            sums + number * stride,
            wide_sums + number * wide_stride,
        )


@njit(cache=True, nogil=True)
def apply_shards(
    rows: RowsView,
    places: RowPlaces,
    bags: Bags,
    columns: Columns,
    learning: Learning,
    factor: np.float32,
    first: Whole,
    last: Whole,
    dealt: Dealt,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
) -> None:
    """Sum the gradients of every distinct id of the shards first … last - 1, then update its row once."""
    dim = places.dim
    largest = 0
    for h in range(first, last):
        largest = max(largest, dealt.distinct_H[h])
    room = np.empty(largest * (dim + 1), dtype=np.float32)
    sums, stride = room.ctypes.data, 4 * dim
    wide_sums = sums + largest * stride if places.wide >= 0 else 0
    for h in range(first, last):
        sum_shard(h, bags, columns, dealt, dim, gradient_BI, gradient_wide_B, sums, stride, wide_sums, 4)
        step_shard(h, rows, places, learning, factor, dealt, sums, stride, wide_sums, 4)
    room[:0] = 0  # Numba frees an array after its last use, and reaching it by address is none


@njit(cache=True, nogil=True)
def sum_default(
    s: Whole,
    bags: Bags,
    columns: Columns,
    dim: Whole,
    row_N: NDArray[np.uint32],
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    sums: Whole,
    wide_sums: Whole,
) -> bool:
    """Sum the gradients of a slot's default row, which is row s, into two addresses; whether the batch has it.
    Without a wide weight the second is 0."""
    for j in range(dim):
        f32_at(sums)[j] = np.float32(0)
    wide: Whole = np.float32(0)
    used = False
    start, offset = bags.starts_S1[s], bags.offsets_at_S[s]
    slot_gradient = gradient_BI.ctypes.data + 4 * columns.columns_S[s]
    bag: Whole = 0
    for n in range(start, bags.starts_S1[s + 1]):
        if offset < 0:
            bag = n - start
        else:
            while bags.offsets[offset + bag + 1] <= n:
                bag += 1
        if np.int64(row_N[n]) == s:
            used = True
            _add_gradient(
                bags.offsets,
                offset,
                columns.poolings_S[s],
                columns.winners,
                columns.winners_at_S[s],
                dim,
                bag,
                n,
                f32_at(slot_gradient + 4 * bag * gradient_BI.shape[1]),
                f32_at(sums),
            )
            wide += gradient_wide_B[bag]
    if wide_sums != 0:
        f32_at(wide_sums)[0] = wide
    return used


@njit(cache=True, nogil=True)
def apply_defaults(
    rows: RowsView,
    places: RowPlaces,
    bags: Bags,
    columns: Columns,
    learning: Learning,
    factor: np.float32,
    row_N: NDArray[np.uint32],
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
) -> None:
    """Update the default row of every slot that has candidates in the batch; row s belongs to slot s."""
    dim = places.dim
    room = np.empty(dim + 1, dtype=np.float32)
    sums = room.ctypes.data
    wide_sums = sums + 4 * dim if places.wide >= 0 else 0
    for s in range(columns.poolings_S.size):
        if sum_default(s, bags, columns, dim, row_N, gradient_BI, gradient_wide_B, sums, wide_sums):
            step_row(address_of(rows, s), places, learning, factor, sums, wide_sums)
    room[:0] = 0  # keeps it alive until here
