"""Reads the TFRecord files of Intel's preprocessing, such as train_processed_data.tfrecords.

They hold Criteo rows with scaled numbers and hashed categories, without column names:

    numeric_1: 13 floats; string_1: 26 pairs of int64 (position, bucket); label: int64

The columns of both lists are in the order of their names as text: I1, I10, …, I13, I2, …; C1, C10, …, C19, C2, ….
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.data.readers.reader import BLOCK_BYTES, WRONG_COLUMN_COUNT
from clickline.data.readers.text_blocks import bad_rows
from clickline.data.readers.tf_example import Records
from clickline.data.readers.tfrecord import TFRecordReader
from clickline.records import FLOAT32, PRECISION, Block, IntegerColumn, NumberColumn, RawColumn, RawRows

_NUMBERS = sorted(f"I{n}" for n in range(1, 14))
_CATEGORIES = sorted(f"C{n}" for n in range(1, 27))
_EXPECTED = "numeric_1 must hold 13 floats, string_1 26 pairs of integers (0, bucket), (1, bucket), …"


class IntelTFRecordReader:
    """Reads label, I1 … I13 as numbers and C1 … C26 as the number of their hash bucket."""

    def __init__(self, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._records = TFRecordReader(("label", "numeric_1", "string_1"), block_bytes=block_bytes)

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        return self._records.blocks(file, path)

    def parse(self, block: Block) -> RawRows:
        raw = self._records.parse(block)
        numbers_N, number_starts_B, numbers_B = _lists(raw.columns["numeric_1"], raw.rows, NumberColumn)
        pairs_N, pair_starts_B, pairs_B = _lists(raw.columns["string_1"], raw.rows, IntegerColumn)
        good_B = (numbers_B == len(_NUMBERS)) & (pairs_B == 2 * len(_CATEGORIES))
        positions_GC = pairs_N[pair_starts_B[good_B][:, None] + 2 * np.arange(len(_CATEGORIES))]
        good_B[good_B] = (positions_GC == np.arange(len(_CATEGORIES))).all(axis=1)
        rows = int(good_B.sum())
        columns: dict[str, RawColumn] = {"label": _label(raw.columns["label"], good_B)}
        for n, name in enumerate(_NUMBERS):
            columns[name] = NumberColumn(numbers_N[number_starts_B[good_B] + n], None, PRECISION[FLOAT32])
        for c, name in enumerate(_CATEGORIES):
            buckets_G = pairs_N[pair_starts_B[good_B] + 2 * c + 1]
            columns[name] = IntegerColumn(buckets_G, np.zeros(rows, np.bool_), signed=True)
        records: Records = block.payload
        bad_L = raw.lines_B[~good_B] - block.first_line
        bad_L4 = np.column_stack(
            [raw.lines_B[~good_B], records.starts_B[bad_L], records.ends_B[bad_L], np.zeros_like(bad_L)]
        )
        bad = bad_rows(block, records.data, bad_L4, lambda code: (WRONG_COLUMN_COUNT, _EXPECTED))
        return RawRows(rows, columns, raw.lines_B[good_B], [*raw.bad, *bad])


def _lists(
    column: RawColumn, rows: int, kind: type[NumberColumn] | type[IntegerColumn]
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """The values of all rows, and where each row's begin and how many they are; none if they are of another kind."""
    if not isinstance(column, kind) or column.offsets_B1 is None:
        return np.empty(0, np.uint64), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    return column.values_N, column.offsets_B1[:-1], np.diff(column.offsets_B1)


def _label(column: RawColumn, good_B: NDArray[np.bool_]) -> RawColumn:
    """The labels of the good rows; a label that is not a single integer is missing."""
    if not isinstance(column, IntegerColumn) or column.offsets_B1 is not None:
        rows = int(good_B.sum())
        return IntegerColumn(np.zeros(rows, np.uint64), np.ones(rows, np.bool_), signed=True)
    return IntegerColumn(column.values_N[good_B], column.missing_N[good_B], signed=True)
