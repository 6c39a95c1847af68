"""The layout of a row: in memory, and as a record of a snapshot.

    memory  id 8 · impressions 8 · clicks 8 · hour 4 · slot 4 · generation 4 │ vector state · wide state · wide · vector
    record  id 8 · impressions 8 · clicks 8 · hour 4 · slot 4                │ the same

Fields used together are stored together: finding a row reads the head, pooling reads the end, and in a row of two
cache lines (dim 9 with AdaGrad) each of them is in one line. Only an update needs both.

A candidate, an id that is not admitted yet, has only the fields left of the bar. `generation` is the table's
generation when the row last changed; it depends on when snapshots were taken, so no snapshot holds it.
Counters are doubles: exact up to 2^53 impressions, and they can be decayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from clickline.embedding.optimizers import RowOptimizer

IMPRESSIONS, CLICKS, HOUR, SLOT, GENERATION, HEAD = 8, 16, 24, 28, 32, 36  # byte offsets, and the head's size
_CACHE_LINE = 64
_HEAD_FIELDS: list[Any] = [
    ("id", "<u8"), ("impression", "<f8"), ("click", "<f8"), ("hour", "<i4"), ("slot", "<u4")
]  # fmt: skip


class RowLayoutView(NamedTuple):
    """Byte offsets inside a row, for kernels. `wide` is -1 if rows have no wide weight."""

    dim: int
    wide: int
    vector: int
    wide_state: int
    vector_state: int
    size: int  # bytes used
    stride: int  # bytes from one row to the next


@dataclass(frozen=True)
class RowLayout:
    """The layout of an admitted id's row."""

    dim: int
    embedding_optimizer: RowOptimizer
    wide_optimizer: RowOptimizer | None

    @property
    def view(self) -> RowLayoutView:
        wide_size = 0 if self.wide_optimizer is None else 1
        wide_state_size = self.wide_optimizer.state_size(1) if self.wide_optimizer else 0
        wide_state = HEAD + 4 * self.embedding_optimizer.state_size(self.dim)
        wide = wide_state + 4 * wide_state_size
        vector = wide + 4 * wide_size
        size = vector + 4 * self.dim
        return RowLayoutView(
            self.dim, wide if wide_size else -1, vector, wide_state, HEAD, size, _stride(size)
        )

    @property
    def record(self) -> np.dtype[np.void]:
        """The NumPy type of one row of a snapshot file."""
        fields = list(_HEAD_FIELDS)
        if size := self.embedding_optimizer.state_size(self.dim):
            fields.append(("vector_state", "<f4", (size,)))
        if self.wide_optimizer is not None:
            if size := self.wide_optimizer.state_size(1):
                fields.append(("wide_state", "<f4", (size,)))
            fields.append(("wide", "<f4"))
        fields.append(("vector", "<f4", (self.dim,)))
        return np.dtype(fields)


class CandidateLayout:
    """The layout of a candidate's row: an id that is only counted."""

    stride = 40  # the head, rounded up so that doubles stay aligned
    record: np.dtype[np.void] = np.dtype(_HEAD_FIELDS)


def _stride(size: int) -> int:
    """Round up to full cache lines where that costs little, so that a row spans no more lines than it must."""
    lines = -(-size // _CACHE_LINE) * _CACHE_LINE
    return lines if lines * 8 <= size * 9 else -(-size // 8) * 8
