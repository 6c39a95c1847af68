"""From ids to packed rows, and from those to the network's input.

Two levels are asked in turn: the overlay of all deltas, then the base. Inside a level ids go through a pipeline: while
one id's row is compared, the rows of the next 16 are on their way into the cache, and the directory entries of the
16 after those. So a lookup costs what the memory can deliver, not how long it takes to answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.index import mix
from clickline.embedding.jagged_ids import Bags
from clickline.embedding.pooling import POOLINGS
from clickline.embedding.raw_memory import Whole, f32_at, i64_at, prefetch, u32_at, u64_at
from clickline.embedding.serving.low_precision import half_at, tiny_at
from clickline.embedding.serving.packed_rows import ID_BYTES, PRECISIONS, PartShape, Precision, row_type

SECTION_WORDS = 4  # of one part in one shard: directory, buckets, rows, how many rows

_AHEAD = 16  # ids between asking for a cache line and using it
_RING = 64  # a power of two, above 2 * _AHEAD
_RING_MASK = _RING - 1
_CHUNK = 512  # ids that go through one level, then the rest of them through the next
_TILE = 128  # rows of a batch that are found, then pooled while they are in the cache
_GONE = 0xFFFFFFFF
_FP16, _INT8 = PRECISIONS.index("fp16"), PRECISIONS.index("int8")
_MEAN, _MAX = POOLINGS["mean"], POOLINGS["max"]


class PartView(NamedTuple):
    """One part of all levels and shards, as kernels take it."""

    sections: int  # address of levels · shards · SECTION_WORDS int64
    levels: int
    shards: int
    stride: int  # bytes from one row to the next


class RowPlaces(NamedTuple):
    """Byte offsets inside a packed row, counted from the end of its id. -1: the row has none."""

    dim: int
    precision: int
    wide: int
    scale: int
    vector: int


class SlotPlan(NamedTuple):
    """The slots of one part in one call. G: slots."""

    slots_G: NDArray[np.int64]  # which slot of the call
    columns_G: NDArray[np.int64]
    poolings_G: NDArray[np.int64]
    wide_G: NDArray[np.float32]  # of the default rows
    vector_GD: NDArray[np.float32]


@dataclass(frozen=True)
class GatherPlan:
    """Where the slots of a call stand in the network's input, how each is pooled, and its default row."""

    slots: int
    width: int  # columns that the inputs must have
    by_part: tuple[tuple[int, SlotPlan], ...]  # parts in order, as training sums wide weights


def gather_plan(
    parts: Sequence[PartShape], slots: Sequence[tuple[int, int, str, float, Sequence[float]]]
) -> GatherPlan:
    """A plan for slots given as (part, column in the inputs, pooling, wide and vector of the default row)."""
    by_part = []
    for part in sorted({slot[0] for slot in slots}):
        dim = parts[part].dim
        mine = [s for s, slot in enumerate(slots) if slot[0] == part]
        for s in mine:
            _, column, pooling, _, vector = slots[s]
            if len(vector) != dim or column < 0 or pooling not in POOLINGS:
                raise ValueError(
                    f"slot {s} is pooled by {pooling!r} into column {column}, with {len(vector)} weights by default; "
                    f"expected {', '.join(POOLINGS)}, a column from 0 on, and {dim} weights"
                )
        by_part.append(
            (
                part,
                SlotPlan(
                    np.array(mine, dtype=np.int64),
                    np.array([slots[s][1] for s in mine], dtype=np.int64),
                    np.array([POOLINGS[slots[s][2]] for s in mine], dtype=np.int64),
                    np.array([slots[s][3] for s in mine], dtype=np.float32),
                    np.array([slots[s][4] for s in mine], dtype=np.float32).reshape(len(mine), dim),
                ),
            )
        )
    width = max((slot[1] + parts[slot[0]].dim for slot in slots), default=0)
    return GatherPlan(len(slots), width, tuple(by_part))


def row_places(shape: PartShape, precision: Precision) -> RowPlaces:
    """What a kernel must know to read a packed row."""
    fields: Mapping[str, Any] = row_type(shape, precision).fields or {}
    wide, scale, vector = (
        int(fields[name][1]) - ID_BYTES if name in fields else -1 for name in ("wide", "scale", "vector")
    )
    return RowPlaces(shape.dim, PRECISIONS.index(precision), wide, scale, vector)


