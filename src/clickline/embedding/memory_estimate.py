"""Estimates of the memory and disk that a table with a given number of ids needs."""

from __future__ import annotations

from dataclasses import dataclass

from clickline.embedding.arena import BLOCK_ROWS
from clickline.embedding.index import SHARDS, entries_for
from clickline.embedding.row_layout import CandidateLayout, RowLayout
from clickline.embedding.snapshot import COW_MEMORY_DIVISOR


@dataclass(frozen=True)
class TableMemory:
    """The memory of a table, by purpose."""

    rows: int  # of admitted ids: counters, optimizer state, wide weight, vector
    candidates: int  # of ids that are only counted
    index: int
    slack: int  # rows that are allocated but not used yet

    @property
    def total(self) -> int:
        return self.rows + self.candidates + self.index + self.slack


def table_bytes(layout: RowLayout, ids: int, candidates: int = 0, *, batch_ids: int = 0) -> TableMemory:
    """The memory of a table that was trained on `ids` ids. `batch_ids` are the distinct ids of a batch: with admission
    that many rows are kept free, as any of them may be admitted."""
    stride = layout.view.stride
    slack = _unused_rows(ids) * stride
    if candidates:
        slack += batch_ids * stride + _unused_rows(candidates) * CandidateLayout.stride
    return TableMemory(
        rows=ids * stride,
        candidates=candidates * CandidateLayout.stride,
        index=8 * entries_for(ids + candidates),
        slack=slack,
    )


def _unused_rows(ids: int) -> int:
    """Unused rows of the last block of each shard: on average half a block, once a shard has several."""
    return int(SHARDS * max(BLOCK_ROWS / 2, BLOCK_ROWS - ids / SHARDS))


def copy_on_write_bytes(tables: int) -> int:
    """The most memory that copy-on-write rows of a snapshot take beside tables of `tables` bytes."""
    return tables // (COW_MEMORY_DIVISOR - 1)


def snapshot_bytes(layout: RowLayout, ids: int, candidates: int = 0) -> int:
    """The size of a full snapshot of the table on disk, without its header."""
    return ids * layout.record.itemsize + candidates * CandidateLayout.record.itemsize + SHARDS * 16
