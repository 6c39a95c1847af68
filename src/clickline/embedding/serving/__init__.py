"""The serving table: a version's embedding rows as read-only files, built once and mapped by every server.

snapshot ──snapshot_blocks──▶ rows ──[delta_blocks]──▶ write_shards ──▶ one file per shard: a base, or a delta
base and deltas ──ServingTable.open──▶ gather (a server's own lookups), find (a lookup server's)
ServingTable ──merged_blocks──▶ write_shards ──▶ a new base
"""

from clickline.embedding.serving.file_format import ShardFile, files_bytes, write_shards
from clickline.embedding.serving.lookup_kernels import GatherBatch, GatherPlan, gather_plan, shards_of
from clickline.embedding.serving.packed_rows import RowBlock, row_bytes
from clickline.embedding.serving.row_stream import (
    delta_blocks,
    merged_blocks,
    snapshot_blocks,
    snapshot_parts,
)
from clickline.embedding.serving.serving_table import ServingTable, pool
from clickline.records import PartShape, Precision

__all__ = [
    "GatherBatch",
    "GatherPlan",
    "PartShape",
    "Precision",
    "RowBlock",
    "ServingTable",
    "ShardFile",
    "delta_blocks",
    "files_bytes",
    "gather_plan",
    "merged_blocks",
    "pool",
    "row_bytes",
    "shards_of",
    "snapshot_blocks",
    "snapshot_parts",
    "write_shards",
]
