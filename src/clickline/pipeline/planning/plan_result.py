"""A plan: what to expect, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clickline.pipeline.planning.id_counts import SlotIdCounts


@dataclass(frozen=True)
class RowsPlan:
    """Rows, and how they are learned."""

    train: int
    eval: int
    learned: int  # in one epoch
    batch_size: int
    steps: int  # in one epoch
    exact: bool  # False: told from a sample


@dataclass(frozen=True)
class IdsPlan:
    """Ids of all slots."""

    slots: tuple[SlotIdCounts, ...]
    distinct: int
    low: int  # the range that `distinct` most likely lies in
    high: int
    admitted: int
    candidates: int
    kept: int


@dataclass(frozen=True)
class TablesMemory:
    """Memory of the sparse tables."""

    row_bytes: tuple[int, ...]  # one row of each table, optimizer state included
    rows: int
    candidates: int
    index: int
    slack: int
    total: int


@dataclass(frozen=True)
class DenseMemory:
    """Memory of the network; part of what the process needs."""

    weights: int
    optimizer: int  # gradients and moments
    activations: int  # of a batch, about


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of the train process at its most."""

    tables: TablesMemory
    dense: DenseMemory
    process: int  # Python, PyTorch, the model's code
    working: int  # windows of rows that are read ahead, a batch and its activations
    snapshot: int  # rows that are kept as they were while a checkpoint is written
    peak: int


@dataclass(frozen=True)
class DiskPlan:
    """Bytes on disk."""

    checkpoint: int
    checkpoints: int  # all that a run keeps, one being written included
    version: int
    version_table: int


@dataclass(frozen=True)
class ServingPlan:
    """Memory of one server with the whole table."""

    table: int  # mapped files, shared by its processes; twice while versions change
    process: int  # one worker
    processes: int
    server: int  # the supervisor, and code that all share
    peak: int


@dataclass(frozen=True)
class TimePlan:
    """Seconds, on this machine."""

    prepare: float | None  # None: it is prepared already
    start: float
    rows_per_second: float
    learn: float  # one epoch
    evaluate: float
    checkpoint: float
    epoch: float  # the three together
    total: float  # of `train`


@dataclass(frozen=True)
class Remedy:
    """A change, and what it brings."""

    change: str  # as --set takes it
    train_peak: int
    version: int
    serve_peak: int
    fits: bool  # both then


@dataclass(frozen=True)
class FitPlan:
    """What fits into machines of one size."""

    memory: int
    usable: int
    train_fits: bool
    train_shards: (
        int | None
    )  # machines over which the tables would have to be parted; None: no number is enough
    serve_fits: bool
    serve_shards: int | None  # for `publish.shards` and lookup servers
    serve_processes: int  # workers that one machine has room for beside the whole table
    arithmetic: tuple[str, ...]
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that `clickline plan` tells."""

    basis: str
    rows: RowsPlan
    ids: IdsPlan
    memory: MemoryPlan
    disk: DiskPlan
    serving: ServingPlan
    time: TimePlan | None
    fit: FitPlan
    assumptions: tuple[str, ...]

    def to_json(self) -> Mapping[str, Any]:
        """As plain values; bytes and seconds."""
        return asdict(self)
