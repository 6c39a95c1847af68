"""The embedding rows of a version on lookup servers: `RowSource.gather` over the network.

    ids ──build_requests──▶ requests ──LookupPool.query──▶ answers ──locate_rows──▶ row addresses ──pool──▶ inputs

The result is the same to the bit as that of `ServingTable.gather` from mapped files.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import numpy as np

from clickline.artifacts.version import VersionManifest
from clickline.embedding.raw_memory import address
from clickline.embedding.serving import GatherBatch, PartShape, Precision, pool, row_bytes
from clickline.errors import ArtifactError, RequestRefused
from clickline.scoring.lookup_pool import LookupPool, LookupStats, ShardRequest
from clickline.scoring.lookup_request_kernels import CallBuffers, RowCache, build_requests, locate_rows
from clickline.wire.lookup_frames import (
    LOOKUP_ROWS_AT,
    MAX_KEYS,
    answer_bytes,
    lookup_keys_at,
    write_lookup_header,
)

MissingPolicy = Literal["default", "unavailable"]

_MIN_IDS = 4096  # minimum size of a thread's buffers


class RemoteRows:
    """The rows of one version. Safe to use from several threads."""

    def __init__(
        self,
        lookups: LookupPool,
        version: int,
        parts: Sequence[PartShape],
        precision: Precision,
        *,
        missing: MissingPolicy = "default",
        cache: int = 0,
    ) -> None:
        """`missing`: what to do if no replica of a shard answers. `cache`: number of rows to cache."""
        self.missing: MissingPolicy = missing
        self._lookups = lookups
        self._version = version
        self._parts = tuple(parts)
        self._precision: Precision = precision
        self._widths = [row_bytes(shape, precision) for shape in parts]
        self._width_P = np.array(self._widths, dtype=np.int64)
        words = max(self._widths, default=0) // 8
        self._cache = RowCache(
            np.zeros(cache, dtype=np.uint64),
            np.full(cache, -1, dtype=np.int32),
            np.zeros(cache, dtype=np.uint8),
            np.zeros((cache, words), dtype=np.uint64),
        )
        self._cache_lock = threading.Lock() if cache else nullcontext()
        self._local = threading.local()

    @classmethod
    def for_version(
        cls,
        lookups: LookupPool,
        manifest: VersionManifest,
        *,
        missing: MissingPolicy = "default",
        cache: int = 0,
    ) -> RemoteRows:
        """The rows of the version with this manifest."""
        if manifest.shards != lookups.shards:
            raise ArtifactError(
                f"version {manifest.number} has {manifest.shards} shards, serve.lookup.shards lists {lookups.shards}. "
                "List the servers of every shard, or publish with the previous publish.shards."
            )
        return cls(
            lookups, manifest.number, manifest.parts, manifest.table_precision, missing=missing, cache=cache
        )

    def gather(self, batch: GatherBatch) -> None:
        plan, jagged = batch.plan, batch.jagged
        if jagged.offsets_at_S.size != plan.slots:  # kernels do not check their arrays
            raise ValueError(f"{jagged.offsets_at_S.size} slots given, the plan has {plan.slots}")
        call = self._buffers(jagged.ids_N.size)
        part_S = np.zeros(plan.slots, dtype=np.int64)
        for part, slots in plan.by_part:
            part_S[slots.slots_G] = part
        with self._cache_lock:
            header_words = lookup_keys_at(len(self._parts)) // 8
            distinct, hits = build_requests(
                jagged.ids_N, jagged.starts_S1, part_S, header_words, call, self._cache
            )
        requests = self._shard_requests(call)
        address_N = np.empty(jagged.ids_N.size, dtype=np.int64)
        try:
            self._lookups.query(self._version, requests)
            unanswered = [request for request in requests if request.answer is None]
            if unanswered and self.missing == "unavailable":
                raise _unavailable(unanswered[0])
            answer_H = np.zeros(self._lookups.shards, dtype=np.int64)
            for request in requests:
                if request.answer is not None:
                    answer_H[request.shard] = address(request.answer.buffer.bytes) + LOOKUP_ROWS_AT
            with self._cache_lock:
                defaulted = locate_rows(distinct, answer_H, self._width_P, call, self._cache, address_N)
            pool(self._parts, self._precision, batch, address_N)
        finally:
            self._lookups.release(requests)
        stats = LookupStats(keys=distinct - hits, default_lookups=defaulted)
        if self._cache.ids_C.size:
            stats.cache_lookups, stats.cache_hits = distinct, hits
        self._lookups.add_stats(stats)

    def close(self) -> None:
        """Release the buffers; the pool stays open for other versions."""
        self._local = threading.local()

    def _shard_requests(self, call: CallBuffers) -> list[ShardRequest]:
        frames = call.frames.view(np.uint8)
        header = lookup_keys_at(len(self._parts))
        requests = []
        for shard, counts in enumerate(call.counts_HP.tolist()):
            keys = sum(counts)
            if not keys:
                continue
            if keys > MAX_KEYS:
                raise RequestRefused(
                    "invalid",
                    f"the request has {keys:,} distinct ids in one shard; allowed: {MAX_KEYS:,}.",
                )
            number = self._lookups.next_request_id()
            start = 8 * int(call.frame_start_H[shard])
            write_lookup_header(frames, start, number, self._version, counts)
            frame = frames[start : start + header + 8 * keys].data
            requests.append(ShardRequest(shard, number, frame, answer_bytes(counts, self._widths)))
        return requests

    def _buffers(self, ids: int) -> CallBuffers:
        """The reused buffers of this thread."""
        buffers: CallBuffers | None = getattr(self._local, "call", None)
        if buffers is None or buffers.distinct_N.size < ids:
            size = max(_MIN_IDS, 1 << (ids - 1).bit_length() if ids else 1)
            shards, parts = self._lookups.shards, len(self._parts)
            cached_words = size * self._cache.rows_CW.shape[1] if self._cache.ids_C.size else 0
            buffers = CallBuffers(
                table=np.empty(2 * size, dtype=np.int32),
                distinct_N=np.empty(size, dtype=np.int32),
                ids_D=np.empty(size, dtype=np.uint64),
                part_D=np.empty(size, dtype=np.int32),
                shard_D=np.empty(size, dtype=np.int64),
                rank_D=np.empty(size, dtype=np.int64),
                address_D=np.empty(size, dtype=np.int64),
                frames=np.empty(size + shards * (lookup_keys_at(parts) // 8), dtype=np.uint64),
                cached=np.empty(cached_words, dtype=np.uint64),
                counts_HP=np.empty((shards, parts), dtype=np.int64),
                frame_start_H=np.empty(shards, dtype=np.int64),
            )
            self._local.call = buffers
        return buffers


def _unavailable(request: ShardRequest) -> RequestRefused:
    why = "; ".join(dict.fromkeys(request.errors)) or "no server was tried"
    return RequestRefused(
        "unavailable", f"no lookup server of shard {request.shard} answers: {why}. Try again later."
    )
