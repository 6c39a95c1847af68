"""The driver of a run: an epoch at a time, cuts, and what is done between epochs.

    driver.begin(…)                       shards with the rows of a checkpoint, or none
    for pause in driver.learn(…):         yields where nothing is under way and a cut is due
        driver.freeze(…)
    driver.score(…), driver.evict(…)      between epochs

What cannot be mended in place is raised as `Lost`: then everything goes back to the last cut, by `begin` again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import part_names
from clickline.artifacts.dataset import Dataset
from clickline.embedding import Eviction, SlotReport
from clickline.errors import ClusterError
from clickline.evaluation.binary_metrics import HourlyCounts
from clickline.progress import Progress
from clickline.records import LabelledRows
from clickline.storage.storage import Storage
from clickline.training.batches import Position
from clickline.training.cluster.async_epoch import Leasing
from clickline.training.cluster.embedding_server import ShardState, join_reports
from clickline.training.cluster.job import Job, Lost, Pause
from clickline.training.cluster.job_status import Figures
from clickline.training.cluster.monitor import KEEPER_SECONDS, Watch
from clickline.training.cluster.sync_epoch import Together
from clickline.training.cluster.work_units import units_of
from clickline.training.cluster.worker_group import WORK_SECONDS, WorkerGroup, Failed, WorkerHandle

_SCORE_SECONDS = 600.0
_LOOK_SECONDS = 1.0  # between two looks whether those that write are still there


class Driver:
    """Runs one training job on a cluster. There is one in a run."""

    def __init__(self, job: Job, progress: Progress, tell: Callable[[Figures], None]) -> None:
        self._job = job
        self._watch = Watch(job, progress, tell)
        self._crew = WorkerGroup(job, self._watch, progress)
        self._together = Together(self._crew)
        self._token = 1
        self._dense: Mapping[str, NDArray[Any]] = {}  # what it began with
        self._fresh = True  # and no worker has it yet
        self._scoring_with: tuple[int, tuple[str, ...]] | None = None
        self.step = 0

    def begin(self, restore: Sequence[Path], dense: Mapping[str, NDArray[Any]], step: int, rows: int) -> None:
        """Hold what a checkpoint holds; workers follow when there is something to do."""
        self._together.begin()
        self._crew.begin(restore, dense, step, rows)
        self._dense, self.step, self._fresh, self._scoring_with = dense, step, True, None

    def restarted(self, lost: Lost) -> None:
        """Everything goes back to the last cut. Raises ClusterError when that was done too often."""
        if not lost.decided:
            self._crew.count_restart(lost)
        self._watch.restarted()

    def close(self, state: Literal["done", "stopped", "failed"], message: str = "") -> None:
        """End everything that was started."""
        self._watch.write(state, message=message)
        self._watch.log.close()
        self._crew.end_roles()
        self._crew.close()

    def words(self) -> str:
        """The roles in one line."""
        return self._watch.words()

    # ── an epoch ───────────────────────────────────────────────────────────────────────────────

    def learn(
        self, start: Position, units: Mapping[str, Any] | None, cut_due: Callable[[int], bool]
    ) -> Iterator[Pause]:
        """Learn to the end of the epoch; yields at each pause where a cut is due. Raises Lost."""
        self._crew.await_workers(self._job.rules.min)
        yield from (
            self._learn_together(start, cut_due) if self._job.sync else self._lease(start, units, cut_due)
        )

    def _learn_together(self, start: Position, cut_due: Callable[[int], bool]) -> Iterator[Pause]:
        yield from self._together.learn(start, self.step, self._load, cut_due, self._moved)

    def _lease(
        self, start: Position, units: Mapping[str, Any] | None, cut_due: Callable[[int], bool]
    ) -> Iterator[Pause]:
        settings = self._job.batches
        dataset = Dataset.open(Storage(), self._job.dataset)
        all_units = units_of(dataset, settings["seed"], start.epoch, in_time=settings["in_time"])
        leasing = Leasing(self._crew, all_units, units, self._token)
        try:
            yield from leasing.learn(start, cut_due, self._moved, self.step)
        finally:
            self._token = leasing.leases.next_token

    def tell(self) -> None:
        """The figures as they are now."""
        self._watch.settle(self._crew, self.step)

    def _moved(self, step: int) -> None:
        self.step = step

    def _load(self, member: WorkerHandle) -> None:
        """The first worker of the first group gets what the run began with."""
        self._crew.ask(member, member.actor.load.remote(self._dense, self.step))
        self._fresh = False

    # ── cuts ───────────────────────────────────────────────────────────────────────────────────

    def dense_state(self) -> dict[str, NDArray[Any]]:
        """Network and optimizer as they are, while nothing is under way."""
        crew = self._crew
        if crew.network is not None:
            found: dict[str, NDArray[Any]] = crew.keepers([crew.network.state.remote()])[0]
            return found
        if self._fresh:
            return dict(self._dense)
        for member in crew.here():
            try:
                step, state = crew.ask(member, member.actor.state.remote())
            except Failed:
                continue
            if step == self.step:  # not one that came when the epoch was over
                return dict(state)
        crew.act_on_losses()
        raise Lost("no worker is left that has the network, so everything goes back to the last cut")

    def hours(self) -> list[HourlyCounts]:
        """How well rows were predicted before they were learned, since the last time; without those of lost workers."""
        counted = []
        for member in self._crew.here():
            try:
                counted.append(self._crew.ask(member, member.actor.hours.remote()))
            except Failed:
                continue
        return counted

    def freeze(self, folder: Path, share: float) -> dict[str, Any]:
        """Every shard cuts now and begins to write its part; for each part what will answer with its digest."""
        names = part_names(self._job.shards)
        shards = self._crew.embedding_servers
        begun = self._crew.keepers(
            [shard.freeze.remote(folder / name, share) for shard, name in zip(shards, names, strict=True)]
        )
        if not all(begun):
            raise ClusterError("a cut was asked for while a batch was under way. Please report this.")
        return {name: shard.written.remote() for shard, name in zip(shards, names, strict=True)}

    def written(self, parts: Mapping[str, Any]) -> dict[str, str]:
        """The digests of the parts, once all are on disk. Any thread may wait here."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        writing, shards = list(parts.values()), self._crew.embedding_servers
        until = time.monotonic() + WORK_SECONDS
        try:
            while ray.wait(writing, num_returns=len(writing), timeout=_LOOK_SECONDS)[1]:
                self._crew.check_cluster()
                ray.get([shard.state.remote() for shard in shards], timeout=KEEPER_SECONDS)
                if time.monotonic() > until:
                    raise Lost(f"a shard has not written its part within {WORK_SECONDS:,.0f} s")
            return dict(zip(parts, ray.get(writing), strict=True))
        except RayTaskError as error:  # the disk is full, most likely
            raise error.cause from None
        except RayError as error:
            raise Lost("a shard was lost while it wrote its part") from error

    def cut_done(self, step: int, seconds: float, stalled: float) -> None:
        self._watch.cut_done(step, seconds, stalled)

    # ── between epochs ─────────────────────────────────────────────────────────────────────────

    def states(self) -> list[ShardState]:
        states: list[ShardState] = self._crew.keepers([shard.state.remote() for shard in self._crew.embedding_servers])
        return states

    def slots(self) -> tuple[SlotReport, ...]:
        return join_reports([state.slots for state in self.states()])

    def decay(self, rate: float) -> None:
        self._crew.keepers([shard.decay.remote(rate) for shard in self._crew.embedding_servers], WORK_SECONDS)

    def evict(self, rule: Eviction, now_hour: int) -> tuple[SlotReport, ...]:
        shards = self._crew.embedding_servers
        gone = self._crew.keepers([shard.evict.remote(rule, now_hour) for shard in shards], WORK_SECONDS)
        return join_reports(gone)

    def score(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Click probabilities before calibration; the workers share the rows."""
        crew = self._crew
        while True:
            team = crew.await_workers()
            try:
                self._refresh(team)
                bounds = [rows.rows * rank // len(team) for rank in range(len(team) + 1)]
                asked = [
                    (member, member.actor.score.remote(rows.part(first, last)))
                    for member, first, last in zip(team, bounds, bounds[1:], strict=False)
                ]
                return np.concatenate([crew.ask(member, ref, _SCORE_SECONDS) for member, ref in asked])
            except Failed:
                crew.look_for_losses()  # those that are left score it again

    def _refresh(self, team: Sequence[WorkerHandle]) -> None:
        """Every worker scores with the network as it is now."""
        key = self.step, tuple(member.name for member in team)
        if key == self._scoring_with:
            return
        state = self.dense_state()
        for member in team:
            self._crew.ask(member, member.actor.load.remote(state, self.step))
        self._fresh, self._scoring_with = False, key
