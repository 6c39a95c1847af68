"""What tells the content of tables from any other, without a copy of it."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, IndexView, RowsView, address_of, row_in
from clickline.embedding.raw_memory import Whole, i64_at, prefetch, u32_at, u64_at
from clickline.embedding.row_layout import HEAD, TOUCHED

_AHEAD = 16


@njit(cache=True, nogil=True)
def digest_row(address: Whole, size: Whole) -> np.uint64:
    """A checksum of all that a snapshot holds of a row of `size` bytes."""
    found = np.uint64(0)
    for at in range(0, TOUCHED // 8):
        found = _mixed(found, u64_at(address)[at])
    for at in range(HEAD // 4, size // 4):
        found = _mixed(found, np.uint64(u32_at(address)[at]))
    return found


@njit(cache=True, nogil=True, inline="always")
def _mixed(found: np.uint64, word: np.uint64) -> np.uint64:
    found = (found ^ word) * np.uint64(0xFF51AFD7ED558CCD)
    return found ^ (found >> np.uint64(32))


@njit(cache=True, nogil=True)
def digest_shards(
    index: IndexView, rows: RowsView, first: Whole, last: Whole, size: Whole, sums_H: NDArray[np.uint64]
) -> None:
    """The sum over the admitted ids of each shard: the same in whatever order they came."""
    for h in range(first, last):
        entries = u64_at(i64_at(index.addresses_H)[h])
        end = i64_at(index.ends_H)[h]
        total = np.uint64(0)
        for at in range(end):
            if at + _AHEAD < end and entries[at + _AHEAD] != np.uint64(0):
                prefetch(address_of(rows, row_in(entries[at + _AHEAD])))
            if entries[at] != np.uint64(0) and row_in(entries[at]) < CANDIDATE:
                total += digest_row(address_of(rows, row_in(entries[at])), size)
        sums_H[h] = total
