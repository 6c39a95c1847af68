"""All sparse rows of a model: one table for each dim, behind one door.

    lookup = tables.gather(slots, inputs_BI, wide_B, shows_B=…, clicks_B=…, hours_B=…, train=True)
    …the network's forward and backward…
    tables.apply(lookup, grad_inputs_BI, grad_wide_B, factor)

`gather` is `find` followed by `pool`. A trainer may `find` ahead, in another thread, and bit by bit the
result is that of one step after the other, as long as

- batches are found one at a time, in their order: finding counts, creates and admits ids;
- a batch is pooled after the batches before it were applied, and applied in order, by one thread.

So `find` of the next batch may run beside this batch's `pool`, its dense step and its `apply`. It changes no
weight that they use: an id that this batch saw as a candidate and the next one admits keeps its slot's
default row for this batch, and its own new row follows from (seed, id) alone.

A snapshot, `evict` and `decay` must not come between a batch's `find`, which counts it, and its `apply`;
all three refuse. Who finds ahead does not do so in the last step before one of these.
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
from clickline.embedding.jagged_ids import bags_of
from clickline.embedding.optimizers import AdaGrad, Ftrl, RowOptimizer
from clickline.embedding.pooling import POOLINGS
from clickline.embedding.row_counters import Counts
from clickline.embedding.row_layout import RowLayout
from clickline.embedding.table import Table, TableLookup
from clickline.embedding.thread_pool import Workers
from clickline.records import SlotIds


@dataclass(frozen=True)
class SlotShape:
    """A slot's vector: its length, and how several ids of one row become one."""

    name: str
    dim: int
    pooling: Literal["sum", "mean", "max"] = "sum"

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"slot {self.name} has dim {self.dim}: at least 1 is needed")
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"slot {self.name} is pooled by {self.pooling!r}: {', '.join(POOLINGS)} are known"
            )


@dataclass(frozen=True)
class SlotReport:
    """How many ids of a slot have a vector, and how many are only counted."""

    name: str
    ids: int
    candidates: int


@dataclass(frozen=True)
class Lookup:
    """A batch's rows. Good until the next `evict` or `load`."""

    tables: tuple[TableLookup, ...]
    rows: int
    train: bool


