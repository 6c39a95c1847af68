"""All embedding rows of a model: one table per dim, behind one interface.

    lookup = tables.gather(slots, inputs_BI, wide_B, impressions_B=…, clicks_B=…, hours_B=…, train=True)
    …the network's forward and backward…
    tables.apply(lookup, grad_inputs_BI, grad_wide_B, factor)

`gather` is `find` followed by `pool`. A trainer may `find` ahead in another thread, and the result is bit for bit
that of one step after the other, as long as

- batches are found one at a time, in order: finding counts, creates and admits ids;
- a batch is pooled after all earlier batches were applied, and batches are applied in order by one thread.

So `find` of the next batch may run in parallel with this batch's `pool`, dense step and `apply`. It changes no
weight that they use: an id that is a candidate in this batch and admitted by the next one keeps its slot's default
row for this batch, and its own new row depends only on (seed, id).

A snapshot, `evict` and `decay` must not come between a batch's `find`, which counts it, and its `apply`; all three
raise an error. So do not find ahead in the last step before one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.admission import Admission
from clickline.embedding.eviction import Eviction
from clickline.embedding.jagged_ids import to_jagged
from clickline.embedding.optimizers import AdaGrad, Ftrl, RowOptimizer
from clickline.embedding.pooling import POOLINGS
from clickline.embedding.row_counters import BatchCounts
from clickline.embedding.row_layout import RowLayout
from clickline.embedding.table import Table, TableLookup
from clickline.embedding.thread_pool import ThreadPool
from clickline.records import SlotIds


@dataclass(frozen=True)
class SlotShape:
    """A slot's vector: its dim, and how several ids of one row are pooled."""

    name: str
    dim: int
    pooling: Literal["sum", "mean", "max"] = "sum"

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"slot {self.name} has dim {self.dim}: at least 1 is required")
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"slot {self.name} has pooling {self.pooling!r}: it must be one of {', '.join(POOLINGS)}"
            )


@dataclass(frozen=True)
class SlotReport:
    """The number of ids of a slot with a vector, and of candidates, which are only counted."""

    name: str
    ids: int
    candidates: int


@dataclass(frozen=True)
class BatchLookup:
    """The rows of a batch. Valid until the next `evict` or `load_snapshot`."""

    tables: tuple[TableLookup, ...]
    rows: int
    train: bool


