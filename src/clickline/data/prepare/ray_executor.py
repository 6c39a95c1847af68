"""Builds a dataset in the worker processes of a Ray cluster, each of which reads the log files itself.

For a plain text file, one task finds the byte ranges of its blocks, and the tasks that build shards read those bytes
themselves: only numbers pass through the driver. The driver splits other files into blocks and sends the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.from_config import storage_of
from clickline.config import Config
from clickline.data.input_blocks import FileProgress, Inputs, open_inputs
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.dataset_builder import DatasetBuilder
from clickline.data.prepare.field_statistics import BlockStatistics, measure_block
from clickline.data.prepare.shard_builder import BlockGroup, FileBlock, FinishedShard, ShardBuilder
from clickline.data.schema import Schema
from clickline.distributed.ray_map import ray_map
from clickline.distributed.session import RaySession
from clickline.errors import DataError
from clickline.features import FeatureSpec
from clickline.progress import Progress
from clickline.records import Block, SourceFile

_BLOCKS_PER_TASK = 16  # measured by one task
_HEAD = (
    1 << 20
)  # the first block of a plain file begins within these bytes, after a byte order mark and a header


class _BlockBatch(NamedTuple):
    """Blocks to measure, and the number of the first one."""

    first: int
    blocks: list[tuple[SourceFile, Block]]


class RayExecutor:
    """Runs the work on the processes of a Ray cluster; `ThreadExecutor` is its counterpart on one machine."""

    def __init__(self, session: RaySession, config: Config, schema: Schema) -> None:
        self._session = session
        self._config = config
        self._schema = schema

    @property
    def _concurrency(self) -> int:
        return int(self._session.cpus()) + 1  # one more than can run, so that no worker waits

    def blocks(
        self, inputs: Inputs, progress: Progress, after: FileProgress | None = None
    ) -> Iterator[FileBlock]:
        job = _Job(self._config, self._schema)
        first = 0 if after is None else after.file + (1 if after.last else 0)
        files = inputs.files[first:]
        plans = ray_map(self._session, _plan_file, job, files, max_pending=self._concurrency, in_order=True)
        for number, (file, blocks) in enumerate(zip(files, plans, strict=True), first):
            skip = after.blocks if after is not None and after.file == number else 0
            if blocks is None:
                done = FileProgress(0, skip, False)
                for _, block, last in replace(inputs, files=[file]).blocks(progress, done):
                    yield number, block, last
            else:
                for place, block in enumerate(blocks[skip:], skip + 1):
                    yield number, block, place == len(blocks)

    def measure(self, inputs: Inputs, features: FeatureSpec, progress: Progress) -> Iterator[BlockStatistics]:
        job = _Job(self._config, self._schema)
        file_blocks = self.blocks(inputs, progress)
        blocks = (
            (inputs.files[number], block) for number, block, _ in file_blocks if block.payload is not None
        )

        def batches() -> Iterator[_BlockBatch]:
            first = 0
            while group := list(islice(blocks, _BLOCKS_PER_TASK)):
                yield _BlockBatch(first, group)
                first += len(group)

        for measured in ray_map(
            self._session, _measure, job, batches(), max_pending=self._concurrency, in_order=True
        ):
            yield from measured

    def build(self, builder: ShardBuilder, groups: Iterable[BlockGroup]) -> Iterator[FinishedShard]:
        schema = replace(self._schema, features=builder.reader.features)
        job = _Job(self._config, schema, builder.folder, builder.split, builder.reader.reference_time)
        return ray_map(self._session, _build_shard, job, groups, max_pending=self._concurrency)


# ── in the worker processes of the cluster ────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Job:
    """What every task of the same job needs, as plain values. Two jobs with the same id are equal."""

    config: Config = field(compare=False)
    schema: Schema = field(compare=False)
    folder: str = field(default="", compare=False)
    split: str = field(default="", compare=False)
    reference_time: float = field(default=0.0, compare=False)  # 0 for tasks that do not label rows
    id: str = field(default_factory=lambda: uuid4().hex)


class _TaskContext(NamedTuple):
    """What a process keeps open between the tasks of a job."""

    inputs: Inputs  # without files: the reader, the cache and the store
    shard_builder: ShardBuilder


@lru_cache(maxsize=1)
def _task_context(job: _Job) -> _TaskContext:
    """Open what the tasks of a job need, once per process."""
    builder = DatasetBuilder.for_folder(job.config, storage_of(job.config), job.folder)
    inputs = open_inputs(job.config.data, (), job.schema, builder.cache, builder.storage)
    labelled = LabelledReader(inputs.reader, job.schema.features, job.schema.targets, job.reference_time)
    shard_builder = ShardBuilder(builder.storage, job.folder, builder.scratch, job.split, labelled)
    return _TaskContext(inputs, shard_builder)


class _Span(NamedTuple):
    """The byte range of a block in its file, and its payload without those bytes."""

    offset: int
    size: int
    payload: Any


def _plan_file(job: _Job, file: SourceFile) -> list[Block] | None:
    """The blocks of a file with spans as payloads; None if they are not plain bytes of the file."""
    context = _task_context(job)
    blocks: list[Block] = []
    at: int | None = None
    with context.inputs.cache.local(file) as path:
        for _, block, _ in replace(context.inputs, files=(file,)).blocks(Progress()):
            if block.payload is None and not block.bad:
                blocks.append(block)
                continue
            text = _text(block.payload)
            if block.bad or text is None or text.size != block.size:
                return None
            if at is None:
                with path.open("rb") as raw:
                    at = raw.read(_HEAD + text.size).find(text.tobytes())
            if at < 0 or not np.array_equal(_bytes(path, at, block.size), text):
                return None
            blocks.append(replace(block, payload=_Span(at, block.size, _with_text(block.payload, text[:0]))))
            at += block.size
    return blocks


def _measure(job: _Job, batch: _BlockBatch) -> list[BlockStatistics]:
    context = _task_context(job)
    read = enumerate(_read(context.inputs, batch.blocks), batch.first)
    return [
        measure_block(context.inputs.reader, job.schema.features, number, block)
        for number, (_, block) in read
    ]


def _build_shard(job: _Job, group: BlockGroup) -> FinishedShard:
    context = _task_context(job)
    context.shard_builder.scratch.mkdir(
        parents=True, exist_ok=True
    )  # on this node, if home is a remote store
    return context.shard_builder.build(replace(group, blocks=_read(context.inputs, group.blocks)))


def _read(inputs: Inputs, blocks: Iterable[tuple[SourceFile, Block]]) -> Iterator[tuple[SourceFile, Block]]:
    """The blocks as their reader made them; spans are filled with the bytes of their file."""
    for file, some in groupby(blocks, key=itemgetter(0)):
        spans = False
        with ExitStack() as held:
            path: Path | None = None
            for _, block in some:
                if not isinstance(block.payload, _Span):
                    yield file, block
                    continue
                if path is None:
                    path = held.enter_context(inputs.cache.local(file))
                    spans = True
                yield file, _load_span(block, path)
        if spans:
            inputs.check_unchanged(file)


def _load_span(block: Block, path: Path) -> Block:
    offset, size, payload = block.payload
    text = _bytes(path, offset, size)
    if text.size != size:
        raise DataError(
            f"{block.file} became shorter while it was read. Run the same command again; if it is still being "
            "written, wait until it is complete."
        )
    return replace(block, payload=_with_text(payload, text))


def _bytes(path: Path, offset: int, size: int) -> NDArray[np.uint8]:
    return np.fromfile(path, np.uint8, size, offset=offset)


def _text(payload: Any) -> NDArray[np.uint8] | None:
    """The bytes that a payload is or holds; None if it is something else."""
    data = getattr(payload, "data", None) if is_dataclass(payload) else payload
    return data if isinstance(data, np.ndarray) and data.dtype == np.uint8 else None


def _with_text(payload: Any, text: NDArray[np.uint8]) -> Any:
    return text if isinstance(payload, np.ndarray) else replace(payload, data=text)
