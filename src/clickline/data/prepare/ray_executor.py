"""The crew that does the work on a cluster: processes of Ray, each with the files in its own reach.

Where a file is plain text, a process finds out where its blocks lie, and those who make shards of them read the bytes
themselves: what goes through the driver are numbers. Blocks of other files are cut by the driver and sent.
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
from clickline.data.input_blocks import Inputs, Part, open_reader
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.dataset_builder import Making
from clickline.data.prepare.field_statistics import Seen, look
from clickline.data.prepare.shard_builder import Cut, Finished, Group, Maker
from clickline.data.schema import Layout
from clickline.distributed.ray_map import deal
from clickline.distributed.session import Session
from clickline.errors import DataError
from clickline.features import FeatureSpec
from clickline.progress import Progress
from clickline.records import Block, SourceFile
from clickline.storage.redaction import shown

_LOOKED_AT = 16  # blocks that are measured as one piece of work
_HEAD = 1 << 20  # bytes in which the first block of a plain file begins: before it stand a mark, a header


class _Piece(NamedTuple):
    """Blocks to be measured, and the number of the first."""

    first: int
    blocks: list[tuple[SourceFile, Block]]


class Spread:
    """Work for the processes of a cluster, as `Threads` is for those of one machine."""

    def __init__(self, session: Session, config: Config, fields: Layout) -> None:
        self._session = session
        self._config = config
        self._fields = fields

    @property
    def _at_once(self) -> int:
        return int(self._session.cpus()) + 1  # one more than can run, so that none waits

    def blocks(self, inputs: Inputs, progress: Progress, after: Part | None = None) -> Iterator[Cut]:
        job = _Job(self._config, self._fields)
        first = 0 if after is None else after.file + (1 if after.last else 0)
        files = inputs.files[first:]
        plans = deal(self._session, _plan, job, files, at_once=self._at_once, in_order=True)
        for number, (file, blocks) in enumerate(zip(files, plans, strict=True), first):
            skip = after.blocks if after is not None and after.file == number else 0
            if blocks is None:
                behind = Part(0, skip, False)
                for _, block, last in replace(inputs, files=[file]).blocks(progress, behind):
                    yield number, block, last
            else:
                for place, block in enumerate(blocks[skip:], skip + 1):
                    yield number, block, place == len(blocks)

    def look(self, inputs: Inputs, features: FeatureSpec, progress: Progress) -> Iterator[Seen]:
        job = _Job(self._config, self._fields)
        cuts = self.blocks(inputs, progress)
        blocks = ((inputs.files[number], block) for number, block, _ in cuts if block.payload is not None)

        def pieces() -> Iterator[_Piece]:
            first = 0
            while some := list(islice(blocks, _LOOKED_AT)):
                yield _Piece(first, some)
                first += len(some)

        for seen in deal(self._session, _look, job, pieces(), at_once=self._at_once, in_order=True):
            yield from seen

    def make(self, maker: Maker, groups: Iterable[Group]) -> Iterator[Finished]:
        fields = replace(self._fields, features=maker.reader.features)
        job = _Job(self._config, fields, maker.folder, maker.split, maker.reader.clock)
        return deal(self._session, _make, job, groups, at_once=self._at_once)


# ── in the processes of the cluster ────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Job:
    """What every piece of the same work needs to know, as plain values. Two with the same id are the same."""

    config: Config = field(compare=False)
    fields: Layout = field(compare=False)
    folder: str = field(default="", compare=False)
    split: str = field(default="", compare=False)
    clock: float = field(default=0.0, compare=False)  # nothing is labelled where it is not given
    id: str = field(default_factory=lambda: uuid4().hex)


class _Tools(NamedTuple):
    inputs: Inputs  # of no files: the reader, the cache and the store
    maker: Maker


@lru_cache(maxsize=1)
def _tools(job: _Job) -> _Tools:
    """What a process opens once for all pieces of a job."""
    making = Making.at(job.config, storage_of(job.config), job.folder)
    reader = open_reader(job.config.data, job.fields)
    labelled = LabelledReader(reader, job.fields.features, job.fields.targets, job.clock)
    maker = Maker(making.storage, job.folder, making.scratch, job.split, labelled)
    return _Tools(making.inputs((), reader, job.fields), maker)


class _Span(NamedTuple):
    """Where the bytes of a block lie in its file, and what its payload is without them."""

    offset: int
    size: int
    payload: Any


def _plan(job: _Job, file: SourceFile) -> list[Block] | None:
    """The blocks of a file with spans for payloads; None where they are not plain bytes of it."""
    tools = _tools(job)
    blocks: list[Block] = []
    at: int | None = None
    with tools.inputs.cache.local(file) as path:
        for _, block, _ in replace(tools.inputs, files=(file,)).blocks(Progress()):
            if block.payload is None and not block.faults:
                blocks.append(block)
                continue
            text = _text(block.payload)
            if block.faults or text is None or text.size != block.size:
                return None
            if at is None:
                with path.open("rb") as raw:
                    at = raw.read(_HEAD + text.size).find(text.tobytes())
            if at < 0 or not np.array_equal(_bytes(path, at, block.size), text):
                return None
            blocks.append(replace(block, payload=_Span(at, block.size, _with_text(block.payload, text[:0]))))
            at += block.size
    return blocks


def _look(job: _Job, piece: _Piece) -> list[Seen]:
    tools = _tools(job)
    read = enumerate(_read(tools.inputs, piece.blocks), piece.first)
    return [look(tools.inputs.reader, job.fields.features, number, block) for number, (_, block) in read]


def _make(job: _Job, group: Group) -> Finished:
    tools = _tools(job)
    tools.maker.scratch.mkdir(parents=True, exist_ok=True)  # on this node, where home is a store
    return tools.maker.make(replace(group, blocks=_read(tools.inputs, group.blocks)))


def _read(inputs: Inputs, blocks: Iterable[tuple[SourceFile, Block]]) -> Iterator[tuple[SourceFile, Block]]:
    """The blocks as their reader cut them; those that are spans get their bytes from their file."""
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
                yield file, _filled(block, path)
        if spans:
            now = inputs.storage.describe(file.uri)
            if now is None or (now.size, now.version) != (file.size, file.version):
                raise DataError(
                    f"{shown(file.uri)} changed while it was read. Run the same command again; if it is still "
                    "being written, wait until it is complete."
                )


def _filled(block: Block, path: Path) -> Block:
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
    """The bytes that a payload consists of or holds; None where it is something else."""
    data = getattr(payload, "data", None) if is_dataclass(payload) else payload
    return data if isinstance(data, np.ndarray) and data.dtype == np.uint8 else None


def _with_text(payload: Any, text: NDArray[np.uint8]) -> Any:
    return text if isinstance(payload, np.ndarray) else replace(payload, data=text)
