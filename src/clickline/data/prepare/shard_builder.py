"""From blocks of input to shards of the dataset, on all cores, and again from where it stopped.

The files are cut into blocks; consecutive blocks make a group of about `shard_size` bytes; a crew, of threads
or of a cluster's processes, makes one shard of each group. Which rows a shard holds follows from the input
alone, so a second run finds the finished shards valid and makes the others the same.
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
from clickline.data.input_blocks import Inputs, Part
from clickline.data.labelled_reader import LabelledReader
from clickline.data.prepare.column_sketches import Tally
from clickline.errors import StorageError
from clickline.progress import Progress
from clickline.records import BadRow, Block, LabelledRows, SourceFile
from clickline.storage.storage import Storage

_ROW_GROUP_BYTES = 8 << 20  # of input: some 35,000 Criteo rows, a comfortable unit to shuffle and to lease


Cut = tuple[int, Block, bool]
"""Number of the file, a block of it, whether the file ends with it."""


class _Stopped(Exception):
    """The run ends early; what this worker was making is thrown away."""


@dataclass(frozen=True)
class Finished:
    """A shard that is in place, with what was counted while it was made."""

    number: int
    shard: Shard
    tally: Tally
    parts: tuple[Part, ...]
    size: int  # bytes of input

    def to_json(self) -> bytes:
        return as_json(
            {
                "shard": asdict(self.shard),
                "tally": self.tally.to_json(),
                "parts": [asdict(part) for part in self.parts],
                "size": self.size,
            }
        )

    @classmethod
    def from_json(cls, number: int, text: bytes) -> Finished:
        document: dict[str, Any] = json.loads(text)
        shard = document["shard"]
        return cls(
            number,
            Shard(**{**shard, "row_groups": tuple(shard["row_groups"])}),
            Tally.from_json(document["tally"]),
            tuple(Part(**part) for part in document["parts"]),
            document["size"],
        )


@dataclass
class Group:
    """Consecutive blocks that make one shard."""

    number: int
    blocks: Iterable[tuple[SourceFile, Block]]
    parts: list[Part] = field(default_factory=list)
    size: int = 0


class MakesShards(Protocol):
    """Who cuts files into blocks and makes shards of them."""

    def blocks(self, inputs: Inputs, progress: Progress, after: Part | None = None) -> Iterator[Cut]:
        """The blocks of all files in order, going on behind `after`."""
        ...

    def make(self, maker: Maker, groups: Iterable[Group]) -> Iterator[Finished]:
        """A shard of every group, in no particular order; the next group is asked for when it can be begun soon."""
        ...


def _behind(done: Sequence[Finished]) -> Part | None:
    """How far the input was read for these first shards."""
    after: Part | None = None
    for finished in done:  # blocks of a file that runs through several shards add up
        for part in finished.parts:
            before = after.blocks if after is not None and after.file == part.file else 0
            after = Part(part.file, before + part.blocks, part.last)
    return after


def _groups(files: Sequence[SourceFile], blocks: Iterable[Cut], size: int, first: int) -> Iterator[Group]:
    """The blocks in groups of about `size` bytes, numbered from `first` on."""
    own: list[tuple[SourceFile, Block]] = []
    group = Group(first, own)
    for number, block, last in blocks:
        if group.parts and group.parts[-1].file == number:
            group.parts[-1] = Part(number, group.parts[-1].blocks + 1, last)
        else:
            group.parts.append(Part(number, 1, last))
        own.append((files[number], block))
        group.size += block.size
        if group.size >= size:
            yield group
            own = []
            group = Group(group.number + 1, own)
    if group.parts:
        yield group


@dataclass(frozen=True)
class Maker:
    """Turns a group of blocks into a shard in the dataset's folder."""

    storage: Storage
    folder: str
    scratch: Path
    split: str
    reader: LabelledReader
    stop: threading.Event = field(default_factory=threading.Event)

    def make(self, group: Group) -> Finished:
        """Parse, encode, count and write; the note that it is finished is written last."""
        name = f"{self.split}-{group.number:05d}"
        # A process that was given up may still write when the next one makes the same shard.
        temporary = self.scratch / f"{name}.{secrets.token_hex(4)}.parquet.tmp"
        features = self.reader.features
        missing_ids = [slot.missing_id for slot in features.slots]
        tally = Tally.empty(len(missing_ids))
        bad: list[BadRow] = []
        waiting: list[LabelledRows] = []
        size = 0
        writer: ShardWriter | None = None
        try:
            writer = ShardWriter(temporary, features)
            for source, block in group.blocks:
                if self.stop.is_set():
                    raise _Stopped
                found = self.reader.read(source, block)
                bad += found.bad
                if found.raw is not None and found.rows is not None:
                    tally.sample(found.raw, features.slots, features.missing)
                    tally.observe(found.rows, missing_ids)
                    waiting.append(found.rows)
                    size += block.size
                if size >= _ROW_GROUP_BYTES:
                    writer.write(waiting)
                    waiting, size = [], 0
            writer.write(waiting)
            shard = writer.close(f"{name}.parquet")
        except BaseException as error:
            if writer is not None:
                writer.abandon()
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StorageError(
                    f"could not write {temporary}: {error.strerror or error}. Finished shards are kept: "
                    "free space or mend the disk and run the same command again."
                ) from error
            raise
        for row in bad:
            tally.bad[row.reason] += row.count
        tally.trim()
        self.storage.put(Storage.join(self.folder, shard.file), temporary)
        if bad:
            lines = b"".join(as_json(asdict(row)) + b"\n" for row in bad)
            self.storage.put(Storage.join(self.folder, "quarantine", f"{name}.jsonl"), lines)
        finished = Finished(group.number, shard, tally, tuple(group.parts), group.size)
        self.storage.put(Storage.join(self.folder, "work", f"{name}.json"), finished.to_json())
        return finished


def finished_shards(storage: Storage, folder: str, split: str) -> dict[int, Finished]:
    """The shards of an earlier run that are whole: their note is there and their file has its size."""
    sizes = {
        file.uri.rsplit("/", 1)[-1]: file.size
        for file in storage.list(Storage.inside(folder, f"{split}-*.parquet"))
    }
    found = {}
    for note in storage.list(Storage.inside(Storage.join(folder, "work"), f"{split}-*.json")):
        number = int(note.uri.rsplit("-", 1)[-1].removesuffix(".json"))
        finished = Finished.from_json(number, storage.read(note.uri))
        if sizes.get(finished.shard.file) == finished.shard.size:
            found[number] = finished
    return found


def make_shards(
    maker: Maker, inputs: Inputs, shard_size: int, crew: MakesShards, progress: Progress
) -> Iterator[Finished]:
    """Make every shard that is not there yet; yields all of them, in no particular order."""
    there = finished_shards(maker.storage, maker.folder, maker.split)
    prefix: list[Finished] = []
    while len(prefix) in there:
        prefix.append(there[len(prefix)])
    yield from prefix
    found: list[Finished] = []

    def missing() -> Iterator[Group]:
        blocks = crew.blocks(inputs, progress, _behind(prefix))
        for group in _groups(inputs.files, blocks, shard_size, len(prefix)):
            if group.number in there:
                found.append(there[group.number])
            else:
                yield group

    yield from crew.make(maker, missing())
    yield from found
