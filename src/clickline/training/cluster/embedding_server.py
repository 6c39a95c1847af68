"""An embedding server: one shard of the embedding tables, which applies the batches of each stream in order.

A batch of a stream may come in several parts, one from each worker of a process group. Its ids are looked up, counted
and answered when all parts have been pulled, and its gradients applied when all parts have been pushed: as one batch,
with one optimizer step per id. A batch may be pulled ahead; it is answered when the previous one is applied, so that
no worker trains on outdated rows.

The class knows nothing of Ray except that its methods run in one event loop; the driver runs it as an async actor.
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
    LookupReply,
    LookupRequest,
    RowGradients,
    ShardLookup,
    ShardTables,
    SlotReport,
    Snapshot,
    SnapshotFile,
    Tables,
    begin_snapshot,
    inner_shards,
    load_snapshot,
)
from clickline.errors import Fenced
from clickline.machine import resident_bytes
from clickline.training.cluster.role_log import RoleLog
from clickline.training.cluster.streams import BatchStream, BatchStreams


class PartKey(NamedTuple):
    """Identifies one part of one batch; every message of a worker carries it."""

    stream: int
    token: int
    sequence: int
    part: int
    parts: int


class EmbeddingServerState(NamedTuple):
    """State of one embedding server."""

    ids: int
    memory: int  # bytes of the process, without the tables' free space for new ids
    node: str
    newest_hour: int
    rows: int  # trained, each counted once
    slots: tuple[SlotReport, ...]


@dataclass
class _Batch:
    """A batch of which some parts have arrived."""

    answered: asyncio.Future[tuple[LookupReply, ...]]
    requests: dict[int, LookupRequest] = field(default_factory=dict)
    gradients: dict[int, RowGradients] = field(default_factory=dict)
    rows: int = 0
    found: ShardLookup | None = None


class EmbeddingServer:
    """Holds the rows of its ids; every batch is counted once and applied once. `tables` are the arguments of `Tables`;
    `restore` the table files of a checkpoint, which had trained `rows` rows."""

    def __init__(
        self,
        number: int,
        of: int,
        tables: Mapping[str, Any],
        threads: int,
        restore: Sequence[Path],
        rows: int,
        log: Path,
    ) -> None:
        self._log = RoleLog(log)
        self._inner = Tables(**tables, threads=threads)
        if restore:
            load_snapshot(self._inner, restore, keep=inner_shards(number, of))
        self._tables = ShardTables(self._inner, number, of)
        self._streams = BatchStreams()
        self._batches: dict[tuple[int, int], _Batch] = {}
        self._changed = asyncio.Condition()
        self._rows = rows
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._snapshot: Snapshot | None = None
        self._writing: Future[SnapshotFile] | None = None
        self._node = socket.gethostname()
        self._log.write(f"shard {number} of {of} with {self._inner.size:,} ids, process {os.getpid()}")

    # ── streams ────────────────────────────────────────────────────────────────────────────────

    async def open_stream(self, stream: int, token: int, start: int) -> tuple[int, int]:
        """Give a stream to a new owner; returns how many of its batches were counted and applied. Unfinished batches of
        the previous owner are dropped, and its messages are refused from now on."""
        opened = self._streams.open(stream, token, start)
        fenced = Fenced(f"stream {stream} was given to token {token} in the meantime.")
        for key in [key for key in self._batches if key[0] == stream]:
            batch = self._batches.pop(key)
            if not batch.answered.done():
                batch.answered.set_exception(fenced)
                batch.answered.exception()  # marks it as retrieved: perhaps no call waits for it
        await self._notify()
        self._log.write(f"stream {stream}: token {token}, next batch {opened.applied}")
        return opened.counted, opened.applied

    async def close_stream(self, stream: int) -> None:
        """Close a finished stream: its messages are refused from now on."""
        self._streams.close(stream)
        await self._notify()

    # ── batches ────────────────────────────────────────────────────────────────────────────────

    async def pull(self, key: PartKey, request: LookupRequest) -> LookupReply:
        """The rows for one part of a batch; its ids are counted and created together with those of the other parts."""
        stream = await self._wait_turn(key)
        if key.sequence < stream.applied:  # applied before a fault, here but not on every server
            return self._tables.lookup(request)
        batch = self._batch(key)
        batch.requests[key.part] = request
        if len(batch.requests) == key.parts:
            count = stream.counted == key.sequence
            with self._exit_without_memory():
                batch.found = self._tables.find([batch.requests[p] for p in range(key.parts)], count=count)
                if count:
                    stream.counted += 1
                batch.answered.set_result(self._tables.replies(batch.found))
        return (await asyncio.shield(batch.answered))[key.part]

    async def push(self, key: PartKey, gradients: RowGradients, rows: int, factor: float) -> None:
        """Take the gradients of one part of a batch; the last part applies them all. A repeated push changes
        nothing."""
        stream = self._owned_stream(key)
        if key.sequence < stream.applied:
            return
        batch = self._batch(key)
        if key.part in batch.gradients:
            return
        batch.gradients[key.part] = gradients
        batch.rows += rows
        if len(batch.gradients) < key.parts:
            return
        assert batch.found is not None  # a push follows its pull
        with self._exit_without_memory():
            self._tables.apply(batch.found, [batch.gradients[p] for p in range(key.parts)], factor)
        self._rows += batch.rows
        stream.applied += 1
        del self._batches[key.stream, key.sequence]
        await self._notify()

    async def lookup(self, request: LookupRequest) -> LookupReply:
        """The rows for scoring; nothing is counted or created."""
        return self._tables.lookup(request)

    @contextmanager
    def _exit_without_memory(self) -> Iterator[None]:
        """Exit if memory runs out: the batch may be half counted or half applied, which cannot be undone, so training
        rolls back to the last checkpoint."""
        try:
            yield
        except MemoryError:
            self._log.write("out of memory in a batch: exiting, because its rows may be half updated")
            os._exit(1)

    def _owned_stream(self, key: PartKey) -> BatchStream:
        """The stream, if the sender owns it. A refused message is logged: it shows that a fenced worker was alive."""
        try:
            return self._streams.owned_by(key.stream, key.token)
        except Fenced as error:
            self._log.write(f"refused part {key.part} of batch {key.sequence}: {error}")
            raise

    async def _wait_turn(self, key: PartKey) -> BatchStream:
        """Wait until all earlier batches of the stream are applied."""
        async with self._changed:
            while True:
                stream = self._owned_stream(key)
                if key.sequence <= stream.applied:
                    return stream
                await self._changed.wait()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _batch(self, key: PartKey) -> _Batch:
        batch_key = key.stream, key.sequence
        if batch_key not in self._batches:
            self._batches[batch_key] = _Batch(asyncio.get_running_loop().create_future())
        return self._batches[batch_key]

    # ── snapshots ──────────────────────────────────────────────────────────────────────────────

    async def begin_snapshot(self, path: Path, share: float) -> bool:
        """Snapshot the tables now and begin to write; False while a batch is counted but not applied."""
        if self._streams.in_flight:
            return False
        await self.discard_snapshot()
        self._snapshot = begin_snapshot(self._inner, share=share)
        self._writing = self._writer.submit(_write, self._snapshot, path)
        return True

    async def snapshot_digest(self) -> str:
        """The SHA-256 of the written file, once it is on disk."""
        assert self._writing is not None
        saved = await asyncio.wrap_future(self._writing)
        self._snapshot = self._writing = None
        self._log.write(f"wrote {saved.rows:,} rows, {saved.size:,} bytes")
        return saved.sha256

    async def unthrottle(self) -> None:
        """Write the snapshot at full speed: the caller waits for it."""
        if self._snapshot is not None:
            self._snapshot.unthrottle()

    async def discard_snapshot(self) -> None:
        """Wait for an abandoned snapshot to finish and forget it."""
        if self._writing is not None and self._snapshot is not None:
            self._snapshot.unthrottle()
            await asyncio.wait([asyncio.wrap_future(self._writing)])
        self._snapshot = self._writing = None

    # ── whole tables ───────────────────────────────────────────────────────────────────────────

    async def decay(self, rate: float) -> None:
        self._inner.decay(rate)

    async def evict(self, rule: Eviction, now_hour: int) -> tuple[SlotReport, ...]:
        await self.unthrottle()
        if self._writing is not None:
            await asyncio.wait([asyncio.wrap_future(self._writing)])
        evicted = self._inner.evict(rule, now_hour)
        self._log.write(f"evicted {sum(slot.ids + slot.candidates for slot in evicted):,} ids")
        return evicted

    async def state(self) -> EmbeddingServerState:
        return EmbeddingServerState(
            self._inner.size,
            resident_bytes() - max(0, self._inner.memory_bytes - self._inner.needed_bytes),
            self._node,
            self._tables.newest_hour,
            self._rows,
            self._inner.report(),
        )


def _write(snapshot: Snapshot, path: Path) -> SnapshotFile:
    saved = snapshot.write(path)
    with path.open("rb") as file:  # durable before it is reported
        os.fsync(file.fileno())
    return saved


def merge_reports(reports: Sequence[tuple[SlotReport, ...]]) -> tuple[SlotReport, ...]:
    """Sum the reports of all embedding servers, slot by slot."""
    return tuple(
        SlotReport(slots[0].name, sum(s.ids for s in slots), sum(s.candidates for s in slots))
        for slots in zip(*reports, strict=True)
    )
