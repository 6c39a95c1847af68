"""The rows of all slots of one dim: find, pool, learn, forget, and cut.

A training step is `find` (create and count), `pool` (into the network's input) and `apply` (gradients
back). Three threads may be at work at once. One finds batch after batch; it alone changes the index and
the heads of rows, and it holds the lock. One pools and applies batches that were found: it reads and
writes weights and state of their rows, which `find` touches only in rows that are new. One copies a
snapshot, a slice at a time and with the lock: of a row that a batch found since the cut it reads the
shadow, never the row. So only `find` and the copying ever wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.admission import Admission
from clickline.embedding.arena import BLOCK_ROWS, Arena
from clickline.embedding.checksum import digest_row, digest_shards
from clickline.embedding.copy_on_write import TAGS, Shadows, copy_slice
from clickline.embedding.eviction import Eviction, decay_shards, evict_shard
from clickline.embedding.index import GOLDEN, SHARDS, Index, RowsView
from clickline.embedding.jagged_ids import Bags, Dealt, deal_all, find_rows, spread_rows
from clickline.embedding.optimizers import Learning
from clickline.embedding.packed_messages import apply_packed, pack_rows, step_defaults, take_rows
from clickline.embedding.pooling import (
    POOLINGS,
    Columns,
    apply_defaults,
    apply_shards,
    lay_out,
    pool_rows,
)
from clickline.embedding.raw_memory import address
from clickline.embedding.restore import place_records, remove_ids
from clickline.embedding.row_counters import Counts, FreeRows, NewRows, count_batch, fill_row
from clickline.embedding.row_layout import HEAD, TOUCHED, CandidateLayout, RowLayout
from clickline.embedding.thread_pool import Workers

_PIECE = 1 << 14  # records placed at once; bounds what the index keeps free beyond its load
_INDEX_BYTES = 15  # an id at the index's lowest load, just after it grew
_STACK_BYTES = 8  # an id: a place on the stack of free rows, which doubles when it grows
_SLICE = 1 << 12  # rows copied at once; bounds how long training waits for a snapshot


@dataclass(frozen=True)
class TableLookup:
    """What `find` found for one batch: good until the next `evict` or `load`."""

    bags: Bags
    dealt: Dealt
    columns: Columns
    row_N: NDArray[np.uint32]
    defaults: int  # ids that use their slot's default row
    train: bool


@dataclass(frozen=True)
class PackedLookup:
    """What `find_packed` found for the parts of one batch: good until the next `evict` or `load`."""

    dealt: Dealt
    starts_P1: NDArray[np.int64]  # part p has the ids from starts_P1[p] to starts_P1[p + 1]
    row_N: NDArray[np.uint32]  # of each id of each part


class Table:
    """Rows for some slots; slot s of the table has the default row number s."""

    def __init__(
        self,
        layout: RowLayout,
        poolings: Sequence[str],
        columns: Sequence[int],
        *,
        seed: int,
        init_scale: float,
        l2: float,
        admission: Admission,
        workers: Workers,
    ) -> None:
        self.layout = layout
        self.epoch = 1
        self.lock = threading.Lock()
        self._workers = workers
        self._poolings_S = np.array([POOLINGS[name] for name in poolings], dtype=np.int64)
        self._columns_S = np.array(columns, dtype=np.int64)
        self._places = layout.places
        self._admission = admission
        wide_optimizer = layout.wide_optimizer or layout.embedding_optimizer  # unused where rows have no wide
        self._settings = layout.embedding_optimizer.settings(), wide_optimizer.settings()
        self._learning = Learning(
            layout.embedding_optimizer.kind,
            address(self._settings[0]),
            wide_optimizer.kind,
            address(self._settings[1]),
            np.float32(l2),
        )
        bound = np.float32(init_scale / np.sqrt(layout.dim))
        self._new = NewRows(
            np.uint64(seed % 2**64),
            bound,
            self._places,
            self._learning,
            admission.shows,
            float(admission.probability),
        )
        self._index = Index()
        self._arena = Arena(self._places.stride, SHARDS)
        self._candidates = Arena(CandidateLayout.stride, SHARDS)
        self._rows = RowsView(
            address(self._arena.chunks),
            self._arena.stride,
            address(self._candidates.chunks),
            self._candidates.stride,
        )
        self._free = _free_rows(self._arena)
        self._free_candidates = _free_rows(self._candidates)
        self._shadows = Shadows(self._places.stride)
        self.ids_HS = np.zeros((SHARDS, len(poolings)), dtype=np.int64)
        self.candidates_HS = np.zeros((SHARDS, len(poolings)), dtype=np.int64)
        for slot in self._arena.take(len(poolings)).tolist():
            fill_row(address(self._arena.row(slot)), np.uint64(slot), self._new._replace(bound=np.float32(0)))

    # ── a training step ────────────────────────────────────────────────────────────────────────

    def find(self, bags: Bags, rows: int, counts: Counts | None) -> TableLookup:
        """Rows of a batch's ids. With counts it is training: missing ids are created, and everything is
        counted."""
        dealt = deal_all(self._workers, bags)
        row_N = np.empty(bags.ids_N.size, dtype=np.uint32)
        defaults_H = np.zeros(SHARDS, dtype=np.int64)

        def find_some(first: int, last: int) -> None:
            self._find_some(dealt, counts, first, last)
            spread_rows(first, last, dealt, row_N, defaults_H)

        with self.lock:
            self._workers.each(SHARDS, find_some)
        columns = lay_out(self._poolings_S, self._columns_S, self.layout.dim, bags, rows)
        return TableLookup(bags, dealt, columns, row_N, int(defaults_H.sum()), counts is not None)

    def pool(self, lookup: TableLookup, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> None:
        """Pool vectors into the slots' columns; add wide weights to `wide_B`."""
        self._workers.each(
            wide_B.size,
            lambda first, last: pool_rows(
                self._rows,
                self._places,
                lookup.bags,
                lookup.columns,
                lookup.row_N,
                first,
                last,
                inputs_BI,
                wide_B,
            ),
        )

    def apply(
        self,
        lookup: TableLookup,
        gradient_BI: NDArray[np.float32],
        gradient_wide_B: NDArray[np.float32],
        factor: float,
    ) -> None:
        """One optimizer step for every distinct id of the batch."""
        scale = np.float32(factor)
        self._workers.each(
            SHARDS,
            lambda first, last: apply_shards(
                self._rows,
                self._places,
                lookup.bags,
                lookup.columns,
                self._learning,
                scale,
                first,
                last,
                lookup.dealt,
                gradient_BI,
                gradient_wide_B,
            ),
        )
        if lookup.defaults:
            apply_defaults(
                self._rows,
                self._places,
                lookup.bags,
                lookup.columns,
                self._learning,
                scale,
                lookup.row_N,
                gradient_BI,
                gradient_wide_B,
            )

    def _find_some(self, dealt: Dealt, counts: Counts | None, first: int, last: int) -> None:
        if counts is None:
            find_rows(self._index.view, self._rows, first, last, dealt)
        else:
            self._count(dealt, counts, first, last)

    def _count(self, dealt: Dealt, counts: Counts, first: int, last: int) -> None:
        """Find and count in some shards; where one has no room, make it and go on from there."""
        if self._shadows.open_H.any():  # in advance: in a large table nearly every batch needs more
            for shard in range(first, last):
                if self._shadows.open_H[shard]:
                    self._shadows.reserve(shard, int(dealt.starts_H1[shard + 1] - dealt.starts_H1[shard]))
        while True:
            first = count_batch(
                self._index.view,
                self._rows,
                self._free,
                self._free_candidates,
                self._new,
                self._shadows.view,
                self.epoch,
                first,
                last,
                dealt,
                counts,
                self.ids_HS,
                self.candidates_HS,
            )
            if first == last:
                return
            missing, distinct = int(dealt.missing_H[first]), int(dealt.distinct_H[first])
            self._index.reserve(first, missing)
            if self._admission.admits_all:
                self._arena.reserve(first, missing)
            else:
                self._arena.reserve(first, distinct)
                self._candidates.reserve(first, missing)
                self._candidates.make_room(first, distinct)  # an admitted candidate frees its row

    # ── a training step whose batch is elsewhere (packed_messages.py) ───────────────────────────────────

    def find_packed(
        self, ids_N: NDArray[np.uint64], starts_P1: NDArray[np.int64], counts: Counts | None
    ) -> PackedLookup:
        """Rows of the distinct ids that the parts of a batch have. An id that several have is one: what they
        count of it adds up."""
        none = np.zeros(0, dtype=np.int64)
        bags = Bags(ids_N, np.array([0, ids_N.size]), none, np.full(1, -1))
        dealt = deal_all(self._workers, bags)
        row_N = np.empty(ids_N.size, dtype=np.uint32)

        def find_some(first: int, last: int) -> None:
            self._find_some(dealt, counts, first, last)
            take_rows(first, last, dealt, row_N)

        with self.lock:
            self._workers.each(SHARDS, find_some)
        return PackedLookup(dealt, starts_P1, row_N)

    def pack(self, lookup: PackedLookup, part: int, target: int, defaults: int) -> int:
        """Copy the weights of a part's ids to `target`, and mark at `defaults` those that have none; how many.
        Both are addresses."""
        start, stop = lookup.starts_P1[part : part + 2].tolist()
        return int(pack_rows(self._rows, self._places, lookup.row_N, start, stop, target, defaults))

    def pack_defaults(self, target: int) -> None:
        """Copy the weights of the default rows, slot after slot."""
        row_S = np.arange(self._poolings_S.size, dtype=np.uint32)
        pack_rows(self._rows, self._places, row_S, 0, row_S.size, target, 0)

    def apply_packed(self, lookup: PackedLookup, gradients_P: NDArray[np.int64], factor: float) -> None:
        """One optimizer step for every distinct id, with the sum of what the parts' gradients say; those of a
        part lie at its address as `pack` laid out its rows."""
        scale = np.float32(factor)
        self._workers.each(
            SHARDS,
            lambda first, last: apply_packed(
                self._rows,
                self._places,
                self._learning,
                scale,
                first,
                last,
                lookup.dealt,
                lookup.starts_P1,
                gradients_P,
            ),
        )

    def apply_defaults(self, gradients: int, used_S: NDArray[np.bool_], factor: float) -> None:
        """One step of the default rows that were used. The gradients, at an address, are spoilt by it."""
        step_defaults(self._rows, self._places, self._learning, np.float32(factor), used_S, gradients)

    # ── what is there ──────────────────────────────────────────────────────────────────────────

    @property
    def size(self) -> int:
        return self._index.size

    @property
    def memory_bytes(self) -> int:
        parts = (self._index, self._arena, self._candidates, self._shadows)
        return sum(part.memory_bytes for part in parts)

    @property
    def needed_bytes(self) -> int:
        """What the ids that are there need at most: their rows, a block that each shard has begun, the index."""
        ids, candidates = int(self.ids_HS.sum()), int(self.candidates_HS.sum())
        begun = SHARDS * BLOCK_ROWS
        needed = (ids + begun) * (self._arena.stride + _STACK_BYTES) + (ids + candidates) * _INDEX_BYTES
        if self._admission.shows > 1 or self._admission.probability < 1:
            needed += (candidates + begun) * (self._candidates.stride + _STACK_BYTES)
        return needed

    @property
    def shadow_bytes(self) -> int:
        """How much of the memory holds rows for an open snapshot."""
        return self._shadows.used_bytes

    # ── forgetting ─────────────────────────────────────────────────────────────────────────────

    def decay(self, rate: float) -> None:
        """Multiply every show and click counter by `rate`."""
        with self.lock:
            self._workers.each(
                SHARDS, lambda first, last: decay_shards(self._index.view, self._rows, first, last, rate)
            )

    def checksums(self) -> list[int]:
        """Of the admitted ids and the default rows: what a version is made of."""
        sums_H = np.zeros(SHARDS, dtype=np.uint64)
        size = self._places.size
        with self.lock:
            self._workers.each(
                SHARDS,
                lambda first, last: digest_shards(self._index.view, self._rows, first, last, size, sums_H),
            )
            defaults = [
                int(digest_row(address(self._arena.row(slot)), size)) for slot in range(self._poolings_S.size)
            ]
        return [*sums_H.tolist(), *defaults]

    def evict(self, rule: Eviction, now_hour: int) -> NDArray[np.uint64]:
        """Drop the ids the rule names; which they were. None counts as seen after `now_hour`, where that is known."""
        oldest = -1 if rule.hours_unseen is None else now_hour - rule.hours_unseen
        evicted: list[NDArray[np.uint64]] = [np.zeros(0, dtype=np.uint64)] * SHARDS

        def evict_some(first: int, last: int) -> None:
            for shard in range(first, last):
                for remove in (False, True):
                    admitted, candidates = evict_shard(
                        self._index.view,
                        self._rows,
                        self._free,
                        self._free_candidates,
                        shard,
                        rule.threshold,
                        rule.click_weight,
                        rule.nonclick_weight,
                        self.epoch,
                        now_hour,
                        oldest,
                        remove,
                        evicted[shard],
                        self.ids_HS[shard],
                        self.candidates_HS[shard],
                    )
                    if remove or admitted + candidates == 0:
                        break
                    self._arena.make_room(shard, admitted)
                    self._candidates.make_room(shard, candidates)
                    evicted[shard] = np.empty(admitted + candidates, dtype=np.uint64)

        with self.lock:
            self._workers.each(SHARDS, evict_some)
        return np.concatenate(evicted)

    # ── snapshots ──────────────────────────────────────────────────────────────────────────────

    def cut(self) -> NDArray[np.void]:
        """Begin a snapshot of this moment; the default rows as records. Rows that change from now on count
        as of the next epoch."""
        with self.lock:
            self.epoch += 1
            self._shadows.open()
            return self.default_records()

    def copy_shard(
        self, shard: int, since: int, mark: int, room: NDArray[np.uint8], rest: Callable[[], None]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
        """The shard at the cut, and the room it was copied into: bytes of the records of candidates and of
        admitted ids. They are good until the room is used again. Rests between slices."""
        size, head = self.layout.record.itemsize, CandidateLayout.record.itemsize
        most = int(self._index.used_H[shard])  # ids that come while we copy are not of the cut
        if room.size < most * (size + head):
            room = np.empty(most * (size + head) * 5 // 4, dtype=np.uint8)
        start, candidates_start = address(room), address(room) + most * size
        end, candidates_end = start, candidates_start
        slices = -(-max(1, most) // _SLICE)
        for piece in range(slices):
            first_tag, last_tag = TAGS * piece // slices, TAGS * (piece + 1) // slices
            with self.lock:
                end, candidates_end = copy_slice(
                    self._index.view,
                    self._rows,
                    self._shadows.view,
                    self._shadows.order(shard, first_tag, last_tag),
                    shard,
                    first_tag,
                    last_tag,
                    self._places.size,
                    since,
                    mark,
                    end,
                    candidates_end,
                )
            rest()
        with self.lock:
            self._shadows.close(shard)
        split = most * size
        return (
            room[split : split + candidates_end - candidates_start],
            room[: end - start],
            room,
        )

    def close_cut(self) -> None:
        """Give up what is left of a snapshot."""
        with self.lock:
            for shard in range(SHARDS):
                self._shadows.close(shard)

    def place(self, records: NDArray[np.void], *, candidates: bool) -> None:
        """Set rows from records of a snapshot."""
        size = HEAD if candidates else self._places.size
        arena = self._candidates if candidates else self._arena
        coming_H = _ids_by_shard(records["id"])
        with self.lock:
            for first in range(0, records.size, _PIECE):
                piece = records[first : first + _PIECE]
                wanted_H = _ids_by_shard(piece["id"])
                coming_H -= wanted_H  # ids come in order: an index sized for a piece would be full at one end
                for shard in np.flatnonzero(wanted_H).tolist():
                    self._index.reserve(shard, int(wanted_H[shard]), int(coming_H[shard]))
                    arena.reserve(shard, int(wanted_H[shard]))
                self._make_room(wanted_H)
                place_records(
                    self._index.view,
                    self._rows,
                    self._free,
                    self._free_candidates,
                    piece.view(np.uint32),
                    size,
                    candidates,
                    self.ids_HS,
                    self.candidates_HS,
                )

    def remove(self, ids: NDArray[np.uint64]) -> None:
        """Forget ids, as an eviction did."""
        with self.lock:
            self._make_room(_ids_by_shard(ids))
            remove_ids(
                self._index.view,
                self._rows,
                self._free,
                self._free_candidates,
                ids,
                self.ids_HS,
                self.candidates_HS,
            )

    def default_records(self) -> NDArray[np.void]:
        """The default rows as records; their id is the number of the slot in this table."""
        rows = [self._arena.row(slot)[: self._places.size] for slot in range(self._poolings_S.size)]
        heads = [np.concatenate([row[:TOUCHED], row[HEAD:]]) for row in rows]
        return np.concatenate(heads).view(self.layout.record)

    def place_defaults(self, records: NDArray[np.void]) -> None:
        with self.lock:
            for slot, record in enumerate(records.view(np.uint8).reshape(records.size, -1)):
                row = self._arena.row(slot)
                row[:TOUCHED] = record[:TOUCHED]
                row[HEAD : self._places.size] = record[TOUCHED:]

    def _make_room(self, rows_H: NDArray[np.int64]) -> None:
        for shard in np.flatnonzero(rows_H):
            self._arena.make_room(int(shard), int(rows_H[shard]))
            self._candidates.make_room(int(shard), int(rows_H[shard]))


def _free_rows(arena: Arena) -> FreeRows:
    return FreeRows(address(arena.stack_addresses_H), address(arena.free_H), address(arena.room_H))


def _ids_by_shard(ids: NDArray[np.uint64]) -> NDArray[np.int64]:
    shards = ((ids * GOLDEN) >> np.uint64(58)).astype(np.int64)
    return np.bincount(shards, minlength=SHARDS).astype(np.int64)
