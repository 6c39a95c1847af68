"""The worker's side of sharded tables (sharded_tables.py): it has shapes and batches, but no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.arena import CHUNK_BITS, CHUNK_ROWS
from clickline.embedding.index import SHARDS, RowsView
from clickline.embedding.jagged_ids import scatter_rows, to_jagged
from clickline.embedding.packed_messages import (
    NO_FLAGS,
    NO_FLOATS,
    LookupReply,
    LookupRequest,
    RowGradients,
    assign_reply_rows,
    check_floats,
    number_ids,
    start_offsets,
    sum_gradients,
    write_request,
)
from clickline.embedding.pooling import POOLINGS, Batch, pool_rows, sum_defaults
from clickline.embedding.raw_memory import address
from clickline.embedding.row_counters import BatchCounts
from clickline.embedding.row_layout import RowLayoutView
from clickline.embedding.sharded_tables import inner_shards
from clickline.embedding.tables import SlotShape, batch_counts, check_buffers, slots_by_dim
from clickline.embedding.thread_pool import ThreadPool
from clickline.records import SlotIds


@dataclass
class PendingLookup:
    """A lookup in progress for a part of a batch: the requests, and what the worker needs for the rest of the step."""

    requests: tuple[LookupRequest, ...]  # one per shard, possibly without ids
    rows: int
    tables: list[Batch]
    ids_at_TH: NDArray[np.int64]  # position of an inner shard's first id, counted through all requests
    ids_ST1: NDArray[np.int64]  # where each table of each request begins, counted likewise
    floats_at_TH: NDArray[np.int64]  # the same for the floats of the replies
    floats_ST1: NDArray[np.int64]
    defaults: int | None = None  # ids that use their slot's default row; known once the replies are pooled


class RemoteTables:
    """Tables without rows: the rows are in `shards` shards elsewhere."""

    def __init__(self, slots: Sequence[SlotShape], *, wide: bool, shards: int, threads: int = 1) -> None:
        self.slots = tuple(slots)
        self.shards = shards
        self.width = sum(slot.dim for slot in slots)
        self._thread_pool = ThreadPool(threads)
        dims = [slot.dim for slot in slots]
        columns = np.cumsum([0, *dims])
        self._tables = [_RemoteTable(slots, numbers, columns, wide) for numbers in slots_by_dim(dims)]
        sizes_T = np.array([len(table.slot_numbers) for table in self._tables])
        widths_T = np.array([table.layout.stride // 4 for table in self._tables])
        self._defaults_T1 = start_offsets(sizes_T)
        self._default_floats_T1 = start_offsets(sizes_T * widths_T)
        # All (table, inner shard) pairs in the order of the requests: shard, table, inner shard.
        count = len(self._tables)
        owned_by_shard = [inner_shards(number, shards) for number in range(shards)]
        self._owner_H = np.array([number for number, owned in enumerate(owned_by_shard) for _ in owned])
        self._order = np.array(
            [t * SHARDS + h for owned in owned_by_shard for t in range(count) for h in owned]
        )
        self._widths = widths_T[self._order // SHARDS]
        self._bounds_ST1 = np.array(
            [[count * owned.start + t * len(owned) for t in range(count + 1)] for owned in owned_by_shard]
        )

    def begin_lookup(
        self,
        slots: Sequence[SlotIds],
        rows: int,
        *,
        impressions_B: NDArray[np.uint32] | None = None,
        clicks_B: NDArray[np.uint32] | None = None,
        hours_B: NDArray[np.int32] | None = None,
        count: bool,
    ) -> PendingLookup:
        """Build the requests for the distinct ids of a part of a batch. With `count` they carry the counts of each id,
        as `Tables.find` in training; without it they are for scoring."""
        if len(slots) != len(self.slots):
            raise ValueError(f"got {len(slots)} slots, expected {len(self.slots)}")
        counts = batch_counts(rows, impressions_B, clicks_B, hours_B)
        if count:
            _check_counts(counts, slots, rows)
        batches = []
        for table in self._tables:
            jagged = to_jagged([slots[s] for s in table.slot_numbers], rows)
            batches.append(
                Batch.partition(
                    self._thread_pool, jagged, table.poolings_S, table.columns_S, table.layout.dim, rows
                )
            )
            self._thread_pool.parallel_for(SHARDS, number_ids, batches[-1].partitioned)
        distinct = np.concatenate([batch.partitioned.distinct_H for batch in batches])[self._order]
        ids_at, floats_at = start_offsets(distinct), start_offsets(distinct * self._widths)
        ids_at_TH, floats_at_TH = np.empty((2, len(batches), SHARDS), dtype=np.int64)
        ids_at_TH.reshape(-1)[self._order] = ids_at[:-1]
        floats_at_TH.reshape(-1)[self._order] = floats_at[:-1]
        combined = _allocate_request(int(ids_at[-1]), count)
        for batch, at_H in zip(batches, ids_at_TH, strict=True):
            self._thread_pool.parallel_for(SHARDS, write_request, batch.partitioned, counts, at_H, combined)
        ids_ST1 = ids_at[self._bounds_ST1]
        requests = tuple(_shard_request(combined, starts_T1, count) for starts_T1 in ids_ST1)
        return PendingLookup(
            requests, rows, batches, ids_at_TH, ids_ST1, floats_at_TH, floats_at[self._bounds_ST1]
        )

    def pool(
        self,
        pending: PendingLookup,
        replies: Sequence[LookupReply],
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
    ) -> None:
        """Pool the replies, one from each shard, as `Tables.pool` does."""
        check_buffers(self.width, inputs_BI, wide_B)
        if wide_B.size != pending.rows:
            raise ValueError(f"got {wide_B.size} rows, but the lookup has {pending.rows}")
        self._check_replies(pending, replies)
        wide_B[:] = 0
        rows_S = np.array([address(reply.rows) for reply in replies])
        default_flags_S = np.array(
            [address(reply.defaults_N) if reply.defaults_N.size else 0 for reply in replies]
        )
        owner_H = self._owner_H
        defaults_H = np.zeros(SHARDS, dtype=np.int64)
        defaults = 0
        for t, (table, batch) in enumerate(zip(self._tables, pending.tables, strict=True)):
            chunks, row_S = _chunks(pending, t, rows_S, table.layout.stride)
            chunks[0] = address(replies[0].default_rows) + 4 * int(self._default_floats_T1[t])
            at_H = pending.ids_at_TH[t]
            row_H = row_S[owner_H] + at_H - pending.ids_ST1[owner_H, t]
            default_flags_H = default_flags_S[owner_H]
            default_flags_H[default_flags_H != 0] += (at_H - pending.ids_ST1[owner_H, 0])[
                default_flags_H != 0
            ]
            partitioned, parallel_for = batch.partitioned, self._thread_pool.parallel_for
            parallel_for(SHARDS, assign_reply_rows, partitioned, row_H, default_flags_H)
            parallel_for(SHARDS, scatter_rows, partitioned, batch.row_N, defaults_H, True)
            defaults += int(defaults_H.sum())
            rows = RowsView(address(chunks), table.layout.stride, 0, 0)  # the replies are like an arena
            parallel_for(wide_B.size, pool_rows, rows, table.layout, batch, inputs_BI, wide_B)
        pending.defaults = defaults

    def gradients(
        self, pending: PendingLookup, grad_inputs_BI: NDArray[np.float32], grad_wide_B: NDArray[np.float32]
    ) -> tuple[RowGradients, ...]:
        """The gradients of a pooled part, summed by id: one message per shard."""
        if pending.defaults is None:
            raise ValueError("gradients before pool: call pool with the replies first")
        check_buffers(self.width, grad_inputs_BI, grad_wide_B)
        if grad_wide_B.size != pending.rows:
            raise ValueError(f"got gradients of {grad_wide_B.size} rows, but the lookup has {pending.rows}")
        combined = np.empty(int(pending.floats_ST1[-1, -1]), dtype=np.float32)
        for t, table in enumerate(self._tables):
            batch, target_H = pending.tables[t], address(combined) + 4 * pending.floats_at_TH[t]
            self._thread_pool.parallel_for(
                SHARDS, sum_gradients, table.layout, batch, grad_inputs_BI, grad_wide_B, target_H
            )
        defaults, used_S = NO_FLOATS, NO_FLAGS
        if pending.defaults:
            defaults = np.zeros(int(self._default_floats_T1[-1]), dtype=np.float32)
            used_S = np.zeros(len(self.slots), dtype=np.bool_)
            for t, table in enumerate(self._tables):
                target = address(defaults) + 4 * int(self._default_floats_T1[t])
                used = used_S[self._defaults_T1[t] : self._defaults_T1[t + 1]]
                batch = pending.tables[t]
                sum_defaults(table.layout, batch, grad_inputs_BI, grad_wide_B, target, used)
        return tuple(
            RowGradients(
                combined[floats_T1[0] : floats_T1[-1]],
                defaults if number == 0 else NO_FLOATS,
                used_S if number == 0 else NO_FLAGS,
            )
            for number, floats_T1 in enumerate(pending.floats_ST1)
        )

    def _check_replies(self, pending: PendingLookup, replies: Sequence[LookupReply]) -> None:
        if len(replies) != self.shards:
            raise ValueError(f"got {len(replies)} replies, expected {self.shards}")
        for number, reply in enumerate(replies):
            floats = int(pending.floats_ST1[number, -1] - pending.floats_ST1[number, 0])
            check_floats(reply.rows, floats, f"the rows of shard {number}'s reply")
            if reply.defaults_N.size not in (0, pending.requests[number].ids_N.size):
                raise ValueError(f"the reply of shard {number} has flags for {reply.defaults_N.size} ids")
        check_floats(replies[0].default_rows, int(self._default_floats_T1[-1]), "shard 0's default rows")


class _RemoteTable:
    """The slots of one dim, as one table without rows."""

    def __init__(
        self, slots: Sequence[SlotShape], slot_numbers: Sequence[int], columns: NDArray[np.int64], wide: bool
    ) -> None:
        self.slot_numbers = slot_numbers
        dim = slots[slot_numbers[0]].dim
        size = 4 * (dim + 1 if wide else dim)
        # The row layout of messages.
        self.layout = RowLayoutView(dim, 4 * dim if wide else -1, 0, -1, -1, size, size)
        self.poolings_S = np.array([POOLINGS[slots[s].pooling] for s in slot_numbers], dtype=np.int64)
        self.columns_S = columns[slot_numbers]


def _check_counts(counts: BatchCounts, slots: Sequence[SlotIds], rows: int) -> None:
    """An id's impressions are sent as 32 bits; it may occur in all rows, in each of the slots."""
    largest = max(int(counts.impressions_B.sum(dtype=np.int64)), int(counts.clicks_B.sum(dtype=np.int64)))
    if largest * len(slots) >= 1 << 32 and rows:
        raise ValueError(
            f"{largest:,} impressions or clicks in one batch of {rows} rows could overflow 2^32 for one id. "
            "Use smaller batches."
        )


