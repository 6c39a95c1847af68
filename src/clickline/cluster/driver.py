"""The driver: starts the roles, deals out work, watches, decides by the policy, and acts. There is one in a run.

    driver.begin(…)                       shards with the rows of a checkpoint, or none
    for pause in driver.learn(…):         an epoch; yields where nothing is under way and a cut is due
        driver.cut(…)
    driver.score(…), driver.evict(…)      between epochs

What cannot be mended in place (a shard, the network's holder, the last worker, the cluster) is raised as `Lost`: then
everything goes back to the last cut, by `begin` again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.cluster.leases import Lease, Leases
from clickline.cluster.log import RoleLog
from clickline.cluster.policy import (
    Forget,
    GiveUp,
    Keep,
    Loss,
    MemorySeen,
    Past,
    Resize,
    Restart,
    Rules,
    Seen,
    Why,
    decide,
    decide_memory,
)
from clickline.cluster.session import Session, session
from clickline.cluster.shard import Shard, ShardSpec, ShardState, join_reports
from clickline.cluster.state import (
    CutStatus,
    Event,
    Figures,
    LeaseCounts,
    ShardStatus,
    Status,
    WorkerStatus,
    asked_workers,
    logs_of,
    write_status,
)
from clickline.cluster.units import units_of
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ClicklineError, ClusterError
from clickline.learner.batches import Position
from clickline.learner.plan import ModelPlan
from clickline.progress import Progress
from clickline.records import LabelledRows

__all__ = ["Driver", "Job", "Lost", "Pause"]

_TICK_SECONDS = 0.2
_LOOK_SECONDS = 1.0  # between two looks at everything
_START_SECONDS = 180.0  # for a process to be there, once Ray has room for it
_ANSWER_SECONDS = 30.0  # for a call that takes no time


class Lost(Exception):
    """State is gone that only the last cut has."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Job:
    """What there is to train, and with what; plain values."""

    home: Path
    run: Path
    address: str | None  # of the cluster; None: one of our own
    dataset: str
    batches: Mapping[str, Any]  # settings of `Batches`
    plan: ModelPlan
    tables: Mapping[str, Any]  # what `Tables` are made from
    model_file: Path | None
    sync: bool
    staleness: int
    staleness_rate: bool
    rules: Rules
    shards: int
    worker_cpus: float
    worker_memory: int | None  # bytes to reserve
    shard_cpus: float
    shard_memory: int | None
    eviction: Eviction | None
    total_rows: int
    group_seconds: float = 30.0

    @property
    def threads(self) -> int:
        return max(1, int(self.worker_cpus))


class Pause(NamedTuple):
    """Nothing is under way, and everybody waits."""

    step: int
    position: Position
    units: Mapping[str, Any] | None  # async: which units are done and begun


@dataclass
class _Worker:
    name: str
    actor: Any
    ready: Any  # what `step` answers, once it is there
    since: float
    here: bool = False
    idle: bool = True
    node: str = ""
    report: Any = None
    rows: int = 0
    rows_per_second: float = 0.0
    status: WorkerStatus | None = None
    lease: Any = None  # async: the one it works at


@dataclass
class _View:
    """What was seen at the last look."""

    at: float = 0.0
    shards: tuple[ShardState, ...] = ()
    looking: list[Any] = field(default_factory=list)
    rows: int = 0
    rows_per_second: float = 0.0


