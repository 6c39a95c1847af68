"""A worker: computes batches whose rows live in shards, with a group (sync) or by itself (async).

A step: the replies of its pulls become the network's input; the next batch is asked for; forward and backward; the
gradients by id are pushed; the dense gradients are summed over the group, or go to the network's holder. Everything
that it sends is signed with a place (streams.py), so that after a fault another worker can do it again.

The driver makes a threaded actor of it: `together` or `unit` runs in one thread while others ask, pause or feed it.
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

from clickline.artifacts.dataset import Dataset
from clickline.embedding import Asked, RemoteTables, Reply
from clickline.errors import Fenced
from clickline.evaluation.binary_metrics import HourlyCounts
from clickline.evaluation.rolling_metrics import Window
from clickline.models.model import Model
from clickline.models.model_plan import ModelPlan
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Batches, Position
from clickline.training.cluster.embedding_server import Place
from clickline.training.cluster.process_group import Group, Meeting, PeerLost
from clickline.training.cluster.role_log import RoleLog, resident
from clickline.training.cluster.row_exchange import Closed, Exchange, Portion
from clickline.training.dense_optimizer import ASKED, LOSS, TOTAL, Dense, Diverged

SYNC_STREAM = 0
_SCORED_ROWS = 8192


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is made from."""

    name: str
    dataset: str  # its folder
    batches: Mapping[str, Any]  # settings of `Batches`
    plan: ModelPlan
    model_file: Path | None
    threads: int
    group_seconds: float  # after which a silent member of the group is lost
    log: Path


class UnitLease(NamedTuple):
    """A unit that is this worker's: window `unit` of `epoch` from batch `start` on."""

    stream: int
    token: int
    epoch: int
    unit: int
    start: int


class Ended(NamedTuple):
    """Why a worker's work ended."""

    why: Literal["done", "paused", "broken", "diverged"]
    step: int  # sync: the next step; async: the next batch of the unit
    error: str = ""


class Report(NamedTuple):
    """How a worker is doing."""

    at: str
    step: int  # of the network
    rows: int  # computed, ever
    memory: int
    auc: float | None
    loss: float | None
    doing: str  # one of those below, the last it began with
    seconds: dict[str, float]  # spent, by what


@dataclass(frozen=True)
class _Pulled:
    """A batch that was asked for."""

    rows: LabelledRows
    asked: Asked
    place: Place
    replies: list[Any]


