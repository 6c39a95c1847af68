"""Parquet files, a row group at a time.

Arrow decodes the columns of a batch in its own threads; a row group is taken in bounded batches, so memory is
flat however large it is. A row group that cannot be decoded is lost, and the next one is read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from clickline.readers.arrow import MAX_BATCH_ROWS, to_rows
from clickline.readers.base import BLOCK_BYTES, missing_column
from clickline.records import BadRow, Block, RawRows

__all__ = ["CORRUPT_PARQUET", "Parquet"]

CORRUPT_PARQUET = "corrupt parquet"

# What Arrow raises at a damaged file; a damaged name is a UnicodeDecodeError.
_CORRUPT = (pa.ArrowException, OSError, UnicodeDecodeError)
_REMEDY = "copy or write the file again"


class Parquet:
    """Reads the wanted columns; the file's own names and types are taken as they are."""

    def __init__(self, wanted: tuple[str, ...], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._wanted = wanted
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        try:
            source = pq.ParquetFile(
                path,
                buffer_size=1 << 20,  # a column is read page by page, not whole
                pre_buffer=False,
                page_checksum_verification=True,
                arrow_extensions_enabled=False,
            )
            found = source.schema_arrow.names
            groups = [self._rows_and_bytes(source, group) for group in range(source.num_row_groups)]
        except _CORRUPT as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk's fault, not the content's
                raise
            yield self._fault(file, 1, str(error))
            return
        with source:
            for name in self._wanted:
                if found.count(name) != 1:
                    raise missing_column(file, name, found)
            first = 1
            for group, (rows, size) in enumerate(groups):
                done = yield from self._group(file, source, group, first, rows, size)
                first += max(rows, done)

    def _rows_and_bytes(self, source: pq.ParquetFile, group: int) -> tuple[int, int]:
        """Rows of a row group, and the uncompressed bytes of its wanted columns, as if all were alike.

        Not from the metadata of the columns: pyarrow ends the process when those are damaged.
        """
        meta = source.metadata.row_group(group)
        return meta.num_rows, meta.total_byte_size * len(self._wanted) // max(1, meta.num_columns)

    def _group(
        self, file: str, source: pq.ParquetFile, group: int, first: int, rows: int, size: int
    ) -> Generator[Block, None, int]:
        """The blocks of one row group; returns how many rows there were."""
        batch_rows = min(MAX_BATCH_ROWS, max(1, self._block_bytes * rows // max(1, size)))
        done, problem = 0, f"{rows:,} rows announced"
        batches = source.iter_batches(batch_rows, row_groups=[group], columns=list(self._wanted))
        while True:
            try:
                batch = next(batches, None)
            except _CORRUPT as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                problem = str(error)
                break
            if batch is None:
                break
            yield Block(file, first + done, batch, size * batch.num_rows // max(1, rows))
            done += batch.num_rows
        if done != rows:
            detail = f"row group {group} of {source.num_row_groups} ends after {done:,} rows: {problem}"
            yield self._fault(file, first + done, detail, max(1, rows - done))
        return done

    def parse(self, block: Block) -> RawRows:
        return to_rows(block.file, block.first_line, block.payload, self._wanted)

    def _fault(self, file: str, line: int, detail: str, lost: int = 1) -> Block:
        """A block without rows that says what was lost."""
        nothing = pa.record_batch({name: pa.nulls(0) for name in self._wanted})
        row = BadRow(file, line, CORRUPT_PARQUET, f"{detail}; {_REMEDY}", count=lost)
        return Block(file, line, nothing, 0, (row,))
