"""Parquet files, a row group at a time.

Arrow decodes the columns of a batch in its own threads; a row group is taken in bounded batches, so memory is
flat however large it is. A row group that cannot be decoded is lost, and the next one is read.

A text that stands once in a row group's dictionary may be the value of all its rows: a file of a kilobyte can be
gigabytes of text. So the dictionaries are looked at first, and batches are as small as their longest texts ask for.
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
from clickline.data.readers.reader import BLOCK_BYTES, MAX_LINE_BYTES, missing_column
from clickline.records import BadRow, Block, RawRows

CORRUPT_PARQUET = "corrupt parquet"

# What Arrow raises at a damaged file; a damaged name is a UnicodeDecodeError.
_CORRUPT = (pa.ArrowException, OSError, UnicodeDecodeError)
_REMEDY = "copy or write the file again"
_MOST_TEXT = 256 << 20  # bytes of text that a batch may become


class Parquet:
    """Reads the wanted columns; the file's own names and types are taken as they are."""

    def __init__(self, wanted: tuple[str, ...], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._wanted = wanted
        self._block_bytes = block_bytes

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        try:
            source = _opened(path)
            found = source.schema_arrow.names
            texts = [leaf.path for leaf in self._leaves(source, "BYTE_ARRAY")]
            words = _opened(path, read_dictionary=texts, metadata=source.metadata)
            groups = [self._rows_and_bytes(source, group) for group in range(source.num_row_groups)]
        except _CORRUPT as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk's fault, not the content's
                raise
            yield self._fault(file, 1, str(error))
            return
        with source, words:
            counts = Counter(found)
            for name in self._wanted:
                if counts[name] != 1:
                    raise missing_column(file, name, found)
            first = 1
            for group, (rows, size) in enumerate(groups):
                done = yield from self._group(file, source, words, group, first, rows, size)
                first += max(rows, done)

    def _rows_and_bytes(self, source: pq.ParquetFile, group: int) -> tuple[int, int]:
        """Rows of a row group, and the uncompressed bytes of its wanted columns, as if all were alike.

        Not from the metadata of the columns: pyarrow ends the process when those are damaged.
        """
        meta = source.metadata.row_group(group)
        return meta.num_rows, meta.total_byte_size * len(self._wanted) // max(1, meta.num_columns)

    def _group(
        self,
        file: str,
        source: pq.ParquetFile,
        words: pq.ParquetFile,
        group: int,
        first: int,
        rows: int,
        size: int,
    ) -> Generator[Block, None, int]:
        """The blocks of one row group; returns how many rows there were. `words`: the same file, its texts read as
        numbers into dictionaries."""
        batch_rows = min(MAX_BATCH_ROWS, max(1, self._block_bytes * rows // max(1, size)))
        done, problem = 0, f"{rows:,} rows announced"
        batches = None
        while True:
            try:
                if batches is None:
                    longest = self._longest(words, group)
                    if max(longest, default=0) > MAX_LINE_BYTES:
                        problem = f"a text of {max(longest):,} bytes; {MAX_LINE_BYTES:,} are allowed"
                        break
                    batch_rows = min(batch_rows, max(1, _MOST_TEXT // max(1, sum(longest))))
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
            yield self._fault(file, first + done, detail, max(1, rows - done))
        return done

    def _leaves(self, source: pq.ParquetFile, kind: str) -> list[Any]:
        """What Parquet stores of the wanted columns in this way, at whatever depth."""
        wanted = set(self._wanted)
        leaves = [source.schema.column(number) for number in range(len(source.schema))]
        return [
            leaf for leaf in leaves if leaf.physical_type == kind and not wanted.isdisjoint(_above(leaf.path))
        ]

    def _longest(self, words: pq.ParquetFile, group: int) -> list[int]:
        """The length of the longest text of each dictionary of a row group, and of texts that are all as long."""
        longest = [leaf.length for leaf in self._leaves(words, "FIXED_LEN_BYTE_ARRAY")]
        texts = [leaf.path for leaf in self._leaves(words, "BYTE_ARRAY")]
        found = next(words.iter_batches(1, row_groups=[group], columns=texts), None) if texts else None
        for column in [] if found is None else found.columns:
            longest += [pc.max(pc.binary_length(one)).as_py() or 0 for one in _dictionaries(column)]
        return longest

    def parse(self, block: Block) -> RawRows:
        return to_rows(block.file, block.first_line, block.payload, self._wanted)

    def _fault(self, file: str, line: int, detail: str, lost: int = 1) -> Block:
        """A block without rows that says what was lost."""
        nothing = pa.record_batch({name: pa.nulls(0) for name in self._wanted})
        row = BadRow(file, line, CORRUPT_PARQUET, f"{detail}; {_REMEDY}", count=lost)
        return Block(file, line, nothing, 0, (row,))


def _above(path: str) -> Iterator[str]:
    """Every column that a leaf may be part of; a column's own name may hold a dot."""
    parts = path.split(".")
    return accumulate(parts, lambda above, part: f"{above}.{part}")


def _opened(path: Path, **more: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        path,
        buffer_size=1 << 20,  # a column is read page by page, not whole
        pre_buffer=False,
        page_checksum_verification=True,
        arrow_extensions_enabled=False,
        **more,
    )


def _dictionaries(column: Any) -> Iterator[Any]:
    """The texts of all dictionaries that a column is made of."""
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
