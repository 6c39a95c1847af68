"""Checksums of the tables' content, computed in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, address_of, row_in
from clickline.embedding.row_layout import GENERATION, HEAD
from clickline.embedding.table_view import TableView
from clickline.kernel_intrinsics import Int, i64_at, prefetch, u32_at, u64_at
from clickline.numba_cache import njit

_AHEAD = 16


@njit(cache=True, nogil=True)
def digest_row(address: Int, size: Int) -> np.uint64:
    """The checksum of the part of a row (of `size` bytes) that a snapshot holds."""
    digest = np.uint64(0)
    for at in range(0, GENERATION // 8):
        digest = _mix_word(digest, u64_at(address)[at])
    for at in range(HEAD // 4, size // 4):
        digest = _mix_word(digest, np.uint64(u32_at(address)[at]))
    return digest


@njit(cache=True, nogil=True, inline="always")
def _mix_word(digest: np.uint64, word: np.uint64) -> np.uint64:
    digest = (digest ^ word) * np.uint64(0xFF51AFD7ED558CCD)
    return digest ^ (digest >> np.uint64(32))


@njit(cache=True, nogil=True)
def digest_shards(first: Int, last: Int, table: TableView, sums_H: NDArray[np.uint64]) -> None:
    """Sum the checksums of each shard's admitted ids; their order of arrival does not matter."""
    rows, size = table.rows, table.layout.size
    for h in range(first, last):
        entries = u64_at(i64_at(table.id_index.addresses_H)[h])
        end = i64_at(table.id_index.ends_H)[h]
        total = np.uint64(0)
        for at in range(end):
            if at + _AHEAD < end and entries[at + _AHEAD] != np.uint64(0):
                prefetch(address_of(rows, row_in(entries[at + _AHEAD])))
            if entries[at] != np.uint64(0) and row_in(entries[at]) < CANDIDATE:
                total += digest_row(address_of(rows, row_in(entries[at])), size)
        sums_H[h] = total