class Driver:
    """Runs one training job on a cluster."""

    def __init__(self, job: Job, progress: Progress, tell: Callable[[Figures], None]) -> None:
        self._job = job
        self._progress = progress
        self._tell = tell
        self._log = RoleLog(logs_of(job.run) / "driver.log")
        self._stack = ExitStack()
        self._session: Session | None = None
        self._shards: list[Any] = []
        self._network: Any = None
        self._workers: dict[str, _Worker] = {}
        self._named = 0
        self._generation = 0
        self._token = 1
        self._past = Past()
        self._lost: list[Loss] = []
        self._view = _View()
        self._status = Status("starting", "sync" if job.sync else "async")
        self._dense: Mapping[str, NDArray[Any]] = {}
        self._step = 0
        self._fresh = True  # no worker has the dense state yet
        self._restarts = 0
        self._scored_with = -1
        self._limit = 0  # of a shard's memory
        self._stalled = 0.0
        self._leaving: list[_Worker] = []
        self._crowded: int | None = None  # a shard that must forget ids

    # ── beginning and end ──────────────────────────────────────────────────────────────────────

    def begin(self, restore: Sequence[Path], dense: Mapping[str, NDArray[Any]], step: int, rows: int) -> None:
        """Start shards that hold what `restore` holds; workers follow when there is something to learn."""
        self._end_roles()
        if self._session is not None and self._session.lost():
            self._stack.close()
            self._session = None
        if self._session is None:
            self._session = self._stack.enter_context(
                session(
                    self._job.address, cpus=self._logical_cpus(), home=self._job.home, progress=self._progress
                )
            )
        import ray  # not before the session has set what Ray reads when it is imported

        self._dense, self._step, self._fresh, self._scored_with = dense, step, True, -1
        job, options = self._job, {"num_cpus": self._job.shard_cpus, "max_restarts": 0}
        self._limit = self._shard_limit()
        if job.shard_memory is not None:
            options["memory"] = job.shard_memory
        actor = ray.remote(Shard)
        self._shards = [
            actor.options(**options, max_concurrency=1000, scheduling_strategy="SPREAD").remote(
                ShardSpec(
                    number,
                    job.shards,
                    job.tables,
                    max(1, int(job.shard_cpus)),
                    tuple(restore),
                    rows,
                    logs_of(job.run) / f"shard-{number}.log",
                )
            )
            for number in range(job.shards)
        ]
        if not job.sync:
            from clickline.cluster.network import Network

            self._network = (
                ray.remote(Network)
                .options(num_cpus=0, max_restarts=0, max_concurrency=1000)
                .remote(
                    job.dataset,
                    job.plan,
                    job.model_file,
                    job.staleness,
                    job.staleness_rate,
                    dense,
                    step,
                    logs_of(job.run) / "network.log",
                )
            )
        waiting = [shard.state.remote() for shard in self._shards]
        if self._network is not None:
            waiting.append(self._network.step.remote())
        self._await_roles(waiting)

    def _await_roles(self, waiting: list[Any]) -> None:
        """Until all are there; what Ray cannot place is named."""
        import ray

        began = time.monotonic()
        while True:
            _, waiting_still = ray.wait(waiting, num_returns=len(waiting), timeout=1.0)
            if not waiting_still:
                break
            self._check_cluster()
            if time.monotonic() - began > _START_SECONDS:
                memory = "" if self._job.shard_memory is None else f" and {self._job.shard_memory:,} bytes"
                raise ClusterError(
                    f"{len(waiting_still)} of {len(waiting)} shards found no place within {_START_SECONDS:.0f} s: each "
                    f"asks for {self._job.shard_cpus:g} CPUs{memory} (cluster.shard). The cluster has {self._has()}. "
                    "Add nodes, ask for less, or use fewer shards (train.shards)."
                )
        answers = self._get_keepers(waiting)
        self._view = _View(time.monotonic(), tuple(answers[: self._job.shards]))

    def _end_roles(self) -> None:
        if self._session is not None and not self._session.lost():
            import ray

            roles = [*(worker.actor for worker in self._workers.values()), *self._shards]
            for role in [*roles, *([self._network] if self._network is not None else [])]:
                ray.kill(role)
        self._shards, self._network, self._workers = [], None, {}

    def close(self, state: str, message: str = "") -> None:
        """End everything that was started."""
        self._write(state, message)
        self._end_roles()
        self._stack.close()
        self._session = None

    def say(self, decision: str, reason: str) -> None:
        """A decision, for everybody who watches."""
        self._progress.say(f"cluster: {reason}")
        self._log.say(f"{decision}: {reason}")
        self._status = replace(self._status, events=(*self._status.events[-19:], Event.now(decision, reason)))

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def learn(
        self, start: Position, units: Mapping[str, Any] | None, cut_due: Callable[[int], bool]
    ) -> Iterator[Pause]:
        """Learn to the end of the epoch; yields at each pause where a cut is due. Raises Lost."""
        return (
            self._learn_sync(start, cut_due) if self._job.sync else self._learn_async(start, units, cut_due)
        )

    def _learn_sync(self, start: Position, cut_due: Callable[[int], bool]) -> Iterator[Pause]:
        import ray

        position, step = start, self._step
        while True:
            self._await_workers()
            try:
                position, step = self._form(position, step)
            except _Failed:
                self._decide_losses()
                continue
            team = self._here()
            while True:  # in one group
                tasks = {worker.actor.together.remote(step, self._generation): worker for worker in team}
                pausing = ""
                ended: dict[str, Any] = {}
                trouble_at = None
                while tasks:
                    ready, _ = ray.wait(list(tasks), timeout=_TICK_SECONDS)
                    for task in ready:
                        worker = tasks.pop(task)
                        outcome = self._outcome(worker, task)
                        if outcome is not None:
                            ended[worker.name] = outcome
                        if (outcome is None or outcome.why == "broken") and trouble_at is None:
                            trouble_at = time.monotonic()
                            self._fence()
                    now = time.monotonic()
                    if tasks and trouble_at is not None and now - trouble_at > self._job.group_seconds + 10:
                        for worker in tasks.values():  # they neither answer nor die
                            self._lose(worker, "partitioned", "it did not answer any more")
                        tasks = {}
                    if trouble_at is None and tasks:
                        self._look(step)
                        if not pausing:
                            pausing = self._reason_to_pause(team, cut_due(self._learned_step(step)))
                            if pausing:
                                for worker in team:
                                    worker.actor.pause.remote()
                if any(outcome.why == "diverged" for outcome in ended.values()):
                    raise ClicklineError("training has diverged: the loss is not a number any more.")
                if trouble_at is not None or len(ended) < len(team):
                    self._after_trouble()
                    break
                step = next(iter(ended.values())).step
                self._step = step
                if all(outcome.why == "done" for outcome in ended.values()):
                    self._fresh = False
                    return
                position = self._position_of(step, team, position)
                if pausing == "cut":
                    began = time.monotonic()
                    yield Pause(step, position, None)
                    self._stalled = time.monotonic() - began
                elif pausing == "forget":
                    self._make_room()
                else:  # another group
                    for worker in self._leaving:
                        self._dismiss(worker)
                    self._leaving = []
                    break

    def _position_of(self, step: int, team: Sequence[_Worker], known: Position) -> Position:
        """Where a step is that some worker has seen or comes next."""
        for worker in team:
            try:
                seen = self._ask(worker, worker.actor.places.remote())
            except _Failed:
                continue
            if step in seen:
                found: Position = seen[step]
                return found
        return known

    def _form(self, position: Position, step: int) -> tuple[Position, int]:
        """All workers that are there as one group; where it begins. What was half done is done again."""
        self._generation += 1
        team = self._here()
        applied = [done for _, done in self._fence()]
        first = team[0]
        if self._fresh:
            self._ask(first, first.actor.load.remote(self._dense, self._step))
            self._fresh = False
        steps = {worker.name: self._ask(worker, worker.actor.step.remote()) for worker in team}
        source = max(range(len(team)), key=lambda rank: steps[team[rank].name])
        begin = min(min(applied), steps[team[source].name])
        if begin != step:
            position = self._position_of(begin, team, position)
        meeting = self._ask(first, first.actor.meet.remote()) if len(team) > 1 else ""
        peers = [worker.actor for worker in team]
        joining = [
            (
                worker,
                worker.actor.join.remote(self._generation, rank, peers, meeting, source, position),
            )
            for rank, worker in enumerate(team)
        ]
        failed = None
        for worker, joined in joining:
            try:
                self._ask(worker, joined, self._job.group_seconds + _ANSWER_SECONDS)
            except _Failed as error:
                failed = error
        if failed is not None:
            raise failed
        self._log.say(f"generation {self._generation}: {len(team)} workers from step {begin}, {position}")
        return position, begin

    def _fence(self) -> list[tuple[int, int]]:
        """Take the stream from whoever has it; how far each shard is."""
        from clickline.cluster.worker import SYNC_STREAM

        self._generation += 1
        return self._get_keepers(
            [shard.open.remote(SYNC_STREAM, self._generation, self._step) for shard in self._shards]
        )

    # ── an epoch of leases ─────────────────────────────────────────────────────────────────────

    def _learn_async(
        self, start: Position, known: Mapping[str, Any] | None, cut_due: Callable[[int], bool]
    ) -> Iterator[Pause]:
        import ray

        from clickline.artifacts.dataset import Dataset
        from clickline.storage.stores import Storage

        dataset = Dataset.open(Storage(), self._job.dataset)
        settings = self._job.batches
        units = units_of(dataset, settings["seed"], start.epoch, in_time=settings["in_time"])
        leases = Leases(units, self._token) if known is None else Leases.from_json(units, known, self._token)
        tasks: dict[Any, _Worker] = {}
        torn: set[int] = set()  # units that a lost worker left, until another has finished what it had begun
        pausing = False
        while not leases.all_done:
            self._await_workers()
            if not pausing:
                for worker in self._workers.values():
                    if worker.here and worker.idle:
                        try:
                            self._grant(worker, leases, tasks)
                        except _Failed:
                            break
            ready, _ = ray.wait(list(tasks), timeout=_TICK_SECONDS) if tasks else ([], [])
            for task in ready:
                worker = tasks.pop(task)
                worker.idle = True
                lease, worker.lease = worker.lease, None
                outcome = self._outcome(worker, task)
                if outcome is None or outcome.why == "broken":
                    if any(open_.token == lease.token for open_ in leases.open):
                        torn.add(lease.unit.number)
                    leases.lost(worker.name)
                    if outcome is not None:
                        self._after_broken(worker, outcome.error)
                elif outcome.why == "paused":
                    leases.progress(lease.token, outcome.step)
                    leases.lost(worker.name)  # it goes on from there, with whoever is free
                    torn.discard(lease.unit.number)
                elif leases.finished(lease.token, time.monotonic()):
                    torn.discard(lease.unit.number)
                    self._get_keepers(
                        [role.close.remote(self._stream(lease)) for role in [*self._shards, self._network]]
                    )
            self._token = leases.next_token
            if self._lost:
                for loss in self._lost:
                    for unit in leases.lost(loss.name):
                        torn.add(unit.number)
                self._decide_losses()
            self._look(self._step, LeaseCounts(leases.todo, len(leases.open), leases.done))
            if pausing and not tasks:
                pausing = False
                if not torn:
                    self._step = self._get_keepers([self._network.step.remote()])[0]
                    began = time.monotonic()
                    yield Pause(self._step, start, leases.to_json())
                    self._stalled = time.monotonic() - began
                for worker in self._workers.values():
                    if worker.here:
                        worker.actor.resume.remote()
            elif not pausing and cut_due(self._step):
                pausing = True
                for worker in self._workers.values():
                    if worker.here:
                        worker.actor.pause.remote()
            elif not pausing:
                self._resize_async(leases)
        self._step = self._get_keepers([self._network.step.remote()])[0]

    def _grant(self, worker: _Worker, leases: Leases, tasks: dict[Any, _Worker]) -> None:
        from clickline.cluster.worker import UnitLease

        lease = leases.grant(worker.name, time.monotonic())
        if lease is None:
            return
        self._token = leases.next_token
        keepers = [*self._shards, self._network]
        stream = self._stream(lease)
        opened = self._get_keepers(
            [role.open.remote(stream, lease.token, lease.start_batch) for role in keepers]
        )
        begin = min(*(applied for _, applied in opened[:-1]), opened[-1])
        worker.idle, worker.lease = False, lease
        granted = UnitLease(stream, lease.token, lease.unit.epoch, lease.unit.number, begin)
        tasks[worker.actor.unit.remote(granted)] = worker
        coming = leases.coming()
        if coming is not None:
            worker.actor.read_ahead.remote(coming.epoch, coming.number)

    @staticmethod
    def _stream(lease: Lease) -> int:
        return 1 + lease.unit.epoch * (1 << 32) + lease.unit.number

    def _resize_async(self, leases: Leases) -> None:
        """Let workers go that are too many; those that are missing come by themselves."""
        decision = self._decide()
        if isinstance(decision, Resize):
            self.say("resize", decision.reason)
            here = self._here()
            for worker in here[decision.workers :]:
                if worker.idle:
                    self._dismiss(worker)
                else:
                    worker.actor.pause.remote()
            self._start_workers(decision.workers - len(self._workers))

    # ── workers ────────────────────────────────────────────────────────────────────────────────

    def _await_workers(self) -> None:
        """At least as many workers as training begins with; more come while it runs."""
        while True:
            self._welcome()
            here = sum(worker.here for worker in self._workers.values())
            least = self._job.rules.min if self._fresh else 1
            if here and (here >= least or here == len(self._workers)):
                return
            self._check_cluster()
            if self._lost:
                self._decide_losses()
            if not self._workers:
                decision = self._decide()
                if isinstance(decision, Resize):
                    self.say("resize", decision.reason)
                    self._start_workers(decision.workers)
                elif isinstance(decision, Keep) and decision.reason != self._status.message:
                    self._progress.say(f"cluster: {decision.reason}")
                    self._write("waiting", decision.reason)
            time.sleep(_TICK_SECONDS)

    def _start_workers(self, count: int) -> None:
        import ray

        from clickline.cluster.worker import Worker, WorkerSpec

        job = self._job
        for _ in range(count):
            name = f"worker-{self._named}"
            self._named += 1
            options: dict[str, Any] = {"num_cpus": job.worker_cpus, "max_restarts": 0, "max_concurrency": 8}
            if job.worker_memory is not None:
                options["memory"] = job.worker_memory
            spec = WorkerSpec(
                name,
                job.dataset,
                job.batches,
                job.plan,
                job.model_file,
                job.threads,
                job.group_seconds,
                logs_of(job.run) / f"{name}.log",
            )
            actor: Any = ray.remote(Worker).options(**options).remote(spec, self._shards, self._network)
            self._workers[name] = _Worker(name, actor, actor.where.remote(), time.monotonic())

    def _here(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.here]

    def _welcome(self) -> None:
        """Take in workers that have come."""
        import ray

        for worker in list(self._workers.values()):
            if worker.here:
                continue
            ready, _ = ray.wait([worker.ready], timeout=0)
            if ready:
                try:
                    worker.node = self._ask(worker, worker.ready)
                    worker.here = True
                except _Failed:
                    continue
            elif time.monotonic() - worker.since > _START_SECONDS:
                self._dismiss(worker)

    def _dismiss(self, worker: _Worker) -> None:
        import ray

        ray.kill(worker.actor)
        self._workers.pop(worker.name, None)

    def _reason_to_pause(self, team: Sequence[_Worker], cut_due: bool) -> str:
        """What the group should stop for; empty: nothing."""
        if cut_due:
            return "cut"
        if self._crowded is not None:
            return "forget"
        self._welcome()
        decision = self._decide()
        if isinstance(decision, Resize):
            self.say("resize", decision.reason)
            if decision.workers < len(self._workers):
                for worker in [*self._workers.values()][decision.workers :]:
                    if worker not in team:
                        self._dismiss(worker)
                self._leaving = list(team[decision.workers :])
                return "resize"
            self._start_workers(decision.workers - len(self._workers))
        if any(worker.here and worker not in team for worker in self._workers.values()):
            return "resize"
        return ""

    def _room(self) -> int:
        """How many more workers fit now."""
        assert self._session is not None
        free = self._session.free_cpus()
        if self._job.worker_cpus <= 0:
            return 1
        return int(free / self._job.worker_cpus + 1e-6)

    def _decide(self) -> Any:
        room = self._room()
        seen = Seen(
            workers=len(self._workers),
            room=room if all(worker.here for worker in self._workers.values()) else 0,
            asked=asked_workers(self._job.run),
            learned=self._view.rows,
            has=self._has(),
        )
        decision, self._past = decide(self._job.rules, self._past, seen, time.monotonic())
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        return decision

    # ── losses ─────────────────────────────────────────────────────────────────────────────────

    def _outcome(self, worker: _Worker, task: Any) -> Any:
        """What a worker's work came to; None if the worker is lost."""
        try:
            return self._ask(worker, task)
        except _Failed:
            return None

    def _ask(self, worker: _Worker, ref: Any, seconds: float = _ANSWER_SECONDS) -> Any:
        """A worker's answer. One that died, or raised what nobody expects, is lost."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(ref, timeout=seconds)
        except RayTaskError as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, ClicklineError) and not isinstance(cause, ClusterError):
                raise cause from None
            self._lose(worker, "crashed", str(cause))
        except RayActorError as error:
            self._lose(worker, _why(error), str(error))
        except GetTimeoutError:
            self._lose(worker, "partitioned", f"it did not answer within {seconds:.0f} s")
        raise _Failed(worker.name)

    def _lose(self, worker: _Worker, why: Why, error: str) -> None:
        if self._workers.pop(worker.name, None) is None:
            return
        import ray

        ray.kill(worker.actor)  # fenced by its token already; this frees its place
        place = worker.status.at if worker.status is not None else ""
        loss = Loss("worker", worker.name, why, place, error)
        self._log.say(f"lost: {loss}\n{error}")
        self._lost.append(loss)

    def _get_keepers(self, refs: list[Any]) -> list[Any]:
        """Answers of shards and the network's holder: none of them can be replaced while training runs."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            found: list[Any] = ray.get(refs)
            return found
        except RayTaskError as error:
            cause = getattr(error, "cause", error)
            raise cause from None
        except RayActorError as error:
            self._lost.append(Loss("shard", self._dead_keeper(), _why(error), "", str(error)))
            self._decide_losses()
            raise

    def _dead_keeper(self) -> str:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        names = [f"shard-{number}" for number in range(len(self._shards))]
        roles = list(self._shards)
        if self._network is not None:
            names, roles = [*names, "network"], [*roles, self._network]
        for name, role in zip(names, roles, strict=True):
            try:
                ray.get((role.state if name != "network" else role.step).remote(), timeout=5)
            except (RayError, GetTimeoutError):
                return name
        return "a shard"

    def _after_trouble(self) -> None:
        """A group broke: find out who is gone, and decide."""
        self._check_cluster()
        self._get_keepers([shard.state.remote() for shard in self._shards])
        for worker in list(self._workers.values()):
            if worker.here:
                try:
                    self._ask(worker, worker.actor.step.remote())
                except _Failed:
                    continue
        if self._lost:
            self._decide_losses()

    def _after_broken(self, worker: _Worker, error: str) -> None:
        """A worker could not go on: is a keeper gone?"""
        self._check_cluster()
        self._log.say(f"{worker.name} broke off: {error}")
        keepers = [shard.state.remote() for shard in self._shards]
        self._get_keepers([*keepers, self._network.step.remote()])

    def _decide_losses(self) -> None:
        """Act on what was lost: go on with the rest, or raise Lost or ClusterError."""
        lost, self._lost = tuple(self._lost), []
        seen = Seen(
            workers=sum(worker.here for worker in self._workers.values()),
            room=0,
            lost=lost,
            asked=asked_workers(self._job.run),
            learned=self._view.rows,
            has=self._has(),
        )
        decision, self._past = decide(self._job.rules, self._past, seen, time.monotonic())
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        if isinstance(decision, Restart):
            self.say("restart", decision.reason)
            raise Lost(decision.reason)
        if isinstance(decision, Resize):
            self.say("resize", decision.reason)

    def _check_cluster(self) -> None:
        if self._session is not None and self._session.lost():
            reason = (
                "the cluster's head or this machine's node is gone, so everything goes back to the last cut"
            )
            self.say("restart", reason)
            raise Lost(reason)

    # ── looking ────────────────────────────────────────────────────────────────────────────────

    def _learned_step(self, begun: int) -> int:
        steps: list[int] = [worker.report.step for worker in self._workers.values() if worker.report]
        return max([begun, *steps])

    def _look(self, step: int, leases: LeaseCounts | None = None) -> None:
        """Every second: reports of all roles, memory, the cluster itself; told to whoever watches."""
        import ray

        now = time.monotonic()
        view = self._view
        if now - view.at < _LOOK_SECONDS:
            return
        if view.looking:
            names, refs = view.looking
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            if len(ready) < len(refs) and now - view.at < 10 * _LOOK_SECONDS:
                return
            self._take_reports(names, refs, set(ready), now - view.at)
        self._check_cluster()
        workers = self._here()
        refs = [worker.actor.report.remote() for worker in workers] + [s.state.remote() for s in self._shards]
        view.looking = [[worker.name for worker in workers], refs]
        view.at = now
        self._watch_memory()
        rates = sum(worker.rows_per_second for worker in workers)
        reports = [worker.report for worker in workers if worker.report is not None]
        measured = [report for report in reports if report.auc is not None]
        figures = Figures(
            step=self._learned_step(step) if self._job.sync else step,
            rows=view.rows,
            total_rows=self._job.total_rows,
            rows_per_second=rates,
            auc=float(np.mean([report.auc for report in measured])) if measured else None,
            loss=float(np.mean([report.loss for report in measured])) if measured else None,
        )
        if not self._job.sync:
            self._step = max([self._step, *(report.step for report in reports)])
        self._status = replace(self._status, figures=figures, leases=leases)
        self._tell(figures)
        self._write("running")

    def _take_reports(self, names: list[str], refs: list[Any], ready: set[Any], seconds: float) -> None:
        import ray
        from ray.exceptions import RayError

        for name, ref in zip(names, refs, strict=False):
            worker = self._workers.get(name)
            if worker is None or ref not in ready:
                continue
            try:
                report = ray.get(ref)
            except RayError:
                continue  # its own task tells what became of it
            worker.rows_per_second = (report.rows - worker.rows) / seconds
            worker.rows, worker.report = report.rows, report
            worker.status = WorkerStatus(
                name, worker.node, "learning", report.at, report.rows, worker.rows_per_second, report.memory
            )
        states = []
        for ref in refs[len(names) :]:
            if ref in ready:
                states += self._get_keepers([ref])
        if len(states) == len(self._shards):
            self._view.shards = tuple(states)
            self._view.rows = states[0].rows

    def _watch_memory(self) -> None:
        for number, state in enumerate(self._view.shards):
            decision = decide_memory(
                MemorySeen(number, state.process_bytes, self._limit), evicts=self._job.eviction is not None
            )
            if isinstance(decision, GiveUp):
                raise ClusterError(f"{decision.reason}.")
            if isinstance(decision, Forget):
                self._crowded = number
            if decision.reason and decision.reason != self._status.message:
                self._progress.say(f"cluster: {decision.reason}")
                self._status = replace(self._status, message=decision.reason)

    def _write(self, state: str, message: str | None = None) -> None:
        limit = self._limit or None
        self._status = replace(
            self._status,
            state=state,  # type: ignore[arg-type]
            generation=self._restarts,
            workers=tuple(
                worker.status or WorkerStatus(worker.name, worker.node, "idle" if worker.here else "starting")
                for worker in self._workers.values()
            ),
            shards=tuple(
                ShardStatus(f"shard-{number}", "", state.ids, state.process_bytes, limit)
                for number, state in enumerate(self._view.shards)
            ),
            message=self._status.message if message is None else message,
        )
        write_status(self._job.run, self._status)

    def words(self) -> str:
        """The roles in one line."""
        rates = " + ".join(f"{worker.rows_per_second:,.0f}" for worker in self._here())
        ids = sum(state.ids for state in self._view.shards)
        parts = [f"{len(self._here())} workers ({rates} rows/s)", f"{len(self._shards)} shards ({ids:,} ids)"]
        if self._status.leases is not None:
            parts.append(f"{self._status.leases.open} leases, {self._status.leases.todo} units to do")
        if self._status.last_cut is not None:
            parts.append(f"last cut at step {self._status.last_cut.step:,}")
        return ", ".join(parts)

    def _has(self) -> str:
        assert self._session is not None
        nodes = [node for node in self._session.nodes() if node.alive]
        cpus = sum(node.cpus for node in nodes)
        return f"{len(nodes)} nodes with {cpus:g} CPUs, {self._session.free_cpus():g} of them free"

    def _logical_cpus(self) -> int:
        """What our own Ray declares: room for the workers that may come, and at least the cores there are."""
        import os

        rules = self._job.rules
        most = max(rules.min, rules.max or 0)
        needed = most * self._job.worker_cpus + self._job.shards * self._job.shard_cpus
        return max(len(os.sched_getaffinity(0)), int(np.ceil(needed)))

    def _shard_limit(self) -> int:
        """Memory that a shard may use."""
        if self._job.shard_memory is not None:
            return self._job.shard_memory
        assert self._session is not None
        nodes = [node for node in self._session.nodes() if node.alive]
        smallest = min(node.memory for node in nodes)
        on_one = -(-self._job.shards // len(nodes))
        return int(0.6 * smallest / on_one)  # the rest is the workers' and the object store's

    # ── cuts ───────────────────────────────────────────────────────────────────────────────────

    def dense_state(self) -> dict[str, NDArray[Any]]:
        """Network and optimizer as they are, while nothing is under way."""
        if self._network is not None:
            found: dict[str, NDArray[Any]] = self._get_keepers([self._network.state.remote()])[0]
            return found
        for worker in list(self._workers.values()):
            if worker.here:
                try:
                    state: dict[str, NDArray[Any]] = self._ask(worker, worker.actor.state.remote())
                    return state
                except _Failed:
                    continue
        if self._fresh:
            return dict(self._dense)
        self._decide_losses()
        raise Lost("no worker is left")

    def freeze(self, folder: Path, share: float) -> dict[str, Any]:
        """Every shard begins to write its part; the names of the parts and what will answer with their digests."""
        of = self._job.shards
        names = [f"tables-{number:02d}-of-{of:02d}.bin" for number in range(of)]
        begun = self._get_keepers(
            [s.freeze.remote(folder / name, share) for s, name in zip(self._shards, names, strict=True)]
        )
        if not all(begun):
            raise ClusterError("a cut was asked for while a batch was under way. Please report this.")
        return {name: s.written.remote() for s, name in zip(self._shards, names, strict=True)}

    def written(self, parts: Mapping[str, Any]) -> dict[str, str]:
        """The digests of the parts, once all are on disk."""
        import ray

        return dict(zip(parts, ray.get(list(parts.values())), strict=True))

    def cut_done(self, step: int, seconds: float) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        self._status = replace(self._status, last_cut=CutStatus(step, at, seconds, self._stalled))

    # ── between epochs ─────────────────────────────────────────────────────────────────────────

    @property
    def step(self) -> int:
        return self._step

    def states(self) -> list[ShardState]:
        return self._get_keepers([shard.state.remote() for shard in self._shards])

    def slots(self) -> tuple[SlotReport, ...]:
        return join_reports([state.slots for state in self.states()])

    def decay(self, rate: float) -> None:
        self._get_keepers([shard.decay.remote(rate) for shard in self._shards])

    def _make_room(self) -> None:
        """Let the crowded shard forget ids, while nothing is under way."""
        rule, number = self._job.eviction, self._crowded
        assert rule is not None
        assert number is not None
        shard = self._shards[number]
        newest = max(state.newest_hour for state in self.states())
        gone = self._get_keepers([shard.evict.remote(rule, newest)])[0]
        self._crowded = None
        self.say("forget", f"shard {number} forgot {sum(s.ids + s.candidates for s in gone):,} ids")

    def evict(self, rule: Eviction, now_hour: int) -> tuple[SlotReport, ...]:
        return join_reports(self._get_keepers([shard.evict.remote(rule, now_hour) for shard in self._shards]))

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities before calibration; the workers share the rows."""
        while True:
            self._await_workers()
            self._check_cluster()
            team = self._here()
            try:
                self._refresh(team)
                bounds = [rows.rows * rank // len(team) for rank in range(len(team) + 1)]
                asked = [
                    (worker, worker.actor.score.remote(rows.part(first, last)))
                    for worker, first, last in zip(team, bounds, bounds[1:], strict=False)
                ]
                return np.concatenate([self._ask(worker, ref, 600.0) for worker, ref in asked])
            except _Failed:
                self._after_trouble()  # what is left scores it again

    def _refresh(self, team: Sequence[_Worker]) -> None:
        """Every worker scores with the network as it is now."""
        if self._scored_with == self._step and not self._fresh:
            return
        state = self.dense_state()
        for worker in team:
            self._ask(worker, worker.actor.load.remote(state, self._step))
        self._fresh, self._scored_with = False, self._step


class _Failed(Exception):
    """A worker gave no answer; what became of it is noted."""


def _why(error: Any) -> Why:
    """What ended an actor."""
    text = str(error)
    if getattr(error, "preempted", False) or "node was terminated" in text or "node died" in text.lower():
        return "preempted"
    if "OutOfMemory" in text or "memory pressure" in text or "OOM" in text:
        return "out_of_memory"
    return "crashed"
