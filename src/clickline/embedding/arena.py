"""Memory for rows: chunks that are never moved or copied, given to shards in blocks.

A row's number is its location: chunk `row >> CHUNK_BITS`, position `row & (CHUNK_ROWS - 1)`. Each shard has a
free list: the unused rows of its last block, and the rows of evicted ids. Which row an id gets affects neither
results nor snapshots.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.raw_memory import address, allocate, grown

CHUNK_BITS = 18
CHUNK_ROWS = 1 << CHUNK_BITS
BLOCK_ROWS = 256
MAX_ROWS = 1 << 31  # row numbers have 32 bits; the highest bit marks candidates


class Arena:
    """Storage for rows of one size, shared by all shards of a table."""

    def __init__(self, stride: int, shards: int) -> None:
        self.stride = stride
        self.chunks: NDArray[np.int64] = np.zeros(
            MAX_ROWS >> CHUNK_BITS, dtype=np.int64
        )  # addresses of the chunks
        self.free_list_addresses_H: NDArray[np.int64] = np.zeros(shards, dtype=np.int64)
        self.free_counts_H: NDArray[np.int64] = np.zeros(
            shards, dtype=np.int64
        )  # rows in each shard's free list
        self.capacity_H: NDArray[np.int64] = np.zeros(shards, dtype=np.int64)  # rows a free list can hold
        self._lock = threading.Lock()
        self._memory: list[NDArray[np.uint8]] = []
        self._free_lists: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)] * shards
        self._rows = 0  # allocated so far, used or free

    @property
    def memory_bytes(self) -> int:
        return self._rows * self.stride + sum(free_list.nbytes for free_list in self._free_lists)

    def reserve(self, shard: int, rows: int) -> None:
        """Give a shard at least `rows` free rows. Safe to call for several shards at once."""
        missing = rows - int(self.free_counts_H[shard])
        if missing > 0:
            used = int(self.free_counts_H[shard])
            numbers = self.allocate_rows(-(-missing // BLOCK_ROWS) * BLOCK_ROWS)
            self.make_room(shard, numbers.size)
            self._free_lists[shard][used : used + numbers.size] = numbers[
                ::-1
            ]  # the lowest number is used first
            self.free_counts_H[shard] = used + numbers.size

    def allocate_rows(self, rows: int) -> NDArray[np.uint32]:
        """Numbers of rows that were never used before."""
        with self._lock:
            first, self._rows = self._rows, self._rows + rows
            if self._rows >= MAX_ROWS:  # the last number means that an id has no row
                raise MemoryError(f"a table holds fewer than {MAX_ROWS:,} rows of one dim")
            while self._rows > len(self._memory) * CHUNK_ROWS:
                chunk = allocate(CHUNK_ROWS * self.stride)
                self.chunks[len(self._memory)] = address(chunk)
                self._memory.append(chunk)
        return np.arange(first, first + rows, dtype=np.uint32)

    def row(self, number: int) -> NDArray[np.uint8]:
        """The bytes of one row."""
        first = (number & (CHUNK_ROWS - 1)) * self.stride
        return self._memory[number >> CHUNK_BITS][first : first + self.stride]

    def make_room(self, shard: int, rows: int) -> None:
        """Make room for `rows` more rows in a shard's free list."""
        used = int(self.free_counts_H[shard])
        if used + rows > self._free_lists[shard].size:
            wider = grown(self._free_lists[shard], max(used + rows, 2 * self._free_lists[shard].size))
            self._free_lists[shard] = wider
            self.free_list_addresses_H[shard] = address(wider)
            self.capacity_H[shard] = wider.size
