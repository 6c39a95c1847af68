"""Sparse tables in several processes: shards hold the rows, workers the batches (what they say: packed.py).

A worker                                          shard a of S
    asked = remote.ask(slots, rows, …)
        asked.requests[a]  ───────────────────▶   found = shard.find(requests of all parts, count=True)
    remote.pool(asked, replies, inputs, wide)  ◀─  shard.replies(found)
    …the network's forward and backward…
    remote.gradients(asked, …)[a]  ───────────▶   shard.apply(found, gradients of all parts, factor)

An id belongs to one of the tables' 64 inner shards, and shard a of S has those that `inner_shards` says. It
counts, creates, admits and learns as `Tables` does. With one part the result is that of local tables bit by
bit, for any S; with several only the order of float sums differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.arena import CHUNK_BITS, CHUNK_ROWS
from clickline.embedding.batch import Bags, Dealt, bags_of, deal_all, spread_rows
from clickline.embedding.counting import Counts
from clickline.embedding.index import GOLDEN, SHARDS, RowsView
from clickline.embedding.layout import RowPlaces
from clickline.embedding.memory import address
from clickline.embedding.packed import (
    Gradients,
    Reply,
    Request,
    name_rows,
    number_ids,
    sum_default_gradients,
    sum_gradients,
    write_request,
)
from clickline.embedding.pooling import POOLINGS, Columns, lay_out, pool_rows
from clickline.embedding.table import PackedLookup
from clickline.embedding.tables import SlotShape, Tables, check_buffers, counts_of, members_of
from clickline.embedding.workers import Workers
from clickline.records import SlotIds

__all__ = ["Asked", "Found", "RemoteTables", "ShardTables", "inner_shards"]

_NO_FLOATS = np.zeros(0, dtype=np.float32)
_NO_MARKS = np.zeros(0, dtype=np.bool_)


def inner_shards(number: int, of: int) -> range:
    """The tables' own shards that shard `number` of so many has: those h with h · of // 64 == number."""
    if not 1 <= of <= SHARDS or not 0 <= number < of:
        raise ValueError(f"shard {number} of {of}: from 1 to {SHARDS} are allowed, counted from 0")
    return range(-(-number * SHARDS // of), -(-(number + 1) * SHARDS // of))


# ── the worker's side ──────────────────────────────────────────────────────────────────────────


@dataclass
class _AskedTable:
    """One table's part of a batch."""

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
        self.members = members_of([slot.dim for slot in slots])
        self._workers = Workers(threads)
        columns = np.cumsum([0, *(slot.dim for slot in slots)])
        self._columns = [np.array([columns[s] for s in mine], dtype=np.int64) for mine in self.members]
        self._poolings = [
            np.array([POOLINGS[slots[s].pooling] for s in mine], dtype=np.int64) for mine in self.members
        ]
        dims = [slots[mine[0]].dim for mine in self.members]
        self._places = [_packed_places(dim, wide) for dim in dims]
        sizes_T = np.array([len(mine) for mine in self.members])
        self._defaults_T1 = _ends(sizes_T)
        self._default_floats_T1 = _ends(sizes_T * [places.stride // 4 for places in self._places])
        # All (table, inner shard) in the order in which requests have them: shard, table, inner shard.
        tables = len(dims)
        owned = [inner_shards(number, shards) for number in range(shards)]
        self._owner_H = np.array([number for number, mine in enumerate(owned) for _ in mine])
        self._order = np.array([t * SHARDS + h for mine in owned for t in range(tables) for h in mine])
        self._widths = np.array([places.stride // 4 for places in self._places])[self._order // SHARDS]
        self._cuts_ST1 = np.array(
            [[tables * mine.start + t * len(mine) for t in range(tables + 1)] for mine in owned]
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
        tables = []
        for mine, poolings_S, columns_S, places in zip(
            self.members, self._poolings, self._columns, self._places, strict=True
        ):
            bags = bags_of([slots[s] for s in mine], rows)
            dealt = deal_all(self._workers, bags)
            self._workers.each(SHARDS, lambda first, last, dealt=dealt: number_ids(first, last, dealt))  # type: ignore[misc]
            columns = lay_out(poolings_S, columns_S, places.dim, bags, rows)
            tables.append(_AskedTable(bags, dealt, columns, np.empty(bags.ids_N.size, dtype=np.uint32)))
        distinct = np.concatenate([table.dealt.distinct_H for table in tables])[self._order]
        ids_at, floats_at = _ends(distinct), _ends(distinct * self._widths)
        ids_at_TH, floats_at_TH = np.empty((2, len(tables), SHARDS), dtype=np.int64)
        ids_at_TH.reshape(-1)[self._order] = ids_at[:-1]
        floats_at_TH.reshape(-1)[self._order] = floats_at[:-1]
        everything = _room_for(int(ids_at[-1]), count)
        for table, at_H in zip(tables, ids_at_TH, strict=True):
            self._workers.each(
                SHARDS,
                lambda first, last, table=table, at_H=at_H: write_request(  # type: ignore[misc]
                    first, last, table.dealt, counts, at_H, everything
                ),
            )
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
        for t, (table, places) in enumerate(zip(asked.tables, self._places, strict=True)):
            chunks, row_S = _chunks(asked, t, rows_S, places.stride)
            chunks[0] = address(replies[0].default_rows) + 4 * int(self._default_floats_T1[t])
            owner_H, at_H = self._owner_H, asked.ids_at_TH[t]
            row_H = row_S[owner_H] + at_H - asked.ids_ST1[owner_H, t]
            marks_H = marks_S[owner_H]
            marks_H[marks_H != 0] += (at_H - asked.ids_ST1[owner_H, 0])[marks_H != 0]
            defaults_H = np.zeros(SHARDS, dtype=np.int64)

            def spread(first: int, last: int) -> None:
                name_rows(first, last, table.dealt, row_H, marks_H)  # noqa: B023  (called right here)
                spread_rows(first, last, table.dealt, table.row_N, defaults_H)  # noqa: B023

            view = RowsView(address(chunks), places.stride, 0, 0)

            def pool_some(first: int, last: int) -> None:
                pool_rows(
                    view, places, table.bags, table.columns, table.row_N, first, last, inputs_BI, wide_B  # noqa: B023
                )  # fmt: skip

            self._workers.each(SHARDS, spread)
            self._workers.each(asked.rows, pool_some)
            table.defaults = int(defaults_H.sum())
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
        for t, (table, places) in enumerate(zip(asked.tables, self._places, strict=True)):
            target_H = address(everything) + 4 * asked.floats_at_TH[t]

            def sum_some(first: int, last: int) -> None:
                sum_gradients(
                    first, last, places, table.bags, table.columns, table.dealt,  # noqa: B023
                    grad_inputs_BI, grad_wide_B, target_H,  # noqa: B023
                )  # fmt: skip

            self._workers.each(SHARDS, sum_some)
        defaults, used_S = _NO_FLOATS, _NO_MARKS
        if any(table.defaults for table in asked.tables):
            defaults = np.zeros(int(self._default_floats_T1[-1]), dtype=np.float32)
            used_S = np.zeros(len(self.slots), dtype=np.bool_)
            for t, (table, places) in enumerate(zip(asked.tables, self._places, strict=True)):
                sum_default_gradients(
                    places,
                    table.bags,
                    table.columns,
                    table.row_N,
                    grad_inputs_BI,
                    grad_wide_B,
                    address(defaults) + 4 * int(self._default_floats_T1[t]),
                    used_S[self._defaults_T1[t] : self._defaults_T1[t + 1]],
                )
        return tuple(
            Gradients(
                everything[floats_T1[0] : floats_T1[-1]],
                defaults if number == 0 else _NO_FLOATS,
                used_S if number == 0 else _NO_MARKS,
            )
            for number, floats_T1 in enumerate(asked.floats_ST1)
        )

    def _check_replies(self, asked: Asked, replies: Sequence[Reply]) -> None:
        if len(replies) != self.shards:
            raise ValueError(f"{len(replies)} replies given, {self.shards} expected")
        for number, reply in enumerate(replies):
            floats = int(asked.floats_ST1[number, -1] - asked.floats_ST1[number, 0])
            _check_floats(reply.rows, floats, f"the rows of shard {number}'s reply")
            if reply.defaults_N.size not in (0, asked.requests[number].ids_N.size):
                raise ValueError(f"the reply of shard {number} marks {reply.defaults_N.size} ids")
        _check_floats(replies[0].default_rows, int(self._default_floats_T1[-1]), "shard 0's default rows")


def _packed_places(dim: int, wide: bool) -> RowPlaces:
    """A row as messages have it: the vector, then the wide weight."""
    size = 4 * (dim + 1 if wide else dim)
    return RowPlaces(dim, 4 * dim if wide else -1, 0, -1, -1, size, size)


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


def _ends(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each begins that has such a size, and where the last ends."""
    return np.append(0, np.cumsum(sizes))


# ── the shard's side ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Found:
    """The parts of a batch, found: good until the next `evict` or `load`."""

    tables: tuple[PackedLookup, ...]
    starts_PT1: NDArray[np.int64]  # as in the requests


class ShardTables:
    """Shard `number` of so many: tables that hold only its ids, for workers elsewhere.

    `find`, `replies` and `apply` may run in the threads that `Tables` allows for `find`, `pool` and `apply`."""

    def __init__(self, tables: Tables, number: int, of: int) -> None:
        self.tables = tables
        self.number = number
        self.newest_hour = -1  # of all that was counted
        self._mine = inner_shards(number, of)
        self._widths_T = np.array([part.layout.dim for part in tables.parts])
        if tables.wide_optimizer is not None:
            self._widths_T = self._widths_T + 1
        self._slots_T = np.array([len(members) for members in tables.members])

    def find(self, requests: Sequence[Request], *, count: bool) -> Found:
        """Find what the parts of one batch ask for, as one batch: an id that several have is counted, created
        and admitted once, with the sum of their shows.

        Without `count` nothing is counted or created: for a batch whose ids were counted before and that is
        done again after a fault. It is in flight since then, until it is applied."""
        for request in requests:
            self._check(request, count)
        starts_PT1 = np.stack([request.starts_T1 for request in requests])
        batches = [self._join(requests, t, count) for t in range(len(self.tables.parts))]
        if count:
            self.tables.takes_off()
            hours = [int(request.hours_N.max()) for request in requests if request.hours_N.size]
            self.newest_hour = max([self.newest_hour, *hours])
        tables = zip(self.tables.parts, batches, strict=True)
        return Found(tuple(table.find_packed(*batch) for table, batch in tables), starts_PT1)

    def replies(self, found: Found) -> tuple[Reply, ...]:
        """What each part gets: the rows as they are now."""
        return tuple(self._reply(found, part) for part in range(len(found.starts_PT1)))

    def apply(self, found: Found, gradients: Sequence[Gradients], factor: float = 1.0) -> None:
        """One optimizer step for each distinct id, with the sum of what the parts say; the same for the default
        rows."""
        floats_PT1 = self._floats(found)
        if len(gradients) != len(floats_PT1):
            raise ValueError(f"gradients of {len(gradients)} parts given, {len(floats_PT1)} were found")
        for part, one in enumerate(gradients):
            _check_floats(one.rows, int(floats_PT1[part, -1]), f"the gradients of part {part}")
        defaults = self._sum_defaults(gradients)
        begins_P = np.array([address(one.rows) for one in gradients])
        for t, (table, lookup) in enumerate(zip(self.tables.parts, found.tables, strict=True)):
            table.apply_packed(lookup, begins_P + 4 * floats_PT1[:, t], factor)
        if defaults is not None:
            sums, used_S = defaults
            slots_T1, floats_T1 = _ends(self._slots_T), _ends(self._slots_T * self._widths_T)
            for t, table in enumerate(self.tables.parts):
                at = address(sums) + 4 * int(floats_T1[t])
                table.apply_defaults(at, used_S[slots_T1[t] : slots_T1[t + 1]], factor)
        self.tables.lands()

    def look(self, request: Request) -> Reply:
        """The rows as they are, to score with: nothing changes."""
        return self.replies(self.find([request], count=False))[0]

    def _reply(self, found: Found, part: int) -> Reply:
        starts_T1, floats_T1 = found.starts_PT1[part], self._floats(found)[part]
        rows = np.empty(int(floats_T1[-1]), dtype=np.float32)
        marks_N = np.zeros(int(starts_T1[-1]), dtype=np.bool_)
        defaults = 0
        for t, (table, lookup) in enumerate(zip(self.tables.parts, found.tables, strict=True)):
            target = address(rows) + 4 * int(floats_T1[t])
            defaults += table.pack(lookup, part, target, address(marks_N) + int(starts_T1[t]))
        return Reply(rows, marks_N if defaults else _NO_MARKS, self._default_rows())

    def _default_rows(self) -> NDArray[np.float32]:
        if self.number != 0:
            return _NO_FLOATS
        floats_T1 = _ends(self._slots_T * self._widths_T)
        rows = np.empty(int(floats_T1[-1]), dtype=np.float32)
        for t, table in enumerate(self.tables.parts):
            table.pack_defaults(address(rows) + 4 * int(floats_T1[t]))
        return rows

    def _sum_defaults(
        self, gradients: Sequence[Gradients]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]] | None:
        told = [one for one in gradients if one.defaults_used_S.size]
        if self.number != 0 or not told:
            return None
        sums = np.zeros(int((self._slots_T * self._widths_T).sum()), dtype=np.float32)
        used_S = np.zeros(int(self._slots_T.sum()), dtype=np.bool_)
        for one in told:
            _check_floats(one.default_rows, sums.size, "the gradients of the default rows")
            sums += one.default_rows
            used_S |= one.defaults_used_S
        return sums, used_S

    def _floats(self, found: Found) -> NDArray[np.int64]:
        """For each part, where each table's floats begin."""
        ids_PT = np.diff(found.starts_PT1, axis=1)
        return np.pad(np.cumsum(ids_PT * self._widths_T, axis=1), ((0, 0), (1, 0)))

    def _join(
        self, requests: Sequence[Request], t: int, count: bool
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], Counts | None]:
        """One table's ids of all parts, where each part begins, and what they count. All are copies, so that
        kernels never see a read-only array."""

        def joined(name: str) -> NDArray[Any]:
            return np.concatenate(
                [
                    getattr(request, name)[request.starts_T1[t] : request.starts_T1[t + 1]]
                    for request in requests
                ]
            )

        sizes_P = np.array([int(request.starts_T1[t + 1] - request.starts_T1[t]) for request in requests])
        counts = None
        if count:
            counts = Counts(joined("shows_N"), joined("clicks_N"), joined("hours_N"), joined("slots_N"))
            if counts.slot_B.size and int(counts.slot_B.max()) >= self._slots_T[t]:
                raise ValueError(
                    f"a request names slot {counts.slot_B.max()} of a table with {self._slots_T[t]} slots"
                )
        return joined("ids_N"), _ends(sizes_P), counts

    def _check(self, request: Request, count: bool) -> None:
        """Kernels trust their arrays, and these come from other processes."""
        starts_T1, ids = request.starts_T1, request.ids_N.size
        cut = starts_T1.size == self._slots_T.size + 1 and starts_T1[0] == 0 and starts_T1[-1] == ids
        if not cut or (np.diff(starts_T1) < 0).any():
            raise ValueError(
                f"a request's starts {starts_T1} do not cut {ids} ids into {self._slots_T.size} tables"
            )
        if count and any(values_N.size != ids for values_N in request[2:]):
            raise ValueError(f"a request has {ids} ids, but not as many counts: ask with count=True to train")
        shards_N = (request.ids_N * GOLDEN) >> np.uint64(58)
        if ids and not (self._mine.start <= int(shards_N.min()) and int(shards_N.max()) < self._mine.stop):
            raise ValueError(
                f"shard {self.number} was asked for ids of others: the worker counts with another number of shards"
            )


def _check_floats(array: NDArray[np.float32], size: int, what: str) -> None:
    if array.dtype != np.float32 or array.size != size or not array.flags.c_contiguous:
        raise ValueError(f"{what}: {array.size} values of {array.dtype} given, {size} of float32 expected")
