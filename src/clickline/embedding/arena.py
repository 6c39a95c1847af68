"""Where rows live: chunks that are never moved or copied, handed to shards in blocks.

A row's number says where it is: chunk `row >> CHUNK_BITS`, place `row & (CHUNK_ROWS - 1)`. Each shard
keeps a stack of its free rows: those of its last block that are not used yet, and those of ids that
were evicted. Which row an id gets never shows in a result or in a snapshot.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.raw_memory import address, allocate

CHUNK_BITS = 18
CHUNK_ROWS = 1 << CHUNK_BITS
BLOCK_ROWS = 256
MAX_ROWS = 1 << 31  # row numbers have 32 bits, the highest marks candidates


class Arena:
    """Rows of one size for all shards of a table."""

    def __init__(self, stride: int, shards: int) -> None:
        self.stride = stride
        self.chunks: NDArray[np.int64] = np.zeros(MAX_ROWS >> CHUNK_BITS, dtype=np.int64)  # their addresses
        self.stack_addresses_H: NDArray[np.int64] = np.zeros(shards, dtype=np.int64)
        self.free_H: NDArray[np.int64] = np.zeros(shards, dtype=np.int64)  # rows on each shard's stack
        self.room_H: NDArray[np.int64] = np.zeros(shards, dtype=np.int64)  # rows a stack can hold
        self._lock = threading.Lock()
        self._memory: list[NDArray[np.uint8]] = []
        self._stacks: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)] * shards
        self._rows = 0  # handed out so far, used or free

    @property
    def memory_bytes(self) -> int:
        return self._rows * self.stride + sum(stack.nbytes for stack in self._stacks)

    def reserve(self, shard: int, rows: int) -> None:
        """Give a shard at least so many free rows. Shards may ask at the same time."""
        short = rows - int(self.free_H[shard])
        if short > 0:
            used = int(self.free_H[shard])
            taken = self.take(-(-short // BLOCK_ROWS) * BLOCK_ROWS)
            self.make_room(shard, taken.size)
            self._stacks[shard][used : used + taken.size] = taken[::-1]  # the lowest is taken first
            self.free_H[shard] = used + taken.size

    def take(self, rows: int) -> NDArray[np.uint32]:
        """Numbers of rows nobody has had before."""
        with self._lock:
            first, self._rows = self._rows, self._rows + rows
            if self._rows >= MAX_ROWS:  # the last number means that there is no row
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
        """Let a shard's stack take `rows` more freed rows."""
        used = int(self.free_H[shard])
        if used + rows > self._stacks[shard].size:
            wider = np.zeros(max(used + rows, 2 * self._stacks[shard].size), dtype=np.uint32)
            wider[:used] = self._stacks[shard][:used]
            self._stacks[shard] = wider
            self.stack_addresses_H[shard] = address(wider)
            self.room_H[shard] = wider.size
