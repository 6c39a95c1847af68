"""A table: the rows of all slots of one dim, with lookup, training, eviction and snapshots.

A training step is `find` (create and count), `pool` (into the network's input) and `apply` (gradients back).
Three threads may work at once. One finds batch after batch; only it changes the index and the heads of rows, and
it holds the lock. One pools and applies found batches: it reads and writes weights and optimizer state of their
rows, which `find` writes only in new rows. One copies a snapshot, a slice at a time and with the lock: if a batch
found a row since the snapshot began, it reads the saved copy, never the row. So only `find` and the copying ever
wait for each other.
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
from clickline.embedding.copy_on_write import TAGS, CopyOnWriteRows, copy_slice
from clickline.embedding.eviction import Eviction, decay_shards, evict_shard
from clickline.embedding.index import GOLDEN, SHARDS, Index, RowsView
from clickline.embedding.jagged_ids import JaggedIds, Partitioned, find_rows, partition_batch, scatter_rows
from clickline.embedding.optimizers import OptimizerView
from clickline.embedding.packed_messages import apply_packed, pack_rows
from clickline.embedding.pooling import (
    POOLINGS,
    Batch,
    apply_shards,
    packed_width,
    pool_rows,
    sum_defaults,
    update_defaults,
)
from clickline.embedding.raw_memory import address
from clickline.embedding.restore import remove_ids, restore_records
from clickline.embedding.row_counters import BatchCounts, count_batch, init_row
from clickline.embedding.row_layout import GENERATION, HEAD, CandidateLayout, RowLayout
from clickline.embedding.table_view import FreeRows, RowInit, TableView
from clickline.embedding.thread_pool import ThreadPool

_RESTORE_ROWS = 1 << 14  # records restored at once; bounds the index's free space beyond its load
_INDEX_BYTES = 15  # per id at the index's lowest load, just after it grew
_FREE_LIST_BYTES = 8  # per id: an entry of the free list, which doubles when it grows
_SLICE_ROWS = 1 << 12  # rows copied at once; bounds how long training waits for a snapshot writer


@dataclass(frozen=True)
class TableLookup:
    """The rows of one batch in one table. Valid until the next `evict` or `load_snapshot`."""

    batch: Batch
    defaults: int  # number of ids that use their slot's default row


@dataclass(frozen=True)
class PackedLookup:
    """The rows of all parts of one batch in one table. Valid until the next `evict` or `load_snapshot`."""

    partitioned: Partitioned
    starts_P1: NDArray[np.int64]  # part p has the ids from starts_P1[p] to starts_P1[p + 1]
    row_N: NDArray[np.uint32]  # of each id of each part


class Table:
    """The rows of all slots of one dim; slot s of the table has default row number s."""

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
        thread_pool: ThreadPool,
    ) -> None:
        self.layout = layout
        self.generation = 1
        self.lock = threading.Lock()
        self._thread_pool = thread_pool
        self._poolings_S = np.array([POOLINGS[name] for name in poolings], dtype=np.int64)
        self._columns_S = np.array(columns, dtype=np.int64)
        self._admission = admission
        # The second optimizer is unused if rows have no wide weight.
        optimizers = layout.embedding_optimizer, layout.wide_optimizer or layout.embedding_optimizer
        self._settings = [optimizer.settings() for optimizer in optimizers]
        self._index = Index()
        self._arena = Arena(layout.view.stride, SHARDS)
        self._candidates = Arena(CandidateLayout.stride, SHARDS)
        self._cow = CopyOnWriteRows(layout.view.stride)
        self.ids_HS = np.zeros((SHARDS, len(poolings)), dtype=np.int64)
        self.candidates_HS = np.zeros((SHARDS, len(poolings)), dtype=np.int64)
        self._view = TableView(
            self._index.view,
            RowsView(
                address(self._arena.chunks),
                self._arena.stride,
                address(self._candidates.chunks),
                self._candidates.stride,
            ),
            _free_rows(self._arena),
            _free_rows(self._candidates),
            self._cow.view,
            layout.view,
            OptimizerView(
                optimizers[0].kind,
                address(self._settings[0]),
                optimizers[1].kind,
                address(self._settings[1]),
                np.float32(l2),
            ),
            RowInit(
                np.uint64(seed % 2**64),
                np.float32(init_scale / np.sqrt(layout.dim)),
                admission.min_impressions,
                float(admission.probability),
            ),
            self.ids_HS,
            self.candidates_HS,
        )
        zeros = self._view.init._replace(bound=np.float32(0))
        for slot in self._arena.allocate_rows(len(poolings)).tolist():
            init_row(
                address(self._arena.row(slot)), np.uint64(slot), zeros, layout.view, self._view.optimizer
            )

    # ── a training step ────────────────────────────────────────────────────────────────────────

    def find(self, jagged: JaggedIds, rows: int, counts: BatchCounts | None) -> TableLookup:
        """Find the rows of a batch's ids. With counts, for training, missing ids are created and all are counted."""
        batch = Batch.partition(
            self._thread_pool, jagged, self._poolings_S, self._columns_S, self.layout.dim, rows
        )
        return TableLookup(batch, self._find(batch.partitioned, counts, batch.row_N, use_defaults=True))

    def pool(self, lookup: TableLookup, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> None:
        """Pool vectors into the slots' columns; add wide weights to `wide_B`."""
        view = self._view
        self._thread_pool.parallel_for(
            wide_B.size, pool_rows, view.rows, view.layout, lookup.batch, inputs_BI, wide_B
        )

    def apply(
        self,
        lookup: TableLookup,
        gradient_BI: NDArray[np.float32],
        gradient_wide_B: NDArray[np.float32],
        factor: float,
    ) -> None:
        """One optimizer step for every distinct id of the batch."""
        view, batch, gradients = self._view, lookup.batch, (gradient_BI, gradient_wide_B)
        self._thread_pool.parallel_for(SHARDS, apply_shards, view, batch, np.float32(factor), *gradients)
        if lookup.defaults:
            used_S = np.zeros(self._poolings_S.size, dtype=np.bool_)
            sums = np.zeros(used_S.size * packed_width(view.layout), dtype=np.float32)
            sum_defaults(view.layout, batch, *gradients, address(sums), used_S)
            self.apply_defaults(address(sums), used_S, factor)

    def _find(
        self,
        partitioned: Partitioned,
        counts: BatchCounts | None,
        row_N: NDArray[np.uint32],
        *,
        use_defaults: bool,
    ) -> int:
        """Find the row of every id, and return the number of ids without a vector."""
        defaults_H = np.zeros(SHARDS, dtype=np.int64)

        def find_in_shards(first: int, last: int) -> None:
            if counts is None:
                find_rows(first, last, self._view, partitioned)
            else:
                self._count(partitioned, counts, first, last)
            scatter_rows(first, last, partitioned, row_N, defaults_H, use_defaults)

        with self.lock:
            self._thread_pool.parallel_for(SHARDS, find_in_shards)
        return int(defaults_H.sum())

    def _count(self, partitioned: Partitioned, counts: BatchCounts, first: int, last: int) -> None:
        """Find and count in the shards first … last - 1; grow a shard without room and continue from there."""
        if self._cow.open_H.any():  # in advance: in a large table nearly every batch needs more room
            for shard in range(first, last):
                if self._cow.open_H[shard]:
                    self._cow.reserve(
                        shard, int(partitioned.starts_H1[shard + 1] - partitioned.starts_H1[shard])
                    )
        while True:
            first = count_batch(first, last, self._view, self.generation, partitioned, counts)
            if first == last:
                return
            missing, distinct = int(partitioned.missing_H[first]), int(partitioned.distinct_H[first])
            self._index.reserve(first, missing)
            if self._admission.admits_all:
                self._arena.reserve(first, missing)
            else:
                self._arena.reserve(first, distinct)
                self._candidates.reserve(first, missing)
                self._candidates.make_room(first, distinct)  # an admitted candidate frees its candidate row

    # ── a training step whose batch is elsewhere (packed_messages.py) ──────────────────────────

    def find_packed(
        self, ids_N: NDArray[np.uint64], starts_P1: NDArray[np.int64], counts: BatchCounts | None
    ) -> PackedLookup:
        """Find the rows of the distinct ids of all parts of a batch. The counts of an id in several parts are added."""
        none = np.zeros(0, dtype=np.int64)
        jagged = JaggedIds(ids_N, np.array([0, ids_N.size]), none, np.full(1, -1))
        partitioned = partition_batch(self._thread_pool, jagged)
        row_N = np.empty(ids_N.size, dtype=np.uint32)
        self._find(partitioned, counts, row_N, use_defaults=False)
        return PackedLookup(partitioned, starts_P1, row_N)

    def pack(self, lookup: PackedLookup, part: int, target: int, defaults: int) -> int:
        """Copy the weights of a part's ids to address `target`, and flag those without weights at address `defaults`.
        Returns the number of flags set."""
        start, stop = lookup.starts_P1[part : part + 2].tolist()
        return int(pack_rows(start, stop, self._view, lookup.row_N, target, defaults))

    def pack_defaults(self, target: int) -> None:
        """Copy the weights of the default rows to address `target`, slot after slot."""
        row_S = np.arange(self._poolings_S.size, dtype=np.uint32)
        pack_rows(0, row_S.size, self._view, row_S, target, 0)

    def apply_packed(self, lookup: PackedLookup, gradients_P: NDArray[np.int64], factor: float) -> None:
        """One optimizer step for every distinct id, with the sum of the parts' gradients; those of a part are at its
        address, laid out as `pack` does."""
        batch = lookup.partitioned, np.float32(factor), lookup.starts_P1, gradients_P
        self._thread_pool.parallel_for(SHARDS, apply_packed, self._view, *batch)

    def apply_defaults(self, gradients: int, used_S: NDArray[np.bool_], factor: float) -> None:
        """One optimizer step of the used default rows. Overwrites the gradients at the address `gradients`."""
        update_defaults(self._view, np.float32(factor), gradients, used_S)

    # ── size and memory ────────────────────────────────────────────────────────────────────────

    @property
    def size(self) -> int:
        return self._index.size

    @property
    def memory_bytes(self) -> int:
        parts = (self._index, self._arena, self._candidates, self._cow)
        return sum(part.memory_bytes for part in parts)

    @property
    def needed_bytes(self) -> int:
        """The most memory that the current ids need: their rows, one partly used block per shard, the index."""
        ids, candidates = int(self.ids_HS.sum()), int(self.candidates_HS.sum())
        partly_used = SHARDS * BLOCK_ROWS
        needed = (ids + partly_used) * (self._arena.stride + _FREE_LIST_BYTES) + (
            ids + candidates
        ) * _INDEX_BYTES
        if self._admission.min_impressions > 1 or self._admission.probability < 1:
            needed += (candidates + partly_used) * (self._candidates.stride + _FREE_LIST_BYTES)
        return needed

    @property
    def copy_on_write_bytes(self) -> int:
        """Memory used by copy-on-write rows of an open snapshot."""
        return self._cow.used_bytes

    # ── decay and eviction ─────────────────────────────────────────────────────────────────────

    def decay(self, rate: float) -> None:
        """Multiply every impression and click counter by `rate`."""
        with self.lock:
            self._thread_pool.parallel_for(SHARDS, decay_shards, self._view, rate)

    def checksums(self) -> list[int]:
        """Checksums of the admitted ids, by shard, and of the default rows: what a version is made of."""
        sums_H = np.zeros(SHARDS, dtype=np.uint64)
        size = self._view.layout.size
        with self.lock:
            self._thread_pool.parallel_for(SHARDS, digest_shards, self._view, sums_H)
            defaults = [
                int(digest_row(address(self._arena.row(slot)), size)) for slot in range(self._poolings_S.size)
            ]
        return [*sums_H.tolist(), *defaults]

    def evict(self, rule: Eviction, now_hour: int) -> NDArray[np.uint64]:
        """Evict the ids that match the rule, and return them. Hours after `now_hour`, if known, count as `now_hour`."""
        oldest = -1 if rule.max_idle_hours is None else now_hour - rule.max_idle_hours
        evicted: list[NDArray[np.uint64]] = [np.zeros(0, dtype=np.uint64)] * SHARDS

        def evict_in_shards(first: int, last: int) -> None:
            for shard in range(first, last):
                for remove in (False, True):
                    admitted, candidates = evict_shard(
                        self._view,
                        shard,
                        rule.threshold,
                        rule.click_weight,
                        rule.nonclick_weight,
                        self.generation,
                        now_hour,
                        oldest,
                        remove,
                        evicted[shard],
                    )
                    if remove or admitted + candidates == 0:
                        break
                    self._arena.make_room(shard, admitted)
                    self._candidates.make_room(shard, candidates)
                    evicted[shard] = np.empty(admitted + candidates, dtype=np.uint64)

        with self.lock:
            self._thread_pool.parallel_for(SHARDS, evict_in_shards)
        return np.concatenate(evicted)

    # ── snapshots ──────────────────────────────────────────────────────────────────────────────

    def begin_snapshot(self) -> NDArray[np.void]:
        """Begin a snapshot, and return the default rows as records. Rows changed from now on belong to the next
        generation."""
        with self.lock:
            self.generation += 1
            self._cow.open()
            return self.default_records()

    def copy_shard(
        self, shard: int, since: int, generation: int, buffer: NDArray[np.uint8], pause: Callable[[], None]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
        """Copy a shard as it was when the snapshot began. Returns the records of candidates and of admitted ids
        as bytes, and the buffer that holds them; they are valid until it is used again. Pauses between slices."""
        size, head = self.layout.record.itemsize, CandidateLayout.record.itemsize
        max_ids = int(self._index.used_H[shard])  # ids added during the copy are not part of the snapshot
        if buffer.size < max_ids * (size + head):
            buffer = np.empty(max_ids * (size + head) * 5 // 4, dtype=np.uint8)
        start, candidates_start = address(buffer), address(buffer) + max_ids * size
        end, candidates_end = start, candidates_start
        slices = -(-max(1, max_ids) // _SLICE_ROWS)
        for piece in range(slices):
            first_tag, last_tag = TAGS * piece // slices, TAGS * (piece + 1) // slices
            with self.lock:
                end, candidates_end = copy_slice(
                    self._view,
                    self._cow.order(shard, first_tag, last_tag),
                    shard,
                    first_tag,
                    last_tag,
                    since,
                    generation,
                    end,
                    candidates_end,
                )
            pause()
        with self.lock:
            self._cow.close(shard)
        split = max_ids * size
        return (
            buffer[split : split + candidates_end - candidates_start],
            buffer[: end - start],
            buffer,
        )

    def end_snapshot(self) -> None:
        """Discard the rest of a snapshot."""
        with self.lock:
            for shard in range(SHARDS):
                self._cow.close(shard)

    def restore(self, records: NDArray[np.void], *, candidates: bool) -> None:
        """Restore rows from records of a snapshot."""
        size = HEAD if candidates else self._view.layout.size
        arena = self._candidates if candidates else self._arena
        coming_H = _ids_by_shard(records["id"])
        with self.lock:
            for first in range(0, records.size, _RESTORE_ROWS):
                piece = records[first : first + _RESTORE_ROWS]
                counts_H = _ids_by_shard(piece["id"])
                coming_H -= counts_H  # ids are sorted: an index sized for one piece would be full at one end
                for shard in np.flatnonzero(counts_H).tolist():
                    self._index.reserve(shard, int(counts_H[shard]), int(coming_H[shard]))
                    arena.reserve(shard, int(counts_H[shard]))
                self._make_room(counts_H)
                restore_records(self._view, piece.view(np.uint32), size, candidates)

    def remove(self, ids: NDArray[np.uint64]) -> None:
        """Remove ids, as an eviction did."""
        with self.lock:
            self._make_room(_ids_by_shard(ids))
            remove_ids(self._view, ids)

    def default_records(self) -> NDArray[np.void]:
        """The default rows as records; their id is the slot's number in this table."""
        rows = [self._arena.row(slot)[: self._view.layout.size] for slot in range(self._poolings_S.size)]
        heads = [np.concatenate([row[:GENERATION], row[HEAD:]]) for row in rows]
        return np.concatenate(heads).view(self.layout.record)

    def restore_defaults(self, records: NDArray[np.void]) -> None:
        with self.lock:
            for slot, record in enumerate(records.view(np.uint8).reshape(records.size, -1)):
                row = self._arena.row(slot)
                row[:GENERATION] = record[:GENERATION]
                row[HEAD : self._view.layout.size] = record[GENERATION:]

    def _make_room(self, rows_H: NDArray[np.int64]) -> None:
        for shard in np.flatnonzero(rows_H):
            self._arena.make_room(int(shard), int(rows_H[shard]))
            self._candidates.make_room(int(shard), int(rows_H[shard]))


def _free_rows(arena: Arena) -> FreeRows:
    return FreeRows(
        address(arena.free_list_addresses_H), address(arena.free_counts_H), address(arena.capacity_H)
    )


def _ids_by_shard(ids: NDArray[np.uint64]) -> NDArray[np.int64]:
    shards = ((ids * GOLDEN) >> np.uint64(58)).astype(np.int64)
    return np.bincount(shards, minlength=SHARDS).astype(np.int64)
