"""The kernels of the serving table: from ids to packed rows, and from those to the network's input.

Two levels are searched in turn: the overlay of all deltas, then the base. Inside a level ids go through a pipeline:
while one id's row is compared, the rows of the next 16 are being prefetched, and the directory entries of the 16
after those. So lookups are limited by memory bandwidth, not by latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import mix
from clickline.embedding.jagged_ids import JaggedIds
from clickline.embedding.pooling import POOLINGS
from clickline.embedding.serving.packed_rows import ID_BYTES, PRECISIONS, row_type
from clickline.kernel_intrinsics import Int, f32_at, fp16_at, i64_at, int8_at, prefetch, u32_at, u64_at
from clickline.numba_cache import njit
from clickline.records import PartShape, Precision

SECTION_WORDS = 4  # per part and shard: address of the directory, buckets, address of the rows, rows

_AHEAD = 16  # ids between prefetching a cache line and using it
_RING = 64  # a power of two, above 2 * _AHEAD
_RING_MASK = _RING - 1
_CHUNK = 512  # ids searched in one level before the misses go to the next
_TILE = 128  # rows of a batch that are found and then pooled while in the cache
_TOMBSTONE = 0xFFFFFFFF
_FP16, _INT8 = PRECISIONS.index("fp16"), PRECISIONS.index("int8")
_MEAN, _MAX = POOLINGS["mean"], POOLINGS["max"]


class PartView(NamedTuple):
    """One part in all levels and shards, for kernels."""

    sections: int  # address of levels · shards · SECTION_WORDS int64
    levels: int
    shards: int
    stride: int  # bytes from one row to the next


class PackedLayoutView(NamedTuple):
    """Byte offsets inside a packed row, counted from the end of its id; -1 for absent fields."""

    dim: int
    precision: int
    wide: int
    scale: int
    vector: int


class SlotPlan(NamedTuple):
    """The slots of one part in a GatherPlan. G: slots."""

    slots_G: NDArray[np.int64]  # number of the slot in the batch
    columns_G: NDArray[np.int64]
    poolings_G: NDArray[np.int64]
    wide_G: NDArray[np.float32]  # the default rows
    vector_GD: NDArray[np.float32]


@dataclass(frozen=True)
class GatherPlan:
    """For each slot its columns in the network's input, its pooling and its default row."""

    slots: int
    width: int  # columns required in the inputs
    by_part: tuple[tuple[int, SlotPlan], ...]  # in the order in which training sums wide weights


class GatherBatch(NamedTuple):
    """The ids of a batch, and the arrays that pooling their rows fills."""

    plan: GatherPlan
    jagged: JaggedIds
    inputs_BI: NDArray[np.float32]  # the vectors, in the slots' columns
    wide_B: NDArray[np.float32]  # the sums of wide weights
    misses_S: NDArray[np.int64]  # incremented for each unknown id, which uses its slot's default row


def gather_plan(
    parts: Sequence[PartShape], slots: Sequence[tuple[int, int, str, float, Sequence[float]]]
) -> GatherPlan:
    """A plan for slots given as (part, column in the inputs, pooling, wide and vector of the default row)."""
    by_part = []
    for part in sorted({slot[0] for slot in slots}):
        dim = parts[part].dim
        part_slots = [s for s, slot in enumerate(slots) if slot[0] == part]
        for s in part_slots:
            _, column, pooling, _, vector = slots[s]
            if len(vector) != dim or column < 0 or pooling not in POOLINGS:
                raise ValueError(
                    f"slot {s} has pooling {pooling!r}, column {column} and {len(vector)} default weights; "
                    f"expected one of {', '.join(POOLINGS)}, a column from 0 on, and {dim} weights"
                )
        by_part.append(
            (
                part,
                SlotPlan(
                    np.array(part_slots, dtype=np.int64),
                    np.array([slots[s][1] for s in part_slots], dtype=np.int64),
                    np.array([POOLINGS[slots[s][2]] for s in part_slots], dtype=np.int64),
                    np.array([slots[s][3] for s in part_slots], dtype=np.float32),
                    np.array([slots[s][4] for s in part_slots], dtype=np.float32).reshape(
                        len(part_slots), dim
                    ),
                ),
            )
        )
    width = max((slot[1] + parts[slot[0]].dim for slot in slots), default=0)
    return GatherPlan(len(slots), width, tuple(by_part))


def packed_layout(shape: PartShape, precision: Precision) -> PackedLayoutView:
    """The layout of packed rows for kernels."""
    fields: Mapping[str, Any] = row_type(shape, precision).fields or {}
    wide, scale, vector = (
        int(fields[name][1]) - ID_BYTES if name in fields else -1 for name in ("wide", "scale", "vector")
    )
    return PackedLayoutView(shape.dim, PRECISIONS.index(precision), wide, scale, vector)


