"""A worker computes batches whose embedding rows live in embedding servers, with a process group (sync) or alone
(async).

A step: pulled rows become the network's input; the next batch is pulled ahead; forward and backward; row gradients are
pushed to the embedding servers; dense gradients are all-reduced over the group, or pushed to the dense parameter
server. Every message carries a `PartKey` (see streams.py), so that another worker can repeat it after a fault.

The driver runs it as a threaded Ray actor: `run_sync` or `run_unit` runs in one thread, other calls in the others.
"""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayError, RayTaskError

from clickline.artifacts.checkpoint import Position
from clickline.artifacts.dataset import Dataset
from clickline.embedding import LookupReply, PendingLookup, RemoteTables
from clickline.errors import Fenced
from clickline.evaluation.binary_metrics import HourlyCounts
from clickline.evaluation.rolling_metrics import RollingMetrics
from clickline.models.model import Model
from clickline.models.model_plan import ModelPlan
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Batches
from clickline.training.cluster.embedding_server import PartKey
from clickline.training.cluster.process_group import PeerLost, ProcessGroup
from clickline.training.cluster.role_log import RoleLog, resident_bytes
from clickline.training.cluster.row_exchange import ExchangeClosed, LocalBatch, RowExchange
from clickline.training.dense_optimizer import LOSS, PAUSE_REQUESTED, TOTAL_WEIGHT, DenseOptimizer, Diverged

SYNC_STREAM = 0
_SCORED_ROWS = 8192


@dataclass(frozen=True)
class WorkerSpec:
    """Constructor arguments of a worker."""

    name: str
    dataset: str  # the dataset's folder
    batches: Mapping[str, Any]  # settings of `Batches`
    plan: ModelPlan
    model_file: Path | None
    threads: int
    group_seconds: float  # after which a silent peer of the process group is lost
    log: Path


class LeasedUnit(NamedTuple):
    """A work unit leased to this worker: window `unit` of `epoch`, from batch `start` on."""

    stream: int
    token: int
    epoch: int
    unit: int
    start: int


class WorkResult(NamedTuple):
    """How `run_sync` or `run_unit` ended."""

    outcome: Literal["done", "paused", "broken", "diverged"]
    step: int  # sync: the next step; async: the next batch of the unit
    error: str = ""


class WorkerReport(NamedTuple):
    """State of one worker, as polled by the monitor."""

    location: str
    step: int  # of the network
    rows: int  # computed since it started
    memory: int
    auc: float | None
    loss: float | None
    phase: str  # the current phase, as passed to `_timed`
    seconds: dict[str, float]  # spent in each phase


@dataclass(frozen=True)
class _PulledBatch:
    """A batch whose rows were requested."""

    rows: LabelledRows
    asked: PendingLookup
    key: PartKey
    replies: list[Any]


