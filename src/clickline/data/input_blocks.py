"""The blocks of input files, in order and from any place on, and work on all cores that keeps their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from clickline.config import DataSection
from clickline.data.readers import Custom, Parquet, Reader, RecordIO
from clickline.data.readers import open_reader as reader_of
from clickline.data.readers.reader import BLOCK_BYTES
from clickline.data.readers.text_blocks import expansion
from clickline.data.schema import Layout
from clickline.errors import DataError, StorageError
from clickline.progress import Progress
from clickline.records import Block, RawRows, SourceFile, TimeUnit
from clickline.storage.file_cache import Cache
from clickline.storage.redaction import shown
from clickline.storage.storage import Storage

Item = TypeVar("Item")
Result = TypeVar("Result")


def open_reader(data: DataSection, layout: Layout) -> Reader:
    """The reader of the config's logs, for the columns of a layout."""
    return reader_of(
        Path(data.reader) if data.reader is not None else str(data.format),
        layout.columns,
        delimiter=data.delimiter,
        header=data.header,
        columns=data.columns or (),
        slots=[int(column) for column in layout.features.columns if column.isdigit()],
        dense=layout.dense,
        modulo=data.modulo,
        block_bytes=min(BLOCK_BYTES, data.shard_size),
    )


@dataclass(frozen=True)
class Part:
    """How many blocks of one file were read, and whether the file ends with them."""

    file: int
    blocks: int
    last: bool


@dataclass(frozen=True)
class Inputs:
    """The files of one split and the way to read them."""

    files: Sequence[SourceFile]
    reader: Reader
    cache: Cache
    storage: Storage
    find_unit: Callable[[RawRows], TimeUnit | None] | None = None  # of unix times; None: nobody needs to know

    def text_bytes(self, progress: Progress) -> int | None:
        """About how much there is to read once it is decompressed; None where that cannot be told."""
        if isinstance(self.reader, Custom | Parquet | RecordIO):
            return None
        packed = [file for file in self.files if file.uri.endswith((".gz", ".zst"))]
        total = sum(file.size for file in self.files)
        if packed:
            with self.cache.local(packed[0], progress) as path:
                total += int((expansion(path) - 1.0) * sum(file.size for file in packed))
        return total

    def blocks(self, progress: Progress, after: Part | None = None) -> Iterator[tuple[int, Block, bool]]:
        """(file, block, whether the file ends with it) in order, going on behind `after`."""
        first = 0 if after is None else after.file + (1 if after.last else 0)
        for number in range(first, len(self.files)):
            file = self.files[number]
            skip = after.blocks if after is not None and after.file == number else 0
            before: Block | None = None
            unit: TimeUnit | None = None
            with self.cache.local(file, progress) as path, _readable(file):
                for block in self.reader.blocks(shown(file.uri), path):
                    if before is not None:
                        unit = unit or self._unit_in(before)
                        if skip > 0:
                            skip -= 1
                        else:
                            yield number, replace(before, time_unit=unit), False
                    before = block
            now = self.storage.describe(file.uri)
            if now is None or (now.size, now.version) != (file.size, file.version):
                raise DataError(
                    f"{shown(file.uri)} changed while it was read. Run the same command again; if it is still "
                    "being written, wait until it is complete."
                )
            if before is None:  # an empty file still ends, and is remembered to have
                before = Block(shown(file.uri), 1, None, 0)
            yield number, replace(before, time_unit=unit), True

    def _unit_in(self, block: Block) -> TimeUnit | None:
        """The first block that tells the unit of a file's times tells it for the file; the last, for itself alone."""
        if self.find_unit is None or block.payload is None:
            return None
        return self.find_unit(self.reader.parse(block))


@contextmanager
def _readable(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{shown(file.uri)}: {error.strerror or error}. It is one of the logs to be read; "
            "make it readable, or leave it out."
        ) from error


def in_order(
    work: Callable[[int, Item], Result], items: Iterable[Item], threads: int
) -> Iterator[tuple[Item, Result]]:
    """`work` on every numbered item, on all cores; results in their order, so that sums come out the same."""
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
