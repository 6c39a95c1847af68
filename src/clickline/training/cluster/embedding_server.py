"""A shard: its part of the sparse rows, and the order in which it takes what workers say.

A batch of a stream may come in several parts, one from each worker of a group. It is found, counted and answered when
all parts have asked, and applied when all have pushed: as one batch, with one optimizer step an id. A batch may be
asked for early; it is answered when the one before it is applied, so that nobody learns from rows of the past.

The class knows nothing of Ray but that its methods run in one event loop; the driver makes an actor of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clickline.embedding import (
    Eviction,
    Found,
    Gradients,
    Reply,
    Request,
    Saved,
    ShardTables,
    SlotReport,
    Snapshot,
    Tables,
    freeze,
    inner_shards,
    load,
)
from clickline.errors import Fenced
from clickline.training.cluster.role_log import RoleLog, resident
from clickline.training.cluster.streams import Stream, Streams


@dataclass(frozen=True)
class ShardSpec:
    """What a shard is made from."""

    number: int
    of: int
    tables: Mapping[str, Any]  # what `Tables` are made from
    threads: int
    restore: tuple[Path, ...]  # the parts of the checkpoint it begins with
    rows: int  # that were learned before it
    log: Path


class Place(NamedTuple):
    """Which part of which batch: how a worker signs what it sends."""

    stream: int
    token: int
    sequence: int
    part: int
    parts: int


class ShardState(NamedTuple):
    """What a shard holds."""

    ids: int
    memory: int  # bytes of the process, without what its tables hold free for new ids
    node: str
    newest_hour: int
    rows: int  # that were learned, each once
    slots: tuple[SlotReport, ...]


@dataclass
class _Batch:
    """A batch of which some parts have come."""

    answered: asyncio.Future[tuple[Reply, ...]]
    requests: dict[int, Request] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    rows: int = 0
    found: Found | None = None


class Shard:
    """Rows of the ids that belong to it; every batch counted once and applied once."""

    def __init__(self, spec: ShardSpec) -> None:
        self._log = RoleLog(spec.log)
        tables = Tables(**spec.tables, threads=spec.threads)
        if spec.restore:
            load(tables, spec.restore, keep=inner_shards(spec.number, spec.of))
        self._tables = ShardTables(tables, spec.number, spec.of)
        self._inner = tables
        self._streams = Streams()
        self._batches: dict[tuple[int, int], _Batch] = {}
        self._moved = asyncio.Condition()
        self._rows = spec.rows
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cut")
        self._snapshot: Snapshot | None = None
        self._writing: Future[Saved] | None = None
        self._node = socket.gethostname()
        self._log.say(f"shard {spec.number} of {spec.of} with {tables.size:,} ids, process {os.getpid()}")

    # ── owners ─────────────────────────────────────────────────────────────────────────────────

    async def open(self, stream: int, token: int, start: int) -> tuple[int, int]:
        """Give a stream to a new owner; how many batches of it were counted, and applied. What the owner before had
        begun is dropped, and whatever it still sends is refused."""
        opened = self._streams.open(stream, token, start)
        dropped = Fenced(f"stream {stream} was given to token {token} meanwhile.")
        for key in [key for key in self._batches if key[0] == stream]:
            batch = self._batches.pop(key)
            if not batch.answered.done():
                batch.answered.set_exception(dropped)
                batch.answered.exception()  # whoever waits gets it; if nobody does, that is no news
        await self._move()
        self._log.say(f"stream {stream}: token {token} from batch {opened.applied} on")
        return opened.found, opened.applied

    async def close(self, stream: int) -> None:
        """The stream is learned: nothing is taken for it any more."""
        self._streams.close(stream)
        await self._move()

    # ── batches ────────────────────────────────────────────────────────────────────────────────

    async def pull(self, place: Place, request: Request) -> Reply:
        """The rows of one part of a batch; its ids are counted and created with those of the other parts."""
        stream = await self._turn(place)
        if place.sequence < stream.applied:  # done before a fault, here but not everywhere
            return self._tables.look(request)
        batch = self._batch(place)
        batch.requests[place.part] = request
        if len(batch.requests) == place.parts:
            count = stream.found == place.sequence
            with self._whole_or_gone():
                batch.found = self._tables.find([batch.requests[p] for p in range(place.parts)], count=count)
                if count:
                    stream.found += 1
                batch.answered.set_result(self._tables.replies(batch.found))
        return (await asyncio.shield(batch.answered))[place.part]

    async def push(self, place: Place, gradients: Gradients, rows: int, factor: float) -> None:
        """Learn one part of a batch; with the last part all of it. A repeated push changes nothing."""
        stream = self._owned(place)
        if place.sequence < stream.applied:
            return
        batch = self._batch(place)
        if place.part in batch.gradients:
            return
        batch.gradients[place.part] = gradients
        batch.rows += rows
        if len(batch.gradients) < place.parts:
            return
        assert batch.found is not None  # who pushes has pulled
        with self._whole_or_gone():
            self._tables.apply(batch.found, [batch.gradients[p] for p in range(place.parts)], factor)
        self._rows += batch.rows
        stream.applied += 1
        del self._batches[place.stream, place.sequence]
        await self._move()

    async def look(self, request: Request) -> Reply:
        """Rows to score with; nothing is counted or created."""
        return self._tables.look(request)

    @contextmanager
    def _whole_or_gone(self) -> Iterator[None]:
        """Without memory a batch may be half counted or half learned, which nobody can take back: then this shard
        ends, and everything goes back to the last cut."""
        try:
            yield
        except MemoryError:
            self._log.say("no memory for a batch: this shard ends, since its rows may be half learned")
            os._exit(1)

    def _owned(self, place: Place) -> Stream:
        """The stream that is the sender's. That one was refused is worth a line: it is how a late one is known."""
        try:
            return self._streams.of(place.stream, place.token)
        except Fenced as error:
            self._log.say(f"refused part {place.part} of batch {place.sequence}: {error}")
            raise

    async def _turn(self, place: Place) -> Stream:
        """Wait until the batches before it are applied."""
        async with self._moved:
            while True:
                stream = self._owned(place)
                if place.sequence <= stream.applied:
                    return stream
                await self._moved.wait()

    async def _move(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def _batch(self, place: Place) -> _Batch:
        key = place.stream, place.sequence
        if key not in self._batches:
            self._batches[key] = _Batch(asyncio.get_running_loop().create_future())
        return self._batches[key]

    # ── cuts ───────────────────────────────────────────────────────────────────────────────────

    async def freeze(self, path: Path, share: float) -> bool:
        """Cut here and now, and begin to write; False while a batch is counted and not learned."""
        if self._streams.in_flight:
            return False
        await self.forget_cut()
        self._snapshot = freeze(self._inner, share=share)
        self._writing = self._writer.submit(_write, self._snapshot, path)
        return True

    async def written(self) -> str:
        """The SHA-256 of the part, once it is on disk."""
        assert self._writing is not None
        saved = await asyncio.wrap_future(self._writing)
        self._snapshot = self._writing = None
        self._log.say(f"wrote {saved.rows:,} rows, {saved.size:,} bytes")
        return saved.sha256

    async def hurry(self) -> None:
        """Somebody waits for the part."""
        if self._snapshot is not None:
            self._snapshot.hurry()

    async def forget_cut(self) -> None:
        """Nobody will use the part that is being written."""
        if self._writing is not None and self._snapshot is not None:
            self._snapshot.hurry()
            await asyncio.wait([asyncio.wrap_future(self._writing)])
        self._snapshot = self._writing = None

    # ── all of it ──────────────────────────────────────────────────────────────────────────────

    async def decay(self, rate: float) -> None:
        self._inner.decay(rate)

    async def evict(self, rule: Eviction, now_hour: int) -> tuple[SlotReport, ...]:
        await self.hurry()
        if self._writing is not None:
            await asyncio.wait([asyncio.wrap_future(self._writing)])
        gone = self._inner.evict(rule, now_hour)
        self._log.say(f"forgot {sum(slot.ids + slot.candidates for slot in gone):,} ids")
        return gone

    async def state(self) -> ShardState:
        return ShardState(
            self._inner.size,
            resident() - max(0, self._inner.memory_bytes - self._inner.needed_bytes),
            self._node,
            self._tables.newest_hour,
            self._rows,
            self._inner.report(),
        )


def _write(snapshot: Snapshot, path: Path) -> Saved:
    saved = snapshot.write(path)
    with path.open("rb") as file:  # on disk before anybody says so
        os.fsync(file.fileno())
    return saved


def join_reports(reports: Sequence[tuple[SlotReport, ...]]) -> tuple[SlotReport, ...]:
    """What all shards together say of every slot."""
    return tuple(
        SlotReport(slots[0].name, sum(s.ids for s in slots), sum(s.candidates for s in slots))
        for slots in zip(*reports, strict=True)
    )
