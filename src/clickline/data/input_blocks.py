"""Reads the blocks of input files in order, from any position, and processes them on all cores in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from clickline.config import DataSection
from clickline.config.sections import Dates
from clickline.data.readers import CustomReader, ParquetReader, Reader, RecordIOReader, open_reader
from clickline.data.readers.reader import BLOCK_BYTES
from clickline.data.readers.text_blocks import compression_ratio
from clickline.data.schema import Schema, named_tokens
from clickline.data.targets import time_unit_detector
from clickline.errors import DataError, StorageError
from clickline.progress import Progress
from clickline.records import Block, RawRows, SourceFile, TimeUnit
from clickline.storage.file_cache import FileCache
from clickline.storage.log_files import DateRange, resolve_files
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

Item = TypeVar("Item")
Result = TypeVar("Result")


def reader_from_config(data: DataSection, schema: Schema) -> Reader:
    """The reader of the config's logs, for the columns of a schema."""
    return open_reader(
        Path(data.reader) if data.reader is not None else str(data.format),
        schema.columns,
        delimiter=data.delimiter,
        header=data.header,
        columns=data.columns or (),
        slots=[int(column) for column in schema.features.columns if column.isdigit()],
        dense=schema.dense,
        modulo=data.modulo,
        named=named_tokens(data, schema.features),
        block_bytes=min(BLOCK_BYTES, data.shard_size),
    )


def files_from_config(
    data: DataSection, patterns: Sequence[str], dates: Dates | None, storage: Storage, progress: Progress
) -> list[SourceFile]:
    """The files of patterns in the hours of `dates`; HourNotReady if some of them do not arrive in time."""
    hours = None if dates is None else DateRange(dates.first, dates.last)
    wait = 0 if dates is None else dates.wait
    return resolve_files(storage, list(patterns), hours, data.donefile, wait, progress)


@dataclass(frozen=True)
class FileProgress:
    """How many blocks of one file were read, and whether the file ends with them."""

    file: int
    blocks: int
    last: bool


@dataclass(frozen=True)
class Inputs:
    """The files of one split, with the reader, cache and store to read them."""

    files: Sequence[SourceFile]
    reader: Reader
    cache: FileCache
    storage: Storage
    detect_time_unit: Callable[[RawRows], TimeUnit | None] | None = None  # of unix times; None: not needed

    def uncompressed_bytes(self, progress: Progress) -> int | None:
        """The approximate size of the input when decompressed; None if unknown."""
        if isinstance(self.reader, CustomReader | ParquetReader | RecordIOReader):
            return None
        compressed = [file for file in self.files if file.uri.endswith((".gz", ".zst"))]
        total = sum(file.size for file in self.files)
        if compressed:
            with self.cache.local(compressed[0], progress) as path:
                total += int((compression_ratio(path) - 1.0) * sum(file.size for file in compressed))
        return total

    def blocks(
        self, progress: Progress, after: FileProgress | None = None
    ) -> Iterator[tuple[int, Block, bool]]:
        """(file number, block, whether it is the last of the file) in order, resuming after `after`."""
        first = 0 if after is None else after.file + (1 if after.last else 0)
        for number in range(first, len(self.files)):
            file = self.files[number]
            skip = after.blocks if after is not None and after.file == number else 0
            previous: Block | None = None
            unit: TimeUnit | None = None
            with self.cache.local(file, progress) as path, _explain_read_errors(file):
                for block in self.reader.blocks(redacted(file.uri), path):
                    if previous is not None:
                        unit = unit or self._time_unit(previous)
                        if skip > 0:
                            skip -= 1
                        else:
                            yield number, replace(previous, time_unit=unit), False
                    previous = block
            self.check_unchanged(file)
            if previous is None:  # an empty file also has a last block, so that it is recorded as read
                previous = Block(redacted(file.uri), 1, None, 0)
            yield number, replace(previous, time_unit=unit), True

    def check_unchanged(self, file: SourceFile) -> None:
        """Raise an error if the file is no longer the one that was listed."""
        now = self.storage.describe(file.uri)
        if now is None or (now.size, now.version) != (file.size, file.version):
            raise DataError(
                f"{redacted(file.uri)} changed while it was read. Run the same command again; if it is still "
                "being written, wait until it is complete."
            )

    def _time_unit(self, block: Block) -> TimeUnit | None:
        """The time unit in a block. The first block with one decides for its file; the last, only for itself."""
        if self.detect_time_unit is None or block.payload is None:
            return None
        return self.detect_time_unit(self.reader.parse(block))


def open_inputs(
    data: DataSection, files: Sequence[SourceFile], schema: Schema, cache: FileCache, storage: Storage
) -> Inputs:
    """Files of the config's logs, with the reader for the columns of a schema."""
    detect_unit = time_unit_detector(schema.targets, schema.features.missing)
    return Inputs(files, reader_from_config(data, schema), cache, storage, detect_unit)


@contextmanager
def _explain_read_errors(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{redacted(file.uri)}: {error.strerror or error}. It is one of the input files; "
            "make it readable, or remove it from data."
        ) from error


def map_in_order(
    work: Callable[[int, Item], Result], items: Iterable[Item], threads: int
) -> Generator[tuple[Item, Result], None, None]:
    """Call `work(number, item)` for every item, in threads. Results keep the order, so float sums are reproducible."""
    pool = ThreadPoolExecutor(threads)
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for number, item in enumerate(items):
            waiting.append((item, pool.submit(work, number, item)))
            if len(waiting) > 2 * threads:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
