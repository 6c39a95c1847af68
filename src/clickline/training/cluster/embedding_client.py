"""A worker's side of the embedding servers: pulls the rows of a batch, pools them into the network's input, and pushes
their gradients.

Every message carries a `PartKey` (see streams.py), so that another worker can repeat it after a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from clickline.embedding import LookupReply, PendingLookup, RemoteTables
from clickline.models.model import DenseModel
from clickline.records import LabelledRows
from clickline.training.cluster.embedding_server import PartKey
from clickline.training.cluster.worker_metrics import WorkerMetrics
from clickline.training.dense_optimizer import BatchResult


@dataclass(frozen=True)
class PulledBatch:
    """A batch whose rows were requested."""

    rows: LabelledRows
    lookup: PendingLookup
    key: PartKey
    replies: list[Any]  # refs


class EmbeddingClient:
    """Sends each batch to all embedding servers at once."""

    def __init__(
        self, servers: Sequence[Any], model: DenseModel, metrics: WorkerMetrics, threads: int
    ) -> None:
        self._servers = list(servers)
        self._model = model
        self._metrics = metrics
        self._tables = RemoteTables(
            model.plan.slots, wide=model.uses_wide, shards=len(self._servers), threads=threads
        )

    def pull(self, rows: LabelledRows, key: PartKey) -> PulledBatch:
        """Request the rows of a batch, or of this worker's part of it."""
        with self._metrics.timed("request"):
            custom = self._model.custom
            if custom is not None and custom.feed is not None and rows.rows:
                rows = custom.feed(rows)
            lookup = self._tables.begin_lookup(
                rows.encoded.slots,
                rows.rows,
                impressions_B=rows.impression_B,
                clicks_B=rows.click_B,
                hours_B=rows.event_hour_B,
                count=True,
            )
            requests = zip(self._servers, lookup.requests, strict=True)
            replies = [server.pull.remote(key, request) for server, request in requests]
        return PulledBatch(rows, lookup, key, replies)

    def pool(
        self, pulled: PulledBatch, replies: list[LookupReply]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The network's input."""
        with self._metrics.timed("pool"):
            inputs_BI, wide_B = self._model.buffers(pulled.rows)
            self._tables.pool(pulled.lookup, replies, inputs_BI, wide_B)
        return inputs_BI, wide_B

    def push(self, pulled: PulledBatch, computed: BatchResult, step: int) -> list[Any]:
        """Send the gradients of the rows; the refs of the acknowledgements."""
        with self._metrics.timed("push"):
            gradients = self._tables.gradients(pulled.lookup, computed.grad_inputs_BI, computed.grad_wide_B)
            factor = self._model.plan.row_schedule.factor(step)
            return [
                server.push.remote(pulled.key, part, pulled.rows.rows, factor)
                for server, part in zip(self._servers, gradients, strict=True)
            ]

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities before calibration; trains nothing."""

        def gather(part: LabelledRows, inputs_BI: NDArray[np.float32], wide_B: NDArray[np.float32]) -> None:
            lookup = self._tables.begin_lookup(part.encoded.slots, part.rows, count=False)
            requests = zip(self._servers, lookup.requests, strict=True)
            replies = ray.get([server.lookup.remote(request) for server, request in requests])
            self._tables.pool(lookup, replies, inputs_BI, wide_B)

        return self._model.score_with(gather, rows)
