"""Pooling of rows into the network's input, and the sum of gradients by id on the way back.

Forward, threads split the rows of the batch; backward, they split the shards. Sums run in the batch's order
either way, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, RowsView, address_of
from clickline.embedding.jagged_ids import JaggedIds, Partitioned, partition_batch
from clickline.embedding.optimizers import update
from clickline.embedding.row_layout import RowLayoutView
from clickline.embedding.table_view import TableView
from clickline.embedding.thread_pool import ThreadPool
from clickline.kernel_intrinsics import Int, f32_at, prefetch, u32_at
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


class Batch(NamedTuple):
    """The ids of a batch in one table, and where their rows are."""

    jagged: JaggedIds
    plan: PoolingPlan
    partitioned: Partitioned
    row_N: NDArray[np.uint32]  # the row of each id; set once it is found

    @staticmethod
    def partition(
        thread_pool: ThreadPool,
        jagged: JaggedIds,
        poolings_S: NDArray[np.int64],
        columns_S: NDArray[np.int64],
        dim: int,
        rows: int,
    ) -> Batch:
        """A batch of `rows` rows, partitioned by shard, with an argmax buffer for max-pooled slots."""
        sizes_S = ((poolings_S == MAX) & (jagged.offsets_at_S >= 0)) * rows * dim
        argmax = np.full(int(sizes_S.sum()), -1, dtype=np.int32)
        plan = PoolingPlan(poolings_S, columns_S, np.cumsum(sizes_S) - sizes_S, argmax)
        row_N = np.empty(jagged.ids_N.size, dtype=np.uint32)
        return Batch(jagged, plan, partition_batch(thread_pool, jagged), row_N)


@njit(cache=True, nogil=True)
def pool_rows(
    first: Int,
    last: Int,
    rows: RowsView,
    layout: RowLayoutView,
    batch: Batch,
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
) -> None:
    """Pool the vectors of the batch's rows first … last - 1 into `inputs_BI`, add wide weights to `wide_B`."""
    jagged, plan, row_N = batch.jagged, batch.plan, batch.row_N
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
def packed_width(layout: RowLayoutView) -> Int:
    """Floats of a row's weights or gradients outside the table: the vector, then the wide weight if rows have one."""
    return layout.dim + 1 if layout.wide >= 0 else layout.dim


@njit(cache=True, nogil=True, inline="always")
def _update_row(table: TableView, row: Int, factor: np.float32, gradient: Int) -> None:
    """One optimizer step on one row, with its packed gradient at an address."""
    layout, optimizer, address = table.layout, table.optimizer, address_of(table.rows, row)
    vector, state = f32_at(address + layout.vector), f32_at(address + layout.vector_state)
    vector_gradient = f32_at(gradient)
    if optimizer.l2 != np.float32(0):
        for j in range(layout.dim):
            vector_gradient[j] += optimizer.l2 * vector[j]
    update(optimizer.kind, vector, state, vector_gradient, layout.dim, f32_at(optimizer.settings), factor)
    if layout.wide >= 0:
        wide, wide_state = f32_at(address + layout.wide), f32_at(address + layout.wide_state)
        wide_gradient = f32_at(gradient + 4 * layout.dim)
        update(
            optimizer.wide_kind, wide, wide_state, wide_gradient, 1, f32_at(optimizer.wide_settings), factor
        )


