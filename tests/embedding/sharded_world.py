"""Sharded tables in one process: what a driver with workers and embedding servers does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from clickline.embedding import (
    LookupReply,
    LookupRequest,
    PendingLookup,
    RemoteTables,
    RowGradients,
    ShardLookup,
    ShardTables,
    SlotShape,
    Tables,
)
from clickline.records import SlotIds

Message = TypeVar("Message", LookupRequest, LookupReply, RowGradients)


class Batch(NamedTuple):
    """A training batch, with the gradients it will have."""

    slots: list[SlotIds]
    rows: int
    impressions_B: NDArray[np.uint32]
    clicks_B: NDArray[np.uint32]
    hours_B: NDArray[np.int32]
    grad_BI: NDArray[np.float32]
    grad_wide_B: NDArray[np.float32]

    def part(self, first: int, last: int) -> Batch:
        keep_B = np.zeros(self.rows, dtype=np.bool_)
        keep_B[first:last] = True
        slots = [slot.take(np.flatnonzero(keep_B)) for slot in self.slots]
        return Batch(
            slots,
            last - first,
            self.impressions_B[first:last],
            self.clicks_B[first:last],
            self.hours_B[first:last],
            self.grad_BI[first:last],
            self.grad_wide_B[first:last],
        )

    def counts(self) -> dict[str, Any]:
        return {"impressions_B": self.impressions_B, "clicks_B": self.clicks_B, "hours_B": self.hours_B}


def batch_of(
    rng: np.random.Generator,
    slots: Sequence[SlotShape],
    rows: int,
    vocabulary: int,
    multi: Sequence[int] = (),
    strays: float = 0.1,
) -> Batch:
    """Random ids, skewed; the slots in `multi` have zero to four per row. `strays` is the share of ids that belong to
    the first slot, whatever slot they are in."""
    drawn = []
    for s in range(len(slots)):
        sizes = rng.integers(0, 5, rows) if s in multi else np.ones(rows, dtype=np.int64)
        ids = (vocabulary * rng.random(int(sizes.sum())) ** 3).astype(np.uint64)
        ids = ids * np.uint64(1000) + np.where(rng.random(ids.size) < strays, 0, s).astype(np.uint64)
        offsets = np.append(0, np.cumsum(sizes)) if s in multi else None
        drawn.append(SlotIds(ids, offsets))
    width = sum(slot.dim for slot in slots)
    return Batch(
        drawn,
        rows,
        rng.integers(0, 4, rows).astype(np.uint32),
        rng.integers(0, 2, rows).astype(np.uint32),
        rng.integers(400_000, 400_009, rows).astype(np.int32),
        rng.normal(size=(rows, width)).astype(np.float32),
        rng.normal(size=rows).astype(np.float32),
    )


def train_locally(
    tables: Tables, batch: Batch, factor: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """One step of local tables; returns the pooled inputs."""
    inputs_BI = np.full((batch.rows, tables.width), np.nan, dtype=np.float32)
    wide_B = np.full(batch.rows, np.nan, dtype=np.float32)
    lookup = tables.gather(batch.slots, inputs_BI, wide_B, **batch.counts(), train=True)
    tables.apply(lookup, batch.grad_BI, batch.grad_wide_B, factor)
    return inputs_BI, wide_B


def as_sent(message: Message) -> Message:
    """A message as it arrives in another process: its arrays are read-only copies."""
    arrays = [array.copy() for array in message]
    for array in arrays:
        array.flags.writeable = False
    return type(message)(*arrays)  # type: ignore[arg-type]


class ShardedTables:
    """Workers and shards that exchange messages as over a network."""

    def __init__(self, tables: Sequence[Tables], *, threads: int = 1) -> None:
        first = tables[0]
        self.shards = [ShardTables(item, number, len(tables)) for number, item in enumerate(tables)]
        self.remote = RemoteTables(
            first.slots, wide=first.wide_optimizer is not None, shards=len(tables), threads=threads
        )
        self.width = first.width

    def begin_lookup(
        self, batch: Batch, parts: int = 1, *, count: bool = True
    ) -> tuple[list[Batch], list[PendingLookup]]:
        bounds = [batch.rows * part // parts for part in range(parts + 1)]
        pieces = [batch.part(bounds[p], bounds[p + 1]) for p in range(parts)]
        counted = [piece.counts() if count else {} for piece in pieces]
        pending = [
            self.remote.begin_lookup(piece.slots, piece.rows, **counts, count=count)
            for piece, counts in zip(pieces, counted, strict=True)
        ]
        return pieces, pending

    def find(self, pending: Sequence[PendingLookup], *, count: bool = True) -> list[ShardLookup]:
        return [
            shard.find([as_sent(item.requests[number]) for item in pending], count=count)
            for number, shard in enumerate(self.shards)
        ]

    def pool(
        self, pending: Sequence[PendingLookup], lookups: Sequence[ShardLookup]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        replies = [shard.replies(item) for shard, item in zip(self.shards, lookups, strict=True)]
        inputs, wides = [], []
        for part, item in enumerate(pending):
            inputs_BI = np.full((item.rows, self.width), np.nan, dtype=np.float32)
            wide_B = np.full(item.rows, np.nan, dtype=np.float32)
            self.remote.pool(item, [as_sent(of_shard[part]) for of_shard in replies], inputs_BI, wide_B)
            inputs.append(inputs_BI)
            wides.append(wide_B)
        return np.concatenate(inputs), np.concatenate(wides)

    def apply(
        self,
        pieces: Sequence[Batch],
        pending: Sequence[PendingLookup],
        lookups: Sequence[ShardLookup],
        factor: float = 1.0,
    ) -> None:
        gradients = [
            self.remote.gradients(item, piece.grad_BI, piece.grad_wide_B)
            for piece, item in zip(pieces, pending, strict=True)
        ]
        for number, (shard, item) in enumerate(zip(self.shards, lookups, strict=True)):
            shard.apply(item, [as_sent(of_shard[number]) for of_shard in gradients], factor)

    def train(
        self, batch: Batch, parts: int = 1, factor: float = 1.0
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """One full training step; returns the pooled inputs."""
        pieces, pending = self.begin_lookup(batch, parts)
        lookups = self.find(pending)
        pooled = self.pool(pending, lookups)
        self.apply(pieces, pending, lookups, factor)
        return pooled
