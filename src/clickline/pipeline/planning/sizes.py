"""Computes bytes from shapes and counts: tables, network, checkpoint, version, servers."""

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
_PROCESS_BYTES = 560 * MIB  # a training process without data, if not measured
_WINDOW_COPIES = 6  # while the next window is read, including overhead of Arrow and malloc
_ID_REPEATS = 4  # approximate occurrences of an id in a batch, if not measured
_SERVER_BYTES = 190 * MIB  # the supervisor and code shared by its workers
_WORKER_BYTES = 115 * MIB
_SMALL_FILES_BYTES = 100 * 1024  # manifest and stored config of a version, approximately


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that determine its size."""

    layouts: tuple[RowLayout, ...]  # of each table
    slots_by_table: tuple[tuple[int, ...], ...]  # indices of the slots of each table
    wide: bool
    weights: int  # trainable numbers
    buffers: int  # other numbers
    width: int  # of the network's input
    layers: int  # total output width of the linear layers

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
        """Sum numbers per slot over the slots of each table."""
        return [sum(numbers[slot] for slot in slot_indices) for slot_indices in self.slots_by_table]

    @property
    def parts(self) -> tuple[PartShape, ...]:
        return tuple(PartShape(layout.dim, self.wide) for layout in self.layouts)


def tables_memory(shape: ModelShape, slots: Sequence[SlotIdCounts], batch_ids: int) -> TablesMemory:
    """Memory of the tables at the end of training."""
    parts_memory = [
        table_bytes(layout, ids, candidates, batch_ids=batch_ids * len(slot_indices) // max(1, len(slots)))
        for layout, slot_indices, ids, candidates in zip(
            shape.layouts,
            shape.slots_by_table,
            shape.by_table([slot.admitted for slot in slots]),
            shape.by_table([slot.candidates for slot in slots]),
            strict=True,
        )
    ]
    return TablesMemory(
        tuple(layout.view.stride for layout in shape.layouts),
        sum(part.rows for part in parts_memory),
        sum(part.candidates for part in parts_memory),
        sum(part.index for part in parts_memory),
        sum(part.slack for part in parts_memory),
        sum(part.total for part in parts_memory),
    )


def dense_memory(shape: ModelShape, batch_size: int) -> DenseMemory:
    """Float32 weights, their gradients and Adam's two moments, and the activations of a batch for the backward pass."""
    weights = 4 * shape.weights
    return DenseMemory(weights, 3 * weights, 4 * batch_size * (2 * shape.width + 3 * shape.layers))


def row_memory(features: FeatureSpec, values_per_row: float) -> float:
    """Bytes of a row in memory: ids, offsets of multi-valued slots, dense values, and five targets."""
    multi_slots = sum(slot.multi for slot in features.slots)
    return 8 * (values_per_row + multi_slots) + 4 * len(features.dense) + 20


def _copies(windows: int) -> int:
    """Copies of a window in memory: as read, concatenated, shuffled, and the one being trained on."""
    return 3 if windows < 2 else 4


def memory_plan(
    shape: ModelShape,
    slots: Sequence[SlotIdCounts],
    batch_size: int,
    row_bytes: float,
    train_rows: int,
    checkpoints_in_epoch: bool,
    probed: ProbeResult | None,
) -> MemoryPlan:
    """The peak memory of training. A row takes `row_bytes`; `checkpoints_in_epoch`: checkpoints are written during an
    epoch."""
    window, windows = row_bytes * min(train_rows, WINDOW_ROWS), math.ceil(train_rows / WINDOW_ROWS)
    batch_values = batch_size * sum(map(len, shape.slots_by_table))
    batch_ids = batch_values // _ID_REPEATS if probed is None else probed.distinct_ids
    tables = tables_memory(shape, slots, batch_ids)
    dense = dense_memory(shape, batch_size)
    if probed is None:
        process = _PROCESS_BYTES
        working = int(_WINDOW_COPIES * window) + dense.weights + dense.optimizer + dense.activations
    else:
        process, working = probed.process_bytes, probed.working_bytes
        probed_windows = _copies(probed.windows) * probed.window_rows * row_bytes
        # A sample may be smaller than a window.
        working += max(0, int(_copies(windows) * window - probed_windows))
    snapshot = copy_on_write_bytes(tables.total) if checkpoints_in_epoch else 0
    return MemoryPlan(tables, dense, process, working, snapshot, process + working + tables.total + snapshot)


def disk_plan(config: Config, shape: ModelShape, slots: Sequence[SlotIdCounts], row_bytes: float) -> DiskPlan:
    """Sizes of the checkpoint and the version after training."""
    kept = shape.by_table([slot.kept for slot in slots])
    candidates = shape.by_table([slot.kept_candidates for slot in slots])
    dense = 4 * (3 * shape.weights + shape.buffers)
    checkpoint = dense + sum(map(snapshot_bytes, shape.layouts, kept, candidates))
    publish = config.publish
    table = files_bytes(shape.parts, publish.table_precision, publish.shards, kept)
    network = 4 * shape.weights // (4 if publish.dense_precision == "int8" else 1)
    version = table + network + int(publish.sample_rows * row_bytes) + _SMALL_FILES_BYTES
    return DiskPlan(checkpoint, (config.train.keep_checkpoints + 1) * checkpoint, version, table)


def serving_plan(config: Config, disk: DiskPlan, cores: int) -> ServingPlan:
    """Memory of one server with the whole table. During a version switch both versions are mapped."""
    processes = config.serve.processes or cores
    worker = _WORKER_BYTES + 2 * (disk.version - disk.version_table)
    return ServingPlan(
        disk.version_table,
        worker,
        processes,
        _SERVER_BYTES,
        _SERVER_BYTES + processes * worker + 2 * disk.version_table,
    )
