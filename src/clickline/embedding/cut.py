"""A consistent view of a table while training goes on: copy on write, row by row.

`Cut` marks a moment. From then on a training batch keeps a row as it was (its shadow) before it first
changes it, unless the row's shard was copied already. `copy_shard` merges rows and shadows into records
in the index's order. It holds the table only while one shard is copied, so a step waits for a 64th of
the table at most, and memory grows only by the rows that training touches meanwhile.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.counting import ShadowView
from clickline.embedding.index import CANDIDATE, GOLDEN, SHARDS, IndexView, RowsView, address_of, mix, row_in
from clickline.embedding.layout import HEAD, TOUCHED
from clickline.embedding.memory import Whole, address, allocate, i64_at, prefetch, u32_at, u64_at

__all__ = ["Shadows", "copy_shard", "record_from"]

_AHEAD = 16


class Shadows:
    """Rows as they were at the cut, for each shard that is not copied yet."""

    def __init__(self, stride: int) -> None:
        numbers = np.zeros((len(ShadowView._fields), SHARDS), dtype=np.int64)
        self.open_H, self.addresses_H, self.rows_addresses_H, self.used_H, self.room_H = numbers
        self.view = ShadowView(*map(address, numbers))
        self._stride = stride
        self._images: list[NDArray[np.uint8]] = [np.zeros(0, dtype=np.uint8)] * SHARDS
        self._rows: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)] * SHARDS

    @property
    def memory_bytes(self) -> int:
        return sum(images.nbytes for images in self._images)

    def open(self) -> None:
        self.open_H[:] = 1
        self.used_H[:] = 0

    def close(self, shard: int) -> None:
        """Forget a shard's shadows; its rows are kept no longer."""
        self.open_H[shard] = 0
        self.used_H[shard] = self.room_H[shard] = 0
        self._images[shard] = np.zeros(0, dtype=np.uint8)
        self._rows[shard] = np.zeros(0, dtype=np.uint32)

    def reserve(self, shard: int, rows: int) -> None:
        """Make room for so many more shadows in a shard."""
        used = int(self.used_H[shard])
        if used + rows > self.room_H[shard]:
            kept = np.zeros((used + rows) * 3 // 2, dtype=np.uint32)
            images = allocate(kept.size * self._stride)
            kept[:used] = self._rows[shard][:used]
            images[: used * self._stride] = self._images[shard][: used * self._stride]
            self._rows[shard], self._images[shard] = kept, images
            self.addresses_H[shard], self.rows_addresses_H[shard] = address(images), address(kept)
            self.room_H[shard] = kept.size

    def order(self, shard: int) -> NDArray[np.int64]:
        """A shard's shadows in the index's order."""
        used = int(self.used_H[shard])
        images = self._images[shard][: used * self._stride].reshape(used, self._stride)
        ids = images[:, :8].copy().view(np.uint64).reshape(used)
        return np.argsort(ids * GOLDEN)


@njit(cache=True, nogil=True)
def record_from(address: Whole, size: Whole, target: Whole) -> Whole:
    """Write a row as a record, which leaves out `touched`; where the next record goes."""
    source, record = u32_at(address), u32_at(target)
    words = TOUCHED // 4
    for at in range(words):
        record[at] = source[at]
    for at in range(HEAD // 4, size // 4):
        record[at - 1] = source[at]
    return target + size - 4


@njit(cache=True, nogil=True)
def copy_shard(
    index: IndexView,
    rows: RowsView,
    shadow: ShadowView,
    order: NDArray[np.int64],
    shard: Whole,
    size: Whole,
    since: Whole,
    mark: Whole,
    target: Whole,
    candidates_target: Whole,
) -> tuple[int, int]:
    """Copy the shard's rows that changed after `since`, as they were at `mark`, and count them."""
    full_start, candidates_start = target, candidates_target
    entries = u64_at(i64_at(index.addresses_H)[shard])
    end = i64_at(index.ends_H)[shard]
    kept = 0
    at = 0
    while at < end or kept < order.size:
        address = row = np.int64(-1)
        if at < end:
            if at + _AHEAD < end and entries[at + _AHEAD] != np.uint64(0):
                coming = address_of(rows, row_in(entries[at + _AHEAD]))
                prefetch(coming)
                prefetch(coming + 64)
            if entries[at] != np.uint64(0):
                row = row_in(entries[at])
                address = address_of(rows, row)
                if np.int64(u32_at(address + TOUCHED)[0]) > mark:
                    address = np.int64(-1)
            if address < 0:
                at += 1
                continue
        if kept < order.size:
            image = i64_at(shadow.addresses_H)[shard] + order[kept] * rows.stride
            if address < 0 or mix(u64_at(image)[0]) < mix(u64_at(address)[0]):
                address = image
                row = np.int64(u32_at(i64_at(shadow.rows_addresses_H)[shard])[order[kept]])
                kept += 1
            else:
                at += 1
        else:
            at += 1
        if np.int64(u32_at(address + TOUCHED)[0]) > since:
            if row >= CANDIDATE:
                candidates_target = record_from(address, HEAD, candidates_target)
            else:
                target = record_from(address, size, target)
    return (
        (target - full_start) // (size - 4),
        (candidates_target - candidates_start) // (HEAD - 4),
    )
