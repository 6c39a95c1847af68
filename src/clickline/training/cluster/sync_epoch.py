"""An epoch in sync mode: groups of workers that step together, formed anew when members come, go or are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from clickline.errors import ClicklineError, ClusterError
from clickline.training.batches import Position
from clickline.training.cluster.job import Lost, Pause
from clickline.training.cluster.monitor import READ_SECONDS
from clickline.training.cluster.policy import Resize
from clickline.training.cluster.worker_group import WorkerGroup, Failed, WorkerHandle

_TICK_SECONDS = 0.2
_SILENT_SECONDS = 10.0  # beyond the group's own patience
_TRIES = 5  # to form a group


class Together:
    """The one group that a run has at a time."""

    def __init__(self, crew: WorkerGroup) -> None:
        self._crew = crew
        self._generation = 0  # of the group, and its token: what members of an earlier one send is refused
        self._in_vain = 0  # groups that were not formed, one after the other, with nobody lost
        self._leaving: list[WorkerHandle] = []
        self._with_network: set[str] = set()  # who was in the last group: only they have what was learned

    def begin(self) -> None:
        """There are new shards, and no worker has anything."""
        self._with_network = set()

    def learn(
        self,
        start: Position,
        step: int,
        load: Callable[[WorkerHandle], None],
        cut_due: Callable[[int], bool],
        moved: Callable[[int], None],
    ) -> Iterator[Pause]:
        """From a position, which is that of `step`, to the end of its epoch; yields where a cut is due."""
        crew, position = self._crew, start
        while True:
            team = crew.await_workers()
            try:
                position, step = self._form(team, position, step, load)
            except Failed:
                crew.look_for_losses()
                continue
            while True:
                ended, pausing = self._stretch(team, step, cut_due)
                if ended is None:
                    crew.look_for_losses()
                    break
                step = ended[0].step
                moved(step)
                if all(one.why == "done" for one in ended):
                    return
                position = self._position_of(step, team)
                if pausing == "cut":
                    yield Pause(position, None)
                elif pausing == "forget":
                    crew.make_room()
                else:
                    for member in self._leaving:
                        crew.dismiss(member)
                    self._leaving = []
                    break

    def _form(
        self, team: Sequence[WorkerHandle], position: Position, step: int, load: Callable[[WorkerHandle], None]
    ) -> tuple[Position, int]:
        """One group of all; the position and step it begins with. What was half done is done again."""
        crew = self._crew
        applied = [done for _, done in self._fence(step)]
        first = team[0]
        names = {member.name for member in team}
        if not self._with_network:
            load(first)
        elif self._with_network.isdisjoint(names):  # they came too late to learn it from the others
            raise Lost("no worker is left that has the network, so everything goes back to the last cut")
        steps: list[int] = [crew.ask(member, member.actor.step.remote()) for member in team]
        source = max(range(len(team)), key=steps.__getitem__)  # who has the newest network
        begin = min([*applied, steps[source]])
        if begin != step:
            position = self._position_of(begin, team)
        meeting = crew.ask(first, first.actor.meet.remote()) if len(team) > 1 else ""
        peers = [member.actor for member in team]
        joining = [
            member.actor.join.remote(self._generation, rank, peers, meeting, source, position)
            for rank, member in enumerate(team)
        ]
        self._await_joined(team, joining)
        self._with_network = names
        crew.watch.log.say(
            f"generation {self._generation}: {', '.join(member.name for member in team)} from step {begin}, {position}"
        )
        return position, begin

    def _await_joined(self, team: Sequence[WorkerHandle], joining: Sequence[Any]) -> None:
        """Until all have joined. When one is lost the others hear of it as soon, or wait in vain: they are all asked,
        so that those who are left are known."""
        crew, wrong, lost = self._crew, "", False
        for member, joined in zip(team, joining, strict=True):
            try:
                wrong = crew.ask(member, joined, crew.job.group_seconds + _SILENT_SECONDS) or wrong
            except Failed:
                lost = True
        if not wrong and not lost:
            self._in_vain = 0
            return
        self._in_vain = 0 if lost else self._in_vain + 1
        if self._in_vain == _TRIES:
            raise ClusterError(
                f"the workers {', '.join(member.name for member in team)} are all there, but did not find each other "
                f"{_TRIES} times: {wrong} Look whether their machines "
                f"({', '.join(sorted({member.machine for member in team}))}) can open connections to each other on any "
                "port; with `train.sync: false` they need none."
            )
        raise Failed("the group")

    def _fence(self, step: int) -> list[tuple[int, int]]:
        """Take the stream from whoever has it; how far each shard is."""
        from clickline.training.cluster.worker import SYNC_STREAM

        self._generation += 1
        shards = self._crew.embedding_servers
        return self._crew.keepers(
            [shard.open.remote(SYNC_STREAM, self._generation, step) for shard in shards]
        )

    def _stretch(
        self, team: Sequence[WorkerHandle], step: int, cut_due: Callable[[int], bool]
    ) -> tuple[list[Any] | None, str]:
        """Let the group learn until it ends: how it ended for each, and what it was paused for. None if it broke."""
        import ray

        crew = self._crew
        tasks = {member.actor.together.remote(step, self._generation): member for member in team}
        ended: list[Any] = []
        patience = crew.job.group_seconds + _SILENT_SECONDS
        pausing, broken_at, began = "", 0.0, time.monotonic()
        while tasks:
            ready, _ = ray.wait(list(tasks), timeout=_TICK_SECONDS)
            for task in ready:
                try:
                    ended.append(crew.ask(tasks.pop(task), task))
                except Failed:
                    ended.append(None)
                if (ended[-1] is None or ended[-1].why == "broken") and not broken_at:
                    broken_at = self._break_off(tasks.values(), step)
            if broken_at:
                if time.monotonic() - broken_at > patience:
                    for member in tasks.values():
                        crew.lose(member, "partitioned", "it neither answered nor ended")
                    tasks = {}
            elif tasks:
                looked = crew.watch.look(crew, step)
                silent = [
                    *crew.watch.lose_silent(crew, patience),
                    *self._lose_stuck(tasks.values()),
                    *self._lose_starved(tasks.values(), began),
                ]
                if any(member in team for member in silent):
                    # Others may wait for its rows, or for its part of a batch.
                    tasks = {task: member for task, member in tasks.items() if member not in silent}
                    broken_at = self._break_off(tasks.values(), step)
                elif not pausing:
                    pausing = self._reason_to_pause(team, cut_due(crew.watch.step(step)), looked)
                    if pausing:  # the others hear of it from the one
                        team[0].actor.pause.remote()
        if any(one is not None and one.why == "diverged" for one in ended):
            raise ClicklineError("training has diverged: the loss is not a number any more.")
        return (None if broken_at else ended), pausing

    def _lose_stuck(self, members: Iterable[WorkerHandle]) -> list[WorkerHandle]:
        """Give up those that answer, but hang at what all others wait for; who they were."""
        stuck = {member.name: self._crew.watch.stuck_at(member.name, READ_SECONDS) for member in members}
        lost = [member for member in members if stuck[member.name]]
        for member in lost:
            self._crew.lose(member, "straggling", f"it did nothing but {stuck[member.name]} for too long")
        return lost

    def _lose_starved(self, members: Iterable[WorkerHandle], since: float) -> list[WorkerHandle]:
        """When all wait for each other: give up those whose rows did not come; who they were."""
        members = list(members)
        waiting = self._crew.watch.standstill([member.name for member in members], since)
        lost = [member for member in members if waiting.get(member.name) == "rows"]
        for member in lost:
            self._crew.lose(member, "straggling", "rows that another worker has read for it did not arrive")
        if waiting and not lost:
            raise Lost(
                "the shards answer, but not to the batch that all workers wait for, so everything goes back to the "
                "last cut"
            )
        return lost

    def _break_off(self, others: Iterable[WorkerHandle], step: int) -> float:
        """The group has lost a member: wake those that wait for it. When that was."""
        broken = self._generation
        self._fence(step)  # a part that they wait for will not come
        for member in others:  # nor rows that nobody reads any more
            member.actor.leave.remote(broken)
        return time.monotonic()

    def _reason_to_pause(self, team: Sequence[WorkerHandle], cut_due: bool, looked: bool) -> str:
        """What the group should stop for; empty: nothing. Whether there is room is asked only now and then."""
        crew = self._crew
        if cut_due:
            return "cut"
        if not looked:
            return ""
        if crew.watch.crowded is not None:
            return "forget"
        crew.welcome()
        crew.act_on_losses()  # of those that did not come: else they would be started again and again
        decision = crew.decide()
        if isinstance(decision, Resize):
            crew.resize(decision)
            self._leaving = list(crew.members.values())[decision.workers :]
        come = any(member not in team for member in crew.here())
        return "resize" if come or self._leaving else ""

    def _position_of(self, step: int, team: Sequence[WorkerHandle]) -> Position:
        """Where a step is that the workers have done last, or would do next."""
        for member in team:
            try:
                places: dict[int, Position] = self._crew.ask(member, member.actor.places.remote())
            except Failed:
                continue
            if step in places:
                return places[step]
        raise Lost(
            f"no worker is left that knows where step {step} is, so everything goes back to the last cut"
        )
