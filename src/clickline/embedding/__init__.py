"""Sparse tables: from 64-bit ids to rows that learn."""

from clickline.embedding.admission import Admission
from clickline.embedding.eviction import Eviction
from clickline.embedding.lr_schedules import Constant, Cosine, Schedule, Settle, StepDrop
from clickline.embedding.memory_estimate import TableBytes, shadow_bytes, snapshot_bytes, table_bytes
from clickline.embedding.optimizers import (
    OPTIMIZERS,
    AdaGrad,
    Adam,
    Ftrl,
    RowOptimizer,
    RowWiseAdaGrad,
    Sgd,
)
from clickline.embedding.packed_messages import Gradients, Reply, Request
from clickline.embedding.remote_tables import Asked, RemoteTables
from clickline.embedding.sharded_tables import Found, ShardTables, inner_shards
from clickline.embedding.snapshot import Saved, Snapshot, freeze, load, read_header, save, snapshot_digest
from clickline.embedding.tables import Lookup, SlotReport, SlotShape, Tables

__all__ = [
    "OPTIMIZERS",
    "AdaGrad",
    "Adam",
    "Admission",
    "Asked",
    "Constant",
    "Cosine",
    "Eviction",
    "Found",
    "Ftrl",
    "Gradients",
    "Lookup",
    "RemoteTables",
    "Reply",
    "Request",
    "RowOptimizer",
    "RowWiseAdaGrad",
    "Saved",
    "Schedule",
    "Settle",
    "Sgd",
    "ShardTables",
    "SlotReport",
    "SlotShape",
    "Snapshot",
    "StepDrop",
    "TableBytes",
    "Tables",
    "freeze",
    "inner_shards",
    "load",
    "read_header",
    "save",
    "shadow_bytes",
    "snapshot_bytes",
    "snapshot_digest",
    "table_bytes",
]
