"""The description of a cluster training job and the values that the driver's parts exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clickline.artifacts.checkpoint import Position
from clickline.embedding import Eviction
from clickline.machine import cores
from clickline.models.model_plan import ModelPlan
from clickline.training.cluster.policy import PolicyRules


@dataclass(frozen=True)
class TrainingJob:
    """Everything that defines a cluster training job."""

    home: Path
    run: Path
    address: str | None  # of the Ray cluster; None: an embedded one
    dataset: str
    batches: Mapping[str, Any]  # settings of `Batches`
    plan: ModelPlan
    tables: Mapping[str, Any]  # arguments of `Tables`
    model_file: Path | None
    sync: bool
    max_staleness: int
    scale_lr_by_staleness: bool
    rules: PolicyRules
    shards: int
    worker_cpus: float
    worker_memory: int | None  # bytes to reserve
    shard_cpus: float
    shard_memory: int | None
    eviction: Eviction | None
    total_rows: int
    group_seconds: float = 30.0  # after which a silent worker of a process group is lost

    @property
    def threads(self) -> int:
        """Threads of one worker."""
        return max(1, int(self.worker_cpus))

    def logical_cpus(self) -> int:
        """CPUs that an embedded cluster declares: enough for all workers that may start, and at least all cores."""
        max_workers = max(self.rules.min, self.rules.max or 0)
        return max(cores(), math.ceil(max_workers * self.worker_cpus + self.shards * self.shard_cpus))


class PausePoint(NamedTuple):
    """A point at which all workers are paused and no batch is in flight."""

    position: Position
    units: Mapping[str, Any] | None  # async: progress of the leases


class StateLost(Exception):
    """State was lost that only the last checkpoint has. `decided`: the policy has counted and reported it."""

    def __init__(self, reason: str, *, decided: bool = False) -> None:
        super().__init__(reason)
        self.decided = decided