class Worker:
    """One process that computes."""

    def __init__(self, spec: WorkerSpec, shards: Sequence[Any], network: Any | None) -> None:
        self._log = RoleLog(spec.log)
        self._spec = spec
        self._shards = list(shards)
        self._network = network
        dataset = Dataset.open(Storage(), spec.dataset)
        self._batches = Batches(dataset, Path(spec.dataset), **spec.batches)
        self._model = Model.build(dataset.features, spec.plan, spec.threads, spec.model_file)
        self._dense = Dense(self._model.network, spec.plan, self._model.custom)
        wide = self._model.tables.wide_optimizer is not None
        self._tables = RemoteTables(spec.plan.slots, wide=wide, shards=len(shards), threads=spec.threads)
        self._address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._meeting: Meeting | None = None
        self._group: Group | None = None
        self._exchange: Exchange | None = None
        self._portions: Iterator[Portion] | None = None
        self._waiting: dict[tuple[int, int], list[tuple[int, int, LabelledRows | Exception]]] = {}
        self._recent: deque[tuple[int, Position]] = deque(maxlen=8)
        self._pause = threading.Event()
        self._window = Window()
        self._in_time = bool(spec.batches["in_time"])
        self._hours = (
            HourlyCounts()
        )  # rows of the first epoch as they were predicted, until somebody asks for them
        self._rows = 0
        self._at = "start"
        self._doing = ""
        self._seconds: dict[str, float] = {}
        self._reading: dict[tuple[int, int], Future[LabelledRows]] = {}  # by epoch and unit
        self._working_at = -1, -1
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._guard = threading.Lock()
        self._log.say(f"{spec.name}, process {os.getpid()}")

    # ── state ──────────────────────────────────────────────────────────────────────────────────

    def load(self, state: Mapping[str, NDArray[Any]], step: int) -> None:
        """Be where the dense state was taken."""
        self._dense.load_state(state, step=step)

    def state(self) -> tuple[int, dict[str, NDArray[Any]]]:
        return self._dense.step, self._dense.state()

    def step(self) -> int:
        return self._dense.step

    def places(self) -> dict[int, Position]:
        """Where the last steps were, and where the next one is."""
        return dict(self._recent)

    def where(self) -> str:
        """Which machine it is on; the first answer says that it is there."""
        return socket.gethostname()

    def hours(self) -> HourlyCounts:
        """How well rows were predicted before they were learned, since the last time this was asked."""
        counted, self._hours = self._hours, HourlyCounts()
        return counted

    def report(self) -> Report:
        auc, loss = self._window.measure()
        doing, exchange = self._doing, self._exchange
        if doing == "read" and exchange is not None and not exchange.is_waited_for:
            doing = "rows"  # that another one reads
        return Report(
            self._at, self._dense.step, self._rows, resident(), auc, loss, doing, dict(self._seconds)
        )

    def pause(self) -> None:
        """End at the next place where nothing is under way: with the group, all of it."""
        self._pause.set()

    # ── with a group ───────────────────────────────────────────────────────────────────────────

    def meet(self) -> str:
        """Open the group's meeting point here."""
        self._meeting = Group.host(self._address)
        return self._meeting.name

    def leave(self, generation: int | None = None) -> None:
        """Be in no group any more; or not in that one."""
        if generation is not None and (self._group is None or self._group.generation != generation):
            return
        if self._exchange is not None:
            self._exchange.close()
        if self._group is not None:
            self._group.close()
        self._group = self._exchange = self._portions = None

    def join(
        self, generation: int, rank: int, peers: Sequence[Any], meeting: str, source: int, start: Position
    ) -> str:
        """Form a group with `peers`, take the dense state of member `source`, and begin to read from `start` on. Why
        it was not formed; empty: it was."""
        try:
            self._join(generation, rank, peers, meeting, source, start)
        except PeerLost as error:  # that is nothing against this one
            self._log.say(f"generation {generation} was not formed: {error}")
            self.leave()
            return str(error)
        return ""

    def _join(
        self, generation: int, rank: int, peers: Sequence[Any], meeting: str, source: int, start: Position
    ) -> None:
        self.leave()
        self._pause.clear()
        self._group = Group(
            meeting,
            generation,
            rank,
            len(peers),
            address=self._address,
            timeout=self._spec.group_seconds,
        )
        if len(peers) > 1:
            mine = _pack(self._dense.state(), self._dense.step) if rank == source else None
            state, step = _unpack(self._group.share(mine, source))
            if rank != source:
                self._dense.load_state(state, step=step)

        def send(member: int, number: int, total: int, rows: LabelledRows) -> None:
            sent = peers[member].take.remote(generation, start.epoch, number, total, rows)
            refused = partial(self._refused, peers[member], generation, start.epoch, number)
            sent.future().add_done_callback(refused)

        with self._guard:
            self._exchange = exchange = Exchange(self._batches, start, rank, len(peers), send)
            for early in self._waiting.pop((generation, start.epoch), []):
                exchange.take(*early)
            self._waiting.clear()
        self._portions = self._exchange.portions()
        self._log.say(f"member {rank} of {len(peers)} in generation {generation}, from {start}")

    def take(self, generation: int, epoch: int, number: int, total: int, rows: LabelledRows) -> None:
        """Rows that another member has read for this one."""
        came: LabelledRows | Exception
        try:
            came = rows.take(np.arange(rows.rows))  # what came by Ray cannot be written, nor be PyTorch's
        except Exception as error:  # noqa: BLE001 - raised where the rows are waited for
            came = error
        self._hand_in(generation, epoch, number, total, came)

    def miss(self, generation: int, epoch: int, number: int, why: str) -> None:
        """Rows that another member has read for this one, but could not hand over."""
        self._hand_in(
            generation, epoch, number, 0, RuntimeError(f"the rows of window {number} did not arrive: {why}")
        )

    def _hand_in(
        self, generation: int, epoch: int, number: int, total: int, rows: LabelledRows | Exception
    ) -> None:
        with self._guard:
            group = self._group
            if self._exchange is None or group is None or group.generation < generation:
                self._waiting.setdefault((generation, epoch), []).append((number, total, rows))
            elif group.generation == generation:
                self._exchange.take(number, total, rows)

    def _refused(self, peer: Any, generation: int, epoch: int, number: int, sent: Future[None]) -> None:
        """Rows were handed over, or were not. Then the one who waits for them must hear of it: it would wait for ever,
        and the others for its part of the batch. One that is gone the driver sees by itself."""
        error = sent.exception()
        if error is None or isinstance(error, RayActorError):
            return
        self._log.say(f"window {number} was not handed over: {error}")
        last = (str(error).strip().splitlines() or [""])[-1]
        # Not from the thread of Ray that calls this.
        self._reader.submit(peer.miss.remote, generation, epoch, number, f"{type(error).__name__}: {last}")

    def together(self, step: int, token: int) -> Ended:
        """Learn with the group from `step` on, until the epoch ends, a pause is agreed on, or somebody is lost."""
        try:
            return self._together(step, token)
        except (PeerLost, Fenced, Closed, RayError) as error:
            if isinstance(error, RayTaskError) and not isinstance(error, Fenced):
                raise
            self._log.say(f"broken at {self._at}: {error}")
            group = self._group  # another thread may leave it meanwhile
            if group is not None:
                group.close()
            return Ended("broken", self._dense.step, f"{type(error).__name__}: {error}")
        except Exception as error:
            error.add_note(self._at)  # the place that fails
            raise

    def _together(self, step: int, token: int) -> Ended:
        group, portions = self._group, self._portions
        if group is None or portions is None:
            raise Closed("the group broke before it began")

        def ask(portion: Portion | None, number: int) -> tuple[Portion, _Pulled] | None:
            if portion is None:
                return None
            place = Place(SYNC_STREAM, token, number, group.rank, group.size)
            return portion, self._pull(portion.rows, place)

        coming = ask(self._next(portions), step)
        pushed: list[Any] = []
        stopping = False
        while coming is not None:
            portion, pulled = coming
            self._at = f"step {step}"
            self._recent += [(step, portion.position), (step + 1, portion.after)]
            replies = self._get("pull", pulled.replies)
            self._get("ack", pushed)  # done, or the pulls would not have been answered; errors are told here
            inputs_BI, wide_B = self._pool(pulled, replies)
            coming = None if stopping else ask(self._next(portions), step + 1)
            with self._timed("compute"):
                computed = self._dense.compute(pulled.rows, inputs_BI, wide_B, rank=group.rank)
            if computed.finite:
                pushed = self._push(
                    pulled, computed.grad_inputs_BI, computed.grad_wide_B, self._row_factor(step)
                )
            with self._timed("sum"):
                gradient = self._dense.gradient()
                gradient[ASKED] = self._pause.is_set()
                group.sum(gradient)
            if not np.isfinite(gradient[LOSS]):
                if not computed.finite:
                    raise Diverged(computed.mean, pulled.rows)
                return Ended("diverged", step)
            with self._timed("learn"):
                if self._dense.step == step:  # else it was learned before a fault, and only the rows are not
                    self._dense.learn(gradient, float(gradient[TOTAL]))
            self._tell(pulled.rows, computed.logit_B, portion.position.epoch)
            step += 1
            if stopping:
                self._get("ack", pushed)
                self._pause.clear()
                return Ended("paused", step)
            stopping = bool(gradient[ASKED])
        self._get("ack", pushed)
        return Ended("done", step)

    def _next(self, portions: Iterator[Portion]) -> Portion | None:
        """The next batch that has rows; a window that has lost all of its rows is no step."""
        with self._timed("read"):
            for portion in portions:
                if portion.of:
                    return portion
        return None

    # ── alone ──────────────────────────────────────────────────────────────────────────────────

    def read_ahead(self, epoch: int, unit: int) -> None:
        """Read a unit that will most likely be leased next."""
        with self._guard:
            self._unit_rows(epoch, unit)
            for other in [key for key in self._reading if key not in (self._working_at, (epoch, unit))]:
                del self._reading[other]  # another worker was quicker

    def unit(self, lease: UnitLease) -> Ended:
        """Learn the batches of a unit until it ends, a pause is asked for, or the lease is another's."""
        try:
            return self._unit(lease)
        except (Fenced, RayError) as error:
            if isinstance(error, RayTaskError) and not isinstance(error, Fenced):
                raise
            self._log.say(f"broken at {self._at}: {error}")
            return Ended("broken", lease.start, f"{type(error).__name__}: {error}")
        except Exception as error:
            error.add_note(self._at)  # the place that fails
            raise

    def _unit(self, lease: UnitLease) -> Ended:
        network = self._network
        assert network is not None
        with self._timed("read"):
            with self._guard:
                self._working_at = lease.epoch, lease.unit
                reading = self._unit_rows(lease.epoch, lease.unit)
            rows = reading.result()
        fresh = network.weights.remote(lease.stream, lease.token)
        places = self._batches.places(lease.epoch, lease.unit, rows.rows) if rows.rows else []

        def ask(batch: int) -> _Pulled | None:
            if batch >= len(places) or (batch > lease.start and self._pause.is_set()):
                return None
            start, stop, _, _ = places[batch]
            place = Place(lease.stream, lease.token, batch, 0, 1)
            return self._pull(rows.part(start, stop), place)

        batch = lease.start
        coming = ask(batch)
        pushed: list[Any] = []
        while coming is not None:
            pulled = coming
            self._at = f"unit {lease.unit}, batch {batch}"
            replies = self._get("pull", pulled.replies)
            coming = ask(batch + 1)
            inputs_BI, wide_B = self._pool(pulled, replies)
            with self._timed("weights"):
                weights, version = ray.get(fresh)
                self._dense.load_weights(weights)
                self._dense.step = version
            with self._timed("compute"):
                computed = self._dense.compute(pulled.rows, inputs_BI, wide_B, rank=lease.unit)
            if not computed.finite:
                raise Diverged(computed.mean, pulled.rows)
            self._get("ack", pushed)  # of the batch before: errors are told here
            pushed = self._push(
                pulled, computed.grad_inputs_BI, computed.grad_wide_B, self._row_factor(version)
            )
            fresh = network.push.remote(
                lease.stream,
                lease.token,
                batch,
                self._dense.gradient(),
                computed.total,
                version,
                pulled.rows.rows,
            )
            self._tell(pulled.rows, computed.logit_B, lease.epoch)
            batch += 1
        self._get("ack", [*pushed, fresh])
        if batch < len(places):
            return Ended("paused", batch)
        with self._guard:
            self._reading.pop((lease.epoch, lease.unit), None)
        return Ended("done", batch)

    def resume(self) -> None:
        """A pause is over."""
        self._pause.clear()

    def _unit_rows(self, epoch: int, unit: int) -> Future[LabelledRows]:
        key = epoch, unit
        if key not in self._reading:
            self._reading[key] = self._reader.submit(self._batches.read_window, epoch, unit)
        return self._reading[key]

    # ── a step's parts ─────────────────────────────────────────────────────────────────────────

    def _pull(self, rows: LabelledRows, place: Place) -> _Pulled:
        with self._timed("ask"):
            custom = self._model.custom
            if custom is not None and custom.feed is not None and rows.rows:
                rows = custom.feed(rows)
            asked = self._tables.ask(
                rows.encoded.slots,
                rows.rows,
                shows_B=rows.show_B,
                clicks_B=rows.click_B,
                hours_B=rows.event_hour_B,
                count=True,
            )
            sent = [
                shard.pull.remote(place, request)
                for shard, request in zip(self._shards, asked.requests, strict=True)
            ]
        return _Pulled(rows, asked, place, sent)

    def _pool(self, pulled: _Pulled, replies: list[Reply]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        with self._timed("pool"):
            inputs_BI, wide_B = self._model.buffers(pulled.rows)
            self._tables.pool(pulled.asked, replies, inputs_BI, wide_B)
        return inputs_BI, wide_B

    def _push(
        self,
        pulled: _Pulled,
        grad_inputs_BI: NDArray[np.float32],
        grad_wide_B: NDArray[np.float32],
        factor: float,
    ) -> list[Any]:
        with self._timed("push"):
            gradients = self._tables.gradients(pulled.asked, grad_inputs_BI, grad_wide_B)
            return [
                shard.push.remote(pulled.place, part, pulled.rows.rows, factor)
                for shard, part in zip(self._shards, gradients, strict=True)
            ]

    def _row_factor(self, step: int) -> float:
        return self._spec.plan.row_schedule.factor(step)

    def _get(self, what: str, refs: list[Any]) -> list[Any]:
        with self._timed(what):
            found: list[Any] = ray.get(refs)
        return found

    def _tell(self, rows: LabelledRows, logit_B: NDArray[np.float32], epoch: int) -> None:
        if rows.rows:
            probability_B = self._model.probabilities(torch.from_numpy(logit_B))
            self._window.add(rows.label_B, rows.weight_B, probability_B)
            if self._in_time and epoch == 0:
                self._hours.add(rows.event_hour_B, rows.label_B, rows.weight_B, probability_B)
            self._rows += rows.rows

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        self._doing = what
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - began

    # ── scoring ────────────────────────────────────────────────────────────────────────────────

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities before calibration, without learning anything."""
        rows = rows.take(np.arange(rows.rows))
        self._model.network.eval()
        probability_B = np.empty(rows.rows, dtype=np.float32)
        for start in range(0, rows.rows, _SCORED_ROWS):
            part = rows.part(start, min(start + _SCORED_ROWS, rows.rows))
            asked = self._tables.ask(part.encoded.slots, part.rows, count=False)
            replies = ray.get(
                [shard.look.remote(r) for shard, r in zip(self._shards, asked.requests, strict=True)]
            )
            inputs_BI, wide_B = self._model.buffers(part)
            self._tables.pool(asked, replies, inputs_BI, wide_B)
            with torch.no_grad():
                logit_B = self._model.network(torch.from_numpy(inputs_BI), torch.from_numpy(wide_B))
            probability_B[start : start + part.rows] = self._model.probabilities(logit_B)
        return probability_B


def _pack(state: Mapping[str, NDArray[Any]], step: int) -> bytes:
    room = io.BytesIO()
    np.savez(room, allow_pickle=False, **state, **{"/step": np.array(step)})
    return room.getvalue()


def _unpack(data: bytes) -> tuple[dict[str, NDArray[Any]], int]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        state = dict(arrays)
    return state, int(state.pop("/step"))
