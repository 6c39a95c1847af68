"""The messages between a worker and an embedding server about a batch, and the kernels that write and read them.

A worker has a part of a batch and no rows; a server (a shard of the tables) has rows and no batch. They exchange
the distinct ids of the part, table after table and inside a table in the order of inner shards, and flat floats:
for each id its vector, then its wide weight if the model has one. So nothing is sent twice, every array is
written once, and the ids of one shard are contiguous.

Arrays from another process are read-only. Kernels take them by address, because Numba would compile everything
again for read-only arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, NO_ROW, address_of
from clickline.embedding.jagged_ids import Partitioned, make_dedup_table, number_distinct
from clickline.embedding.pooling import Batch, packed_width, sum_shard, sums_buffer, update_shard
from clickline.embedding.row_counters import BatchCounts, sum_counts
from clickline.embedding.row_layout import RowLayoutView
from clickline.embedding.table_view import TableView
from clickline.kernel_intrinsics import Int, f32_at, i32_at, prefetch, u8_at, u16_at, u32_at
from clickline.numba_cache import njit

NO_FLOATS: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
NO_FLAGS: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

_AHEAD = 16


class LookupRequest(NamedTuple):
    """The distinct ids that one worker requests from one shard for its part of a batch. Without counting only the
    first two fields are set; the others are empty."""

    ids_N: NDArray[np.uint64]
    starts_T1: NDArray[np.int64]  # table t has the ids from starts_T1[t] to starts_T1[t + 1]
    slots_N: NDArray[np.uint16]  # the first of the table's slots with the id
    impressions_N: NDArray[np.uint32]
    clicks_N: NDArray[np.uint32]
    hours_N: NDArray[np.int32]  # the latest


class LookupReply(NamedTuple):
    """The rows a shard returns for a LookupRequest."""

    rows: NDArray[np.float32]  # flat: table after table, id after id
    defaults_N: NDArray[np.bool_]  # ids without a vector of their own; empty if there are none
    default_rows: NDArray[np.float32]  # the rows those ids use, by slot: table after table; only from shard 0


class RowGradients(NamedTuple):
    """The gradients of a worker's part of the batch, summed by row."""

    rows: NDArray[np.float32]  # as in the reply; ignored for ids without a vector of their own
    default_rows: NDArray[np.float32]  # only to shard 0, and only if any were used
    defaults_used_S: NDArray[np.bool_]  # which default rows the part uses, table after table


