"""The worker's side of tables that are elsewhere (sharded_tables.py): shapes, and batches, but no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.arena import CHUNK_BITS, CHUNK_ROWS
from clickline.embedding.index import SHARDS, RowsView
from clickline.embedding.jagged_ids import Bags, Dealt, bags_of, deal_all, spread_rows
from clickline.embedding.packed_messages import (
    NO_FLOATS,
    NO_MARKS,
    Gradients,
    Reply,
    Request,
    check_floats,
    name_rows,
    number_ids,
    starts_of,
    sum_default_gradients,
    sum_gradients,
    write_request,
)
from clickline.embedding.pooling import POOLINGS, Columns, lay_out, pool_rows
from clickline.embedding.raw_memory import address
from clickline.embedding.row_counters import Counts
from clickline.embedding.row_layout import RowPlaces
from clickline.embedding.sharded_tables import inner_shards
from clickline.embedding.tables import SlotShape, check_buffers, counts_of, members_of
from clickline.embedding.thread_pool import Workers
from clickline.records import SlotIds


@dataclass
class _AskedTable:
    """One table's share of a part."""

    bags: Bags
    dealt: Dealt
    columns: Columns
    row_N: NDArray[np.uint32]  # where each id's weights lie in the replies; known since they were pooled
    defaults: int = 0  # ids that use their slot's default row


@dataclass
class Asked:
    """A part of a batch on its way: what to ask the shards, and what the worker needs for the rest of the step."""

    requests: tuple[Request, ...]  # one for each shard, possibly without ids
    rows: int
    tables: list[_AskedTable]
    ids_at_TH: NDArray[np.int64]  # place of an inner shard's first id, counted through all requests
    ids_ST1: NDArray[np.int64]  # where each table of each request begins, counted likewise
    floats_at_TH: NDArray[np.int64]  # the same for the floats of the replies
    floats_ST1: NDArray[np.int64]
    pooled: bool = False