class Tables:
    """Growable tables from 64-bit ids to rows.

    threads      affects only the speed, never the result
    init_scale   vectors start uniform within ±init_scale / √dim
    l2           adds l2 · vector to the gradient of a vector, once in each batch with the id, before the optimizer
                 step (so AdaGrad and Adam scale it too). It is the gradient of l2 / 2 · |vector|², not divided
                 by the batch's rows. It does not apply to wide weights: Ftrl has its own l2.
    """

    def __init__(
        self,
        slots: Sequence[SlotShape],
        *,
        embedding_optimizer: RowOptimizer | None = None,
        wide_optimizer: RowOptimizer | None = Ftrl(),  # noqa: B008  (a frozen value)
        seed: int = 0,
        threads: int = 1,
        init_scale: float = 0.01,
        l2: float = 0.0,
        admission: Admission = Admission(),  # noqa: B008
    ) -> None:
        self.slots = tuple(slots)
        self.embedding_optimizer = embedding_optimizer or AdaGrad()
        self.wide_optimizer = wide_optimizer
        self.width = sum(slot.dim for slot in slots)
        thread_pool = ThreadPool(threads)
        columns = np.cumsum([0, *(slot.dim for slot in slots)])
        self.slots_by_table = slots_by_dim([slot.dim for slot in slots])
        self.parts: list[Table] = []
        for slot_numbers in self.slots_by_table:
            self.parts.append(
                Table(
                    RowLayout(slots[slot_numbers[0]].dim, self.embedding_optimizer, wide_optimizer),
                    [slots[s].pooling for s in slot_numbers],
                    [int(columns[s]) for s in slot_numbers],
                    seed=seed,
                    init_scale=init_scale,
                    l2=l2,
                    admission=admission,
                    thread_pool=thread_pool,
                )
            )
        self.in_flight = 0  # training batches that are found but not applied yet
        self._in_flight_lock = threading.Lock()  # one thread may find while another applies
        self.trained = False
        self.snapshot_open = False
        self.decays: list[tuple[int, float]] = []  # generation and rate, for deltas
        self.tombstones: list[tuple[int, list[NDArray[np.uint64]]]] = []  # generation, and ids of each table
        self.digests: dict[int, str] = {}  # of the snapshot written or loaded at each generation

    # ── a training step ────────────────────────────────────────────────────────────────────────

    def gather(
        self,
        slots: Sequence[SlotIds],
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
        *,
        impressions_B: NDArray[np.uint32] | None = None,
        clicks_B: NDArray[np.uint32] | None = None,
        hours_B: NDArray[np.int32] | None = None,
        train: bool,
    ) -> BatchLookup:
        """Find a batch's rows, pool their vectors into the first columns of `inputs_BI`, and set `wide_B`."""
        check_buffers(self.width, inputs_BI, wide_B)
        lookup = self.find(
            slots, wide_B.size, impressions_B=impressions_B, clicks_B=clicks_B, hours_B=hours_B, train=train
        )
        self.pool(lookup, inputs_BI, wide_B)
        return lookup

    def find(
        self,
        slots: Sequence[SlotIds],
        rows: int,
        *,
        impressions_B: NDArray[np.uint32] | None = None,
        clicks_B: NDArray[np.uint32] | None = None,
        hours_B: NDArray[np.int32] | None = None,
        train: bool,
    ) -> BatchLookup:
        """Find the rows of a batch's ids. In training unknown ids are created, and each id counts the impressions, the
        clicks and the hour of the rows it occurs in, once per row. Otherwise nothing changes, and unknown ids use
        their slot's default row. By default a row is one impression without a click, at an unknown hour (-1)."""
        if len(slots) != len(self.slots):
            raise ValueError(f"got {len(slots)} slots, expected {len(self.slots)}")
        jagged = [to_jagged([slots[s] for s in slot_numbers], rows) for slot_numbers in self.slots_by_table]
        counts = None
        if train:
            counts = batch_counts(rows, impressions_B, clicks_B, hours_B)
            self.begin_batch()
        lookups = tuple(
            table.find(table_ids, rows, counts) for table, table_ids in zip(self.parts, jagged, strict=True)
        )
        return BatchLookup(lookups, rows, train)

    def pool(self, lookup: BatchLookup, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> None:
        """Fill the first columns of `inputs_BI` and all of `wide_B`; the columns of dense fields are not changed."""
        check_buffers(self.width, inputs_BI, wide_B)
        wide_B[:] = 0
        for table, table_lookup in zip(self.parts, lookup.tables, strict=True):
            table.pool(table_lookup, inputs_BI, wide_B)

    def apply(
        self,
        lookup: BatchLookup,
        grad_inputs_BI: NDArray[np.float32],
        grad_wide_B: NDArray[np.float32],
        learning_rate_factor: float = 1.0,
    ) -> None:
        """Sum the gradients by id, then do one optimizer step per row."""
        if not lookup.train:
            raise ValueError("this batch was looked up without train=True, so it cannot be trained on")
        check_buffers(self.width, grad_inputs_BI, grad_wide_B)
        for table, table_lookup in zip(self.parts, lookup.tables, strict=True):
            table.apply(table_lookup, grad_inputs_BI, grad_wide_B, learning_rate_factor)
        self.end_batch()

    def begin_batch(self) -> None:
        """Called before a batch is counted: it is in flight until it is applied."""
        self.trained = True
        with self._in_flight_lock:
            self.in_flight += 1

    def end_batch(self) -> None:
        """Called after a counted batch was applied."""
        with self._in_flight_lock:
            self.in_flight -= 1

    # ── size and memory ────────────────────────────────────────────────────────────────────────

    @property
    def size(self) -> int:
        """The number of ids with a row, including candidates."""
        return sum(table.size for table in self.parts)

    @property
    def memory_bytes(self) -> int:
        return sum(table.memory_bytes for table in self.parts)

    @property
    def needed_bytes(self) -> int:
        """The memory that the current ids need. Depends only on their number, unlike `memory_bytes`, which includes
        freed rows that wait for new ids."""
        return sum(table.needed_bytes for table in self.parts)

    def report(self) -> tuple[SlotReport, ...]:
        """The number of ids and candidates of every slot."""
        ids, candidates = self._by_slot()
        return tuple(
            SlotReport(slot.name, int(ids[s]), int(candidates[s])) for s, slot in enumerate(self.slots)
        )

    def _by_slot(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids, candidates = np.zeros((2, len(self.slots)), dtype=np.int64)
        for table, slot_numbers in zip(self.parts, self.slots_by_table, strict=True):
            ids[slot_numbers] = table.ids_HS.sum(axis=0)
            candidates[slot_numbers] = table.candidates_HS.sum(axis=0)
        return ids, candidates

    def checksums(self) -> list[list[int]]:
        """Checksums of the content of each table, independent of training order and memory layout."""
        return [table.checksums() for table in self.parts]

    # ── decay and eviction ─────────────────────────────────────────────────────────────────────

    def decay(self, rate: float) -> None:
        """Multiply every counter by `rate`. Counters are then no longer exact counts, but what eviction uses."""
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"decay by {rate}: it must be above 0 and at most 1")
        self.require_no_snapshot("decay")
        self._require_no_batch_in_flight("decay")
        for table in self.parts:
            table.decay(rate)
        self.decays.append((self.parts[0].generation, rate))

    def evict(self, rule: Eviction, now_hour: int = -1) -> tuple[SlotReport, ...]:
        """Evict the ids that match the rule, and return how many of each slot. Their rows are reused."""
        self.require_no_snapshot("evict")
        self._require_no_batch_in_flight("evict")
        ids, candidates = self._by_slot()
        generation = self.parts[0].generation
        evicted = [table.evict(rule, now_hour) for table in self.parts]
        if any(part.size for part in evicted):
            self.tombstones.append((generation, evicted))
        ids_left, candidates_left = self._by_slot()
        return tuple(
            SlotReport(slot.name, int(ids[s] - ids_left[s]), int(candidates[s] - candidates_left[s]))
            for s, slot in enumerate(self.slots)
        )

    def drop_history_before(self, generation: int) -> None:
        """Drop what is only needed for deltas since a generation before this one."""
        self.tombstones = [(at, ids) for at, ids in self.tombstones if at > generation]
        self.decays = [(at, rate) for at, rate in self.decays if at > generation]
        self.digests = {at: digest for at, digest in self.digests.items() if at >= generation}

    def _require_no_batch_in_flight(self, what: str) -> None:
        if self.in_flight:
            raise RuntimeError(f"{what} between a batch's find and its apply: apply the batch first")

    def require_no_snapshot(self, what: str) -> None:
        if self.snapshot_open:
            raise RuntimeError(f"{what} while a snapshot is being written: finish or close it first")


def slots_by_dim(dims: Sequence[int]) -> list[list[int]]:
    """The slots of each table: there is one table per dim, in the order in which the dims first occur."""
    return [[s for s, dim in enumerate(dims) if dim == wanted] for wanted in dict.fromkeys(dims)]


def check_buffers(width: int, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> None:
    """Check the arrays here, because kernels do not."""
    shape = inputs_BI.shape
    if inputs_BI.ndim != 2 or shape[0] != wide_B.size or shape[1] < width:
        raise ValueError(
            f"inputs have shape {shape} for {wide_B.size} rows; at least {width} columns are required"
        )
    for array in (inputs_BI, wide_B):
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError(f"inputs must be contiguous float32, not {array.dtype}")


def batch_counts(
    rows: int,
    impressions_B: NDArray[np.uint32] | None,
    clicks_B: NDArray[np.uint32] | None,
    hours_B: NDArray[np.int32] | None,
) -> BatchCounts:
    """The counts of the rows. By default a row is one impression without a click, at an unknown hour (-1)."""
    return BatchCounts(
        _column(impressions_B, rows, np.uint32, 1),
        _column(clicks_B, rows, np.uint32, 0),
        _column(hours_B, rows, np.int32, -1),
        np.zeros(0, dtype=np.uint16),
    )


def _column(values_B: NDArray[Any] | None, rows: int, dtype: Any, default: int) -> NDArray[Any]:
    if values_B is None:
        return np.full(rows, default, dtype=dtype)
    if values_B.shape != (rows,):
        raise ValueError(f"got {values_B.shape} counts for {rows} rows")
    return np.ascontiguousarray(values_B, dtype=dtype)
