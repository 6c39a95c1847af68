"""Pooling of rows into the network's input, and the sum of gradients by id on the way back.

Forward, threads split the rows of the batch; backward, they split the shards. Sums run in the batch's order
either way, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, RowsView, address_of
from clickline.embedding.jagged_ids import JaggedIds, Partitioned
from clickline.embedding.optimizers import OptimizerView, update
from clickline.embedding.raw_memory import Int, f32_at, prefetch, u32_at
from clickline.embedding.row_layout import RowLayoutView
from clickline.numba_cache import njit

SUM, MEAN, MAX = 0, 1, 2
POOLINGS = {"sum": SUM, "mean": MEAN, "max": MAX}

_AHEAD = 24


class PoolingPlan(NamedTuple):
    """The column of each slot's pooled vector in the network's input, and how the slot is pooled."""

    poolings_S: NDArray[np.int64]
    columns_S: NDArray[np.int64]
    argmax_at_S: NDArray[np.int64]  # where the B · dim positions of a max-pooled slot begin in `argmax`
    argmax: NDArray[np.int32]  # which id of the batch row gave each component


def pooling_plan(
    poolings_S: NDArray[np.int64], columns_S: NDArray[np.int64], dim: int, jagged: JaggedIds, rows: int
) -> PoolingPlan:
    """The plan for a batch, with an argmax buffer for max-pooled slots."""
    needed_S = (poolings_S == MAX) & (jagged.offsets_at_S >= 0)
    sizes_S = needed_S * rows * dim
    argmax = np.full(int(sizes_S.sum()), -1, dtype=np.int32)
    return PoolingPlan(poolings_S, columns_S, np.cumsum(sizes_S) - sizes_S, argmax)


@njit(cache=True, nogil=True)
def pool_rows(
    rows: RowsView,
    layout: RowLayoutView,
    jagged: JaggedIds,
    plan: PoolingPlan,
    row_N: NDArray[np.uint32],
    first: Int,
    last: Int,
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
) -> None:
    """Pool the vectors of the batch's rows first … last - 1 into `inputs_BI`, add wide weights to `wide_B`."""
    dim = layout.dim
    starts_S1, offsets, offsets_at_S = jagged.starts_S1, jagged.offsets, jagged.offsets_at_S
    poolings_S, columns_S = plan.poolings_S, plan.columns_S
    argmax_at_S, argmax = plan.argmax_at_S, plan.argmax
    for b in range(first, last):
        wide = wide_B[b]
        for s in range(poolings_S.size):
            start, offset = starts_S1[s], offsets_at_S[s]
            pooled = f32_at(inputs_BI.ctypes.data + 4 * (b * inputs_BI.shape[1] + columns_S[s]))
            if offset < 0:
                if b + 2 < last:
                    coming = address_of(rows, np.int64(row_N[start + b + 2]))
                    prefetch(coming + layout.vector)
                    prefetch(coming + layout.size - 4)
                address = address_of(rows, np.int64(row_N[start + b]))
                vector = f32_at(address + layout.vector)
                for j in range(dim):
                    pooled[j] = vector[j]
                if layout.wide >= 0:
                    wide += f32_at(address + layout.wide)[0]
                continue
            begin, end = offsets[offset + b], offsets[offset + b + 1]
            for j in range(dim):
                pooled[j] = 0
            for n in range(begin, end):
                if n + _AHEAD < starts_S1[s + 1]:
                    prefetch(address_of(rows, np.int64(row_N[n + _AHEAD])) + layout.vector)
                address = address_of(rows, np.int64(row_N[n]))
                vector = f32_at(address + layout.vector)
                if poolings_S[s] == MAX:
                    argmax_start = argmax_at_S[s] + b * dim
                    for j in range(dim):
                        if n == begin or vector[j] > pooled[j]:
                            pooled[j] = vector[j]
                            argmax[argmax_start + j] = n - begin
                else:
                    for j in range(dim):
                        pooled[j] += vector[j]
                if layout.wide >= 0:
                    wide += f32_at(address + layout.wide)[0]
            if poolings_S[s] == MEAN and end > begin:
                for j in range(dim):
                    pooled[j] /= np.float32(end - begin)
        wide_B[b] = wide


