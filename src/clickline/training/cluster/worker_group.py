"""The processes of a job: started, asked, lost, replaced. What is to be done about a loss, the policy decides.

Workers can be replaced while training runs. Shards and the network's holder keep state: when one is lost, `Lost` is
raised, and everything goes back to the last cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from numpy.typing import NDArray

from clickline.distributed.session import Session, session
from clickline.errors import ClicklineError, ClusterError
from clickline.machine import cores
from clickline.progress import Progress, human_size
from clickline.training.cluster.embedding_server import Shard, ShardSpec
from clickline.training.cluster.job import Job, Lost
from clickline.training.cluster.job_status import asked_workers, logs_of
from clickline.training.cluster.monitor import KEEPER_SECONDS, Watch
from clickline.training.cluster.policy import Decision, GiveUp, Loss, Past, Resize, Restart, Seen, Why, decide

_START_SECONDS = 180.0  # for a worker to find a place, and as long again to be there
_RESTORE_SECONDS = 180.0  # for a shard to be there, once it has a place, and longer for what it restores:
_RESTORED_BYTES = 2 << 20  # a second
_ANSWER_SECONDS = 30.0  # for a call that takes no time
_PLACE_SECONDS = 15.0  # for a node to be found for a process, and to start it
WORK_SECONDS = 3600.0  # for what goes through all ids of a shard
_WAIT_SECONDS = 0.2
_LOOK_SECONDS = 1.0  # between two looks whether the cluster is still there
# Messages of a batch, some hundred kB each, go straight from process to process. Through the object store, as Ray does
# with all above 100 kB, each costs the node's daemon more than a millisecond: a tenth of all work on two cores.
_STRAIGHT = {
    "RAY_max_direct_call_object_size": str(8 << 20),
    "RAY_task_rpc_inlined_bytes_limit": str(32 << 20),
}
_GUESSES = " Some common causes include"  # Ray says so of every process that ends, and names memory first
_LEAST_MEMORY = 1 << 20  # that keepers reserve: so none is on a node that gives no memory, as a driver's own
_SHARD_SHARE = 0.6  # of a node's memory; the rest is the workers' and the object store's


class Failed(Exception):
    """A worker gave no answer. If it is lost, that is noted among the losses."""


@dataclass
class WorkerHandle:
    """A worker."""

    name: str
    actor: Any
    arrival: Any  # answers with its machine, once it is there
    since: float
    machine: str = ""
    lease: Any = None  # async: what it works at
    ready: int | None = None  # async: the unit that it reads ahead

    @property
    def here(self) -> bool:
        return self.machine != ""


class WorkerGroup:
    """Shards, the network's holder, workers, and the cluster they run on."""

    def __init__(self, job: Job, watch: Watch, progress: Progress) -> None:
        self.job = job
        self.watch = watch
        self.embedding_servers: list[Any] = []
        self.network: Any = None
        self.members: dict[str, WorkerHandle] = {}
        self.losses: list[Loss] = []
        self.shard_limit = 0  # bytes
        self._progress = progress
        self._stack = ExitStack()
        self._session: Session | None = None
        self._named = 0
        self._past = Past()

    # ── beginning and end ──────────────────────────────────────────────────────────────────────

    def begin(self, restore: Sequence[Path], dense: Mapping[str, NDArray[Any]], step: int, rows: int) -> None:
        """Start the keepers of state, with what a checkpoint holds."""
        self.end_roles()
        if self._session is not None and self._session.lost():
            self.close()
        if self._session is None:
            self._session = self._stack.enter_context(
                session(
                    self.job.address, cpus=self._logical_cpus(), home=self.job.home, progress=self._progress
                )
            )
        import ray  # not before the session has set what Ray reads when it is imported

        job, logs = self.job, logs_of(self.job.run)
        options: dict[str, Any] = {
            "max_restarts": 0,
            "max_concurrency": 1000,
            "runtime_env": {"env_vars": _STRAIGHT},
        }
        memory = _LEAST_MEMORY if job.shard_memory is None else job.shard_memory
        self.shard_limit = self._limit_of_a_shard()
        shard = ray.remote(Shard).options(
            **options, memory=memory, num_cpus=job.shard_cpus, scheduling_strategy="SPREAD"
        )
        threads = max(1, int(job.shard_cpus))
        self.embedding_servers = [
            shard.remote(
                ShardSpec(
                    number,
                    job.shards,
                    job.tables,
                    threads,
                    tuple(restore),
                    rows,
                    logs / f"shard-{number}.log",
                )
            )
            for number in range(job.shards)
        ]
        if not job.sync:
            from clickline.training.cluster.dense_actor import Network

            self.network = (
                ray.remote(Network)
                .options(**options, memory=_LEAST_MEMORY, num_cpus=0)
                .remote(
                    job.dataset,
                    job.plan,
                    job.model_file,
                    job.staleness,
                    job.staleness_rate,
                    dense,
                    step,
                    logs / "network.log",
                )
            )
        self._await_keepers(_RESTORE_SECONDS + sum(file.stat().st_size for file in restore) / _RESTORED_BYTES)

    def _await_keepers(self, seconds: float) -> None:
        """Until all are there; what finds no place is named, and who has one and does not come in time is lost."""
        import ray

        waiting = [shard.state.remote() for shard in self.embedding_servers]
        if self.network is not None:
            waiting.append(self.network.step.remote())
        settled = placed = time.monotonic()
        while True:
            ready, missing = ray.wait(waiting, num_returns=len(waiting), timeout=1.0)
            self.keepers(ready)  # one that is lost is told now, not when the others have come
            if not missing:
                break
            self.check_cluster()
            now = time.monotonic()
            if self._tell_homeless(now - settled):
                placed = now
            else:
                settled = now  # a head that once does not tell of their places means nothing
                if now - placed > seconds:
                    self.keepers(missing, 1.0)
        self.watch.shards = tuple(self.keepers(waiting)[: self.job.shards])

    def _tell_homeless(self, seconds: float) -> int:
        """Shards without a place: said after a while, an error when it takes too long. How many there are."""
        assert self._session is not None
        homeless = sum(not self._session.has_place(shard) for shard in self.embedding_servers)
        if seconds < _PLACE_SECONDS or not homeless:
            return homeless
        job = self.job
        memory = "" if job.shard_memory is None else f" and {human_size(job.shard_memory)}"
        found = (
            f"{homeless} of {job.shards} shards found no place: each asks for {job.shard_cpus:g} CPUs{memory} "
            f"(cluster.shard). The cluster has {self.has()}."
        )
        if seconds > job.rules.room_seconds:
            raise ClusterError(
                f"{found} Waited {seconds:,.0f} s for more. Add nodes, ask for less, or use fewer shards "
                "(train.shards); the same command then goes on from the last checkpoint."
            )
        self.watch.wait_for(f"waits for room: {found}")
        return homeless

    def end_roles(self) -> None:
        """End every process that was started."""
        if self._session is not None and not self._session.lost():
            import ray

            keepers = [*self.embedding_servers, *([self.network] if self.network is not None else [])]
            for actor in [*(member.actor for member in self.members.values()), *keepers]:
                ray.kill(actor)
        self.embedding_servers, self.network, self.members, self.losses = [], None, {}, []

    def close(self) -> None:
        """Leave the cluster; one of our own goes."""
        self._stack.close()
        self._session = None

    # ── workers ────────────────────────────────────────────────────────────────────────────────

    def here(self) -> list[WorkerHandle]:
        """The workers that can be asked."""
        return [member for member in self.members.values() if member.here]

    def await_workers(self, least: int = 1) -> list[WorkerHandle]:
        """The workers, once there are so many; more come while training runs."""
        while True:
            self.welcome()
            here = self.here()
            if here and (len(here) >= least or len(here) == len(self.members)):
                return here
            self.check_cluster()
            self.act_on_losses()
            if not self.members:
                decision = self.decide()
                if isinstance(decision, Resize):
                    self.resize(decision)
                else:
                    self.watch.wait_for(decision.reason)
            time.sleep(_WAIT_SECONDS)

    def resize(self, decision: Resize) -> None:
        """Start what is missing. Who lets workers go that are too many, knows when they can."""
        self.watch.say("resize", decision.reason)
        missing = decision.workers - len(self.members)
        if missing > 0:
            self._ask_autoscaler(decision.workers)
        for _ in range(missing):
            self._start_worker()

    def _start_worker(self) -> None:
        import ray

        from clickline.training.cluster.worker import Worker, WorkerSpec

        job, name = self.job, f"worker-{self._named}"
        self._named += 1
        memory = {} if job.worker_memory is None else {"memory": job.worker_memory}
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
        worker = ray.remote(Worker).options(
            **memory,
            num_cpus=job.worker_cpus,
            max_restarts=0,
            max_concurrency=8,
            runtime_env={"env_vars": _STRAIGHT},
        )
        actor: Any = worker.remote(spec, self.embedding_servers, self.network)
        self.members[name] = WorkerHandle(name, actor, actor.where.remote(), time.monotonic())

    def welcome(self) -> None:
        """Take in the workers that have come."""
        import ray

        assert self._session is not None
        for member in list(self.members.values()):
            if member.here:
                continue
            if ray.wait([member.arrival], timeout=0)[0]:
                with suppress(Failed):
                    member.machine = self.ask(member, member.arrival)
                continue
            waited = time.monotonic() - member.since
            if waited > 2 * _START_SECONDS:
                self.lose(member, "partitioned", f"it was not there after {waited:.0f} s")
            elif waited > _START_SECONDS and not self._session.has_place(member.actor):
                self.dismiss(member)  # the room it was asked for was not there after all

    def dismiss(self, member: WorkerHandle) -> None:
        """Let a worker go that has nothing to do."""
        import ray

        ray.kill(member.actor)
        self.members.pop(member.name, None)

    def decide(self) -> Decision:
        """Whether there should be more or fewer workers. Raises ClusterError when there will never be enough."""
        arriving = any(not member.here for member in self.members.values())
        seen = Seen(
            workers=len(self.members),
            room=0 if arriving else self._room(),
            asked=asked_workers(self.job.run),
            learned=self.watch.rows,
            has=self.has(),
        )
        decision, self._past = decide(self.job.rules, self._past, seen, time.monotonic())
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        return decision

    def _room(self) -> int:
        """How many more workers fit now."""
        assert self._session is not None
        if self.job.worker_cpus <= 0:  # nothing is reserved for them: one for each core
            return max(0, int(self._session.cpus()) - len(self.members))
        return self._session.room_for(self.job.worker_cpus, self.job.worker_memory)

    def _ask_autoscaler(self, workers: int) -> None:
        """Where there is an autoscaler, nodes come; where there is none, nothing happens."""
        if self.job.address is not None:
            from ray.autoscaler.sdk import request_resources

            request_resources(bundles=[{"CPU": self.job.worker_cpus}] * workers)

    # ── answers and losses ─────────────────────────────────────────────────────────────────────

    def ask(self, member: WorkerHandle, answer: Any, seconds: float = _ANSWER_SECONDS) -> Any:
        """A worker's answer. One that died, is silent, or raised what nobody expects, is lost: Failed. That is raised
        too when somebody else is gone, whom it had called; then it stays."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return self._get(answer, seconds)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RayActorError):
                raise Failed(f"{member.name} called somebody who is gone: {cause}") from None
            if isinstance(cause, ClicklineError) and not isinstance(cause, ClusterError):
                raise cause from None
            place = next(iter(getattr(cause, "__notes__", ())), "")
            self.lose(member, "crashed", f"{type(cause).__name__}: {cause}", place)
        except RayActorError as error:
            self.lose(member, self._why(error, member.actor), str(error))
        except GetTimeoutError:
            self.lose(member, "partitioned", f"it did not answer within {seconds:.0f} s")
        raise Failed(member.name)

    def lose(self, member: WorkerHandle, why: Why, error: str, place: str = "") -> None:
        """Give a worker up. What it still sends is refused by its token; killing it frees its place. Where it was,
        it told as it failed, or a little earlier."""
        if self.members.pop(member.name, None) is None:
            return
        import ray

        ray.kill(member.actor)
        place = place or self.watch.place_of(member.name)
        loss = Loss("worker", member.name, why, place, _words(why, error))
        self.watch.log.say(f"lost: {loss}\n{error}")
        self.losses.append(loss)

    def keepers(self, answers: Sequence[Any], seconds: float = KEEPER_SECONDS) -> list[Any]:
        """Answers of shards and the network's holder. Raises Lost when one of them is gone, or silent."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        try:
            found: list[Any] = self._get(list(answers), seconds)
        except RayTaskError as error:
            raise error.cause from None
        except GetTimeoutError:
            name, actor = self._dead_keeper()
            if actor is None:  # all answer: it may be this process that stood still
                with suppress(RayError):
                    return list(ray.get(list(answers), timeout=_LOOK_SECONDS))
            self._lose_keeper(name, "partitioned", "it did not answer in time")
        except RayActorError as error:
            name, actor = self._dead_keeper()
            self._lose_keeper(name, _why(error) if actor is None else self._why(error, actor), str(error))
        return found

    def _get(self, answers: Any, seconds: float) -> Any:
        """As `ray.get`. When the cluster goes meanwhile, Lost is raised: Ray would end this process after a minute."""
        import ray
        from ray.exceptions import GetTimeoutError

        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            try:
                return ray.get(answers, timeout=min(left, _LOOK_SECONDS))
            except GetTimeoutError:
                self.check_cluster()
                if left <= _LOOK_SECONDS:
                    raise

    def _lose_keeper(self, name: str, why: Why, error: str) -> NoReturn:
        role: Literal["network", "shard"] = "network" if name == "network" else "shard"
        loss = Loss(role, name, why, "", _words(why, error))
        self.watch.log.say(f"lost: {loss}\n{error}")
        self.losses.append(loss)
        self.act_on_losses()
        raise Lost(str(loss))

    def _dead_keeper(self) -> tuple[str, Any]:
        import ray
        from ray.exceptions import RayError

        calls = {f"shard-{number}": (shard, shard.state) for number, shard in enumerate(self.embedding_servers)}
        if self.network is not None:
            calls["network"] = self.network, self.network.step
        for name, (actor, call) in calls.items():
            try:
                ray.get(call.remote(), timeout=5)
            except RayError:
                return name, actor
        return "shard", None

    def _why(self, error: Any, actor: Any) -> Why:
        why = _why(error)
        if why == "crashed" and self._session is not None and self._session.has_left(actor):
            return "preempted"
        return why

    def look_for_losses(self) -> None:
        """Something broke: find out what is gone, and act on it."""
        self.check_cluster()
        self.keepers([shard.state.remote() for shard in self.embedding_servers])
        if self.network is not None:
            self.keepers([self.network.step.remote()])
        for member in self.here():
            try:
                self.ask(member, member.actor.step.remote())
            except Failed:
                continue
        self.act_on_losses()

    def act_on_losses(self) -> None:
        """Go on with those that are left; or raise Lost, or ClusterError."""
        if not self.losses:
            return
        lost, self.losses = tuple(self.losses), []
        seen = Seen(
            workers=len(self.members),  # those that are on their way too
            room=0,
            lost=lost,
            asked=asked_workers(self.job.run),
            learned=self.watch.rows,
            cut=self.watch.cut_step,
        )
        decision, self._past = decide(self.job.rules, self._past, seen, time.monotonic())
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        if isinstance(decision, Restart):
            self.watch.say("restart", decision.reason)
            raise Lost(decision.reason, decided=True)
        self.watch.say("resize", decision.reason)

    def count_restart(self, lost: Lost) -> None:
        """Everything goes back to the last cut, and the policy does not know of it. Raises ClusterError when that
        was done too often."""
        if self._session is not None:
            try:
                self.look_for_losses()  # who is gone tells more
            except Lost as found:
                if found.decided:
                    return
        seen = Seen(workers=0, room=0, restart=str(lost), learned=self.watch.rows, cut=self.watch.cut_step)
        decision, self._past = decide(self.job.rules, self._past, seen, time.monotonic())
        if isinstance(decision, GiveUp):
            raise ClusterError(f"{decision.reason}.")
        self.watch.say("restart", decision.reason)

    def check_cluster(self) -> None:
        """Raises Lost when the cluster itself is gone."""
        if self._session is not None and self._session.lost():
            raise Lost(
                "the cluster's head or this machine's node is gone, so everything goes back to the last cut"
            )

    # ── room ───────────────────────────────────────────────────────────────────────────────────

    def make_room(self) -> None:
        """Let the crowded shard forget ids, while nothing is under way."""
        number = self.watch.crowded
        assert number is not None
        newest = max(state.newest_hour for state in self.watch.shards)
        [gone] = self.keepers([self.embedding_servers[number].evict.remote(self.job.eviction, newest)], WORK_SECONDS)
        states = self.keepers([shard.state.remote() for shard in self.embedding_servers])
        self.watch.forgot(number, tuple(states))
        self.watch.say("forget", f"shard {number} forgot {sum(s.ids + s.candidates for s in gone):,} ids")

    def has(self) -> str:
        """What the cluster has, in words."""
        assert self._session is not None
        free = self._session.free_cpus()
        return f"{self._session.cpus():g} CPUs, {free:g} of them free"

    def _logical_cpus(self) -> int:
        """What a cluster of our own declares: room for the workers that may come, and at least the cores there are."""
        rules = self.job.rules
        most = max(rules.min, rules.max or 0)
        needed = most * self.job.worker_cpus + self.job.shards * self.job.shard_cpus
        return max(cores(), math.ceil(needed))

    def _limit_of_a_shard(self) -> int:
        if self.job.shard_memory is not None:
            return self.job.shard_memory
        assert self._session is not None
        room = [node.memory for node in self._session.nodes() if node.alive and node.memory >= _LEAST_MEMORY]
        if not room:  # then none finds a place
            return _LEAST_MEMORY
        return int(_SHARD_SHARE * min(room) / math.ceil(self.job.shards / len(room)))


def _words(why: Why, error: str) -> str:
    """What is told of an error; that its node left says it all."""
    return "" if why == "preempted" else error.partition(_GUESSES)[0]


def _why(error: Any) -> Why:
    """What ended an actor."""
    words = str(error).partition(_GUESSES)[0].lower()
    if getattr(error, "preempted", False) or "node was terminated" in words or "node died" in words:
        return "preempted"
    if any(sign in words for sign in ("out of memory", "low on memory", "memory pressure")):
        return "out_of_memory"
    return "crashed"