@njit(cache=True, nogil=True, inline="always")
def _shard_of(mixed: np.uint64, shards: np.uint64) -> Int:
    """mixed · shards >> 64, in 64 bits."""
    low = (mixed & np.uint64(0xFFFFFFFF)) * shards
    return np.int64(((mixed >> np.uint64(32)) * shards + (low >> np.uint64(32))) >> np.uint64(32))


@njit(cache=True, nogil=True)
def shards_of(ids_N: NDArray[np.uint64], shards: int, shard_N: NDArray[np.int64]) -> None:
    """The shard of each id."""
    for n in range(ids_N.size):
        shard_N[n] = _shard_of(mix(ids_N[n]), np.uint64(shards))


@njit(cache=True, nogil=True)
def _locate(view: PartView, ids: Int, count: Int, layout: Int, copies: Int) -> None:
    """For `count` ids at address `ids`, write the addresses of their rows' weights to `addresses`: 0 for an id without
    a row, or with a tombstone. Where `copies` is not 0, also copy the weights there, row after row."""
    id_at, address_at = u64_at(ids), i64_at(layout)
    shards, stride = np.uint64(view.shards), view.stride
    words = (stride - ID_BYTES) // 8
    buffer = np.empty(_CHUNK + 3 * _RING, dtype=np.int64)
    pending, section_at = i64_at(buffer.ctypes.data), i64_at(buffer.ctypes.data + 8 * _CHUNK)
    at = i64_at(buffer.ctypes.data + 8 * (_CHUNK + _RING))
    rows_at = i64_at(buffer.ctypes.data + 8 * (_CHUNK + 2 * _RING))
    for begin in range(0, count, _CHUNK):
        left = min(_CHUNK, count - begin)
        for i in range(left):
            pending[i] = begin + i
        for level in range(view.levels):
            n_missing = 0
            for i in range(left + 2 * _AHEAD):
                if i < left:
                    mixed = mix(id_at[pending[i]])
                    shard = level * view.shards + _shard_of(mixed, shards)
                    section = view.sections + 8 * SECTION_WORDS * shard
                    within = (mixed * shards) >> np.uint64(32)
                    bucket = np.int64((within * np.uint64(i64_at(section)[1])) >> np.uint64(32))
                    entry = i64_at(section)[0] + 4 * bucket
                    prefetch(entry)
                    section_at[i & _RING_MASK] = section
                    at[i & _RING_MASK] = entry
                r = (i - _AHEAD) & _RING_MASK
                if _AHEAD <= i < left + _AHEAD:
                    section, entries = i64_at(section_at[r]), u32_at(at[r])
                    first = min(np.int64(entries[0]), section[3])
                    rows = min(np.int64(entries[1]), section[3]) - first
                    row = section[2] + first * stride
                    for line in range(0, stride, 64):
                        prefetch(row + line)
                    prefetch(row + stride - 1)
                    prefetch(row + stride * (1 + (rows > 1)) - 1)  # the second row, if the bucket has two
                    at[r] = row
                    rows_at[r] = rows
                if i >= 2 * _AHEAD:
                    r = (i - 2 * _AHEAD) & _RING_MASK
                    n = pending[i - 2 * _AHEAD]
                    id, row = id_at[n], at[r]
                    row_address = 0
                    for _ in range(rows_at[r]):
                        if u64_at(row)[0] == id:
                            row_address = row + ID_BYTES
                            break
                        row += stride
                    if row_address == 0:
                        pending[n_missing] = n
                        n_missing += 1
                    elif u32_at(row_address)[0] == np.uint32(_TOMBSTONE):
                        row_address = 0
                    address_at[n] = row_address
                    if copies != 0 and row_address != 0:
                        source, target = u64_at(row_address), u64_at(copies + n * words * 8)
                        for word in range(words):
                            target[word] = source[word]
            left = n_missing
    buffer[0] = 0  # keeps it alive: Numba frees an array after its last use, and access by address is none


@njit(cache=True, nogil=True)
def copy_rows(view: PartView, ids: Int, copies: Int, found_N: NDArray[np.bool_]) -> Int:
    """Copy the packed rows of the ids at an address to another, zeros for ids without a row; returns how many have one.
    Takes addresses, because arrays from a socket are read-only and unaligned, and would be compiled again."""
    words = (view.stride - ID_BYTES) // 8
    address_N = np.empty(found_N.size, dtype=np.int64)
    _locate(view, ids, found_N.size, address_N.ctypes.data, copies)
    count = 0
    for n in range(found_N.size):
        is_found = address_N[n] != 0
        found_N[n] = is_found
        count += is_found
        if not is_found:
            row = u64_at(copies + n * words * 8)
            for word in range(words):
                row[word] = np.uint64(0)
    return count


