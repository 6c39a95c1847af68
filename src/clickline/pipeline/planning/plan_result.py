"""The result of `clickline plan`, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clickline.pipeline.planning.id_counts import SlotIdCounts


@dataclass(frozen=True)
class RowsPlan:
    """Rows and training steps."""

    train: int
    eval: int
    learned: int  # trained in one epoch
    batch_size: int
    steps: int  # in one epoch
    exact: bool  # False: extrapolated from a sample


@dataclass(frozen=True)
class IdsPlan:
    """Ids over all slots."""

    slots: tuple[SlotIdCounts, ...]
    distinct: int
    low: int  # likely range of `distinct`
    high: int
    admitted: int
    candidates: int
    kept: int


@dataclass(frozen=True)
class TablesMemory:
    """Memory of the embedding tables."""

    row_bytes: tuple[int, ...]  # one row of each table, optimizer state included
    rows: int
    candidates: int
    index: int
    slack: int
    total: int


@dataclass(frozen=True)
class DenseMemory:
    """Memory of the network; included in that of the process."""

    weights: int
    optimizer: int  # gradients and moments
    activations: int  # of a batch, approximately


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory of the training process."""

    tables: TablesMemory
    dense: DenseMemory
    process: int  # Python, PyTorch, the model's code
    working: int  # prefetched windows of rows, a batch and its activations
    snapshot: int  # copies of rows while a checkpoint is written
    peak: int


@dataclass(frozen=True)
class DiskPlan:
    """Bytes on disk."""

    checkpoint: int
    checkpoints: int  # all that a run keeps, including one being written
    version: int
    version_table: int


@dataclass(frozen=True)
class ServingPlan:
    """Memory of one server with the whole table."""

    table: int  # mapped files, shared by its processes; twice during a version switch
    process: int  # one worker
    processes: int
    server: int  # the supervisor and shared code
    peak: int


@dataclass(frozen=True)
class TimePlan:
    """Seconds, on this machine."""

    prepare: float | None  # None: already prepared
    start: float
    rows_per_second: float
    learn: float  # one epoch
    evaluate: float
    checkpoint: float
    epoch: float  # training, evaluation and checkpoint
    total: float  # of `train`


@dataclass(frozen=True)
class Remedy:
    """A config change and its effect."""

    change: str  # in the syntax of --set
    train_peak: int
    version: int
    serve_peak: int
    fits: bool  # whether both fit then


@dataclass(frozen=True)
class FitPlan:
    """What fits on machines with this memory."""

    memory: int
    usable: int
    train_fits: bool
    train_shards: int | None  # machines needed for the tables; None: no number is enough
    serve_fits: bool
    serve_shards: int | None  # for `publish.shards` and lookup servers
    serve_processes: int  # workers that fit on one machine with the whole table
    arithmetic: tuple[str, ...]
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True)
class Plan:
    """The whole plan."""

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
        """As plain values, in bytes and seconds."""
        return asdict(self)