def start_offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The start offset of each of these sizes, and the end of the last."""
    return np.append(0, np.cumsum(sizes))


def check_floats(array: NDArray[np.float32], size: int, what: str) -> None:
    if array.dtype != np.float32 or array.size != size or not array.flags.c_contiguous:
        raise ValueError(f"{what}: got {array.size} values of {array.dtype}, expected {size} of float32")


# ── the worker's side ──────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True)
def number_ids(first: Int, last: Int, partitioned: Partitioned) -> None:
    """Number the distinct ids of the inner shards first … last - 1."""
    numbers = make_dedup_table(partitioned.starts_H1, first, last)
    for h in range(first, last):
        number_distinct(h, partitioned, numbers, numbers.ctypes.data, 0)  # no index to prefetch from


@njit(cache=True, nogil=True)
def write_request(
    first: Int,
    last: Int,
    partitioned: Partitioned,
    counts: BatchCounts,
    at_H: NDArray[np.int64],
    request: LookupRequest,
) -> None:
    """Write the distinct ids of the inner shards first … last - 1 from position at_H[h] on, with their counts if the
    request has arrays for them."""
    impressions_N, clicks_N = request.impressions_N.ctypes.data, request.clicks_N.ctypes.data
    hours_N, slots_N = request.hours_N.ctypes.data, request.slots_N.ctypes.data
    last_rows_D = np.empty(max(1, partitioned.distinct_H[first:last].max()), dtype=np.int64)
    for h in range(first, last):
        begin, at, distinct = partitioned.starts_H1[h], at_H[h], partitioned.distinct_H[h]
        request.ids_N[at : at + distinct] = partitioned.distinct_ids_K[begin : begin + distinct]
        if request.slots_N.size > 0:
            impressions, clicks = u32_at(impressions_N + 4 * at), u32_at(clicks_N + 4 * at)
            hours, slots = i32_at(hours_N + 4 * at), u16_at(slots_N + 2 * at)
            sum_counts(h, partitioned, counts, impressions, clicks, hours, slots, last_rows_D)


@njit(cache=True, nogil=True)
def assign_reply_rows(
    first: Int, last: Int, partitioned: Partitioned, row_H: NDArray[np.int64], defaults_H: NDArray[np.int64]
) -> None:
    """Number the rows of a reply: those of inner shard h from row_H[h] on. `defaults_H` has the address of its flags
    for ids without a vector; 0 if there are none."""
    row_K = u32_at(partitioned.row_K.ctypes.data)
    for h in range(first, last):
        begin, row, defaults = partitioned.starts_H1[h], row_H[h], defaults_H[h]
        for d in range(partitioned.distinct_H[h]):
            row_K[begin + d] = row + d
        if defaults != 0:
            for d in range(partitioned.distinct_H[h]):
                if u8_at(defaults)[d] != 0:
                    row_K[begin + d] = NO_ROW


@njit(cache=True, nogil=True)
def sum_gradients(
    first: Int,
    last: Int,
    layout: RowLayoutView,
    batch: Batch,
    gradient_BI: NDArray[np.float32],
    gradient_wide_B: NDArray[np.float32],
    target_H: NDArray[np.int64],
) -> None:
    """Sum the gradients of the distinct ids of the inner shards first … last - 1; those of shard h are contiguous
    from address target_H[h] on."""
    for h in range(first, last):
        sum_shard(h, layout, batch, gradient_BI, gradient_wide_B, target_H[h])


# ── the shard's side ───────────────────────────────────────────────────────────────────────────


@njit(cache=True, nogil=True)
def pack_rows(
    first: Int, last: Int, table: TableView, row_N: NDArray[np.uint32], target: Int, defaults: Int
) -> Int:
    """Copy the weights of the rows first … last - 1 to consecutive rows at address `target`. Ids without weights get
    zeros and a flag at address `defaults`; returns how many there are."""
    rows, layout = table.rows, table.layout
    dim, wide, width = layout.dim, layout.wide, packed_width(layout)
    defaulted = 0
    for n in range(first, last):
        if n + _AHEAD < last:
            coming = np.int64(row_N[n + _AHEAD])
            if coming < CANDIDATE:
                prefetch(address_of(rows, coming) + layout.vector)
                prefetch(address_of(rows, coming) + layout.size - 4)
        packed = f32_at(target + 4 * width * (n - first))
        row = np.int64(row_N[n])
        if row >= CANDIDATE:  # includes NO_ROW
            for j in range(width):
                packed[j] = np.float32(0)
            u8_at(defaults)[n - first] = 1
            defaulted += 1
            continue
        address = address_of(rows, row)
        vector = f32_at(address + layout.vector)
        for j in range(dim):
            packed[j] = vector[j]
        if wide >= 0:
            packed[dim] = f32_at(address + wide)[0]
    return defaulted


@njit(cache=True, nogil=True)
def apply_packed(
    first: Int,
    last: Int,
    table: TableView,
    partitioned: Partitioned,
    factor: np.float32,
    starts_P1: NDArray[np.int64],
    gradients_P: NDArray[np.int64],
) -> None:
    """Sum the parts' gradients of every distinct id of the inner shards first … last - 1, then update its row once.
    `gradients_P` are addresses."""
    order_K, distinct_K = u32_at(partitioned.order_K.ctypes.data), u32_at(partitioned.distinct_K.ctypes.data)
    width = packed_width(table.layout)
    buffer = sums_buffer(first, last, partitioned, table.layout)
    sums, stride = buffer.ctypes.data, 4 * width
    for h in range(first, last):
        buffer[: partitioned.distinct_H[h] * width] = 0
        part = 0
        for k in range(partitioned.starts_H1[h], partitioned.starts_H1[h + 1]):
            n = np.int64(order_K[k])
            while n >= starts_P1[part + 1]:
                part += 1
            gradient = f32_at(gradients_P[part] + (n - starts_P1[part]) * stride)
            total = f32_at(sums + np.int64(distinct_K[k]) * stride)
            for j in range(width):
                total[j] += gradient[j]
        update_shard(h, table, partitioned, factor, sums)
    buffer[:0] = 0  # keeps it alive: Numba frees an array after its last use, and access by address is none
