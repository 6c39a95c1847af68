"""The worker's side of sharded tables (sharded_tables.py): it has shapes and batches, but no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.arena import CHUNK_BITS, CHUNK_ROWS
from clickline.embedding.index import SHARDS, RowsView
from clickline.embedding.jagged_ids import JaggedIds, Partitioned, partition_batch, scatter_rows, to_jagged
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
    sum_default_gradients,
    sum_gradients,
    write_request,
)
from clickline.embedding.pooling import POOLINGS, PoolingPlan, pool_rows, pooling_plan
from clickline.embedding.raw_memory import address
from clickline.embedding.row_counters import BatchCounts
from clickline.embedding.row_layout import RowLayoutView
from clickline.embedding.sharded_tables import inner_shards
from clickline.embedding.tables import SlotShape, batch_counts, check_buffers, slots_by_dim
from clickline.embedding.thread_pool import ThreadPool
from clickline.records import SlotIds


@dataclass
class _PendingTable:
    """One table's share of a PendingLookup."""

    jagged: JaggedIds
    partitioned: Partitioned
    plan: PoolingPlan
    row_N: NDArray[np.uint32]  # where each id's weights are in the replies; known once they are pooled
    defaults: int = 0  # ids that use their slot's default row


@dataclass
class PendingLookup:
    """A lookup in progress for a part of a batch: the requests, and what the worker needs for the rest of the step."""

    requests: tuple[LookupRequest, ...]  # one per shard, possibly without ids
    rows: int
    tables: list[_PendingTable]
    ids_at_TH: NDArray[np.int64]  # position of an inner shard's first id, counted through all requests
    ids_ST1: NDArray[np.int64]  # where each table of each request begins, counted likewise
    floats_at_TH: NDArray[np.int64]  # the same for the floats of the replies
    floats_ST1: NDArray[np.int64]
    pooled: bool = False