@njit(cache=True, nogil=True)
def sum_shard(
    h: Int,
    layout: RowLayoutView,
    batch: Batch,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    sums: Int,
) -> None:
    """Sum the gradients of every distinct id of a shard: packed, one after the other, from address `sums` on."""
    jagged, plan, partitioned = batch.jagged, batch.plan, batch.partitioned
    offsets, argmax = jagged.offsets, plan.argmax
    order_K = u32_at(partitioned.order_K.ctypes.data)
    batch_row_K = u32_at(partitioned.batch_row_K.ctypes.data)
    distinct_K = u32_at(partitioned.distinct_K.ctypes.data)
    gradients_wide = f32_at(gradient_wide_B.ctypes.data)
    segments_HS1 = partitioned.segments_HS1
    slots, width, dim = plan.poolings_S.size, gradient_BI.shape[1], layout.dim
    stride = 4 * packed_width(layout)
    for at in range(partitioned.distinct_H[h] * stride // 4):
        f32_at(sums)[at] = np.float32(0)
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
            batch_row = np.int64(batch_row_K[k])
            gradient = f32_at(slot_gradient + 4 * batch_row * width)
            total = f32_at(sums + np.int64(distinct_K[k]) * stride)
            n = np.int64(order_K[k])
            _add_gradient(offsets, offset, pooling, argmax, argmax_at, dim, batch_row, n, gradient, total)
            if layout.wide >= 0:
                total[dim] += gradients_wide[batch_row]


@njit(cache=True, nogil=True)
def update_shard(h: Int, table: TableView, partitioned: Partitioned, factor: np.float32, sums: Int) -> None:
    """Update the row of every distinct id of a shard once, from its sums by `sum_shard`."""
    row_K = u32_at(partitioned.row_K.ctypes.data)
    begin, distinct = partitioned.starts_H1[h], partitioned.distinct_H[h]
    stride = 4 * packed_width(table.layout)
    for number in range(distinct):
        if number + _AHEAD < distinct:
            coming = address_of(table.rows, np.int64(row_K[begin + number + _AHEAD]))
            prefetch(coming + table.layout.vector_state)
            prefetch(coming + table.layout.size - 4)
        row = np.int64(row_K[begin + number])
        if row < CANDIDATE:
            _update_row(table, row, factor, sums + number * stride)


@njit(cache=True, nogil=True)
def sums_buffer(
    first: Int, last: Int, partitioned: Partitioned, layout: RowLayoutView
) -> NDArray[np.float32]:
    """Memory for the packed sums of any of the shards first … last - 1."""
    largest = 0
    for h in range(first, last):
        largest = max(largest, partitioned.distinct_H[h])
    return np.empty(largest * packed_width(layout), dtype=np.float32)


@njit(cache=True, nogil=True)
def apply_shards(
    first: Int,
    last: Int,
    table: TableView,
    batch: Batch,
    factor: np.float32,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
) -> None:
    """Sum the gradients of every distinct id of the shards first … last - 1, then update its row once."""
    buffer = sums_buffer(first, last, batch.partitioned, table.layout)
    for h in range(first, last):
        sum_shard(h, table.layout, batch, gradient_BI, gradient_wide_B, buffer.ctypes.data)
        update_shard(h, table, batch.partitioned, factor, buffer.ctypes.data)
    buffer[:0] = 0  # keeps it alive: Numba frees an array after its last use, and access by address is none


@njit(cache=True, nogil=True)
def sum_defaults(
    layout: RowLayoutView,
    batch: Batch,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    sums: Int,
    used_S: NDArray[np.bool_],
) -> None:
    """Sum the gradients of the slots' default rows, packed from address `sums` on, which holds zeros; slot s has row s.
    Flags those that the batch uses."""
    jagged, plan, row_N = batch.jagged, batch.plan, batch.row_N
    offsets, argmax, dim = jagged.offsets, plan.argmax, layout.dim
    for s in range(used_S.size):
        pooling, argmax_at = plan.poolings_S[s], plan.argmax_at_S[s]
        total = f32_at(sums + 4 * packed_width(layout) * s)
        start, offset = jagged.starts_S1[s], jagged.offsets_at_S[s]
        slot_gradient = gradient_BI.ctypes.data + 4 * plan.columns_S[s]
        batch_row: Int = 0
        for n in range(start, jagged.starts_S1[s + 1]):
            if offset < 0:
                batch_row = n - start
            else:
                while offsets[offset + batch_row + 1] <= n:
                    batch_row += 1
            if np.int64(row_N[n]) == s:
                used_S[s] = True
                gradient = f32_at(slot_gradient + 4 * batch_row * gradient_BI.shape[1])
                _add_gradient(offsets, offset, pooling, argmax, argmax_at, dim, batch_row, n, gradient, total)
                if layout.wide >= 0:
                    total[dim] += gradient_wide_B[batch_row]


@njit(cache=True, nogil=True)
def update_defaults(table: TableView, factor: np.float32, sums: Int, used_S: NDArray[np.bool_]) -> None:
    """Update the default rows that were used, from their sums by `sum_defaults`, which are overwritten."""
    for s in range(used_S.size):
        if used_S[s]:
            _update_row(table, s, factor, sums + 4 * packed_width(table.layout) * s)
