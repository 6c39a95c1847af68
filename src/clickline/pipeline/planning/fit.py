"""Checks what fits into machines of a given memory."""

from __future__ import annotations

import math

from clickline.pipeline.planning.plan_result import FitPlan, MemoryPlan, Remedy, ServingPlan
from clickline.progress import human_size

_USABLE_SHARE = 0.9  # of a machine's memory; the rest is for the system and its file cache
_MAX_SHARDS = 4096  # the maximum of `publish.shards`


def usable_memory(memory: int) -> int:
    return int(memory * _USABLE_SHARE)


def fits(memory: MemoryPlan, serving: ServingPlan, usable: int) -> bool:
    """Whether training fits on one machine, and serving too."""
    return memory.peak <= usable and serving.peak <= usable


def fit_plan(
    machine: int, memory: MemoryPlan, serving: ServingPlan, cores: int, remedies: tuple[Remedy, ...]
) -> FitPlan:
    """The smallest numbers of shards, with the arithmetic as text."""
    usable = usable_memory(machine)
    fixed = memory.process + memory.working
    sharded = memory.tables.total + memory.snapshot
    train_shards = _shards(sharded, usable - fixed)
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
            f"usable: {human_size(machine)} x {_USABLE_SHARE:g} = {human_size(usable)}",
            f"train: {_arithmetic(sharded, fixed, train_shards, usable)}",
            f"serve: {_arithmetic(2 * serving.table, serve_fixed, serve_shards, usable)}",
        ),
        remedies,
    )


def _shards(sharded: int, room: int) -> int | None:
    """The smallest number of equal shards that fit; None if no number is enough."""
    if room <= 0:
        return None
    shards = max(1, math.ceil(sharded / room))
    return shards if shards <= _MAX_SHARDS else None


def _arithmetic(sharded: int, fixed: int, shards: int | None, usable: int) -> str:
    if shards is None:
        return f"{human_size(fixed)} without the tables already exceeds the usable {human_size(usable)}"
    each = human_size(fixed + sharded / shards)
    return f"{human_size(fixed)} + {human_size(sharded)} of tables / {shards} = {each} ≤ {human_size(usable)}"
