"""Stores the true click probabilities of a sample log, and computes the best AUC that a model can reach."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clickline.numba_cache import njit

_SCHEMA = pa.schema([pa.field("p", pa.float64()), pa.field("label", pa.int8())])
_GROUP_ROWS = 1 << 17  # fixed, so that the bytes of the file do not depend on block sizes
_BINS = 1 << 16


class TruthFile:
    """A Parquet file with columns `p` and `label`, one row for each row of the log."""

    def __init__(self, path: Path) -> None:
        # p does not compress, and a dictionary of it would be as large as the column
        self._writer = pq.ParquetWriter(path, _SCHEMA, compression="none", use_dictionary=["label"])
        self._probability_G = np.empty(_GROUP_ROWS, np.float64)
        self._clicks_G = np.empty(_GROUP_ROWS, np.int8)
        self._filled = 0

    def add(self, probability_B: NDArray[np.float64], clicks_B: NDArray[np.int8]) -> None:
        taken = 0
        while taken < probability_B.size:
            some = min(probability_B.size - taken, _GROUP_ROWS - self._filled)
            into = slice(self._filled, self._filled + some)
            self._probability_G[into] = probability_B[taken : taken + some]
            self._clicks_G[into] = clicks_B[taken : taken + some]
            self._filled += some
            taken += some
            if self._filled == _GROUP_ROWS:
                self._flush()

    def _flush(self) -> None:
        columns = [self._probability_G[: self._filled], self._clicks_G[: self._filled]]
        self._writer.write_table(pa.table(columns, schema=_SCHEMA))
        self._filled = 0

    def __enter__(self) -> TruthFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._filled:
            self._flush()
        self._writer.close()


class AucCounter:
    """Computes AUC in constant memory: probabilities are counted in 65,536 equal bins.

    Pairs within one bin count as ties, so the error is at most half the share of such pairs:
    below 1e-4 for the distribution of the click model.
    """

    def __init__(self) -> None:
        self._counts_2K = np.zeros((2, _BINS), np.int64)

    def add(self, probability_B: NDArray[np.float64], clicks_B: NDArray[np.int8]) -> None:
        _count_bins(probability_B, clicks_B, self._counts_2K)

    def auc(self) -> float | None:
        """The AUC; None if there are only clicks or no clicks."""
        unclicked_K, clicked_K = self._counts_2K
        pairs = int(unclicked_K.sum()) * int(clicked_K.sum())
        if pairs == 0:
            return None
        below_K = np.cumsum(unclicked_K) - unclicked_K
        won_twice = sum(
            (int(c) * int(2 * b + u)) for c, b, u in zip(clicked_K, below_K, unclicked_K, strict=True)
        )
        return won_twice / (2 * pairs)


@njit(cache=True, nogil=True)
def _count_bins(
    probability_B: NDArray[np.float64], clicks_B: NDArray[np.int8], counts_2K: NDArray[np.int64]
) -> None:
    bins = counts_2K.shape[1]
    for b in range(probability_B.size):
        counts_2K[clicks_B[b], min(np.int64(probability_B[b] * bins), bins - 1)] += 1
