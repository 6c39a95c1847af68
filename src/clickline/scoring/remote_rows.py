"""Rows of a version that lie on lookup servers: `RowSource.gather` over the network.

    ids ──deal──▶ distinct ids, one request a shard ──LookupPool.ask──▶ answers ──settle──▶ addresses ──pool──▶ inputs

To the bit what `FrozenTables.gather` gives from mapped files.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.jagged_ids import Bags
from clickline.embedding.raw_memory import address
from clickline.embedding.serving import GatherPlan, PartShape, Precision, pool, row_bytes
from clickline.errors import ArtifactError, RequestRefused
from clickline.scoring.lookup_pool import LookupPool, Question, Stats
from clickline.scoring.lookup_request_kernels import CacheView, CallView, deal, settle
from clickline.wire.frames import (
    LOOKUP_ROWS_AT,
    MAX_KEYS,
    answer_bytes,
    lookup_keys_at,
    write_lookup_head,
)

Missing = Literal["default", "unavailable"]

_FIRST_IDS = 4096  # that a thread has memory for


class RemoteRows:
    """The rows of one version. Any number of threads may gather at once."""

    def __init__(
        self,
        lookups: LookupPool,
        version: int,
        parts: Sequence[PartShape],
        precision: Precision,
        *,
        missing: Missing = "default",
        cache: int = 0,
    ) -> None:
        """`missing`: what is done when no replica of a shard answers. `cache`: hot rows to keep."""
        self.missing: Missing = missing
        self._lookups = lookups
        self._version = version
        self._parts = tuple(parts)
        self._precision: Precision = precision
        self._widths = [row_bytes(shape, precision) for shape in parts]
        self._width_P = np.array(self._widths, dtype=np.int64)
        words = max(self._widths, default=0) // 8
        self._cache = CacheView(
            np.zeros(cache, dtype=np.uint64),
            np.full(cache, -1, dtype=np.int32),
            np.zeros(cache, dtype=np.uint8),
            np.zeros((cache, words), dtype=np.uint64),
        )
        self._turn = threading.Lock() if cache else nullcontext()  # whose is the cache
        self._local = threading.local()

    @classmethod
    def of_version(
        cls, lookups: LookupPool, body: Mapping[str, Any], *, missing: Missing = "default", cache: int = 0
    ) -> RemoteRows:
        """The rows of the version with this manifest."""
        if body["shards"] != lookups.shards:
            raise ArtifactError(
                f"version {body['number']} has {body['shards']} shards, serve.lookup.shards lists {lookups.shards}. "
                "List the servers of every shard, or publish with publish.shards as before."
            )
        parts = [PartShape(part["dim"], part["wide"]) for part in body["parts"]]
        return cls(lookups, body["number"], parts, body["precision"], missing=missing, cache=cache)

    def gather(
        self,
        plan: GatherPlan,
        bags: Bags,
        rows: int,
        inputs_BI: NDArray[np.float32],
        wide_B: NDArray[np.float32],
        misses_S: NDArray[np.int64],
    ) -> None:
        if bags.offsets_at_S.size != plan.slots:  # kernels trust their arrays
            raise ValueError(f"{bags.offsets_at_S.size} slots given, {plan.slots} planned")
        call = self._call(bags.ids_N.size)
        part_S = np.zeros(plan.slots, dtype=np.int64)
        for part, slots in plan.by_part:
            part_S[slots.slots_G] = part
        with self._turn:
            distinct, recalled = deal(
                bags.ids_N,
                bags.starts_S1,
                part_S,
                lookup_keys_at(len(self._parts)) // 8,
                call,
                self._cache,
            )
        questions = self._questions(call)
        place_N = np.empty(bags.ids_N.size, dtype=np.int64)
        try:
            self._lookups.ask(self._version, questions)
            lost = [question for question in questions if question.answer is None]
            if lost and self.missing == "unavailable":
                raise _unavailable(lost[0])
            answer_H = np.zeros(self._lookups.shards, dtype=np.int64)
            for question in questions:
                if question.answer is not None:
                    answer_H[question.shard] = address(question.answer.inbox.bytes) + LOOKUP_ROWS_AT
            with self._turn:
                defaults = settle(distinct, answer_H, self._width_P, call, self._cache, place_N)
            pool(self._parts, self._precision, plan, bags, rows, place_N, inputs_BI, wide_B, misses_S)
        finally:
            self._lookups.give_back(questions)
        counted = Stats(keys=distinct - recalled, default_lookups=defaults)
        if self._cache.ids_C.size:
            counted.cache_lookups, counted.cache_hits = distinct, recalled
        self._lookups.count(counted)

    def close(self) -> None:
        """The pool lives on: other versions use it."""
        self._local = threading.local()

    def _questions(self, call: CallView) -> list[Question]:
        frames = call.frames.view(np.uint8)
        head = lookup_keys_at(len(self._parts))
        questions = []
        for shard, counts in enumerate(call.counts_HP.tolist()):
            keys = sum(counts)
            if not keys:
                continue
            if keys > MAX_KEYS:
                raise RequestRefused(
                    "invalid",
                    f"the request has {keys:,} different ids in one shard; {MAX_KEYS:,} are allowed.",
                )
            request = self._lookups.request()
            start = 8 * int(call.frame_H[shard])
            write_lookup_head(frames, start, request, self._version, counts)
            frame = frames[start : start + head + 8 * keys].data
            questions.append(Question(shard, request, frame, answer_bytes(counts, self._widths)))
        return questions

    def _call(self, ids: int) -> CallView:
        """Memory that this thread uses again and again."""
        kept: CallView | None = getattr(self._local, "call", None)
        if kept is None or kept.distinct_N.size < ids:
            size = max(_FIRST_IDS, 1 << (ids - 1).bit_length() if ids else 1)
            shards, parts = self._lookups.shards, len(self._parts)
            hot = size * self._cache.rows_CW.shape[1] if self._cache.ids_C.size else 0
            kept = CallView(
                table=np.empty(2 * size, dtype=np.int32),
                distinct_N=np.empty(size, dtype=np.int32),
                ids_D=np.empty(size, dtype=np.uint64),
                part_D=np.empty(size, dtype=np.int32),
                shard_D=np.empty(size, dtype=np.int64),
                rank_D=np.empty(size, dtype=np.int64),
                place_D=np.empty(size, dtype=np.int64),
                frames=np.empty(size + shards * (lookup_keys_at(parts) // 8), dtype=np.uint64),
                hot=np.empty(hot, dtype=np.uint64),
                counts_HP=np.empty((shards, parts), dtype=np.int64),
                frame_H=np.empty(shards, dtype=np.int64),
            )
            self._local.call = kept
        return kept


def _unavailable(question: Question) -> RequestRefused:
    why = "; ".join(dict.fromkeys(question.troubles)) or "no server was asked"
    return RequestRefused(
        "unavailable", f"no lookup server of shard {question.shard} answers: {why}. Try again later."
    )
