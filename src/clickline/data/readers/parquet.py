"""Reads Parquet files, one row group at a time.

Arrow decodes the columns of a batch in its own threads. A row group is read in bounded batches, so memory does not
grow with its size. A row group that cannot be decoded is skipped, and the next one is read.

A text stored once in a row group's dictionary may be the value of all its rows: a file of a kilobyte can expand to
gigabytes of text. So the dictionaries are read first, and their longest texts limit the batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clickline.data.readers.arrow_columns import MAX_BATCH_ROWS, to_rows
from clickline.data.readers.reader import BLOCK_BYTES, MAX_LINE_BYTES, missing_column_error
from clickline.records import BadRow, Block, RawRows

CORRUPT_PARQUET = "corrupt parquet"

# What Arrow raises for a damaged file; a damaged name is a UnicodeDecodeError.
_CORRUPT = (pa.ArrowException, OSError, UnicodeDecodeError)
_REMEDY = "copy or write the file again"
_MAX_TEXT_BYTES = 256 << 20  # bytes of text in a batch


class ParquetReader:
    """Reads the wanted columns, with the names and types of the file."""

    def __init__(self, wanted: tuple[str, ...], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._wanted = wanted
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        try:
            source = _open(path)
            found = source.schema_arrow.names
            texts = [leaf.path for leaf in self._leaf_columns(source, "BYTE_ARRAY")]
            dictionaries = _open(path, read_dictionary=texts, metadata=source.metadata)
            groups = [self._rows_and_bytes(source, group) for group in range(source.num_row_groups)]
        except _CORRUPT as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk failed, not the content
                raise
            yield self._error_block(file, 1, str(error))
            return
        with source, dictionaries:
            counts = Counter(found)
            for name in self._wanted:
                if counts[name] != 1:
                    raise missing_column_error(file, name, found)
            first = 1
            for group, (rows, size) in enumerate(groups):
                done = yield from self._group(file, source, dictionaries, group, first, rows, size)
                first += max(rows, done)

    def _rows_and_bytes(self, source: pq.ParquetFile, group: int) -> tuple[int, int]:
        """Rows of a row group, and the uncompressed bytes of its wanted columns, assuming columns of equal size.

        The metadata of the columns is not used: pyarrow aborts the process if it is damaged.
        """
        meta = source.metadata.row_group(group)
        return meta.num_rows, meta.total_byte_size * len(self._wanted) // max(1, meta.num_columns)

    def _group(
        self,
        file: str,
        source: pq.ParquetFile,
        dictionaries: pq.ParquetFile,
        group: int,
        first: int,
        rows: int,
        size: int,
    ) -> Generator[Block, None, int]:
        """The blocks of one row group; returns its number of rows. `dictionaries` is the same file, opened so that
        texts are read as dictionaries."""
        batch_rows = min(MAX_BATCH_ROWS, max(1, self._block_bytes * rows // max(1, size)))
        done, problem = 0, f"{rows:,} rows announced"
        batches = None
        while True:
            try:
                if batches is None:
                    longest = self._longest_texts(dictionaries, group)
                    if max(longest, default=0) > MAX_LINE_BYTES:
                        problem = f"a text of {max(longest):,} bytes; {MAX_LINE_BYTES:,} are allowed"
                        break
                    batch_rows = min(batch_rows, max(1, _MAX_TEXT_BYTES // max(1, sum(longest))))
                    batches = source.iter_batches(batch_rows, row_groups=[group], columns=list(self._wanted))
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
            yield self._error_block(file, first + done, detail, max(1, rows - done))
        return done

    def _leaf_columns(self, source: pq.ParquetFile, kind: str) -> list[Any]:
        """The Parquet leaf columns of this physical type in the wanted columns, at any depth."""
        wanted = set(self._wanted)
        leaves = [source.schema.column(number) for number in range(len(source.schema))]
        return [
            leaf
            for leaf in leaves
            if leaf.physical_type == kind and not wanted.isdisjoint(_prefixes(leaf.path))
        ]

    def _longest_texts(self, dictionaries: pq.ParquetFile, group: int) -> list[int]:
        """The length of the longest text in each dictionary of a row group, and of fixed-length texts."""
        longest = [leaf.length for leaf in self._leaf_columns(dictionaries, "FIXED_LEN_BYTE_ARRAY")]
        texts = [leaf.path for leaf in self._leaf_columns(dictionaries, "BYTE_ARRAY")]
        found = next(dictionaries.iter_batches(1, row_groups=[group], columns=texts), None) if texts else None
        for column in [] if found is None else found.columns:
            longest += [pc.max(pc.binary_length(one)).as_py() or 0 for one in _dictionaries(column)]
        return longest

    def parse(self, block: Block) -> RawRows:
        return to_rows(block.file, block.first_line, block.payload, self._wanted)

    def _error_block(self, file: str, line: int, detail: str, lost: int = 1) -> Block:
        """A block without rows that reports what was lost."""
        nothing = pa.record_batch({name: pa.nulls(0) for name in self._wanted})
        row = BadRow(file, line, CORRUPT_PARQUET, f"{detail}; {_REMEDY}", count=lost)
        return Block(file, line, nothing, 0, (row,))


def _prefixes(path: str) -> Iterator[str]:
    """Every column that a leaf may belong to; a column name may contain a dot."""
    parts = path.split(".")
    return accumulate(parts, lambda prefix, part: f"{prefix}.{part}")


def _open(path: Path, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        path,
        buffer_size=1 << 20,  # a column is read page by page, not at once
        pre_buffer=False,
        page_checksum_verification=True,
        arrow_extensions_enabled=False,
        **options,
    )


def _dictionaries(column: Any) -> Iterator[Any]:
    """The texts of all dictionaries in a column."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        if (
            pa.types.is_string(kind.value_type)
            or pa.types.is_binary(kind.value_type)
            or pa.types.is_large_string(kind.value_type)
            or pa.types.is_large_binary(kind.value_type)
        ):
            yield column.dictionary
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _dictionaries(column.field(number))
    elif pa.types.is_nested(kind):
        yield from _dictionaries(column.values)