class TrainWorker:
    """The Ray actor that computes batches."""

    def __init__(self, spec: WorkerSpec, shards: Sequence[Any], dense_server: Any | None) -> None:
        self._log = RoleLog(spec.log)
        self._spec = spec
        self._shards = list(shards)
        self._dense_server = dense_server
        dataset = Dataset.open(Storage(), spec.dataset)
        self._batches = Batches(dataset, Path(spec.dataset), **spec.batches)
        self._model = Model.build(dataset.features, spec.plan, spec.threads, spec.model_file)
        self._dense = DenseOptimizer(self._model.network, spec.plan, self._model.custom)
        wide = self._model.tables.wide_optimizer is not None
        self._tables = RemoteTables(spec.plan.slots, wide=wide, shards=len(shards), threads=spec.threads)
        self._address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._group: ProcessGroup | None = None
        self._exchange: RowExchange | None = None
        self._local_batches: Iterator[LocalBatch] | None = None
        self._early: dict[tuple[int, int], list[tuple[int, int, LabelledRows | Exception]]] = {}
        self._recent: deque[tuple[int, Position]] = deque(maxlen=8)
        self._pause = threading.Event()
        self._window = RollingMetrics()
        self._time_ordered = bool(spec.batches["time_ordered"])
        self._hours = HourlyCounts()  # predictions of the first epoch, until they are taken
        self._rows = 0
        self._location = "start"
        self._phase = ""
        self._seconds: dict[str, float] = {}
        self._reading: dict[tuple[int, int], Future[LabelledRows]] = {}  # by epoch and unit
        self._current_unit = -1, -1
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._lock = threading.Lock()
        self._log.write(f"{spec.name}, process {os.getpid()}")

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def load_state(self, state: Mapping[str, NDArray[Any]], step: int) -> None:
        """Load a dense state and its step."""
        self._dense.load_state(state, step=step)

    def state(self) -> tuple[int, dict[str, NDArray[Any]]]:
        return self._dense.step, self._dense.state()

    def step(self) -> int:
        return self._dense.step

    def positions(self) -> dict[int, Position]:
        """Positions of the last steps and of the next one, by step."""
        return dict(self._recent)

    def hostname(self) -> str:
        """The machine it runs on; the first answer means that it has started."""
        return socket.gethostname()

    def take_hourly_counts(self) -> HourlyCounts:
        """Prediction counts of rows before they were trained on, since the last call."""
        counted, self._hours = self._hours, HourlyCounts()
        return counted

    def report(self) -> WorkerReport:
        auc, loss = self._window.measure()
        phase, exchange = self._phase, self._exchange
        if phase == "read" and exchange is not None and not exchange.blocks_group:
            phase = "rows"  # another worker reads them
        return WorkerReport(
            self._location,
            self._dense.step,
            self._rows,
            resident_bytes(),
            auc,
            loss,
            phase,
            dict(self._seconds),
        )

    def pause(self) -> None:
        """Stop at the next point where no batch is in flight; in sync mode the whole group stops."""
        self._pause.set()

    # ── sync ───────────────────────────────────────────────────────────────────────────────────

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
        try:
            self._join_group(generation, rank, peers, rendezvous, source, start)
        except PeerLost as error:  # not a fault of this worker
            self._log.write(f"generation {generation} was not formed: {error}")
            self.leave_group()
            return str(error)
        return ""

    def _join_group(
        self, generation: int, rank: int, peers: Sequence[Any], rendezvous: str, source: int, start: Position
    ) -> None:
        self.leave_group()
        self._pause.clear()
        self._group = ProcessGroup(
            rendezvous,
            generation,
            rank,
            len(peers),
            address=self._address,
            timeout=self._spec.group_seconds,
        )
        if len(peers) > 1:
            packed = _pack(self._dense.state(), self._dense.step) if rank == source else None
            state, step = _unpack(self._group.broadcast(packed, source))
            if rank != source:
                self._dense.load_state(state, step=step)

        def send(peer: int, number: int, total: int, rows: LabelledRows) -> None:
            sent = peers[peer].receive_rows.remote(generation, start.epoch, number, total, rows)
            check_sent = partial(self._check_sent, peers[peer], generation, start.epoch, number)
            sent.future().add_done_callback(check_sent)

        with self._lock:
            self._exchange = exchange = RowExchange(self._batches, start, rank, len(peers), send)
            for waiting in self._early.pop((generation, start.epoch), []):
                exchange.receive(*waiting)
            self._early.clear()
        self._local_batches = self._exchange.local_batches()
        self._log.write(f"rank {rank} of {len(peers)} in generation {generation}, from {start}")

    def receive_rows(self, generation: int, epoch: int, number: int, total: int, rows: LabelledRows) -> None:
        """Receive rows that another worker has read for this one."""
        received: LabelledRows | Exception
        try:
            received = rows.take(
                np.arange(rows.rows)
            )  # arrays from Ray are read-only, which PyTorch does not support
        except Exception as error:  # noqa: BLE001 - raised where the rows are awaited
            received = error
        self._deliver(generation, epoch, number, total, received)

    def rows_failed(self, generation: int, epoch: int, number: int, why: str) -> None:
        """Report that rows another worker has read for this one could not be sent."""
        self._deliver(
            generation, epoch, number, 0, RuntimeError(f"the rows of window {number} did not arrive: {why}")
        )

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
        self._reader.submit(
            peer.rows_failed.remote, generation, epoch, number, f"{type(error).__name__}: {last}"
        )

    def run_sync(self, step: int, token: int) -> WorkResult:
        """Train with the group from `step` until the epoch ends, the group pauses, or a process is lost."""
        try:
            return self._run_sync(step, token)
        except (PeerLost, Fenced, ExchangeClosed, RayError) as error:
            if isinstance(error, RayTaskError) and not isinstance(error, Fenced):
                raise
            self._log.write(f"broken at {self._location}: {error}")
            group = self._group  # another thread may leave it in the meantime
            if group is not None:
                group.close()
            return WorkResult("broken", self._dense.step, f"{type(error).__name__}: {error}")
        except Exception as error:
            error.add_note(self._location)  # where it failed
            raise

    def _run_sync(self, step: int, token: int) -> WorkResult:
        group, local_batches = self._group, self._local_batches
        if group is None or local_batches is None:
            raise ExchangeClosed("the group broke before it started")

        def pull(local_batch: LocalBatch | None, number: int) -> tuple[LocalBatch, _PulledBatch] | None:
            if local_batch is None:
                return None
            key = PartKey(SYNC_STREAM, token, number, group.rank, group.size)
            return local_batch, self._pull(local_batch.rows, key)

        coming = pull(self._next(local_batches), step)
        pushed: list[Any] = []
        stopping = False
        while coming is not None:
            local_batch, pulled = coming
            self._location = f"step {step}"
            self._recent += [(step, local_batch.position), (step + 1, local_batch.after)]
            replies = self._get("pull", pulled.replies)
            self._get("ack", pushed)  # complete, or the pull would not have been answered; raises errors
            inputs_BI, wide_B = self._pool(pulled, replies)
            coming = None if stopping else pull(self._next(local_batches), step + 1)
            with self._timed("compute"):
                computed = self._dense.compute(pulled.rows, inputs_BI, wide_B, rank=group.rank)
            if computed.finite:
                pushed = self._push(
                    pulled, computed.grad_inputs_BI, computed.grad_wide_B, self._row_factor(step)
                )
            with self._timed("sum"):
                gradient = self._dense.gradient()
                gradient[PAUSE_REQUESTED] = self._pause.is_set()
                group.all_reduce(gradient)
            if not np.isfinite(gradient[LOSS]):
                if not computed.finite:
                    raise Diverged(computed.mean_loss, pulled.rows)
                return WorkResult("diverged", step)
            with self._timed("update"):
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
        with self._timed("read"):
            for local_batch in local_batches:
                if local_batch.total_rows:
                    return local_batch
        return None

    # ── async ──────────────────────────────────────────────────────────────────────────────────

    def read_ahead(self, epoch: int, unit: int) -> None:
        """Prefetch the unit that will probably be leased next."""
        with self._lock:
            self._read_unit(epoch, unit)
            for other in [key for key in self._reading if key not in (self._current_unit, (epoch, unit))]:
                del self._reading[other]  # another worker got that unit

    def run_unit(self, lease: LeasedUnit) -> WorkResult:
        """Train the batches of a unit until it ends, a pause is requested, or the lease is lost."""
        try:
            return self._run_unit(lease)
        except (Fenced, RayError) as error:
            if isinstance(error, RayTaskError) and not isinstance(error, Fenced):
                raise
            self._log.write(f"broken at {self._location}: {error}")
            return WorkResult("broken", lease.start, f"{type(error).__name__}: {error}")
        except Exception as error:
            error.add_note(self._location)  # where it failed
            raise

    def _run_unit(self, lease: LeasedUnit) -> WorkResult:
        dense_server = self._dense_server
        assert dense_server is not None
        with self._timed("read"):
            with self._lock:
                self._current_unit = lease.epoch, lease.unit
                reading = self._read_unit(lease.epoch, lease.unit)
            rows = reading.result()
        fresh = dense_server.weights.remote(lease.stream, lease.token)
        slices = self._batches.batch_slices(lease.epoch, lease.unit, rows.rows) if rows.rows else []

        def pull(batch: int) -> _PulledBatch | None:
            if batch >= len(slices) or (batch > lease.start and self._pause.is_set()):
                return None
            start, stop, _, _ = slices[batch]
            key = PartKey(lease.stream, lease.token, batch, 0, 1)
            return self._pull(rows.slice(start, stop), key)

        batch = lease.start
        coming = pull(batch)
        pushed: list[Any] = []
        while coming is not None:
            pulled = coming
            self._location = f"unit {lease.unit}, batch {batch}"
            replies = self._get("pull", pulled.replies)
            coming = pull(batch + 1)
            inputs_BI, wide_B = self._pool(pulled, replies)
            with self._timed("weights"):
                weights, version = ray.get(fresh)
                self._dense.load_weights(weights)
                self._dense.step = version
            with self._timed("compute"):
                computed = self._dense.compute(pulled.rows, inputs_BI, wide_B, rank=lease.unit)
            if not computed.finite:
                raise Diverged(computed.mean_loss, pulled.rows)
            self._get("ack", pushed)  # of the previous batch; raises errors
            pushed = self._push(
                pulled, computed.grad_inputs_BI, computed.grad_wide_B, self._row_factor(version)
            )
            fresh = dense_server.push.remote(
                lease.stream,
                lease.token,
                batch,
                self._dense.gradient(),
                computed.total_weight,
                version,
                pulled.rows.rows,
            )
            self._record(pulled.rows, computed.logit_B, lease.epoch)
            batch += 1
        self._get("ack", [*pushed, fresh])
        if batch < len(slices):
            return WorkResult("paused", batch)
        with self._lock:
            self._reading.pop((lease.epoch, lease.unit), None)
        return WorkResult("done", batch)

    def resume(self) -> None:
        """Clear a pause request."""
        self._pause.clear()

    def _read_unit(self, epoch: int, unit: int) -> Future[LabelledRows]:
        key = epoch, unit
        if key not in self._reading:
            self._reading[key] = self._reader.submit(self._batches.read_window, epoch, unit)
        return self._reading[key]

    # ── phases of a step ───────────────────────────────────────────────────────────────────────

    def _pull(self, rows: LabelledRows, key: PartKey) -> _PulledBatch:
        with self._timed("request"):
            custom = self._model.custom
            if custom is not None and custom.feed is not None and rows.rows:
                rows = custom.feed(rows)
            asked = self._tables.begin_lookup(
                rows.encoded.slots,
                rows.rows,
                impressions_B=rows.impression_B,
                clicks_B=rows.click_B,
                hours_B=rows.event_hour_B,
                count=True,
            )
            sent = [
                shard.pull.remote(key, request)
                for shard, request in zip(self._shards, asked.requests, strict=True)
            ]
        return _PulledBatch(rows, asked, key, sent)

    def _pool(
        self, pulled: _PulledBatch, replies: list[LookupReply]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        with self._timed("pool"):
            inputs_BI, wide_B = self._model.buffers(pulled.rows)
            self._tables.pool(pulled.asked, replies, inputs_BI, wide_B)
        return inputs_BI, wide_B

    def _push(
        self,
        pulled: _PulledBatch,
        grad_inputs_BI: NDArray[np.float32],
        grad_wide_B: NDArray[np.float32],
        factor: float,
    ) -> list[Any]:
        with self._timed("push"):
            gradients = self._tables.gradients(pulled.asked, grad_inputs_BI, grad_wide_B)
            return [
                shard.push.remote(pulled.key, part, pulled.rows.rows, factor)
                for shard, part in zip(self._shards, gradients, strict=True)
            ]

    def _row_factor(self, step: int) -> float:
        return self._spec.plan.row_schedule.factor(step)

    def _get(self, phase: str, refs: list[Any]) -> list[Any]:
        with self._timed(phase):
            values: list[Any] = ray.get(refs)
        return values

    def _record(self, rows: LabelledRows, logit_B: NDArray[np.float32], epoch: int) -> None:
        if rows.rows:
            probability_B = self._model.probabilities(torch.from_numpy(logit_B))
            self._window.add(rows.label_B, rows.weight_B, probability_B)
            if self._time_ordered and epoch == 0:
                self._hours.add(rows.event_hour_B, rows.label_B, rows.weight_B, probability_B)
            self._rows += rows.rows

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        self._phase = phase
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    # ── scoring ────────────────────────────────────────────────────────────────────────────────

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities before calibration; trains nothing."""
        rows = rows.take(np.arange(rows.rows))
        self._model.network.eval()
        probability_B = np.empty(rows.rows, dtype=np.float32)
        for start in range(0, rows.rows, _SCORED_ROWS):
            part = rows.slice(start, min(start + _SCORED_ROWS, rows.rows))
            asked = self._tables.begin_lookup(part.encoded.slots, part.rows, count=False)
            replies = ray.get(
                [shard.lookup.remote(r) for shard, r in zip(self._shards, asked.requests, strict=True)]
            )
            inputs_BI, wide_B = self._model.buffers(part)
            self._tables.pool(asked, replies, inputs_BI, wide_B)
            with torch.no_grad():
                logit_B = self._model.network(torch.from_numpy(inputs_BI), torch.from_numpy(wide_B))
            probability_B[start : start + part.rows] = self._model.probabilities(logit_B)
        return probability_B


def _pack(state: Mapping[str, NDArray[Any]], step: int) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **state, **{"/step": np.array(step)})
    return buffer.getvalue()


def _unpack(data: bytes) -> tuple[dict[str, NDArray[Any]], int]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        state = dict(arrays)
    return state, int(state.pop("/step"))