@njit(cache=True, nogil=True, inline="always")
def _shard_of(mixed: np.uint64, shards: np.uint64) -> Whole:
    """mixed · shards >> 64, in 64 bits."""
    low = (mixed & np.uint64(0xFFFFFFFF)) * shards
    return np.int64(((mixed >> np.uint64(32)) * shards + (low >> np.uint64(32))) >> np.uint64(32))


@njit(cache=True, nogil=True)
def shards_of(ids_N: NDArray[np.uint64], shards: int, shard_N: NDArray[np.int64]) -> None:
    """The shard of each id."""
    for n in range(ids_N.size):
        shard_N[n] = _shard_of(mix(ids_N[n]), np.uint64(shards))


@njit(cache=True, nogil=True)
def _locate(view: PartView, ids: Whole, count: Whole, places: Whole, copies: Whole) -> None:
    """For `count` ids at an address, put the addresses of their rows' weights at another: 0 for an id that is not
    there, or gone. Where `copies` is not 0, copy the weights there too, row after row."""
    id_at, place_at = u64_at(ids), i64_at(places)
    shards, stride = np.uint64(view.shards), view.stride
    words = (stride - ID_BYTES) // 8
    room = np.empty(_CHUNK + 3 * _RING, dtype=np.int64)
    todo, section_at = i64_at(room.ctypes.data), i64_at(room.ctypes.data + 8 * _CHUNK)
    at = i64_at(room.ctypes.data + 8 * (_CHUNK + _RING))
    rows_at = i64_at(room.ctypes.data + 8 * (_CHUNK + 2 * _RING))
    for begin in range(0, count, _CHUNK):
        left = min(_CHUNK, count - begin)
        for i in range(left):
            todo[i] = begin + i
        for level in range(view.levels):
            unknown = 0
            for i in range(left + 2 * _AHEAD):
                if i < left:
                    mixed = mix(id_at[todo[i]])
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
                    prefetch(row + stride * (1 + (rows > 1)) - 1)  # the second, if the bucket has two
                    at[r] = row
                    rows_at[r] = rows
                if i >= 2 * _AHEAD:
                    r = (i - 2 * _AHEAD) & _RING_MASK
                    n = todo[i - 2 * _AHEAD]
                    id, row = id_at[n], at[r]
                    place = 0
                    for _ in range(rows_at[r]):
                        if u64_at(row)[0] == id:
                            place = row + ID_BYTES
                            break
                        row += stride
                    if place == 0:
                        todo[unknown] = n
                        unknown += 1
                    elif u32_at(place)[0] == np.uint32(_GONE):
                        place = 0
                    place_at[n] = place
                    if copies != 0 and place != 0:
                        source, target = u64_at(place), u64_at(copies + n * words * 8)
                        for word in range(words):
                            target[word] = source[word]
            left = unknown
    room[0] = 0  # Numba frees an array after its last use, and reaching it by address is none


@njit(cache=True, nogil=True)
def copy_rows(view: PartView, ids: Whole, copies: Whole, found_N: NDArray[np.bool_]) -> Whole:
    """Copy the packed rows of the ids at an address to another, zeros for those that are not there; how many were.
    Addresses, because what came from a socket is read-only and not aligned: other types, compiled again."""
    words = (view.stride - ID_BYTES) // 8
    place_N = np.empty(found_N.size, dtype=np.int64)
    _locate(view, ids, found_N.size, place_N.ctypes.data, copies)
    count = 0
    for n in range(found_N.size):
        found = place_N[n] != 0
        found_N[n] = found
        count += found
        if not found:
            row = u64_at(copies + n * words * 8)
            for word in range(words):
                row[word] = np.uint64(0)
    return count


