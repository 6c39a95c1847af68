"""The sparse table as files that are only read: built once, mapped by every server.

snapshot ──snapshot_blocks──▶ rows ──[difference]──▶ write_shards ──▶ one file a shard: a base, or a delta
base and deltas ──FrozenTables.open──▶ gather (a server's own lookups), find (a lookup server's)
FrozenTables ──merged──▶ write_shards ──▶ a new base
"""

from clickline.frozen.content import difference, merged, snapshot_blocks, snapshot_parts
from clickline.frozen.format import ShardFile, files_bytes, write_shards
from clickline.frozen.lookup import GatherPlan, gather_plan, shards_of
from clickline.frozen.rows import PartShape, Precision, RowBlock, row_bytes
from clickline.frozen.tables import FrozenTables, pool

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
