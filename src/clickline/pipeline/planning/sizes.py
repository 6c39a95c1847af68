"""Bytes from shapes and counts: tables, network, checkpoint, version, servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from clickline.config import Config
from clickline.embedding import copy_on_write_bytes, snapshot_bytes, table_bytes
from clickline.embedding.row_layout import RowLayout
from clickline.embedding.serving import PartShape, files_bytes
from clickline.features import FeatureSpec
from clickline.models.model import Model
from clickline.pipeline.planning.cost_probe import ProbeResult
from clickline.pipeline.planning.id_counts import SlotIdCounts
from clickline.pipeline.planning.plan_result import (
    DenseMemory,
    DiskPlan,
    MemoryPlan,
    ServingPlan,
    TablesMemory,
)
from clickline.training.batches import WINDOW_ROWS

MIB = 1 << 20
_PROCESS = 560 * MIB  # of a train process without its data, where it is not measured
_WINDOWS = 6  # copies of a window while the next is read, with what Arrow and malloc keep
_REPEATED = 4  # times that an id occurs in a batch, about, where it is not measured
_SERVER = 190 * MIB  # supervisor, and code that its workers share
_WORKER = 115 * MIB
_SMALL_FILES = 100 * 1024  # manifest and stored config of a version, about


@dataclass(frozen=True)
class ModelShape:
    """A model as far as its size goes."""

    layouts: tuple[RowLayout, ...]  # of each table
    members: tuple[tuple[int, ...], ...]  # which slots each serves
    wide: bool
    weights: int  # numbers that are learned
    buffers: int  # numbers that are not
    width: int  # of the network's input
    layers: int  # numbers that the layers put out for a row

    @classmethod
    def of(cls, model: Model) -> ModelShape:
        tables, network = model.tables, model.network
        return cls(
            tuple(part.layout for part in tables.parts),
            tuple(map(tuple, tables.slots_by_table)),
            tables.wide_optimizer is not None,
            sum(weight.numel() for weight in network.parameters()),
            sum(buffer.numel() for buffer in network.buffers()),
            model.spec.width,
            sum(layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear)),
        )

    def by_table(self, numbers: Sequence[int]) -> list[int]:
        """Sums over the slots of each table."""
        return [sum(numbers[slot] for slot in members) for members in self.members]

    @property
    def parts(self) -> tuple[PartShape, ...]:
        return tuple(PartShape(layout.dim, self.wide) for layout in self.layouts)


def tables_memory(shape: ModelShape, slots: Sequence[SlotIdCounts], batch_ids: int) -> TablesMemory:
    """Memory of the tables when training ends."""
    found = [
        table_bytes(layout, ids, candidates, batch_ids=batch_ids * len(members) // max(1, len(slots)))
        for layout, members, ids, candidates in zip(
            shape.layouts,
            shape.members,
            shape.by_table([slot.admitted for slot in slots]),
            shape.by_table([slot.candidates for slot in slots]),
            strict=True,
        )
    ]
    return TablesMemory(
        tuple(layout.view.stride for layout in shape.layouts),
        sum(part.rows for part in found),
        sum(part.candidates for part in found),
        sum(part.index for part in found),
        sum(part.slack for part in found),
        sum(part.total for part in found),
    )


def dense_memory(shape: ModelShape, batch_size: int) -> DenseMemory:
    """Weights in single precision, their gradients and Adam's two moments, and what backward needs of a batch."""
    weights = 4 * shape.weights
    return DenseMemory(weights, 3 * weights, 4 * batch_size * (2 * shape.width + 3 * shape.layers))


def row_memory(features: FeatureSpec, values_per_row: float) -> float:
    """A row in memory: ids, where those of each slot begin if there may be several, numbers, and five targets."""
    several = sum(slot.multi for slot in features.slots)
    return 8 * (values_per_row + several) + 4 * len(features.dense) + 20


def _copies(windows: int) -> int:
    """How often rows of a window lie in memory: as read, put together, shuffled, and being learned meanwhile."""
    return 3 if windows < 2 else 4


def memory_plan(
    shape: ModelShape,
    slots: Sequence[SlotIdCounts],
    batch_size: int,
    row_bytes: float,
    train_rows: int,
    cuts: bool,
    measured: ProbeResult | None,
) -> MemoryPlan:
    """The peak of training. A row takes `row_bytes` in memory; `cuts` says whether a checkpoint is written while rows
    are learned."""
    window, windows = row_bytes * min(train_rows, WINDOW_ROWS), math.ceil(train_rows / WINDOW_ROWS)
    several = batch_size * sum(map(len, shape.members))
    batch_ids = several // _REPEATED if measured is None else measured.distinct_ids
    tables = tables_memory(shape, slots, batch_ids)
    dense = dense_memory(shape, batch_size)
    if measured is None:
        process = _PROCESS
        working = int(_WINDOWS * window) + dense.weights + dense.optimizer + dense.activations
    else:
        process, working = measured.process_bytes, measured.working_bytes
        had = _copies(measured.windows) * measured.window_rows * row_bytes
        working += max(0, int(_copies(windows) * window - had))  # a sample may hold less than a window
    snapshot = copy_on_write_bytes(tables.total) if cuts else 0
    return MemoryPlan(tables, dense, process, working, snapshot, process + working + tables.total + snapshot)


def disk_plan(config: Config, shape: ModelShape, slots: Sequence[SlotIdCounts], row_bytes: float) -> DiskPlan:
    """Checkpoint and version, as training leaves them."""
    kept = shape.by_table([slot.kept for slot in slots])
    counted = shape.by_table([slot.kept_candidates for slot in slots])
    dense = 4 * (3 * shape.weights + shape.buffers)
    checkpoint = dense + sum(map(snapshot_bytes, shape.layouts, kept, counted))
    publish = config.publish
    table = files_bytes(shape.parts, publish.table_precision, publish.shards, kept)
    network = 4 * shape.weights // (4 if publish.dense_precision == "int8" else 1)
    version = table + network + int(publish.sample_rows * row_bytes) + _SMALL_FILES
    return DiskPlan(checkpoint, (config.train.keep_checkpoints + 1) * checkpoint, version, table)


def serving_plan(config: Config, disk: DiskPlan, cores: int) -> ServingPlan:
    """One server with the whole table. While versions change, both are mapped."""
    processes = config.serve.processes or cores
    worker = _WORKER + 2 * (disk.version - disk.version_table)
    return ServingPlan(
        disk.version_table, worker, processes, _SERVER, _SERVER + processes * worker + 2 * disk.version_table
    )
