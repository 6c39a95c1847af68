"""Embedding tables: they map 64-bit ids to trainable rows."""

from clickline.embedding.admission import Admission
from clickline.embedding.eviction import Eviction
from clickline.embedding.lr_schedules import Constant, Cosine, LinearTail, Schedule, StepDrop
from clickline.embedding.memory_estimate import TableMemory, copy_on_write_bytes, snapshot_bytes, table_bytes
from clickline.embedding.optimizers import (
    OPTIMIZERS,
    AdaGrad,
    Adam,
    Ftrl,
    RowOptimizer,
    RowWiseAdaGrad,
    Sgd,
)
from clickline.embedding.packed_messages import LookupReply, LookupRequest, RowGradients
from clickline.embedding.remote_tables import PendingLookup, RemoteTables
from clickline.embedding.sharded_tables import ShardLookup, ShardTables, inner_shards
from clickline.embedding.snapshot import (
    Snapshot,
    SnapshotFile,
    begin_snapshot,
    load_snapshot,
    read_header,
    save_snapshot,
    snapshot_digest,
)
from clickline.embedding.tables import BatchLookup, SlotReport, SlotShape, Tables

__all__ = [
    "OPTIMIZERS",
    "AdaGrad",
    "Adam",
    "Admission",
    "BatchLookup",
    "Constant",
    "Cosine",
    "Eviction",
    "Ftrl",
    "LinearTail",
    "LookupReply",
    "LookupRequest",
    "PendingLookup",
    "RemoteTables",
    "RowGradients",
    "RowOptimizer",
    "RowWiseAdaGrad",
    "Schedule",
    "Sgd",
    "ShardLookup",
    "ShardTables",
    "SlotReport",
    "SlotShape",
    "Snapshot",
    "SnapshotFile",
    "StepDrop",
    "TableMemory",
    "Tables",
    "begin_snapshot",
    "copy_on_write_bytes",
    "inner_shards",
    "load_snapshot",
    "read_header",
    "save_snapshot",
    "snapshot_bytes",
    "snapshot_digest",
    "table_bytes",
]
