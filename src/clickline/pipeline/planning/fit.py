"""What fits into machines of a given memory, and what could be changed where it does not."""

from __future__ import annotations

import math

from clickline.pipeline.planning.plan_result import FitPlan, MemoryPlan, Remedy, ServingPlan
from clickline.progress import human_size

_USABLE = 0.9  # of a machine's memory; the system and its file cache want some
_MOST_SHARDS = 4096  # that `publish.shards` allows


def usable_of(memory: int) -> int:
    return int(memory * _USABLE)


def fits(memory: MemoryPlan, serving: ServingPlan, usable: int) -> bool:
    """Whether one machine is enough to train, and one to serve."""
    return memory.peak <= usable and serving.peak <= usable


def fit_plan(
    machine: int, memory: MemoryPlan, serving: ServingPlan, cores: int, remedies: tuple[Remedy, ...]
) -> FitPlan:
    """Smallest numbers of shards, with the arithmetic in words."""
    usable = usable_of(machine)
    fixed = memory.process + memory.working
    parted = memory.tables.total + memory.snapshot
    train_shards = _shards(parted, usable - fixed)
    serve_fixed = serving.server + serving.process
    serve_shards = _shards(2 * serving.table, usable - serve_fixed)
    room = usable - serving.server - 2 * serving.table
    return FitPlan(
        machine,
        usable,
        memory.peak <= usable,
        train_shards,
        serving.peak <= usable,
        serve_shards,
        max(0, min(cores, room // serving.process)),
        (
            f"usable: {human_size(machine)} x {_USABLE:g} = {human_size(usable)}",
            f"train: {_sum(parted, fixed, train_shards, usable)}",
            f"serve: {_sum(2 * serving.table, serve_fixed, serve_shards, usable)}",
        ),
        remedies,
    )


def _shards(parted: int, room: int) -> int | None:
    """The smallest number of equal parts of which each has room."""
    if room <= 0:
        return None
    shards = max(1, math.ceil(parted / room))
    return shards if shards <= _MOST_SHARDS else None


def _sum(parted: int, fixed: int, shards: int | None, usable: int) -> str:
    if shards is None:
        return f"{human_size(fixed)} beside the tables, which alone leaves too little of {human_size(usable)}"
    each = human_size(fixed + parted / shards)
    return f"{human_size(fixed)} + {human_size(parted)} of tables / {shards} = {each} ≤ {human_size(usable)}"
