"""A sync worker: trains its part of every batch with the other workers of a process group.

It joins a group, trains until the group pauses or breaks, and may then join another. Rows that it reads for its peers,
and they for it, are sent as calls between the workers (see row_exchange.py).
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError

from clickline.artifacts.checkpoint import Position
from clickline.records import LabelledRows
from clickline.training.cluster.embedding_client import PulledBatch
from clickline.training.cluster.embedding_server import PartKey
from clickline.training.cluster.job import TrainingJob
from clickline.training.cluster.process_group import PeerLost, ProcessGroup
from clickline.training.cluster.row_exchange import ExchangeClosed, LocalBatch, RowExchange
from clickline.training.cluster.worker import TrainWorker, WorkResult, writable
from clickline.training.cluster.worker_metrics import WorkerReport
from clickline.training.dense_optimizer import LOSS, PAUSE_REQUESTED, TOTAL_WEIGHT, Diverged

SYNC_STREAM = 0


class SyncWorker(TrainWorker):
    """The Ray actor of `sync: true`."""

    def __init__(self, job: TrainingJob, name: str, embedding_servers: Sequence[Any]) -> None:
        super().__init__(job, name, embedding_servers)
        self._address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._group_seconds = job.group_seconds
        self._group: ProcessGroup | None = None
        self._exchange: RowExchange | None = None
        self._local_batches: Iterator[LocalBatch] | None = None
        self._early: dict[tuple[int, int], list[tuple[int, int, LabelledRows | Exception]]] = {}
        self._recent: deque[tuple[int, Position]] = deque(maxlen=8)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._lock = threading.Lock()

    def positions(self) -> dict[int, Position]:
        """Positions of the last steps and of the next one, by step."""
        return dict(self._recent)

    def report(self) -> WorkerReport:
        report, exchange = super().report(), self._exchange
        if report.phase == "read" and exchange is not None and not exchange.blocks_group:
            return report._replace(phase="rows")  # another worker reads them
        return report

    # ── the group ──────────────────────────────────────────────────────────────────────────────

    def leave_group(self, generation: int | None = None) -> None:
        """Leave the process group, or only that of `generation`."""
        if generation is not None and (self._group is None or self._group.generation != generation):
            return
        if self._exchange is not None:
            self._exchange.close()
        if self._group is not None:
            self._group.close()
        self._group = self._exchange = self._local_batches = None

    def join_group(
        self, generation: int, rank: int, peers: Sequence[Any], rendezvous: str, source: int, start: Position
    ) -> str:
        """Form a process group with `peers`, receive the dense state of rank `source`, and begin to read at `start`.
        Returns why the group was not formed; empty: it was."""
        self.leave_group()
        self._pause.clear()
        try:
            self._group = ProcessGroup(
                rendezvous,
                generation,
                rank,
                len(peers),
                address=self._address,
                timeout=self._group_seconds,
            )
            if len(peers) > 1:
                self._share_state(self._group, source)
        except PeerLost as error:  # not a fault of this worker
            self._log.write(f"generation {generation} was not formed: {error}")
            self.leave_group()
            return str(error)

        def send(peer: int, number: int, total: int, rows: LabelledRows) -> None:
            sent = peers[peer].receive_rows.remote(generation, start.epoch, number, total, rows)
            check_sent = partial(self._check_sent, peers[peer], generation, start.epoch, number)
            sent.future().add_done_callback(check_sent)

        with self._lock:
            self._exchange = exchange = RowExchange(self._batches, start, rank, len(peers), send)
            for waiting in self._early.pop((generation, start.epoch), []):
                exchange.receive(*waiting)
            self._early.clear()
        self._local_batches = exchange.local_batches()
        self._log.write(f"rank {rank} of {len(peers)} in generation {generation}, from {start}")
        return ""

    def _share_state(self, group: ProcessGroup, source: int) -> None:
        """Give all ranks the dense state of rank `source`."""
        packed = _pack(self._dense.state(), self._dense.step) if group.rank == source else None
        state, step = _unpack(group.broadcast(packed, source))
        if group.rank != source:
            self._dense.load_state(state, step=step)

    # ── rows of other workers ──────────────────────────────────────────────────────────────────

    def receive_rows(self, generation: int, epoch: int, number: int, total: int, rows: LabelledRows) -> None:
        """Receive rows that another worker has read for this one."""
        received: LabelledRows | Exception
        try:
            received = writable(rows)
        except Exception as error:  # noqa: BLE001 - raised where the rows are awaited
            received = error
        self._deliver(generation, epoch, number, total, received)

    def rows_failed(self, generation: int, epoch: int, number: int, why: str) -> None:
        """Report that rows another worker has read for this one could not be sent."""
        error = RuntimeError(f"the rows of window {number} did not arrive: {why}")
        self._deliver(generation, epoch, number, 0, error)

    def _deliver(
        self, generation: int, epoch: int, number: int, total: int, rows: LabelledRows | Exception
    ) -> None:
        with self._lock:
            group = self._group
            if self._exchange is None or group is None or group.generation < generation:
                self._early.setdefault((generation, epoch), []).append((number, total, rows))
            elif group.generation == generation:
                self._exchange.receive(number, total, rows)

    def _check_sent(self, peer: Any, generation: int, epoch: int, number: int, sent: Future[None]) -> None:
        """If sending rows failed, notify the peer: it would wait forever, and the others for its part of the batch. The
        driver itself notices a peer that is gone."""
        error = sent.exception()
        if error is None or isinstance(error, RayActorError):
            return
        self._log.write(f"window {number} was not sent: {error}")
        last = (str(error).strip().splitlines() or [""])[-1]
        # Not on Ray's callback thread.
        self._sender.submit(
            peer.rows_failed.remote, generation, epoch, number, f"{type(error).__name__}: {last}"
        )

    # ── training ───────────────────────────────────────────────────────────────────────────────

    def run_sync(self, step: int, token: int) -> WorkResult:
        """Train with the group from `step` until the epoch ends, the group pauses, or a process is lost."""
        group = self._group  # another thread may leave it in the meantime
        result = self._attempt(lambda: self._run_sync(step, token))
        if result.outcome == "broken" and group is not None:
            group.close()
        return result

    def _run_sync(self, step: int, token: int) -> WorkResult:
        group, local_batches = self._group, self._local_batches
        if group is None or local_batches is None:
            raise ExchangeClosed("the group broke before it started")

        def pull_next(number: int) -> tuple[LocalBatch, PulledBatch] | None:
            local_batch = self._next(local_batches)
            if local_batch is None:
                return None
            key = PartKey(SYNC_STREAM, token, number, group.rank, group.size)
            return local_batch, self._embeddings.pull(local_batch.rows, key)

        metrics = self._metrics
        coming = pull_next(step)
        pushed: list[Any] = []
        stopping = False
        while coming is not None:
            local_batch, pulled = coming
            metrics.location = f"step {step}"
            self._recent += [(step, local_batch.position), (step + 1, local_batch.after)]
            replies = self._get("pull", pulled.replies)
            self._get("ack", pushed)  # complete, or the pull would not have been answered; raises errors
            inputs_BI, wide_B = self._embeddings.pool(pulled, replies)
            coming = None if stopping else pull_next(step + 1)
            with metrics.timed("compute"):
                computed = self._dense.compute(pulled.rows, inputs_BI, wide_B, rank=group.rank)
            if computed.finite:
                pushed = self._embeddings.push(pulled, computed, step)
            with metrics.timed("sum"):
                gradient = self._dense.gradient()
                gradient[PAUSE_REQUESTED] = self._pause.is_set()
                group.all_reduce(gradient)
            if not np.isfinite(gradient[LOSS]):
                if not computed.finite:
                    raise Diverged(computed.mean_loss, pulled.rows)
                return WorkResult("diverged", step)
            with metrics.timed("update"):
                if self._dense.step == step:  # otherwise only the rows still lack this step, after a fault
                    self._dense.update(gradient, float(gradient[TOTAL_WEIGHT]))
            self._record(pulled.rows, computed.logit_B, local_batch.position.epoch)
            step += 1
            if stopping:
                self._get("ack", pushed)
                self._pause.clear()
                return WorkResult("paused", step)
            stopping = bool(gradient[PAUSE_REQUESTED])
        self._get("ack", pushed)
        return WorkResult("done", step)

    def _next(self, local_batches: Iterator[LocalBatch]) -> LocalBatch | None:
        """The next batch that has rows; a window whose rows were all sampled away is no step."""
        with self._metrics.timed("read"):
            return next((batch for batch in local_batches if batch.total_rows), None)


def _pack(state: Mapping[str, NDArray[Any]], step: int) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **state, **{"/step": np.array(step)})
    return buffer.getvalue()


def _unpack(data: bytes) -> tuple[dict[str, NDArray[Any]], int]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        state = dict(arrays)
    return state, int(state.pop("/step"))
