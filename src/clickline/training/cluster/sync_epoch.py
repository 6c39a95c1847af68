"""An epoch in sync mode: a process group of workers takes every step together and is re-formed when workers join,
leave or are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from clickline.artifacts.checkpoint import Position
from clickline.errors import ClicklineError, ClusterError
from clickline.training.cluster.job import PausePoint, StateLost
from clickline.training.cluster.monitor import READ_SECONDS
from clickline.training.cluster.policy import Resize
from clickline.training.cluster.process_group import Rendezvous
from clickline.training.cluster.worker_group import WorkerFailed, WorkerGroup, WorkerHandle

_TICK_SECONDS = 0.2
_SILENT_SECONDS = 10.0  # on top of the group's own timeout
_ATTEMPTS = 5  # to form a group


class SyncEpoch:
    """Trains sync epochs with one process group at a time."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        # Of the process group, and its token: messages from earlier generations are refused.
        self._generation = 0
        self._failed_attempts = 0  # consecutive failures to form a group although no worker was lost
        self._leaving: list[WorkerHandle] = []
        self._have_network: set[str] = set()  # workers of the last group: only they have the trained network

    def begin(self) -> None:
        """Forget which workers have the network: the embedding servers were restarted."""
        self._have_network = set()

    def run(
        self,
        start: Position,
        step: int,
        load: Callable[[WorkerHandle], None],
        checkpoint_due: Callable[[int], bool],
        on_step: Callable[[int], None],
    ) -> Iterator[PausePoint]:
        """Train from the position of `step` to the end of its epoch; yields when a checkpoint is due."""
        group, position = self._group, start
        while True:
            team = group.await_workers()
            try:
                position, step = self._form_group(team, position, step, load)
            except WorkerFailed:
                group.find_losses()
                continue
            while True:
                results, pausing = self._run_group(team, step, checkpoint_due)
                if results is None:
                    group.find_losses()
                    break
                step = results[0].step
                on_step(step)
                if all(result.outcome == "done" for result in results):
                    return
                position = self._position_of(step, team)
                if pausing == "checkpoint":
                    yield PausePoint(position, None)
                elif pausing == "evict":
                    group.actors.evict_crowded()
                else:
                    for worker in self._leaving:
                        group.stop_worker(worker)
                    self._leaving = []
                    break

    def _form_group(
        self,
        team: Sequence[WorkerHandle],
        position: Position,
        step: int,
        load: Callable[[WorkerHandle], None],
    ) -> tuple[Position, int]:
        """Form one process group of all workers; the position and step it begins with. A batch that was only partly
        applied is repeated."""
        import ray

        group = self._group
        applied = self._fence(step)
        names = {worker.name for worker in team}
        if not self._have_network:
            load(team[0])
        elif self._have_network.isdisjoint(names):  # they joined too late to receive it from the others
            raise StateLost(
                "no worker is left that has the network, so training rolls back to the last checkpoint"
            )
        steps: list[int] = [group.worker_result(worker, worker.actor.step.remote()) for worker in team]
        source = max(range(len(team)), key=steps.__getitem__)  # has the newest network
        first_step = min(applied, steps[source])
        if first_step != step:
            position = self._position_of(first_step, team)
        peers = [worker.actor for worker in team]
        with closing(Rendezvous(ray.util.get_node_ip_address())) as rendezvous:  # type: ignore[no-untyped-call]
            joins = [
                worker.actor.join_group.remote(
                    self._generation, rank, peers, rendezvous.name, source, position
                )
                for rank, worker in enumerate(team)
            ]
            self._await_joined(team, joins, rendezvous)
        self._have_network = names
        ranks = ", ".join(worker.name for worker in team)
        group.monitor.log.write(f"generation {self._generation}: {ranks} from step {first_step}, {position}")
        return position, first_step

    def _await_joined(
        self, team: Sequence[WorkerHandle], joins: Sequence[Any], rendezvous: Rendezvous
    ) -> None:
        """Wait until all workers have joined. If one is lost, the rendezvous is closed, so that the others fail at
        once; each result is collected, so that the remaining workers are known."""
        group, problem, lost = self._group, "", False
        for worker, joined in zip(team, joins, strict=True):
            try:
                problem = (
                    group.worker_result(worker, joined, group.job.group_seconds + _SILENT_SECONDS) or problem
                )
            except WorkerFailed:
                lost = True
            if problem or lost:
                rendezvous.close()
        if not problem and not lost:
            self._failed_attempts = 0
            return
        self._failed_attempts = 0 if lost else self._failed_attempts + 1
        if self._failed_attempts == _ATTEMPTS:
            raise ClusterError(
                f"the workers {', '.join(worker.name for worker in team)} are alive, but failed to connect to each "
                f"other {_ATTEMPTS} times: {problem} Check that their machines "
                f"({', '.join(sorted({worker.host for worker in team}))}) can open connections to each other on any "
                "port; `train.sync: false` needs no such connections."
            )
        raise WorkerFailed("the group")

    def _fence(self, step: int) -> int:
        """Fence the previous owner of the stream; how many batches all embedding servers have applied."""
        from clickline.training.cluster.sync_worker import SYNC_STREAM

        self._generation += 1
        return self._group.actors.open_stream(SYNC_STREAM, self._generation, step)

    def _run_group(
        self, team: Sequence[WorkerHandle], step: int, checkpoint_due: Callable[[int], bool]
    ) -> tuple[list[Any] | None, str]:
        """Let the group train until it stops: the result of each worker, or None if the group broke, and the reason of
        the pause."""
        import ray

        group = self._group
        tasks = {worker.actor.run_sync.remote(step, self._generation): worker for worker in team}
        results: list[Any] = []
        patience = group.job.group_seconds + _SILENT_SECONDS
        pausing, broken_at, began = "", 0.0, time.monotonic()
        while tasks:
            ready, _ = ray.wait(list(tasks), timeout=_TICK_SECONDS)
            for task in ready:
                try:
                    results.append(group.worker_result(tasks.pop(task), task))
                except WorkerFailed:
                    results.append(None)
                if (results[-1] is None or results[-1].outcome == "broken") and not broken_at:
                    broken_at = self._break_group(tasks.values(), step)
            if broken_at:
                if time.monotonic() - broken_at > patience:
                    for worker in tasks.values():
                        group.lose_worker(worker, "partitioned", "it neither answered nor ended")
                    tasks = {}
            elif tasks:
                polled = group.monitor.poll(group, step)
                silent = [
                    *group.monitor.lose_silent_workers(group, patience),
                    *self._lose_stuck(tasks.values()),
                    *self._lose_starved(tasks.values(), began),
                ]
                if any(worker in team for worker in silent):
                    # Other workers may wait for its rows or for its part of a batch.
                    tasks = {task: worker for task, worker in tasks.items() if worker not in silent}
                    broken_at = self._break_group(tasks.values(), step)
                elif not pausing:
                    pausing = self._reason_to_pause(team, checkpoint_due(group.monitor.step(step)), polled)
                    if pausing:  # rank 0 passes the request on to the others
                        team[0].actor.pause.remote()
        if any(result is not None and result.outcome == "diverged" for result in results):
            raise ClicklineError("training has diverged: the loss is no longer finite.")
        return (None if broken_at else results), pausing

    def _lose_stuck(self, workers: Iterable[WorkerHandle]) -> list[WorkerHandle]:
        """Give up the workers that respond but are stuck while all others wait for them; returns them."""
        stuck = {worker.name: self._group.monitor.stuck_at(worker.name, READ_SECONDS) for worker in workers}
        lost = [worker for worker in workers if stuck[worker.name]]
        for worker in lost:
            self._group.lose_worker(worker, "straggling", f"it was stuck in phase {stuck[worker.name]}")
        return lost

    def _lose_starved(self, workers: Iterable[WorkerHandle], since: float) -> list[WorkerHandle]:
        """If all workers wait for each other, give up those whose rows did not arrive; returns them."""
        workers = list(workers)
        waiting = self._group.monitor.standstill([worker.name for worker in workers], since)
        lost = [worker for worker in workers if waiting.get(worker.name) == "rows"]
        for worker in lost:
            self._group.lose_worker(
                worker, "straggling", "rows that another worker read for it did not arrive"
            )
        if waiting and not lost:
            raise StateLost(
                "the embedding servers are alive, but do not answer the batch that all workers wait for, so training "
                "rolls back to the last checkpoint"
            )
        return lost

    def _break_group(self, others: Iterable[WorkerHandle], step: int) -> float:
        """The group has lost a worker: wake the ones that wait for it. Returns the current time."""
        broken = self._generation
        self._fence(step)  # wakes workers that wait for its part of a batch
        for worker in others:  # and workers that wait for its rows
            worker.actor.leave_group.remote(broken)
        return time.monotonic()

    def _reason_to_pause(self, team: Sequence[WorkerHandle], checkpoint_due: bool, polled: bool) -> str:
        """Why the group should pause; empty: no reason. Free capacity is checked only after a poll."""
        group = self._group
        if checkpoint_due:
            return "checkpoint"
        if not polled:
            return ""
        if group.monitor.crowded is not None:
            return "evict"
        group.admit_workers()
        group.handle_losses()  # workers that never started: otherwise they would be started again and again
        decision = group.decide()
        if isinstance(decision, Resize):
            group.resize(decision)
            self._leaving = list(group.workers.values())[decision.workers :]
        arrived = any(worker not in team for worker in group.started_workers())
        return "resize" if arrived or self._leaving else ""

    def _position_of(self, step: int, team: Sequence[WorkerHandle]) -> Position:
        """The position of a step that the workers took recently or would take next."""
        for worker in team:
            try:
                positions: dict[int, Position] = self._group.worker_result(
                    worker, worker.actor.positions.remote()
                )
            except WorkerFailed:
                continue
            if step in positions:
                return positions[step]
        raise StateLost(
            f"no worker is left that knows the position of step {step}, so training rolls back to the last checkpoint"
        )
