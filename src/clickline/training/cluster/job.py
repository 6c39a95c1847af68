"""What there is to train on a cluster, and what the parts of the driver tell each other; plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clickline.embedding import Eviction
from clickline.models.model_plan import ModelPlan
from clickline.training.batches import Position
from clickline.training.cluster.policy import Rules


@dataclass(frozen=True)
class Job:
    """A training run."""

    home: Path
    run: Path
    address: str | None  # of the cluster; None: one of our own
    dataset: str
    batches: Mapping[str, Any]  # settings of `Batches`
    plan: ModelPlan
    tables: Mapping[str, Any]  # what `Tables` are made from
    model_file: Path | None
    sync: bool
    staleness: int
    staleness_rate: bool
    rules: Rules
    shards: int
    worker_cpus: float
    worker_memory: int | None  # bytes to reserve
    shard_cpus: float
    shard_memory: int | None
    eviction: Eviction | None
    total_rows: int
    group_seconds: float = 30.0  # after which a silent member of a group is lost

    @property
    def threads(self) -> int:
        """Of a worker."""
        return max(1, int(self.worker_cpus))


class Pause(NamedTuple):
    """A moment at which nothing is under way and everybody waits."""

    position: Position
    units: Mapping[str, Any] | None  # async: which units are done and begun


class Lost(Exception):
    """State is gone that only the last cut has. `decided`: the policy has counted it, and its reason was told."""

    def __init__(self, reason: str, *, decided: bool = False) -> None:
        super().__init__(reason)
        self.decided = decided