@njit(cache=True, nogil=True)
def gather_slots(
    view: PartView,
    layout: PackedLayoutView,
    plan: SlotPlan,
    jagged: JaggedIds,
    rows: Int,
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
    misses_S: NDArray[np.int64],
) -> None:
    """Find the ids of a part's slots and pool their rows, tile by tile; wide weights are added to `wide_B`."""
    address_N = np.empty(jagged.ids_N.size, dtype=np.int64)
    ids, addresses = jagged.ids_N.ctypes.data, address_N.ctypes.data
    single_tile = rows <= _TILE and plan.slots_G.size == jagged.offsets_at_S.size
    if single_tile:
        _locate(view, ids, jagged.ids_N.size, addresses, 0)
    for first in range(0, rows, _TILE):
        last = min(first + _TILE, rows)
        for g in range(0 if single_tile else plan.slots_G.size):
            s = plan.slots_G[g]
            offset = jagged.offsets_at_S[s]
            if offset < 0:
                begin, end = jagged.starts_S1[s] + first, jagged.starts_S1[s] + last
            else:
                begin, end = jagged.offsets[offset + first], jagged.offsets[offset + last]
            _locate(view, ids + 8 * begin, end - begin, addresses + 8 * begin, 0)
        pool_slots(layout, plan, jagged, first, last, address_N, inputs_BI, wide_B, misses_S)


@njit(cache=True, nogil=True)
def pool_slots(
    layout: PackedLayoutView,
    plan: SlotPlan,
    jagged: JaggedIds,
    first: Int,
    last: Int,
    address_N: NDArray[np.int64],
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
    misses_S: NDArray[np.int64],
) -> None:
    """Pool rows of the batch, given the addresses of their weights; 0 means the default row. Bit for bit the same as
    `embedding.pooling.pool_rows`."""
    dim = layout.dim
    address_at = i64_at(address_N.ctypes.data)
    scratch = np.empty(dim, dtype=np.float32)
    for b in range(first, last):
        wide = wide_B[b]
        for g in range(plan.slots_G.size):
            s = plan.slots_G[g]
            offset, pooling = jagged.offsets_at_S[s], plan.poolings_G[g]
            default = plan.vector_GD.ctypes.data + 4 * g * dim
            target = inputs_BI.ctypes.data + 4 * (b * inputs_BI.shape[1] + plan.columns_G[g])
            pooled = f32_at(target)
            if offset < 0:
                row_address = address_at[jagged.starts_S1[s] + b]
                if b + 2 < last:
                    prefetch(address_at[jagged.starts_S1[s] + b + 2] + layout.vector)
                source = _vector(layout, row_address, default, target)
                if source != target:
                    vector = f32_at(source)
                    for j in range(dim):
                        pooled[j] = vector[j]
                misses_S[s] += row_address == 0
                if layout.wide >= 0:
                    wide += _wide(layout, row_address, plan.wide_G[g])
                continue
            begin, end = jagged.offsets[offset + b], jagged.offsets[offset + b + 1]
            for j in range(dim):
                pooled[j] = 0
            for n in range(begin, end):
                row_address = address_at[n]
                misses_S[s] += row_address == 0
                vector = f32_at(_vector(layout, row_address, default, scratch.ctypes.data))
                if pooling == _MAX:
                    for j in range(dim):
                        if n == begin or vector[j] > pooled[j]:
                            pooled[j] = vector[j]
                else:
                    for j in range(dim):
                        pooled[j] += vector[j]
                if layout.wide >= 0:
                    wide += _wide(layout, row_address, plan.wide_G[g])
            if pooling == _MEAN and end > begin:
                for j in range(dim):
                    pooled[j] /= np.float32(end - begin)
        wide_B[b] = wide


@njit(cache=True, nogil=True, inline="always")
def _wide(layout: PackedLayoutView, row_address: Int, default: np.float32) -> np.float32:
    return default if row_address == 0 else f32_at(row_address + layout.wide)[0]


@njit(cache=True, nogil=True, inline="always")
def _vector(layout: PackedLayoutView, row_address: Int, default: Int, buffer: Int) -> Int:
    """The address of a row's vector as floats: in the table, or unpacked into `buffer`."""
    if row_address == 0:
        return default
    at = row_address + layout.vector
    if layout.precision == _FP16:
        vector = f32_at(buffer)
        for j in range(layout.dim):
            vector[j] = fp16_at(at, j)
        return buffer
    if layout.precision == _INT8:
        vector = f32_at(buffer)
        scale = f32_at(row_address + layout.scale)[0]
        for j in range(layout.dim):
            vector[j] = scale * int8_at(at, j)
        return buffer
    return at