@njit(cache=True, nogil=True)
def gather_slots(
    view: PartView,
    places: RowPlaces,
    plan: SlotPlan,
    bags: Bags,
    rows: Whole,
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
    misses_S: NDArray[np.int64],
) -> None:
    """Find the ids of a part's slots and pool their rows, tile by tile; wide weights are added to `wide_B`."""
    place_N = np.empty(bags.ids_N.size, dtype=np.int64)
    ids, found = bags.ids_N.ctypes.data, place_N.ctypes.data
    whole = rows <= _TILE and plan.slots_G.size == bags.offsets_at_S.size
    if whole:
        _locate(view, ids, bags.ids_N.size, found, 0)
    for first in range(0, rows, _TILE):
        last = min(first + _TILE, rows)
        for g in range(0 if whole else plan.slots_G.size):
            s = plan.slots_G[g]
            offset = bags.offsets_at_S[s]
            if offset < 0:
                begin, end = bags.starts_S1[s] + first, bags.starts_S1[s] + last
            else:
                begin, end = bags.offsets[offset + first], bags.offsets[offset + last]
            _locate(view, ids + 8 * begin, end - begin, found + 8 * begin, 0)
        pool_slots(places, plan, bags, first, last, place_N, inputs_BI, wide_B, misses_S)


@njit(cache=True, nogil=True)
def pool_slots(
    places: RowPlaces,
    plan: SlotPlan,
    bags: Bags,
    first: Whole,
    last: Whole,
    place_N: NDArray[np.int64],
    inputs_BI: NDArray[np.float32],
    wide_B: NDArray[np.float32],
    misses_S: NDArray[np.int64],
) -> None:
    """Pool rows of the batch from where their weights are; 0 means the default row. To the bit what
    `embedding.pooling.pool_rows` does."""
    dim = places.dim
    place_at = i64_at(place_N.ctypes.data)
    scratch = np.empty(dim, dtype=np.float32)
    for b in range(first, last):
        wide = wide_B[b]
        for g in range(plan.slots_G.size):
            s = plan.slots_G[g]
            offset, pooling = bags.offsets_at_S[s], plan.poolings_G[g]
            default = plan.vector_GD.ctypes.data + 4 * g * dim
            target = inputs_BI.ctypes.data + 4 * (b * inputs_BI.shape[1] + plan.columns_G[g])
            pooled = f32_at(target)
            if offset < 0:
                place = place_at[bags.starts_S1[s] + b]
                if b + 2 < last:
                    prefetch(place_at[bags.starts_S1[s] + b + 2] + places.vector)
                source = _vector(places, place, default, target)
                if source != target:
                    vector = f32_at(source)
                    for j in range(dim):
                        pooled[j] = vector[j]
                misses_S[s] += place == 0
                if places.wide >= 0:
                    wide += _wide(places, place, plan.wide_G[g])
                continue
            begin, end = bags.offsets[offset + b], bags.offsets[offset + b + 1]
            for j in range(dim):
                pooled[j] = 0
            for n in range(begin, end):
                place = place_at[n]
                misses_S[s] += place == 0
                vector = f32_at(_vector(places, place, default, scratch.ctypes.data))
                if pooling == _MAX:
                    for j in range(dim):
                        if n == begin or vector[j] > pooled[j]:
                            pooled[j] = vector[j]
                else:
                    for j in range(dim):
                        pooled[j] += vector[j]
                if places.wide >= 0:
                    wide += _wide(places, place, plan.wide_G[g])
            if pooling == _MEAN and end > begin:
                for j in range(dim):
                    pooled[j] /= np.float32(end - begin)
        wide_B[b] = wide


@njit(cache=True, nogil=True, inline="always")
def _wide(places: RowPlaces, place: Whole, default: np.float32) -> np.float32:
    return default if place == 0 else f32_at(place + places.wide)[0]


@njit(cache=True, nogil=True, inline="always")
def _vector(places: RowPlaces, place: Whole, default: Whole, room: Whole) -> Whole:
    """Where a row's vector stands as floats: in the table, or unpacked into the room."""
    if place == 0:
        return default
    at = place + places.vector
    if places.precision == _FP16:
        vector = f32_at(room)
        for j in range(places.dim):
            vector[j] = half_at(at, j)
        return room
    if places.precision == _INT8:
        vector = f32_at(room)
        scale = f32_at(place + places.scale)[0]
        for j in range(places.dim):
            vector[j] = scale * tiny_at(at, j)
        return room
    return at
