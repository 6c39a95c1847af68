"""What is seen of a job while it runs, and told to whoever looks: progress, `clickline status`, the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from clickline.errors import ClusterError
from clickline.progress import Progress
from clickline.training.cluster.embedding_server import ShardState
from clickline.training.cluster.job import Job
from clickline.training.cluster.job_status import (
    CutStatus,
    Event,
    Figures,
    LeaseCounts,
    ShardStatus,
    Status,
    WorkerStatus,
    logs_of,
    write_status,
)
from clickline.training.cluster.policy import Forget, GiveUp, MemorySeen, decide_memory
from clickline.training.cluster.role_log import RoleLog

if TYPE_CHECKING:
    from clickline.training.cluster.worker_group import WorkerGroup, WorkerHandle

_LOOK_SECONDS = 1.0
_LATE_SECONDS = 10.0  # after which a look does without those that did not answer
_FIRST_SECONDS = 180.0  # for the parts of a worker's first batch: kernels may have to be compiled
READ_SECONDS = 180.0  # for rows that all wait for: a store may be slow
STANDSTILL_SECONDS = 180.0  # in which somebody must move, or all of them wait for what will not come
KEEPER_SECONDS = 60.0  # after which a shard, or the network's holder, that does not answer is lost


class Watch:
    """Asks all roles for their figures now and then, without waiting for an answer."""

    def __init__(self, job: Job, progress: Progress, tell: Callable[[Figures], None]) -> None:
        self.log = RoleLog(logs_of(job.run) / "driver.log")
        self.shards: tuple[ShardState, ...] = ()
        self.crowded: int | None = None  # a shard that must forget ids
        self._forgot: set[int] = set()
        self._warned_of: set[int] = set()  # shards whose memory was told of
        self._job = job
        self._progress = progress
        self._tell = tell
        self._status = Status("starting", "sync" if job.sync else "async", most=job.rules.max)
        self._reports: dict[str, Any] = {}
        self._rates: dict[str, float] = {}
        self._machines: dict[str, str] = {}
        self._unheard: dict[str, float] = {}  # for how many seconds a worker was asked and did not answer
        self._keepers_unheard = 0.0
        self._moved: dict[str, float] = {}  # when what a worker tells was last another thing
        self._asked: tuple[list[str], list[Any]] = ([], [])
        self._at = 0.0

    # ── looking ────────────────────────────────────────────────────────────────────────────────

    @property
    def rows(self) -> int:
        """Rows that were learned, each once."""
        return self.shards[0].rows if self.shards else 0

    @property
    def cut_step(self) -> int:
        return 0 if self._status.last_cut is None else self._status.last_cut.step

    def step(self, known: int) -> int:
        """The furthest that any role told of."""
        steps: list[int] = [report.step for report in self._reports.values()]
        return max([known, *steps])

    def place_of(self, worker: str) -> str:
        """What a worker was at when it was last heard of."""
        report = self._reports.get(worker)
        return "" if report is None else str(report.at)

    def stuck_at(self, worker: str, reading: float = 0.0) -> str:
        """What a worker does that answers, but has not moved for too long; empty: it moves, or waits for others.
        To read it may take as many seconds as `reading`, if that is more."""
        report, moved = self._reports.get(worker), self._moved.get(worker)
        if report is None or moved is None or report.doing in _WAITING:
            return ""
        patience = self._job.group_seconds
        if report.doing == "read":
            patience = max(patience, reading)
        elif not report.rows:
            patience = max(patience, _FIRST_SECONDS)
        return str(report.doing) if time.monotonic() - moved > patience else ""

    def standstill(self, workers: Sequence[str], since: float) -> dict[str, str]:
        """What each of these workers waits for, if all of them wait and none has moved for too long; else nothing.
        They work since then: what they told before means nothing."""
        reports = [self._reports.get(worker) for worker in workers]
        doing = ["" if report is None else str(report.doing) for report in reports]
        moved = max([since, *(self._moved.get(worker, since) for worker in workers)])
        patience = max(self._job.group_seconds, STANDSTILL_SECONDS)
        if time.monotonic() - moved <= patience or not set(doing).issubset(_WAITING):
            return {}
        return dict(zip(workers, doing, strict=True))

    def lose_silent(self, crew: WorkerGroup, seconds: float) -> list[WorkerHandle]:
        """Give up the workers that have not answered for so long; who they were."""
        silent = [member for member in crew.here() if self._unheard.get(member.name, 0.0) > seconds]
        for member in silent:
            crew.lose(member, "partitioned", f"it has not answered for more than {seconds:.0f} s")
        return silent

    def look(self, crew: WorkerGroup, step: int, leases: LeaseCounts | None = None) -> bool:
        """Every second: take what the roles answered to the look before, tell it, ask again. Whether it was time."""
        import ray

        now = time.monotonic()
        if now - self._at < _LOOK_SECONDS:
            return False
        names, answers = self._asked
        if answers:
            ready, missing = ray.wait(answers, num_returns=len(answers), timeout=0)
            if missing and now - self._at < _LATE_SECONDS:
                return False
            self._take(crew, names, answers, set(ready), now - self._at)
        crew.check_cluster()
        here = crew.here()
        self._machines = {member.name: member.machine for member in crew.members.values()}
        self._reports = {name: report for name, report in self._reports.items() if name in crew.members}
        self._asked = (
            [member.name for member in here],
            [
                *(member.actor.report.remote() for member in here),
                *(shard.state.remote() for shard in crew.embedding_servers),
                *([crew.network.where.remote()] if crew.network is not None else []),
            ],
        )
        self._at = now
        self._watch_memory(crew.shard_limit)
        self._status = replace(self._status, leases=leases)
        self._tell_figures(crew, step)
        return True

    def settle(self, crew: WorkerGroup, step: int) -> None:
        """An epoch is over: ask all once more and wait, so that what is told last is how it ended."""
        from clickline.training.cluster.worker_group import Failed

        self.shards = tuple(crew.keepers([shard.state.remote() for shard in crew.embedding_servers]))
        for member in crew.here():
            with suppress(Failed):  # what became of it, the next one who needs it acts on
                self._reports[member.name] = crew.ask(member, member.actor.report.remote())
        self._tell_figures(crew, step)

    def _tell_figures(self, crew: WorkerGroup, step: int) -> None:
        reports = list(self._reports.values())
        figures = Figures(
            step=self.step(step),
            rows=self.rows,
            total_rows=self._job.total_rows,
            rows_per_second=sum(self._rates.get(member.name, 0.0) for member in crew.here()),
            auc=_mean(report.auc for report in reports),
            loss=_mean(report.loss for report in reports),
        )
        self._status = replace(self._status, figures=figures)
        self._tell(figures)
        self.write("running", crew.shard_limit)

    def _take(
        self, crew: WorkerGroup, names: list[str], answers: list[Any], ready: set[Any], seconds: float
    ) -> None:
        import ray
        from ray.exceptions import RayError

        for name, answer in zip(names, answers, strict=False):
            self._unheard[name] = 0.0 if answer in ready else self._unheard.get(name, 0.0) + seconds
            if name in crew.members and answer in ready:
                try:
                    report = ray.get(answer)
                except RayError:
                    continue  # its own task tells what became of it
                before = self._reports.get(name)
                if before is None or (before.at, before.doing, before.rows) != (
                    report.at,
                    report.doing,
                    report.rows,
                ):
                    self._moved[name] = time.monotonic()
                self._rates[name] = (report.rows - (before.rows if before else 0)) / seconds
                self._reports[name] = report
        keepers = answers[len(names) :]
        answered = ready.issuperset(keepers)
        self._keepers_unheard = 0.0 if answered else self._keepers_unheard + seconds
        if answered or self._keepers_unheard > KEEPER_SECONDS:
            found = crew.keepers(keepers, 1.0)
            self.shards = tuple(found[: self._job.shards])
            if not self._job.sync:
                machine, memory = found[-1]
                self._status = replace(self._status, network=ShardStatus("network", machine, memory=memory))

    def _watch_memory(self, limit: int) -> None:
        for number, state in enumerate(self.shards):
            seen = MemorySeen(number, state.memory, limit, number in self._forgot)
            decision = decide_memory(seen, evicts=self._job.eviction is not None)
            if isinstance(decision, GiveUp):
                raise ClusterError(f"{decision.reason}.")
            if isinstance(decision, Forget):
                self.crowded = number
            elif not decision.reason and state.memory < limit / 2:
                self._forgot.discard(number)
                self._warned_of.discard(number)
            if decision.reason and number not in self._warned_of:  # its figures change each second
                self._warned_of.add(number)
                self._progress.say(f"cluster: {decision.reason}")
                self._status = replace(self._status, message=decision.reason)

    def forgot(self, number: int, shards: tuple[ShardState, ...]) -> None:
        """A crowded shard has forgotten ids, and this is how they are now: what was asked before is no news."""
        self.crowded, self.shards, self._asked = None, shards, ([], [])
        self._forgot.add(number)
        self._status = replace(self._status, message="")

    # ── telling ────────────────────────────────────────────────────────────────────────────────

    def say(self, decision: str, reason: str) -> None:
        """A decision, for everybody who watches."""
        self._progress.say(f"cluster: {reason}")
        self.log.say(f"{decision}: {reason}")
        self._status = replace(self._status, events=(*self._status.events, Event.now(decision, reason))[-20:])

    def wait_for(self, reason: str) -> None:
        """Nothing can be done until something comes."""
        if reason and reason != self._status.message:
            self._progress.say(f"cluster: {reason}")
            self.write("waiting", message=reason)

    def cut_done(self, step: int, seconds: float, stalled: float) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._status = replace(self._status, last_cut=CutStatus(step, at, seconds, stalled))
        self.log.say(
            f"cut at step {step}: written in {seconds:.2f} s, training stood still for {stalled:.3f} s"
        )

    def words(self) -> str:
        """The roles in one line."""
        rates = " + ".join(f"{self._rates.get(name, 0):,.0f}" for name in self._machines)
        ids = sum(state.ids for state in self.shards)
        parts = [
            f"{len(self._machines)} workers ({rates} rows/s)",
            f"{len(self.shards)} shards ({ids:,} ids)",
        ]
        if self._status.leases is not None:
            parts.append(f"{self._status.leases.open} leases, {self._status.leases.todo} units to do")
        if self._status.last_cut is not None:
            parts.append(f"last cut at step {self._status.last_cut.step:,}")
        return ", ".join(parts)

    def write(
        self,
        state: Literal["starting", "waiting", "running", "done", "stopped", "failed"],
        limit: int | None = None,
        *,
        message: str | None = None,
    ) -> None:
        """For `clickline status`."""
        if message is None and self._status.state == "waiting" and state != "waiting":
            message = ""  # what it waited for has come
        self._status = replace(
            self._status,
            state=state,
            workers=tuple(self._worker(name, machine) for name, machine in self._machines.items()),
            shards=tuple(
                ShardStatus(f"shard-{number}", shard.node, shard.ids, shard.memory, limit)
                for number, shard in enumerate(self.shards)
            ),
            message=self._status.message if message is None else message,
        )
        write_status(self._job.run, self._status)

    def _worker(self, name: str, machine: str) -> WorkerStatus:
        report = self._reports.get(name)
        if report is None:
            return WorkerStatus(name, machine, "idle" if machine else "starting")
        rate = self._rates.get(name, 0.0)
        return WorkerStatus(name, machine, "learning", report.at, report.rows, rate, report.memory)

    def restarted(self) -> None:
        """Everything goes back to the last cut."""
        self._status = replace(self._status, generation=self._status.generation + 1)
        self._reports, self._asked, self._keepers_unheard = {}, ([], []), 0.0
        self.crowded, self._forgot, self._warned_of = None, set(), set()  # the shards are others


_WAITING = ("pull", "weights", "ack", "sum", "rows")  # what a worker does that waits, as it tells


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