class Tables:
    """Growable tables from 64-bit ids to rows.

    threads      never changes a result, only how fast it comes
    init_scale   vectors start uniform within ±init_scale / √dim
    l2           added to the gradient of a vector as l2 · vector, once in each batch that has the id, before
                 the optimizer sees it (so AdaGrad and Adam scale it too). It is the gradient of
                 l2 / 2 · |vector|², not divided by the batch's rows. Wide weights are left alone: Ftrl has
                 an l2 of its own.
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
        workers = Workers(threads)
        columns = np.cumsum([0, *(slot.dim for slot in slots)])
        self.members = members_of([slot.dim for slot in slots])
        self.parts: list[Table] = []
        for members in self.members:
            self.parts.append(
                Table(
                    RowLayout(slots[members[0]].dim, self.embedding_optimizer, wide_optimizer),
                    [slots[s].pooling for s in members],
                    [int(columns[s]) for s in members],
                    seed=seed,
                    init_scale=init_scale,
                    l2=l2,
                    admission=admission,
                    workers=workers,
                )
            )
        self.in_flight = 0  # training batches that were found and not applied yet
        self._counting = threading.Lock()  # one thread may find while another applies
        self.trained = False
        self.cut_open = False
        self.decays: list[tuple[int, float]] = []  # epoch and rate, for deltas
        self.tombstones: list[tuple[int, list[NDArray[np.uint64]]]] = []  # epoch, and ids of each table
        self.digests: dict[int, str] = {}  # of the snapshot that was taken or loaded at each mark

    # ── a training step ────────────────────────────────────────────────────────────────────────

    def gather(
        self,
        slots: Sequence[SlotIds],
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
        *,
        shows_B: NDArray[np.uint32] | None = None,
        clicks_B: NDArray[np.uint32] | None = None,
        hours_B: NDArray[np.int32] | None = None,
        train: bool,
    ) -> Lookup:
        """Find a batch's rows, pool their vectors into the first columns of `inputs_BI`, and set `wide_B`."""
        check_buffers(self.width, inputs_BI, wide_B)
        lookup = self.find(
            slots, wide_B.size, shows_B=shows_B, clicks_B=clicks_B, hours_B=hours_B, train=train
        )
        self.pool(lookup, inputs_BI, wide_B)
        return lookup

    def find(
        self,
        slots: Sequence[SlotIds],
        rows: int,
        *,
        shows_B: NDArray[np.uint32] | None = None,
        clicks_B: NDArray[np.uint32] | None = None,
        hours_B: NDArray[np.int32] | None = None,
        train: bool,
    ) -> Lookup:
        """Rows of a batch's ids. In training unknown ids are created, and each id counts the shows, the clicks
        and the hour of the rows it occurs in, once a row. Otherwise nothing changes, and unknown ids share
        their slot's default row. Not given, a row is one show, no click, at an hour nobody knows (-1)."""
        if len(slots) != len(self.slots):
            raise ValueError(f"{len(slots)} slots given, {len(self.slots)} expected")
        bags = [bags_of([slots[s] for s in members], rows) for members in self.members]
        counts = None
        if train:
            counts = counts_of(rows, shows_B, clicks_B, hours_B)
            self.takes_off()
        found = tuple(
            table.find(table_bags, rows, counts) for table, table_bags in zip(self.parts, bags, strict=True)
        )
        return Lookup(found, rows, train)

    def pool(self, lookup: Lookup, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> None:
        """Fill the first columns of `inputs_BI` and all of `wide_B`; the columns for dense fields stay."""
        check_buffers(self.width, inputs_BI, wide_B)
        wide_B[:] = 0
        for table, found in zip(self.parts, lookup.tables, strict=True):
            table.pool(found, inputs_BI, wide_B)

    def apply(
        self,
        lookup: Lookup,
        grad_inputs_BI: NDArray[np.float32],
        grad_wide_B: NDArray[np.float32],
        learning_rate_factor: float = 1.0,
    ) -> None:
        """Push gradients back: summed by id, then one optimizer step for each row."""
        if not lookup.train:
            raise ValueError("this batch was looked up without train=True, so it has nothing to learn")
        check_buffers(self.width, grad_inputs_BI, grad_wide_B)
        for table, found in zip(self.parts, lookup.tables, strict=True):
            table.apply(found, grad_inputs_BI, grad_wide_B, learning_rate_factor)
        self.lands()

    def takes_off(self) -> None:
        """A batch is about to be counted: it is in flight until it is applied."""
        self.trained = True
        with self._counting:
            self.in_flight += 1

    def lands(self) -> None:
        """A batch that was counted has been applied."""
        with self._counting:
            self.in_flight -= 1

    # ── what is there ──────────────────────────────────────────────────────────────────────────

    @property
    def size(self) -> int:
        """How many ids have a row, candidates included."""
        return sum(table.size for table in self.parts)

    @property
    def memory_bytes(self) -> int:
        return sum(table.memory_bytes for table in self.parts)

    @property
    def needed_bytes(self) -> int:
        """What the ids that are there need. Follows from their number alone, unlike `memory_bytes`, which also
        holds what was given back and waits for new ones."""
        return sum(table.needed_bytes for table in self.parts)

    def report(self) -> tuple[SlotReport, ...]:
        """The state of every slot."""
        ids, candidates = self._by_slot()
        return tuple(
            SlotReport(slot.name, int(ids[s]), int(candidates[s])) for s, slot in enumerate(self.slots)
        )

    def _by_slot(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids, candidates = np.zeros((2, len(self.slots)), dtype=np.int64)
        for table, members in zip(self.parts, self.members, strict=True):
            ids[members] = table.ids_HS.sum(axis=0)
            candidates[members] = table.candidates_HS.sum(axis=0)
        return ids, candidates

    def checksums(self) -> list[list[int]]:
        """What tells the tables' content from any other, by table; no order of learning or memory counts."""
        return [table.checksums() for table in self.parts]

    # ── forgetting ─────────────────────────────────────────────────────────────────────────────

    def decay(self, rate: float) -> None:
        """Let every counter fade. Not exact counts any more, but what eviction judges by."""
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"decay by {rate}: above 0 and up to 1 is allowed")
        self.refuse_while_cut("decay")
        self._refuse_in_flight("decay")
        for table in self.parts:
            table.decay(rate)
        self.decays.append((self.parts[0].epoch, rate))

    def evict(self, rule: Eviction, now_hour: int = -1) -> tuple[SlotReport, ...]:
        """Drop the ids that the rule names; how many of each slot went. Their rows are used again."""
        self.refuse_while_cut("evict")
        self._refuse_in_flight("evict")
        ids, candidates = self._by_slot()
        epoch = self.parts[0].epoch
        gone = [table.evict(rule, now_hour) for table in self.parts]
        if any(part.size for part in gone):
            self.tombstones.append((epoch, gone))
        left, candidates_left = self._by_slot()
        return tuple(
            SlotReport(slot.name, int(ids[s] - left[s]), int(candidates[s] - candidates_left[s]))
            for s, slot in enumerate(self.slots)
        )

    def forget_before(self, mark: int) -> None:
        """No delta will be taken since a mark before this one: drop what only those would need."""
        self.tombstones = [(epoch, ids) for epoch, ids in self.tombstones if epoch > mark]
        self.decays = [(epoch, rate) for epoch, rate in self.decays if epoch > mark]
        self.digests = {known: digest for known, digest in self.digests.items() if known >= mark}

    def _refuse_in_flight(self, what: str) -> None:
        if self.in_flight:
            raise RuntimeError(f"{what} between a batch's find and its apply: apply it first")

    def refuse_while_cut(self, what: str) -> None:
        if self.cut_open:
            raise RuntimeError(f"{what} while a snapshot is being written: finish or close it first")


def members_of(dims: Sequence[int]) -> list[list[int]]:
    """For each table, which slots it serves: there is one for each dim, in the order in which they first occur."""
    return [[s for s, dim in enumerate(dims) if dim == wanted] for wanted in dict.fromkeys(dims)]


def check_buffers(width: int, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> None:
    """Kernels trust their arrays, so these are checked here."""
    shape = inputs_BI.shape
    if inputs_BI.ndim != 2 or shape[0] != wide_B.size or shape[1] < width:
        raise ValueError(
            f"inputs have shape {shape} for {wide_B.size} rows; at least {width} columns are needed"
        )
    for array in (inputs_BI, wide_B):
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError(f"inputs must be contiguous float32, not {array.dtype}")


def counts_of(
    rows: int,
    shows_B: NDArray[np.uint32] | None,
    clicks_B: NDArray[np.uint32] | None,
    hours_B: NDArray[np.int32] | None,
) -> Counts:
    """What the rows count. Not given, a row is one show, no click, at an hour nobody knows (-1)."""
    return Counts(
        _column(shows_B, rows, np.uint32, 1),
        _column(clicks_B, rows, np.uint32, 0),
        _column(hours_B, rows, np.int32, -1),
        np.zeros(0, dtype=np.uint16),
    )


def _column(values_B: NDArray[Any] | None, rows: int, dtype: Any, default: int) -> NDArray[Any]:
    if values_B is None:
        return np.full(rows, default, dtype=dtype)
    if values_B.shape != (rows,):
        raise ValueError(f"{values_B.shape} counts given for {rows} rows")
    return np.ascontiguousarray(values_B, dtype=dtype)
