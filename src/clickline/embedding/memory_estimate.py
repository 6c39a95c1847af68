"""How much memory and disk a table takes with a given number of ids, before there is one."""

from __future__ import annotations

from dataclasses import dataclass

from clickline.embedding.arena import BLOCK_ROWS
from clickline.embedding.index import SHARDS, entries_for
from clickline.embedding.row_layout import CandidateLayout, RowLayout
from clickline.embedding.snapshot import MOST_SHADOWS


@dataclass(frozen=True)
class TableBytes:
    """Memory of a table, by what it is for."""

    rows: int  # of admitted ids: counters, optimizer state, wide weight, vector
    candidates: int  # of ids that are only counted
    index: int
    slack: int  # rows that were handed out and are not used yet

    @property
    def total(self) -> int:
        return self.rows + self.candidates + self.index + self.slack


def table_bytes(layout: RowLayout, ids: int, candidates: int = 0, *, batch_ids: int = 0) -> TableBytes:
    """What a table holds that learned so many ids. `batch_ids` are the distinct ids of a batch: with admission so many
    rows are kept free, as any of them may be admitted."""
    stride = layout.places.stride
    slack = _begun_rows(ids) * stride
    if candidates:
        slack += batch_ids * stride + _begun_rows(candidates) * CandidateLayout.stride
    return TableBytes(
        rows=ids * stride,
        candidates=candidates * CandidateLayout.stride,
        index=8 * entries_for(ids + candidates),
        slack=slack,
    )


def _begun_rows(ids: int) -> int:
    """Rows of the block that each shard has begun: half of it, as it comes, once there are several."""
    return int(SHARDS * max(BLOCK_ROWS / 2, BLOCK_ROWS - ids / SHARDS))


def shadow_bytes(tables: int) -> int:
    """What rows that are kept for a snapshot take at the most, beside tables of so many bytes."""
    return tables // (MOST_SHADOWS - 1)


def snapshot_bytes(layout: RowLayout, ids: int, candidates: int = 0) -> int:
    """A whole snapshot of the table on disk, without its header."""
    return ids * layout.record.itemsize + candidates * CandidateLayout.record.itemsize + SHARDS * 16
