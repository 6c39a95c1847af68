"""Builds the shards of a dataset from blocks of input, in parallel, and resumes after an interruption.

Files are split into blocks; consecutive blocks form a group of about `shard_size` bytes; an executor, of threads
or of a cluster's processes, builds one shard from each group. The rows of a shard depend on the input alone, so a
second run reuses the finished shards and builds the others with the same content.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clickline.artifacts.dataset import Shard, ShardWriter
from clickline.artifacts.manifest import as_json
from clickline.data.input_blocks import FileProgress, Inputs
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.column_sketches import RowStatistics
from clickline.errors import StorageError
from clickline.progress import Progress
from clickline.records import BadRow, Block, LabelledRows, SourceFile
from clickline.storage.storage import Storage

_ROW_GROUP_BYTES = 8 << 20  # of input: about 35,000 Criteo rows, a good size to shuffle and to lease


FileBlock = tuple[int, Block, bool]
"""File number, a block of that file, whether it is the last block."""


class _Stopped(Exception):
    """The run ends early; the unfinished shard of this thread is discarded."""


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is in its place, with the statistics of its rows."""

    number: int
    shard: Shard
    statistics: RowStatistics
    parts: tuple[FileProgress, ...]
    size: int  # bytes of input

    def to_json(self) -> bytes:
        return as_json(
            {
                "shard": asdict(self.shard),
                "tally": self.statistics.to_json(),
                "parts": [asdict(part) for part in self.parts],
                "size": self.size,
            }
        )

    @classmethod
    def from_json(cls, number: int, text: bytes) -> FinishedShard:
        document: dict[str, Any] = json.loads(text)
        shard = document["shard"]
        return cls(
            number,
            Shard(**{**shard, "row_groups": tuple(shard["row_groups"])}),
            RowStatistics.from_json(document["tally"]),
            tuple(FileProgress(**part) for part in document["parts"]),
            document["size"],
        )


@dataclass
class BlockGroup:
    """Consecutive blocks that become one shard."""

    number: int
    blocks: Iterable[tuple[SourceFile, Block]]
    parts: list[FileProgress] = field(default_factory=list)
    size: int = 0


class ShardExecutor(Protocol):
    """Splits files into blocks and builds shards from them."""

    def blocks(
        self, inputs: Inputs, progress: Progress, after: FileProgress | None = None
    ) -> Iterator[FileBlock]:
        """The blocks of all files in order, resuming after `after`."""
        ...

    def build(self, builder: ShardBuilder, groups: Iterable[BlockGroup]) -> Iterator[FinishedShard]:
        """Build a shard of every group, in no particular order; groups are taken as workers become free."""
        ...


def _resume_point(done: Sequence[FinishedShard]) -> FileProgress | None:
    """How far the input was read to build these first shards."""
    after: FileProgress | None = None
    for finished in done:  # blocks of a file that spans several shards add up
        for part in finished.parts:
            before = after.blocks if after is not None and after.file == part.file else 0
            after = FileProgress(part.file, before + part.blocks, part.last)
    return after


def _group_blocks(
    files: Sequence[SourceFile], blocks: Iterable[FileBlock], size: int, first: int
) -> Iterator[BlockGroup]:
    """The blocks in groups of about `size` bytes, numbered from `first`."""
    members: list[tuple[SourceFile, Block]] = []
    group = BlockGroup(first, members)
    for number, block, last in blocks:
        if group.parts and group.parts[-1].file == number:
            group.parts[-1] = FileProgress(number, group.parts[-1].blocks + 1, last)
        else:
            group.parts.append(FileProgress(number, 1, last))
        members.append((files[number], block))
        group.size += block.size
        if group.size >= size:
            yield group
            members = []
            group = BlockGroup(group.number + 1, members)
    if group.parts:
        yield group


@dataclass(frozen=True)
class ShardBuilder:
    """Turns a group of blocks into a shard in the dataset's folder."""

    storage: Storage
    folder: str
    scratch: Path
    split: str
    reader: LabelledReader
    stop: threading.Event = field(default_factory=threading.Event)

    def build(self, group: BlockGroup) -> FinishedShard:
        """Parse, encode, count and write; the record that the shard is finished is written last."""
        name = f"{self.split}-{group.number:05d}"
        # A process that was declared lost may still write while another one builds the same shard.
        temporary = self.scratch / f"{name}.{secrets.token_hex(4)}.parquet.tmp"
        features = self.reader.features
        missing_ids = [slot.missing_id for slot in features.slots]
        statistics = RowStatistics.empty(len(missing_ids))
        bad: list[BadRow] = []
        pending: list[LabelledRows] = []
        size = 0
        writer: ShardWriter | None = None
        try:
            writer = ShardWriter(temporary, features)
            for source, block in group.blocks:
                if self.stop.is_set():
                    raise _Stopped
                labelled = self.reader.read(source, block)
                bad += labelled.bad
                if labelled.raw is not None and labelled.rows is not None:
                    statistics.sample(labelled.raw, features.slots, features.missing)
                    statistics.observe(labelled.rows, missing_ids)
                    pending.append(labelled.rows)
                    size += block.size
                if size >= _ROW_GROUP_BYTES:
                    writer.write(pending)
                    pending, size = [], 0
            writer.write(pending)
            shard = writer.close(f"{name}.parquet")
        except BaseException as error:
            if writer is not None:
                writer.abandon()
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StorageError(
                    f"could not write {temporary}: {error.strerror or error}. Finished shards are kept: "
                    "free space or fix the disk, then run the same command again."
                ) from error
            raise
        for row in bad:
            statistics.bad[row.reason] += row.count
        statistics.trim()
        self.storage.put(Storage.join(self.folder, shard.file), temporary)
        if bad:
            lines = b"".join(as_json(asdict(row)) + b"\n" for row in bad)
            self.storage.put(Storage.join(self.folder, "quarantine", f"{name}.jsonl"), lines)
        finished = FinishedShard(group.number, shard, statistics, tuple(group.parts), group.size)
        self.storage.put(Storage.join(self.folder, "work", f"{name}.json"), finished.to_json())
        return finished


def finished_shards(storage: Storage, folder: str, split: str) -> dict[int, FinishedShard]:
    """The complete shards of an earlier run: their record exists and their file has the recorded size."""
    sizes = storage.sizes(folder, f"{split}-*.parquet")
    shards = {}
    for note in storage.list(Storage.pattern_in(Storage.join(folder, "work"), f"{split}-*.json")):
        number = int(note.uri.rsplit("-", 1)[-1].removesuffix(".json"))
        finished = FinishedShard.from_json(number, storage.read(note.uri))
        if sizes.get(finished.shard.file) == finished.shard.size:
            shards[number] = finished
    return shards


def build_shards(
    builder: ShardBuilder, inputs: Inputs, shard_size: int, executor: ShardExecutor, progress: Progress
) -> Iterator[FinishedShard]:
    """Build every missing shard; yields all shards, in no particular order."""
    finished = finished_shards(builder.storage, builder.folder, builder.split)
    prefix: list[FinishedShard] = []
    while len(prefix) in finished:
        prefix.append(finished[len(prefix)])
    yield from prefix
    reused: list[FinishedShard] = []

    def missing() -> Iterator[BlockGroup]:
        blocks = executor.blocks(inputs, progress, _resume_point(prefix))
        for group in _group_blocks(inputs.files, blocks, shard_size, len(prefix)):
            if group.number in finished:
                reused.append(finished[group.number])
            else:
                yield group

    yield from executor.build(builder, missing())
    yield from reused
