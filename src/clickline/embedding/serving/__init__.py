"""The sparse table as files that are only read: built once, mapped by every server.

snapshot ──snapshot_blocks──▶ rows ──[difference]──▶ write_shards ──▶ one file a shard: a base, or a delta
base and deltas ──FrozenTables.open──▶ gather (a server's own lookups), find (a lookup server's)
FrozenTables ──merged──▶ write_shards ──▶ a new base
"""

from clickline.embedding.serving.file_format import ShardFile, files_bytes, write_shards
from clickline.embedding.serving.lookup_kernels import GatherPlan, gather_plan, shards_of
from clickline.embedding.serving.packed_rows import PartShape, Precision, RowBlock, row_bytes
from clickline.embedding.serving.row_stream import difference, merged, snapshot_blocks, snapshot_parts
from clickline.embedding.serving.serving_table import FrozenTables, pool

__all__ = [
    "FrozenTables",
    "GatherPlan",
    "PartShape",
    "Precision",
    "RowBlock",
    "ShardFile",
    "difference",
    "files_bytes",
    "gather_plan",
    "merged",
    "pool",
    "row_bytes",
    "shards_of",
    "snapshot_blocks",
    "snapshot_parts",
    "write_shards",
]