@njit(cache=True, nogil=True, inline="always")
def _add_gradient(
    offsets: NDArray[np.int64],
    offset: Int,
    pooling: Int,
    argmax: NDArray[np.int32],
    argmax_at: Int,
    dim: Int,
    batch_row: Int,
    n: Int,
    gradient: Any,
    sums: Any,
) -> None:
    """Add to `sums` the share that one id gets of its batch row's gradient."""
    if offset < 0 or pooling == SUM:
        for j in range(dim):
            sums[j] += gradient[j]
    elif pooling == MEAN:
        size = np.float32(offsets[offset + batch_row + 1] - offsets[offset + batch_row])
        for j in range(dim):
            sums[j] += gradient[j] / size
    else:
        argmax_start = argmax_at + batch_row * dim
        position = n - offsets[offset + batch_row]
        for j in range(dim):
            if argmax[argmax_start + j] == position:
                sums[j] += gradient[j]


@njit(cache=True, nogil=True, inline="always")
def update_row(
    address: Int,
    layout: RowLayoutView,
    optimizer: OptimizerView,
    factor: np.float32,
    gradient: Int,
    wide_gradient: Int,
) -> None:
    """One optimizer step on one row, with gradients at two addresses."""
    vector = f32_at(address + layout.vector)
    vector_gradient = f32_at(gradient)
    if optimizer.l2 != np.float32(0):
        for j in range(layout.dim):
            vector_gradient[j] += optimizer.l2 * vector[j]
    state = f32_at(address + layout.vector_state)
    update(optimizer.kind, vector, state, vector_gradient, layout.dim, f32_at(optimizer.settings), factor)
    if layout.wide >= 0:
        wide = f32_at(address + layout.wide)
        wide_state = f32_at(address + layout.wide_state)
        update(
            optimizer.wide_kind,
            wide,
            wide_state,
            f32_at(wide_gradient),
            1,
            f32_at(optimizer.wide_settings),
            factor,
        )


@njit(cache=True, nogil=True)
def sum_shard(
    h: Int,
    jagged: JaggedIds,
    plan: PoolingPlan,
    partitioned: Partitioned,
    dim: Int,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    sums: Int,
    stride: Int,
    wide_sums: Int,
    wide_stride: Int,
) -> None:
    """Sum the gradients of every distinct id of a shard. Id number d has its sum at `sums` + d · stride, and that of
    its wide weight at `wide_sums` + d · wide_stride; without wide weights the latter is 0."""
    offsets, argmax = jagged.offsets, plan.argmax
    order_K = u32_at(partitioned.order_K.ctypes.data)
    batch_row_K = u32_at(partitioned.batch_row_K.ctypes.data)
    distinct_K = u32_at(partitioned.distinct_K.ctypes.data)
    gradients_wide = f32_at(gradient_wide_B.ctypes.data)
    segments_HS1 = partitioned.segments_HS1
    slots, width = plan.poolings_S.size, gradient_BI.shape[1]
    for number in range(partitioned.distinct_H[h]):
        for j in range(dim):
            f32_at(sums + number * stride)[j] = np.float32(0)
        if wide_sums != 0:
            f32_at(wide_sums + number * wide_stride)[0] = np.float32(0)
    coming_slot = 0
    for s in range(slots):
        offset, pooling = jagged.offsets_at_S[s], plan.poolings_S[s]
        argmax_at = plan.argmax_at_S[s]
        slot_gradient = gradient_BI.ctypes.data + 4 * plan.columns_S[s]
        for k in range(segments_HS1[h, s], segments_HS1[h, s + 1]):
            if k + _AHEAD < segments_HS1[h, slots]:
                while k + _AHEAD >= segments_HS1[h, coming_slot + 1]:
                    coming_slot += 1
                coming_column = np.int64(batch_row_K[k + _AHEAD]) * width + plan.columns_S[coming_slot]
                coming = gradient_BI.ctypes.data + 4 * coming_column
                prefetch(coming)
                prefetch(coming + 4 * dim - 4)
            d = np.int64(distinct_K[k])
            batch_row = np.int64(batch_row_K[k])
            _add_gradient(
                offsets,
                offset,
                pooling,
                argmax,
                argmax_at,
                dim,
                batch_row,
                np.int64(order_K[k]),
                f32_at(slot_gradient + 4 * batch_row * width),
                f32_at(sums + d * stride),
            )
            if wide_sums != 0:
                f32_at(wide_sums + d * wide_stride)[0] += gradients_wide[batch_row]


