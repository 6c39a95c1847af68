"""Sparse tables in several processes: shards hold the rows, workers the batches (what they say: packed_messages.py).

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

from clickline.embedding.index import GOLDEN, SHARDS
from clickline.embedding.packed_messages import (
    NO_FLOATS,
    NO_MARKS,
    Gradients,
    Reply,
    Request,
    check_floats,
    starts_of,
)
from clickline.embedding.raw_memory import address
from clickline.embedding.row_counters import Counts
from clickline.embedding.table import PackedLookup
from clickline.embedding.tables import Tables


def inner_shards(number: int, of: int) -> range:
    """The tables' own shards that shard `number` of so many has: those h with h · of // 64 == number."""
    if not 1 <= of <= SHARDS or not 0 <= number < of:
        raise ValueError(f"shard {number} of {of}: from 1 to {SHARDS} are allowed, counted from 0")
    return range(-(-number * SHARDS // of), -(-(number + 1) * SHARDS // of))


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
            check_floats(one.rows, int(floats_PT1[part, -1]), f"the gradients of part {part}")
        defaults = self._sum_defaults(gradients)
        begins_P = np.array([address(one.rows) for one in gradients])
        for t, (table, lookup) in enumerate(zip(self.tables.parts, found.tables, strict=True)):
            table.apply_packed(lookup, begins_P + 4 * floats_PT1[:, t], factor)
        if defaults is not None:
            sums, used_S = defaults
            slots_T1, floats_T1 = starts_of(self._slots_T), starts_of(self._slots_T * self._widths_T)
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
        return Reply(rows, marks_N if defaults else NO_MARKS, self._default_rows())

    def _default_rows(self) -> NDArray[np.float32]:
        if self.number != 0:
            return NO_FLOATS
        floats_T1 = starts_of(self._slots_T * self._widths_T)
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
            check_floats(one.default_rows, sums.size, "the gradients of the default rows")
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
        return joined("ids_N"), starts_of(sizes_P), counts

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
