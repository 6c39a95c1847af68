"""Embedding tables in several processes: shards hold the rows, workers the batches (messages: packed_messages.py).

A worker                                          shard a of S
    pending = remote.begin_lookup(slots, rows, …)
        pending.requests[a]  ─────────────────▶   batch = shard.find(requests of all parts, count=True)
    remote.pool(pending, replies, inputs, wide) ◀─ shard.replies(batch)
    …the network's forward and backward…
    remote.gradients(pending, …)[a]  ─────────▶   shard.apply(batch, gradients of all parts, factor)

An id belongs to one of the tables' 64 inner shards, and shard a of S has those of `inner_shards(a, S)`. It counts,
creates, admits and trains as `Tables` does. With one part the result equals that of local tables bit by bit, for
any S; with several parts only the order of float sums differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import GOLDEN, SHARDS
from clickline.embedding.packed_messages import (
    NO_FLAGS,
    NO_FLOATS,
    LookupReply,
    LookupRequest,
    RowGradients,
    check_floats,
    start_offsets,
)
from clickline.embedding.raw_memory import address
from clickline.embedding.row_counters import BatchCounts
from clickline.embedding.table import PackedLookup
from clickline.embedding.tables import Tables


def inner_shards(number: int, shards: int) -> range:
    """The inner shards of shard `number` of `shards`: those h with h · shards // 64 == number."""
    if not 1 <= shards <= SHARDS or not 0 <= number < shards:
        raise ValueError(f"shard {number} of {shards}: 1 to {SHARDS} shards are allowed, numbered from 0")
    return range(-(-number * SHARDS // shards), -(-(number + 1) * SHARDS // shards))


@dataclass(frozen=True)
class ShardLookup:
    """The rows of all parts of a batch. Valid until the next `evict` or `load_snapshot`."""

    tables: tuple[PackedLookup, ...]
    starts_PT1: NDArray[np.int64]  # as in the requests


class ShardTables:
    """Shard `number` of `shards`: tables that hold only its ids, used by workers elsewhere.

    `find`, `replies` and `apply` may run in the threads that `Tables` allows for `find`, `pool` and `apply`."""

    def __init__(self, tables: Tables, number: int, shards: int) -> None:
        self.tables = tables
        self.number = number
        self.newest_hour = -1  # of all counted rows
        self._mine = inner_shards(number, shards)
        self._widths_T = np.array([part.layout.dim for part in tables.parts])
        if tables.wide_optimizer is not None:
            self._widths_T = self._widths_T + 1
        self._slots_T = np.array([len(slots_by_table) for slots_by_table in tables.slots_by_table])

    def find(self, requests: Sequence[LookupRequest], *, count: bool) -> ShardLookup:
        """Find the rows of all parts of a batch as one batch: an id in several parts is counted, created and admitted
        once, with the sum of their impressions.

        Without `count` nothing is counted or created: for a batch that was counted before and is repeated after a
        fault. It has been in flight since then, until it is applied."""
        for request in requests:
            self._check(request, count)
        starts_PT1 = np.stack([request.starts_T1 for request in requests])
        batches = [self._join(requests, t, count) for t in range(len(self.tables.parts))]
        if count:
            self.tables.begin_batch()
            hours = [int(request.hours_N.max()) for request in requests if request.hours_N.size]
            self.newest_hour = max([self.newest_hour, *hours])
        tables = zip(self.tables.parts, batches, strict=True)
        return ShardLookup(tuple(table.find_packed(*batch) for table, batch in tables), starts_PT1)

    def replies(self, batch: ShardLookup) -> tuple[LookupReply, ...]:
        """The replies to the parts, with the rows' current weights."""
        return tuple(self._reply(batch, part) for part in range(len(batch.starts_PT1)))

    def apply(self, batch: ShardLookup, gradients: Sequence[RowGradients], factor: float = 1.0) -> None:
        """One optimizer step for each distinct id and each default row, with the sum of the parts' gradients."""
        floats_PT1 = self._floats(batch)
        if len(gradients) != len(floats_PT1):
            raise ValueError(f"got gradients of {len(gradients)} parts, but the batch has {len(floats_PT1)}")
        for part, part_gradients in enumerate(gradients):
            check_floats(part_gradients.rows, int(floats_PT1[part, -1]), f"the gradients of part {part}")
        defaults = self._sum_defaults(gradients)
        begins_P = np.array([address(part_gradients.rows) for part_gradients in gradients])
        for t, (table, lookup) in enumerate(zip(self.tables.parts, batch.tables, strict=True)):
            table.apply_packed(lookup, begins_P + 4 * floats_PT1[:, t], factor)
        if defaults is not None:
            sums, used_S = defaults
            slots_T1, floats_T1 = start_offsets(self._slots_T), start_offsets(self._slots_T * self._widths_T)
            for t, table in enumerate(self.tables.parts):
                at = address(sums) + 4 * int(floats_T1[t])
                table.apply_defaults(at, used_S[slots_T1[t] : slots_T1[t + 1]], factor)
        self.tables.end_batch()

    def lookup(self, request: LookupRequest) -> LookupReply:
        """The rows' current weights for scoring; changes nothing."""
        return self.replies(self.find([request], count=False))[0]

    def _reply(self, batch: ShardLookup, part: int) -> LookupReply:
        starts_T1, floats_T1 = batch.starts_PT1[part], self._floats(batch)[part]
        rows = np.empty(int(floats_T1[-1]), dtype=np.float32)
        default_flags_N = np.zeros(int(starts_T1[-1]), dtype=np.bool_)
        defaults = 0
        for t, (table, lookup) in enumerate(zip(self.tables.parts, batch.tables, strict=True)):
            target = address(rows) + 4 * int(floats_T1[t])
            defaults += table.pack(lookup, part, target, address(default_flags_N) + int(starts_T1[t]))
        return LookupReply(rows, default_flags_N if defaults else NO_FLAGS, self._default_rows())

    def _default_rows(self) -> NDArray[np.float32]:
        if self.number != 0:
            return NO_FLOATS
        floats_T1 = start_offsets(self._slots_T * self._widths_T)
        rows = np.empty(int(floats_T1[-1]), dtype=np.float32)
        for t, table in enumerate(self.tables.parts):
            table.pack_defaults(address(rows) + 4 * int(floats_T1[t]))
        return rows

    def _sum_defaults(
        self, gradients: Sequence[RowGradients]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]] | None:
        with_defaults = [
            part_gradients for part_gradients in gradients if part_gradients.defaults_used_S.size
        ]
        if self.number != 0 or not with_defaults:
            return None
        sums = np.zeros(int((self._slots_T * self._widths_T).sum()), dtype=np.float32)
        used_S = np.zeros(int(self._slots_T.sum()), dtype=np.bool_)
        for part_gradients in with_defaults:
            check_floats(part_gradients.default_rows, sums.size, "the gradients of the default rows")
            sums += part_gradients.default_rows
            used_S |= part_gradients.defaults_used_S
        return sums, used_S

    def _floats(self, batch: ShardLookup) -> NDArray[np.int64]:
        """Where each table's floats begin in each part."""
        ids_PT = np.diff(batch.starts_PT1, axis=1)
        return np.pad(np.cumsum(ids_PT * self._widths_T, axis=1), ((0, 0), (1, 0)))

    def _join(
        self, requests: Sequence[LookupRequest], t: int, count: bool
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], BatchCounts | None]:
        """One table's ids of all parts, where each part begins, and their counts. All are copies, so that kernels
        never get a read-only array."""

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
            counts = BatchCounts(
                joined("impressions_N"), joined("clicks_N"), joined("hours_N"), joined("slots_N")
            )
            if counts.slots_B.size and int(counts.slots_B.max()) >= self._slots_T[t]:
                raise ValueError(
                    f"a request has slot {counts.slots_B.max()} of a table with {self._slots_T[t]} slots"
                )
        return joined("ids_N"), start_offsets(sizes_P), counts

    def _check(self, request: LookupRequest, count: bool) -> None:
        """Kernels do not check their arrays, and these come from other processes."""
        starts_T1, ids = request.starts_T1, request.ids_N.size
        well_formed = starts_T1.size == self._slots_T.size + 1 and starts_T1[0] == 0 and starts_T1[-1] == ids
        if not well_formed or (np.diff(starts_T1) < 0).any():
            raise ValueError(
                f"a request's starts {starts_T1} do not split {ids} ids into {self._slots_T.size} tables"
            )
        if count and any(values_N.size != ids for values_N in request[2:]):
            raise ValueError(f"a request has {ids} ids, but not as many counts: use count=True to train")
        shards_N = (request.ids_N * GOLDEN) >> np.uint64(58)
        if ids and not (self._mine.start <= int(shards_N.min()) and int(shards_N.max()) < self._mine.stop):
            raise ValueError(
                f"shard {self.number} got ids of other shards: the worker assumes a different number of shards"
            )