@njit(cache=True, nogil=True)
def update_shard(
    h: Int,
    rows: RowsView,
    layout: RowLayoutView,
    optimizer: OptimizerView,
    factor: np.float32,
    partitioned: Partitioned,
    sums: Int,
    stride: Int,
    wide_sums: Int,
    wide_stride: Int,
) -> None:
    """Update the row of every distinct id of a shard once, from sums as laid out by `sum_shard`."""
    row_K = u32_at(partitioned.row_K.ctypes.data)
    begin, distinct = partitioned.starts_H1[h], partitioned.distinct_H[h]
    for number in range(distinct):
        if number + _AHEAD < distinct:
            coming = address_of(rows, np.int64(row_K[begin + number + _AHEAD]))
            prefetch(coming + layout.vector_state)
            prefetch(coming + layout.size - 4)
        row = np.int64(row_K[begin + number])
        if row >= CANDIDATE:
            continue
        update_row(
            address_of(rows, row),
            layout,
            optimizer,
            factor,
            sums + number * stride,
            wide_sums + number * wide_stride,
        )


@njit(cache=True, nogil=True)
def apply_shards(
    rows: RowsView,
    layout: RowLayoutView,
    jagged: JaggedIds,
    plan: PoolingPlan,
    optimizer: OptimizerView,
    factor: np.float32,
    first: Int,
    last: Int,
    partitioned: Partitioned,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
) -> None:
    """Sum the gradients of every distinct id of the shards first … last - 1, then update its row once."""
    dim = layout.dim
    largest = 0
    for h in range(first, last):
        largest = max(largest, partitioned.distinct_H[h])
    buffer = np.empty(largest * (dim + 1), dtype=np.float32)
    sums, stride = buffer.ctypes.data, 4 * dim
    wide_sums = sums + largest * stride if layout.wide >= 0 else 0
    for h in range(first, last):
        sum_shard(h, jagged, plan, partitioned, dim, gradient_BI, gradient_wide_B, sums, stride, wide_sums, 4)
        update_shard(h, rows, layout, optimizer, factor, partitioned, sums, stride, wide_sums, 4)
    buffer[:0] = 0  # keeps it alive: Numba frees an array after its last use, and access by address is none


@njit(cache=True, nogil=True)
def sum_default(
    s: Int,
    jagged: JaggedIds,
    plan: PoolingPlan,
    dim: Int,
    row_N: NDArray[np.uint32],
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    sums: Int,
    wide_sums: Int,
) -> bool:
    """Sum the gradients of a slot's default row, which is row s, at two addresses; without a wide weight the second
    is 0. Returns whether the batch uses the row."""
    for j in range(dim):
        f32_at(sums)[j] = np.float32(0)
    wide: Int = np.float32(0)
    used = False
    start, offset = jagged.starts_S1[s], jagged.offsets_at_S[s]
    slot_gradient = gradient_BI.ctypes.data + 4 * plan.columns_S[s]
    batch_row: Int = 0
    for n in range(start, jagged.starts_S1[s + 1]):
        if offset < 0:
            batch_row = n - start
        else:
            while jagged.offsets[offset + batch_row + 1] <= n:
                batch_row += 1
        if np.int64(row_N[n]) == s:
            used = True
            _add_gradient(
                jagged.offsets,
                offset,
                plan.poolings_S[s],
                plan.argmax,
                plan.argmax_at_S[s],
                dim,
                batch_row,
                n,
                f32_at(slot_gradient + 4 * batch_row * gradient_BI.shape[1]),
                f32_at(sums),
            )
            wide += gradient_wide_B[batch_row]
    if wide_sums != 0:
        f32_at(wide_sums)[0] = wide
    return used


@njit(cache=True, nogil=True)
def apply_defaults(
    rows: RowsView,
    layout: RowLayoutView,
    jagged: JaggedIds,
    plan: PoolingPlan,
    optimizer: OptimizerView,
    factor: np.float32,
    row_N: NDArray[np.uint32],
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
) -> None:
    """Update the default row of every slot that has candidates in the batch; row s belongs to slot s."""
    dim = layout.dim
    buffer = np.empty(dim + 1, dtype=np.float32)
    sums = buffer.ctypes.data
    wide_sums = sums + 4 * dim if layout.wide >= 0 else 0
    for s in range(plan.poolings_S.size):
        if sum_default(s, jagged, plan, dim, row_N, gradient_BI, gradient_wide_B, sums, wide_sums):
            update_row(address_of(rows, s), layout, optimizer, factor, sums, wide_sums)
    buffer[:0] = 0  # keeps it alive until here