def _allocate_request(ids: int, count: bool) -> LookupRequest:
    """One request with room for all ids of a batch."""
    counted = ids if count else 0
    return LookupRequest(
        np.empty(ids, dtype=np.uint64),
        np.zeros(0, dtype=np.int64),
        np.empty(counted, dtype=np.uint16),
        np.empty(counted, dtype=np.uint32),
        np.empty(counted, dtype=np.uint32),
        np.empty(counted, dtype=np.int32),
    )


def _shard_request(combined: LookupRequest, starts_T1: NDArray[np.int64], count: bool) -> LookupRequest:
    """One shard's slice of the combined request."""
    first, last = int(starts_T1[0]), int(starts_T1[-1])
    counted = slice(first, last) if count else slice(0, 0)
    return LookupRequest(
        combined.ids_N[first:last],
        starts_T1 - first,
        combined.slots_N[counted],
        combined.impressions_N[counted],
        combined.clicks_N[counted],
        combined.hours_N[counted],
    )


def _chunks(
    pending: PendingLookup, t: int, rows_S: NDArray[np.int64], stride: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A table's rows in the replies as the chunks of an arena: their addresses, and the number of each reply's first
    row. The first chunk is reserved for the default rows, so that slot s has row s as in `Table`."""
    ids_S = pending.ids_ST1[:, t + 1] - pending.ids_ST1[:, t]
    chunks_S = -(-ids_S // CHUNK_ROWS)
    first_S = 1 + np.cumsum(chunks_S) - chunks_S
    starts_S = rows_S + 4 * (pending.floats_ST1[:, t] - pending.floats_ST1[:, 0])
    chunk_in_reply = np.arange(int(chunks_S.sum())) - np.repeat(first_S - 1, chunks_S)
    chunks = np.append(0, np.repeat(starts_S, chunks_S) + chunk_in_reply * CHUNK_ROWS * stride)
    return chunks, first_S << CHUNK_BITS
