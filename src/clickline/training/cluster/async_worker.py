"""An async worker: trains the batches of one leased work unit after the other, on its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import ray

from clickline.records import LabelledRows
from clickline.training.cluster.embedding_client import PulledBatch
from clickline.training.cluster.embedding_server import PartKey
from clickline.training.cluster.job import TrainingJob
from clickline.training.cluster.worker import TrainWorker, WorkResult
from clickline.training.dense_optimizer import Diverged


class LeasedUnit(NamedTuple):
    """A work unit leased to this worker: window `unit` of `epoch`, from batch `start` on."""

    stream: int
    token: int
    epoch: int
    unit: int
    start: int


class AsyncWorker(TrainWorker):
    """The Ray actor of `sync: false`."""

    def __init__(
        self, job: TrainingJob, name: str, embedding_servers: Sequence[Any], dense_server: Any
    ) -> None:
        super().__init__(job, name, embedding_servers)
        self._dense_server = dense_server
        self._reading: dict[tuple[int, int], Future[LabelledRows]] = {}  # by epoch and unit
        self._current_unit = -1, -1
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._lock = threading.Lock()

    def resume(self) -> None:
        """Clear a pause request."""
        self._pause.clear()

    def read_ahead(self, epoch: int, unit: int) -> None:
        """Prefetch the unit that will probably be leased next."""
        with self._lock:
            self._read_unit(epoch, unit)
            for other in [key for key in self._reading if key not in (self._current_unit, (epoch, unit))]:
                del self._reading[other]  # another worker got that unit

    def _read_unit(self, epoch: int, unit: int) -> Future[LabelledRows]:
        key = epoch, unit
        if key not in self._reading:
            self._reading[key] = self._reader.submit(self._batches.read_window, epoch, unit)
        return self._reading[key]

    def run_unit(self, lease: LeasedUnit) -> WorkResult:
        """Train the batches of a unit until it ends, a pause is requested, or the lease is lost."""
        return self._attempt(lambda: self._run_unit(lease))

    def _run_unit(self, lease: LeasedUnit) -> WorkResult:
        metrics = self._metrics
        with metrics.timed("read"):
            with self._lock:
                self._current_unit = lease.epoch, lease.unit
                reading = self._read_unit(lease.epoch, lease.unit)
            rows = reading.result()
        fresh = self._dense_server.weights.remote(lease.stream, lease.token)
        slices = self._batches.batch_slices(lease.epoch, lease.unit, rows.rows) if rows.rows else []

        def pull(batch: int) -> PulledBatch | None:
            if batch >= len(slices) or (batch > lease.start and self._pause.is_set()):
                return None
            start, stop, _, _ = slices[batch]
            key = PartKey(lease.stream, lease.token, batch, 0, 1)
            return self._embeddings.pull(rows.slice(start, stop), key)

        batch = lease.start
        coming = pull(batch)
        pushed: list[Any] = []
        while coming is not None:
            pulled = coming
            metrics.location = f"unit {lease.unit}, batch {batch}"
            replies = self._get("pull", pulled.replies)
            coming = pull(batch + 1)
            inputs_BI, wide_B = self._embeddings.pool(pulled, replies)
            with metrics.timed("weights"):
                weights, version = ray.get(fresh)
                self._dense.load_weights(weights)
                self._dense.step = version
            with metrics.timed("compute"):
                computed = self._dense.compute(pulled.rows, inputs_BI, wide_B, rank=lease.unit)
            if not computed.finite:
                raise Diverged(computed.mean_loss, pulled.rows)
            self._get("ack", pushed)  # of the previous batch; raises errors
            pushed = self._embeddings.push(pulled, computed, version)
            fresh = self._dense_server.push.remote(
                lease.stream, lease.token, batch, self._dense.gradient(), computed.total_weight, version
            )
            self._record(pulled.rows, computed.logit_B, lease.epoch)
            batch += 1
        self._get("ack", [*pushed, fresh])
        if batch < len(slices):
            return WorkResult("paused", batch)
        with self._lock:
            self._reading.pop((lease.epoch, lease.unit), None)
        return WorkResult("done", batch)