class RemoteTables:
    """What a worker knows of the tables: their shapes. The rows are in `shards` other places."""

    def __init__(self, slots: Sequence[SlotShape], *, wide: bool, shards: int, threads: int = 1) -> None:
        self.slots = tuple(slots)
        self.shards = shards
        self.width = sum(slot.dim for slot in slots)
        workers = Workers(threads)
        columns = np.cumsum([0, *(slot.dim for slot in slots)])
        self._tables = [
            _RemoteTable([slots[s] for s in mine], mine, columns[mine], wide, workers)
            for mine in members_of([slot.dim for slot in slots])
        ]
        sizes_T = np.array([len(table.members) for table in self._tables])
        widths_T = np.array([table.places.stride // 4 for table in self._tables])
        self._defaults_T1 = starts_of(sizes_T)
        self._default_floats_T1 = starts_of(sizes_T * widths_T)
        # All (table, inner shard) in the order in which requests have them: shard, table, inner shard.
        count = len(self._tables)
        owned = [inner_shards(number, shards) for number in range(shards)]
        self._owner_H = np.array([number for number, mine in enumerate(owned) for _ in mine])
        self._order = np.array([t * SHARDS + h for mine in owned for t in range(count) for h in mine])
        self._widths = widths_T[self._order // SHARDS]
        self._cuts_ST1 = np.array(
            [[count * mine.start + t * len(mine) for t in range(count + 1)] for mine in owned]
        )

    def ask(
        self,
        slots: Sequence[SlotIds],
        rows: int,
        *,
        shows_B: NDArray[np.uint32] | None = None,
        clicks_B: NDArray[np.uint32] | None = None,
        hours_B: NDArray[np.int32] | None = None,
        count: bool,
    ) -> Asked:
        """Find out which distinct ids a part of a batch has. With `count` the requests say what each of them
        counts, as `Tables.find` in training; otherwise it is for scoring."""
        if len(slots) != len(self.slots):
            raise ValueError(f"{len(slots)} slots given, {len(self.slots)} expected")
        counts = counts_of(rows, shows_B, clicks_B, hours_B)
        if count:
            _check_counts(counts, slots, rows)
        tables = [table.ask(slots, rows) for table in self._tables]
        distinct = np.concatenate([table.dealt.distinct_H for table in tables])[self._order]
        ids_at, floats_at = starts_of(distinct), starts_of(distinct * self._widths)
        ids_at_TH, floats_at_TH = np.empty((2, len(tables), SHARDS), dtype=np.int64)
        ids_at_TH.reshape(-1)[self._order] = ids_at[:-1]
        floats_at_TH.reshape(-1)[self._order] = floats_at[:-1]
        everything = _room_for(int(ids_at[-1]), count)
        for t, table in enumerate(self._tables):
            table.write(tables[t], counts, ids_at_TH[t], everything)
        ids_ST1 = ids_at[self._cuts_ST1]
        requests = tuple(_cut(everything, starts_T1, count) for starts_T1 in ids_ST1)
        return Asked(requests, rows, tables, ids_at_TH, ids_ST1, floats_at_TH, floats_at[self._cuts_ST1])

    def pool(
        self,
        asked: Asked,
        replies: Sequence[Reply],
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
    ) -> None:
        """Pool what the shards answered, one reply each, as `Tables.pool` does."""
        check_buffers(self.width, inputs_BI, wide_B)
        if wide_B.size != asked.rows:
            raise ValueError(f"{wide_B.size} rows given, {asked.rows} were asked for")
        self._check_replies(asked, replies)
        wide_B[:] = 0
        rows_S = np.array([address(reply.rows) for reply in replies])
        marks_S = np.array([address(reply.defaults_N) if reply.defaults_N.size else 0 for reply in replies])
        owner_H = self._owner_H
        for t, table in enumerate(self._tables):
            chunks, row_S = _chunks(asked, t, rows_S, table.places.stride)
            chunks[0] = address(replies[0].default_rows) + 4 * int(self._default_floats_T1[t])
            at_H = asked.ids_at_TH[t]
            row_H = row_S[owner_H] + at_H - asked.ids_ST1[owner_H, t]
            marks_H = marks_S[owner_H]
            marks_H[marks_H != 0] += (at_H - asked.ids_ST1[owner_H, 0])[marks_H != 0]
            table.pool(asked.tables[t], chunks, row_H, marks_H, inputs_BI, wide_B)
        asked.pooled = True

    def gradients(
        self, asked: Asked, grad_inputs_BI: NDArray[np.float32], grad_wide_B: NDArray[np.float32]
    ) -> tuple[Gradients, ...]:
        """The gradients of a part that was pooled, summed by id: one message for each shard."""
        if not asked.pooled:
            raise ValueError("gradients before the replies were pooled: which ids have a vector is not known")
        check_buffers(self.width, grad_inputs_BI, grad_wide_B)
        if grad_wide_B.size != asked.rows:
            raise ValueError(f"gradients of {grad_wide_B.size} rows given, {asked.rows} were asked for")
        everything = np.empty(int(asked.floats_ST1[-1, -1]), dtype=np.float32)
        for t, table in enumerate(self._tables):
            target_H = address(everything) + 4 * asked.floats_at_TH[t]
            table.sum(asked.tables[t], grad_inputs_BI, grad_wide_B, target_H)
        defaults, used_S = NO_FLOATS, NO_MARKS
        if any(table.defaults for table in asked.tables):
            defaults = np.zeros(int(self._default_floats_T1[-1]), dtype=np.float32)
            used_S = np.zeros(len(self.slots), dtype=np.bool_)
            for t, table in enumerate(self._tables):
                target = address(defaults) + 4 * int(self._default_floats_T1[t])
                used = used_S[self._defaults_T1[t] : self._defaults_T1[t + 1]]
                table.sum_defaults(asked.tables[t], grad_inputs_BI, grad_wide_B, target, used)
        return tuple(
            Gradients(
                everything[floats_T1[0] : floats_T1[-1]],
                defaults if number == 0 else NO_FLOATS,
                used_S if number == 0 else NO_MARKS,
            )
            for number, floats_T1 in enumerate(asked.floats_ST1)
        )

    def _check_replies(self, asked: Asked, replies: Sequence[Reply]) -> None:
        if len(replies) != self.shards:
            raise ValueError(f"{len(replies)} replies given, {self.shards} expected")
        for number, reply in enumerate(replies):
            floats = int(asked.floats_ST1[number, -1] - asked.floats_ST1[number, 0])
            check_floats(reply.rows, floats, f"the rows of shard {number}'s reply")
            if reply.defaults_N.size not in (0, asked.requests[number].ids_N.size):
                raise ValueError(f"the reply of shard {number} marks {reply.defaults_N.size} ids")
        check_floats(replies[0].default_rows, int(self._default_floats_T1[-1]), "shard 0's default rows")


class _RemoteTable:
    """The slots of one dim."""

    def __init__(
        self,
        slots: Sequence[SlotShape],
        members: Sequence[int],
        columns_S: NDArray[np.int64],
        wide: bool,
        workers: Workers,
    ) -> None:
        self.members = members
        dim = slots[0].dim
        size = 4 * (dim + 1 if wide else dim)
        self.places = RowPlaces(dim, 4 * dim if wide else -1, 0, -1, -1, size, size)  # as messages have rows
        self._poolings_S = np.array([POOLINGS[slot.pooling] for slot in slots], dtype=np.int64)
        self._columns_S = columns_S
        self._workers = workers

    def ask(self, slots: Sequence[SlotIds], rows: int) -> _AskedTable:
        """Number the distinct ids; `slots` are all of the batch."""
        bags = bags_of([slots[s] for s in self.members], rows)
        dealt = deal_all(self._workers, bags)
        self._workers.each(SHARDS, lambda first, last: number_ids(first, last, dealt))
        columns = lay_out(self._poolings_S, self._columns_S, self.places.dim, bags, rows)
        return _AskedTable(bags, dealt, columns, np.empty(bags.ids_N.size, dtype=np.uint32))

    def write(self, asked: _AskedTable, counts: Counts, at_H: NDArray[np.int64], request: Request) -> None:
        self._workers.each(
            SHARDS, lambda first, last: write_request(first, last, asked.dealt, counts, at_H, request)
        )

    def pool(
        self,
        asked: _AskedTable,
        chunks: NDArray[np.int64],
        row_H: NDArray[np.int64],
        marks_H: NDArray[np.int64],
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
    ) -> None:
        """Pool rows that lie in the replies as in an arena."""
        defaults_H = np.zeros(SHARDS, dtype=np.int64)
        view = RowsView(address(chunks), self.places.stride, 0, 0)

        def spread(first: int, last: int) -> None:
            name_rows(first, last, asked.dealt, row_H, marks_H)
            spread_rows(first, last, asked.dealt, asked.row_N, defaults_H)

        def pool(first: int, last: int) -> None:
            pool_rows(
                view, self.places, asked.bags, asked.columns, asked.row_N, first, last, inputs_BI, wide_B
            )

        self._workers.each(SHARDS, spread)
        self._workers.each(wide_B.size, pool)
        asked.defaults = int(defaults_H.sum())

    def sum(
        self,
        asked: _AskedTable,
        gradient_BI: NDArray[np.float32],
        gradient_wide_B: NDArray[np.float32],
        target_H: NDArray[np.int64],
    ) -> None:
        """Sum gradients by id, those of each inner shard to its address."""
        self._workers.each(
            SHARDS,
            lambda first, last: sum_gradients(
                first,
                last,
                self.places,
                asked.bags,
                asked.columns,
                asked.dealt,
                gradient_BI,
                gradient_wide_B,
                target_H,
            ),
        )

    def sum_defaults(
        self,
        asked: _AskedTable,
        gradient_BI: NDArray[np.float32],
        gradient_wide_B: NDArray[np.float32],
        target: int,
        used_S: NDArray[np.bool_],
    ) -> None:
        """Sum gradients of the default rows to an address, and mark those that were used."""
        sum_default_gradients(
            self.places, asked.bags, asked.columns, asked.row_N, gradient_BI, gradient_wide_B, target, used_S
        )


def _check_counts(counts: Counts, slots: Sequence[SlotIds], rows: int) -> None:
    """An id's shows are sent as 32 bits: it can have those of all rows, in each of the slots."""
    most = max(int(counts.show_B.sum(dtype=np.int64)), int(counts.click_B.sum(dtype=np.int64)))
    if most * len(slots) >= 1 << 32 and rows:
        raise ValueError(
            f"{most:,} shows or clicks in one batch of {rows} rows: an id's could pass 2^32. Use smaller batches."
        )


def _room_for(ids: int, count: bool) -> Request:
    """All requests of a batch as one."""
    counted = ids if count else 0
    return Request(
        np.empty(ids, dtype=np.uint64),
        np.zeros(0, dtype=np.int64),
        np.empty(counted, dtype=np.uint16),
        np.empty(counted, dtype=np.uint32),
        np.empty(counted, dtype=np.uint32),
        np.empty(counted, dtype=np.int32),
    )


def _cut(everything: Request, starts_T1: NDArray[np.int64], count: bool) -> Request:
    """One shard's request."""
    first, last = int(starts_T1[0]), int(starts_T1[-1])
    counted = slice(first, last) if count else slice(0, 0)
    return Request(
        everything.ids_N[first:last],
        starts_T1 - first,
        everything.slots_N[counted],
        everything.shows_N[counted],
        everything.clicks_N[counted],
        everything.hours_N[counted],
    )


def _chunks(
    asked: Asked, t: int, rows_S: NDArray[np.int64], stride: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The replies' rows of a table as an arena's chunks: their addresses, and the number of each reply's first
    row. The first chunk is left for the default rows, so that slot s has row s as in `Table`."""
    ids_S = asked.ids_ST1[:, t + 1] - asked.ids_ST1[:, t]
    chunks_S = -(-ids_S // CHUNK_ROWS)
    first_S = 1 + np.cumsum(chunks_S) - chunks_S
    begins_S = rows_S + 4 * (asked.floats_ST1[:, t] - asked.floats_ST1[:, 0])
    inside = np.arange(int(chunks_S.sum())) - np.repeat(first_S - 1, chunks_S)
    chunks = np.append(0, np.repeat(begins_S, chunks_S) + inside * CHUNK_ROWS * stride)
    return chunks, first_S << CHUNK_BITS