class RemoteTables:
    """Tables without rows: the rows are in `shards` shards elsewhere."""

    def __init__(self, slots: Sequence[SlotShape], *, wide: bool, shards: int, threads: int = 1) -> None:
        self.slots = tuple(slots)
        self.shards = shards
        self.width = sum(slot.dim for slot in slots)
        thread_pool = ThreadPool(threads)
        columns = np.cumsum([0, *(slot.dim for slot in slots)])
        self._tables = [
            _RemoteTable([slots[s] for s in numbers], numbers, columns[numbers], wide, thread_pool)
            for numbers in slots_by_dim([slot.dim for slot in slots])
        ]
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
        tables = [table.begin_lookup(slots, rows) for table in self._tables]
        distinct = np.concatenate([table.partitioned.distinct_H for table in tables])[self._order]
        ids_at, floats_at = start_offsets(distinct), start_offsets(distinct * self._widths)
        ids_at_TH, floats_at_TH = np.empty((2, len(tables), SHARDS), dtype=np.int64)
        ids_at_TH.reshape(-1)[self._order] = ids_at[:-1]
        floats_at_TH.reshape(-1)[self._order] = floats_at[:-1]
        combined = _allocate_request(int(ids_at[-1]), count)
        for t, table in enumerate(self._tables):
            table.write(tables[t], counts, ids_at_TH[t], combined)
        ids_ST1 = ids_at[self._bounds_ST1]
        requests = tuple(_shard_request(combined, starts_T1, count) for starts_T1 in ids_ST1)
        return PendingLookup(
            requests, rows, tables, ids_at_TH, ids_ST1, floats_at_TH, floats_at[self._bounds_ST1]
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
        for t, table in enumerate(self._tables):
            chunks, row_S = _chunks(pending, t, rows_S, table.layout.stride)
            chunks[0] = address(replies[0].default_rows) + 4 * int(self._default_floats_T1[t])
            at_H = pending.ids_at_TH[t]
            row_H = row_S[owner_H] + at_H - pending.ids_ST1[owner_H, t]
            default_flags_H = default_flags_S[owner_H]
            default_flags_H[default_flags_H != 0] += (at_H - pending.ids_ST1[owner_H, 0])[
                default_flags_H != 0
            ]
            table.pool(pending.tables[t], chunks, row_H, default_flags_H, inputs_BI, wide_B)
        pending.pooled = True

    def gradients(
        self, pending: PendingLookup, grad_inputs_BI: NDArray[np.float32], grad_wide_B: NDArray[np.float32]
    ) -> tuple[RowGradients, ...]:
        """The gradients of a pooled part, summed by id: one message per shard."""
        if not pending.pooled:
            raise ValueError("gradients before pool: call pool with the replies first")
        check_buffers(self.width, grad_inputs_BI, grad_wide_B)
        if grad_wide_B.size != pending.rows:
            raise ValueError(f"got gradients of {grad_wide_B.size} rows, but the lookup has {pending.rows}")
        combined = np.empty(int(pending.floats_ST1[-1, -1]), dtype=np.float32)
        for t, table in enumerate(self._tables):
            target_H = address(combined) + 4 * pending.floats_at_TH[t]
            table.sum(pending.tables[t], grad_inputs_BI, grad_wide_B, target_H)
        defaults, used_S = NO_FLOATS, NO_FLAGS
        if any(table.defaults for table in pending.tables):
            defaults = np.zeros(int(self._default_floats_T1[-1]), dtype=np.float32)
            used_S = np.zeros(len(self.slots), dtype=np.bool_)
            for t, table in enumerate(self._tables):
                target = address(defaults) + 4 * int(self._default_floats_T1[t])
                used = used_S[self._defaults_T1[t] : self._defaults_T1[t + 1]]
                table.sum_defaults(pending.tables[t], grad_inputs_BI, grad_wide_B, target, used)
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
        self,
        slots: Sequence[SlotShape],
        slot_numbers: Sequence[int],
        columns_S: NDArray[np.int64],
        wide: bool,
        thread_pool: ThreadPool,
    ) -> None:
        self.slot_numbers = slot_numbers
        dim = slots[0].dim
        size = 4 * (dim + 1 if wide else dim)
        self.layout = RowLayoutView(
            dim, 4 * dim if wide else -1, 0, -1, -1, size, size
        )  # the row layout of messages
        self._poolings_S = np.array([POOLINGS[slot.pooling] for slot in slots], dtype=np.int64)
        self._columns_S = columns_S
        self._thread_pool = thread_pool

    def begin_lookup(self, slots: Sequence[SlotIds], rows: int) -> _PendingTable:
        """Number the distinct ids; `slots` are all slots of the batch."""
        jagged = to_jagged([slots[s] for s in self.slot_numbers], rows)
        partitioned = partition_batch(self._thread_pool, jagged)
        self._thread_pool.parallel_for(SHARDS, lambda first, last: number_ids(first, last, partitioned))
        plan = pooling_plan(self._poolings_S, self._columns_S, self.layout.dim, jagged, rows)
        return _PendingTable(jagged, partitioned, plan, np.empty(jagged.ids_N.size, dtype=np.uint32))

    def write(
        self, pending: _PendingTable, counts: BatchCounts, at_H: NDArray[np.int64], request: LookupRequest
    ) -> None:
        self._thread_pool.parallel_for(
            SHARDS, lambda first, last: write_request(first, last, pending.partitioned, counts, at_H, request)
        )

    def pool(
        self,
        pending: _PendingTable,
        chunks: NDArray[np.int64],
        row_H: NDArray[np.int64],
        default_flags_H: NDArray[np.int64],
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
    ) -> None:
        """Pool the rows of the replies, addressed like an arena."""
        defaults_H = np.zeros(SHARDS, dtype=np.int64)
        view = RowsView(address(chunks), self.layout.stride, 0, 0)

        def scatter(first: int, last: int) -> None:
            assign_reply_rows(first, last, pending.partitioned, row_H, default_flags_H)
            scatter_rows(first, last, pending.partitioned, pending.row_N, defaults_H)

        def pool(first: int, last: int) -> None:
            pool_rows(
                view, self.layout, pending.jagged, pending.plan, pending.row_N, first, last, inputs_BI, wide_B
            )

        self._thread_pool.parallel_for(SHARDS, scatter)
        self._thread_pool.parallel_for(wide_B.size, pool)
        pending.defaults = int(defaults_H.sum())

    def sum(
        self,
        pending: _PendingTable,
        gradient_BI: NDArray[np.float32],
        gradient_wide_B: NDArray[np.float32],
        target_H: NDArray[np.int64],
    ) -> None:
        """Sum gradients by id; those of each inner shard go to its address."""
        self._thread_pool.parallel_for(
            SHARDS,
            lambda first, last: sum_gradients(
                first,
                last,
                self.layout,
                pending.jagged,
                pending.plan,
                pending.partitioned,
                gradient_BI,
                gradient_wide_B,
                target_H,
            ),
        )

    def sum_defaults(
        self,
        pending: _PendingTable,
        gradient_BI: NDArray[np.float32],
        gradient_wide_B: NDArray[np.float32],
        target: int,
        used_S: NDArray[np.bool_],
    ) -> None:
        """Sum the gradients of the default rows at an address, and flag those that were used."""
        sum_default_gradients(
            self.layout,
            pending.jagged,
            pending.plan,
            pending.row_N,
            gradient_BI,
            gradient_wide_B,
            target,
            used_S,
        )


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
