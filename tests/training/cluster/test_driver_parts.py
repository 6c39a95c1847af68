"""What the driver's parts do about roles that are slow, silent or crowded. Ray and the roles are doubles: each moment
here is one that real processes hit once in a thousand runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")

from clickline.distributed import session as session_module  # noqa: E402
from clickline.distributed.session import Session  # noqa: E402
from clickline.embedding import Eviction  # noqa: E402
from clickline.errors import ClusterError  # noqa: E402
from clickline.progress import Progress  # noqa: E402
from clickline.training.batches import Position  # noqa: E402
from clickline.training.cluster import driver as driver_module  # noqa: E402
from clickline.training.cluster import monitor as watch_module  # noqa: E402
from clickline.training.cluster import worker_group as crew_module  # noqa: E402
from clickline.training.cluster.async_epoch import Leasing  # noqa: E402
from clickline.training.cluster.driver import Driver  # noqa: E402
from clickline.training.cluster.embedding_server import ShardState  # noqa: E402
from clickline.training.cluster.job import Job, Lost  # noqa: E402
from clickline.training.cluster.monitor import Watch  # noqa: E402
from clickline.training.cluster.policy import Keep, Rules  # noqa: E402
from clickline.training.cluster.role_log import RoleLog  # noqa: E402
from clickline.training.cluster.sync_epoch import Together  # noqa: E402
from clickline.training.cluster.work_units import Unit  # noqa: E402
from clickline.training.cluster.worker import Ended, Report  # noqa: E402
from clickline.training.cluster.worker_group import WorkerGroup, Failed, WorkerHandle  # noqa: E402
from clickline.training.cluster_trainer import ClusterTrainer  # noqa: E402

LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def logs_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[RoleLog] = []

    def open_log(path: Path) -> RoleLog:
        made.append(RoleLog(path))
        return made[-1]

    monkeypatch.setattr(watch_module, "RoleLog", open_log)
    yield
    for log in made:
        log.close()


class Said(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def job(folder: Path, **changes: Any) -> Job:
    nothing: Any = None
    known: dict[str, Any] = {
        **{
            "home": folder,
            "run": folder / "run",
            "address": None,
            "dataset": "",
            "batches": {},
            "plan": nothing,
        },
        **{"tables": {}, "model_file": None, "sync": True, "staleness": 8, "staleness_rate": False},
        **{"rules": Rules(max=4), "shards": 2, "worker_cpus": 1.0, "worker_memory": None, "shard_cpus": 0.0},
        **{"shard_memory": LIMIT, "eviction": Eviction(0.5, None, 1.0, 0.1), "total_rows": 1000},
    }
    return Job(**known | changes)


def watch(folder: Path, said: Progress | None = None, **changes: Any) -> Watch:
    (folder / "run" / "cluster").mkdir(parents=True, exist_ok=True)
    return Watch(job(folder, **changes), said or Progress(), lambda figures: None)


def crew(folder: Path) -> WorkerGroup:
    made = WorkerGroup(job(folder), watch(folder), Progress())
    room = {"cpus": lambda: 4.0, "free_cpus": lambda: 0.0, "has_place": lambda actor: actor.placed}
    made._session = cast("Any", SimpleNamespace(lost=lambda: False, **room))
    return made


def state(memory: float) -> ShardState:
    return ShardState(10, int(memory * LIMIT), "here", 5, 100, ())


class Role:
    """An actor whose methods answer with what the functions give, at once; what was called is noted."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.called: list[str] = []
        self._methods = methods
        self.placed = True

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.called.append(name)
            return self._methods.get(name, lambda *_: None)(*arguments)

        return SimpleNamespace(remote=remote)


def silent(*_: Any, **__: Any) -> Any:
    raise ray.exceptions.GetTimeoutError


# ── memory ─────────────────────────────────────────────────────────────────────────────────────


def test_memory_is_told_once_for_each_shard_however_often_its_figures_change(tmp_path: Path) -> None:
    said = Said()
    seen = watch(tmp_path, said, eviction=None)
    for step in range(5):
        seen.shards = (state(0.86 + step / 100), state(0.87 + step / 100))
        seen._watch_memory(LIMIT)
    assert [line.split(" uses ")[0] for line in said.lines] == ["cluster: shard 0", "cluster: shard 1"]


def test_a_shard_that_has_forgotten_is_judged_by_what_it_holds_now(tmp_path: Path) -> None:
    seen = watch(tmp_path)
    seen.shards = (state(0.97), state(0.1))
    seen._watch_memory(LIMIT)
    assert seen.crowded == 0
    seen.forgot(0, (state(0.6), state(0.1)))
    seen._watch_memory(LIMIT)
    assert seen.crowded is None
    seen.shards = (state(0.96), state(0.1))
    with pytest.raises(ClusterError, match="shard 0 uses"):  # it may not forget twice
        seen._watch_memory(LIMIT)
    seen.restarted()
    seen._watch_memory(LIMIT)
    assert seen.crowded == 0, "another shard, with the rows of the last cut: it has forgotten nothing"


class AsyncCrew:
    """One worker, which comes to the end of its unit if no shard is crowded; else it learns until it is paused."""

    def __init__(self) -> None:
        self.job = SimpleNamespace(group_seconds=30.0)
        log = SimpleNamespace(say=lambda line: None)
        self.watch = SimpleNamespace(
            crowded=None,
            log=log,
            look=lambda *_: True,
            lose_silent=lambda *_: [],
            stuck_at=lambda _: "",
            standstill=lambda *_: {},
            step=lambda known: known,
        )
        self.network = Role(step=lambda: 7, open=lambda *_: 0)
        self.shards = [Role(open=lambda *_: (0, 0))]
        self.member = WorkerHandle("worker-0", Role(unit=lambda lease: lease), None, 0.0, "here")
        self.members = {"worker-0": self.member}
        self.dealt = Leasing(cast("Any", self), [Unit(0, number, (), 10) for number in range(3)], None, 1)
        self.under_way: list[int] = []  # units, whenever a shard forgot

    def wait(self, tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        ends = self.watch.crowded is None or self.member.actor.called[-1] == "pause"
        return (tasks, []) if ends else ([], tasks)

    def ask(self, member: WorkerHandle, task: Any) -> Ended:
        return Ended("done", 3) if self.watch.crowded is None else Ended("paused", 1)

    def here(self) -> list[WorkerHandle]:
        return [self.member]

    await_workers = here

    def keepers(self, answers: list[Any]) -> list[Any]:
        return answers

    def make_room(self) -> None:
        self.under_way.append(len(self.dealt._tasks))
        self.watch.crowded = None

    def dismiss(self, member: WorkerHandle) -> None:
        del self.members[member.name]

    def act_on_losses(self) -> None: ...

    def decide(self) -> Keep:
        return Keep()


@pytest.mark.timeout(20)
def test_a_crowded_shard_forgets_in_async_mode_too_and_not_in_the_middle_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = AsyncCrew()
    monkeypatch.setattr(ray, "wait", made.wait)
    made.watch.crowded = 0
    pauses = list(made.dealt.learn(Position(), lambda _: False, lambda _: None, 0))
    assert (made.under_way, pauses) == ([0], [])
    assert made.dealt.leases.all_done


@pytest.mark.timeout(20)
@pytest.mark.parametrize("cut", [False, True])
def test_who_is_still_at_a_unit_of_another_when_the_epoch_ends_is_let_go(
    monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """It would never be idle again, and score while it computes. If a cut waited for it, the others go on: else they
    would stop after each batch of the next epoch."""
    made = AsyncCrew()
    made.job.group_seconds = 0.1
    late = WorkerHandle("worker-9", Role(), None, 0.0, "here", lease="one that was fenced")
    made.members["worker-9"] = late
    made.dealt._tasks["its task"] = late
    called = made.member.actor.called

    def wait(tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        waits = cut and made.dealt.leases.done == 2 and "pause" not in called
        return [] if waits else [task for task in tasks if task != "its task"], ["its task"]

    monkeypatch.setattr(ray, "wait", wait)

    def cut_due(_: int) -> bool:
        return cut and len(made.dealt._tasks) == 2

    list(made.dealt.learn(Position(), cut_due, lambda _: None, 0))
    assert list(made.members) == ["worker-0"]
    assert [name for name in called if name in ("pause", "resume")] == (["pause", "resume"] if cut else [])


def test_a_unit_that_was_left_in_a_batch_goes_before_the_one_a_worker_has_ready() -> None:
    made = AsyncCrew()
    made.dealt._torn, made.member.ready = {1}, 2
    made.dealt._grant_all()
    assert [lease.unit.number for lease in made.dealt.leases.open] == [1]


# ── workers that are slow, or silent ───────────────────────────────────────────────────────────


def report(rows: int, doing: str) -> Report:
    return Report("unit 0, batch 0", 0, rows, 0, None, None, doing, {})


@pytest.mark.parametrize(
    ("rows", "doing", "seconds", "stuck"),
    [
        (0, "ask", 60.0, ""),  # it compiles
        (0, "ask", 200.0, "ask"),
        (0, "read", 60.0, "read"),  # nothing is compiled there
        (512, "ask", 60.0, "ask"),
        (512, "ask", 20.0, ""),
        (512, "pull", 200.0, ""),  # it waits for others
    ],
)
def test_who_has_learned_nothing_yet_has_time_to_compile(
    tmp_path: Path, rows: int, doing: str, seconds: float, stuck: str
) -> None:
    seen = watch(tmp_path)
    seen._reports["worker-0"] = report(rows, doing)
    seen._moved["worker-0"] = time.monotonic() - seconds
    assert seen.stuck_at("worker-0") == stuck


@pytest.mark.parametrize(
    ("placed", "waited", "stays", "lost"),
    [
        (True, 100, True, 0),
        (False, 100, True, 0),
        (False, 200, False, 0),
        (True, 200, True, 0),
        (True, 400, False, 1),
    ],
)
def test_a_worker_that_has_a_place_and_never_comes_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: bool, waited: int, stays: bool, lost: int
) -> None:
    """One that finds no place is let go, for there was no room after all; what fails must end somewhere."""
    monkeypatch.setattr(ray, "wait", lambda tasks, **_: ([], tasks))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    made, actor = crew(tmp_path), Role()
    actor.placed = placed
    made.members["worker-0"] = WorkerHandle("worker-0", actor, None, time.monotonic() - waited)
    made.welcome()
    assert ("worker-0" in made.members, len(made.losses)) == (stays, lost)


class SyncCrew:
    """Two workers, of which the second has stopped while the first waits for what it reads."""

    def __init__(self) -> None:
        self.job = SimpleNamespace(group_seconds=30.0)
        self.shards = [Role(open=lambda *_: (0, 0))]
        self.team = [
            WorkerHandle(f"worker-{n}", Role(together=lambda *_, n=n: n), None, 0.0, "here") for n in range(2)
        ]
        self.watch = SimpleNamespace(
            look=lambda *_: True,
            stuck_at=lambda *_: "",
            standstill=lambda *_: {},
            lose_silent=lambda *_: self.team[1:],
        )
        self.acted: list[str] = []

    def keepers(self, answers: list[Any]) -> list[Any]:
        return answers

    def ask(self, member: WorkerHandle, task: int) -> Ended:
        return Ended("broken", 3)


@pytest.mark.timeout(20)
def test_a_silent_member_breaks_a_group_that_waits_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SyncCrew()
    first = made.team[0].actor

    def wait(tasks: list[int], **_: Any) -> tuple[list[int], list[int]]:
        return ([0], tasks[1:]) if "leave" in first.called else ([], tasks)

    monkeypatch.setattr(ray, "wait", wait)
    ended, _ = Together(cast("Any", made))._stretch(made.team, 3, lambda _: False)
    assert ended is None
    assert made.shards[0].called == ["open"], "its part of a batch is refused from now on"


@pytest.mark.parametrize(
    ("doing", "moved", "began", "waits"),
    [
        (("rows", "pull"), (200.0, 190.0), 300.0, True),
        (("rows", "pull"), (200.0, 20.0), 300.0, False),  # one has moved
        (("rows", "read"), (200.0, 190.0), 300.0, False),  # one reads what the other waits for
        (("rows", "pull"), (900.0, 900.0), 20.0, False),  # they did nothing before this
    ],
)
def test_workers_that_all_wait_are_noticed(
    tmp_path: Path,
    doing: tuple[str, str],
    moved: tuple[float, float],
    began: float,
    waits: bool,
) -> None:
    seen, now, names = watch(tmp_path), time.monotonic(), ["worker-0", "worker-1"]
    for name, what, seconds in zip(names, doing, moved, strict=True):
        seen._reports[name], seen._moved[name] = report(512, what), now - seconds
    assert seen.standstill(names, now - began) == (dict(zip(names, doing, strict=True)) if waits else {})
    seen._reports.pop("worker-1")
    assert seen.standstill(names, now - began) == {}, "nobody knows what it does"


def starved(doing: dict[str, str]) -> tuple[Together, list[WorkerHandle], list[str]]:
    """A group whose members wait for this, for too long; who of them is given up."""
    lost: list[str] = []
    made = SimpleNamespace(
        watch=SimpleNamespace(standstill=lambda *_: doing),
        lose=lambda member, why, words: lost.append(member.name),
    )
    return Together(cast("Any", made)), [WorkerHandle(name, Role(), None, 0.0, "here") for name in doing], lost


def test_worker_whose_rows_do_not_come_is_given_up_when_all_wait() -> None:
    group, team, lost = starved({"worker-0": "pull", "worker-1": "rows"})
    assert group._lose_starved(team, 0.0) == team[1:]
    assert lost == ["worker-1"]


def test_batch_that_no_shard_answers_sends_everything_back_to_the_last_cut() -> None:
    group, team, lost = starved({"worker-0": "pull", "worker-1": "ack"})
    with pytest.raises(Lost, match="back to the last cut"):
        group._lose_starved(team, 0.0)
    assert lost == []


@pytest.mark.timeout(20)
def test_async_workers_that_all_wait_send_everything_back_to_the_last_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = AsyncCrew()
    made.watch.standstill = lambda workers, since: dict.fromkeys(workers, "weights")
    monkeypatch.setattr(ray, "wait", lambda tasks, **_: ([], tasks))
    with pytest.raises(Lost, match="back to the last cut"):
        list(made.dealt.learn(Position(), lambda _: False, lambda _: None, 0))


def test_who_did_not_come_is_a_loss_before_another_one_is_started() -> None:
    done: list[str] = []
    made = SimpleNamespace(
        watch=SimpleNamespace(crowded=None),
        welcome=lambda: done.append("welcome"),
        act_on_losses=lambda: done.append("losses"),
        decide=lambda: done.append("decide") or Keep(),
        here=list,
    )
    assert Together(cast("Any", made))._reason_to_pause([], False, True) == ""
    assert done == ["welcome", "losses", "decide"]


def test_who_joins_in_vain_is_not_lost_and_all_are_asked() -> None:
    """A member that dies leaves the others with an error of their own, which says nothing against them."""
    asked: list[str] = []

    def ask(member: WorkerHandle, words: str, seconds: float) -> str:
        asked.append(member.name)
        if words == "dead":
            raise Failed(member.name)
        return words

    made = SimpleNamespace(job=SimpleNamespace(group_seconds=1.0), ask=ask)
    team = [WorkerHandle(f"worker-{n}", None, None, 0.0, f"host-{n}") for n in range(3)]
    together = Together(cast("Any", made))
    for _ in range(20):  # what is lost is the policy's
        with pytest.raises(Failed):
            together._await_joined(team, ["lost another one", "dead", "lost another one"])
    assert asked[:3] == ["worker-0", "worker-1", "worker-2"]
    for _ in range(4):
        with pytest.raises(Failed):
            together._await_joined(team, ["", "lost another one.", ""])
    together._await_joined(team, ["", "", ""])
    for _ in range(4):
        with pytest.raises(Failed):
            together._await_joined(team, ["lost another one.", "", ""])
    with pytest.raises(
        ClusterError, match=r"did not find each other 5 times: lost another one\. .*host-0, host-1"
    ):
        together._await_joined(team, ["lost another one.", "", ""])


# ── waiting ends ───────────────────────────────────────────────────────────────────────────────


def test_a_long_wait_ends_when_the_cluster_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", silent)
    made = crew(tmp_path)
    made._session = cast("Any", SimpleNamespace(lost=lambda: True))
    for wait in (made.keepers, lambda answers, seconds: made.ask(cast("Any", None), answers, seconds)):
        with pytest.raises(Lost, match="head or this machine's node is gone"):
            wait([None], crew_module.WORK_SECONDS)


def test_an_answer_that_does_not_come_is_waited_for_as_long_as_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "_LOOK_SECONDS", 0.05)
    waits: list[float] = []

    def get(answers: Any, *, timeout: float) -> Any:
        waits.append(timeout)
        time.sleep(timeout)
        return silent()

    monkeypatch.setattr(ray, "get", get)
    made, began = crew(tmp_path), time.monotonic()
    with pytest.raises(ray.exceptions.GetTimeoutError):
        made._get(None, 0.2)
    assert time.monotonic() - began >= 0.2
    assert sum(waits) < 0.21
    assert max(waits) <= 0.05


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        ("shard", "a shard was lost while it wrote its part"),
        ("cluster", "everything goes back to the last cut"),
        ("disk", "a shard has not written its part within"),
    ],
)
def test_a_cut_is_not_waited_for_when_who_writes_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, reason: str
) -> None:
    """Else the checkpoint's thread would wait for ever, and everything that has to go back to the last cut with it."""
    (tmp_path / "run" / "cluster").mkdir(parents=True)
    monkeypatch.setattr(ray, "wait", lambda parts, **_: ([], parts))
    if gone == "disk":  # the shard answers, and its writer hangs
        monkeypatch.setattr(driver_module, "WORK_SECONDS", 0.0)

    def get(answers: Any, *, timeout: float | None = None) -> Any:
        assert timeout is not None, "this would never end"
        return silent() if gone == "shard" else answers

    monkeypatch.setattr(ray, "get", get)
    driver = Driver(job(tmp_path), Progress(), lambda figures: None)
    driver._crew.embedding_servers = [Role()]
    driver._crew._session = cast("Any", SimpleNamespace(lost=lambda: gone == "cluster"))
    with pytest.raises(Lost, match=reason):
        driver.written({"tables-00-of-01.bin": object()})


@pytest.mark.timeout(20)
def test_a_long_restore_goes_on_when_the_head_once_does_not_tell_of_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def wait(tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += 100.0
        made.embedding_servers[0].placed = now != 800.0
        return (tasks, []) if now > 1500 else ([], tasks)

    monkeypatch.setattr(crew_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda answers, **_: answers)
    made = crew(tmp_path)
    made.embedding_servers = [Role(state=lambda: state(0.5)), Role(state=lambda: state(0.5))]
    made._await_keepers(2000.0)
    assert made.watch.shards == (state(0.5), state(0.5))


@pytest.mark.timeout(20)
def test_shards_that_find_no_place_are_waited_for_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def wait(tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += 100.0
        return [], tasks

    monkeypatch.setattr(crew_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda answers, **_: answers)
    made = crew(tmp_path)
    made.embedding_servers = [Role(), Role()]
    made.embedding_servers[1].placed = False
    with pytest.raises(ClusterError, match=r"1 of 2 shards found no place.*Waited 700 s"):
        made._await_keepers(10.0)


# ── room ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cpus", "memory", "fit"),
    [(1.0, None, 4), (2.0, None, 1), (4.0, None, 0), (0.5, None, 8), (1.0, 4, 3), (1.0, 100, 0)],
)
def test_room_is_what_fits_on_single_nodes(
    monkeypatch: pytest.MonkeyPatch, cpus: float, memory: int | None, fit: int
) -> None:
    """Else workers are asked for again and again that never find a place."""
    free = [{"CPU": 1.0, "memory": 4.0}, {"CPU": 3.0, "memory": 9.0}, {"memory": 90.0}]
    batch = [SimpleNamespace(resources_available=node) for node in free]
    reply = SimpleNamespace(resource_usage_data=SimpleNamespace(batch=batch))
    head = SimpleNamespace(get_all_resource_usage=lambda timeout: reply)
    monkeypatch.setattr(session_module, "_head", lambda: head)
    assert Session.__new__(Session).room_for(cpus, memory) == fit


@pytest.mark.timeout(20)
def test_cluster_that_never_has_a_cpu_is_not_waited_for_without_end(tmp_path: Path) -> None:
    opened = cast("Any", SimpleNamespace(address="10.0.0.1:6379", cpus=lambda: 0.0, lost=lambda: False))
    with pytest.raises(ClusterError, match=r"10\.0\.0\.1:6379 has no CPUs\. Waited 0 s"):
        Session.await_cpus(opened, Progress(), 0.0)


def test_checkpoint_that_a_lost_shard_did_not_write_is_told_once() -> None:
    said, writing = Said(), Future[Any]()
    writing.set_exception(Lost("a shard was lost while it wrote its part"))
    trainer: Any = object.__new__(ClusterTrainer)
    trainer._progress, trainer._writing, trainer._cut_step, trainer._cut_at = said, writing, 40, float("inf")
    trainer._settings = SimpleNamespace(checkpoint_steps=None, checkpoint_every=60.0)
    assert [trainer._cut_due(41), trainer._cut_due(42)] == [False, False]
    [line] = said.lines
    assert line.startswith(
        "the checkpoint of step 40 was not written: a shard was lost while it wrote its part."
    )
    assert "everything goes back" not in line


@pytest.mark.parametrize(("steps", "every"), [(None, 60.0), (10, 1e9)], ids=["by time", "by steps"])
def test_after_a_checkpoint_that_took_too_long_the_next_comes_at_its_time(
    steps: int | None, every: float
) -> None:
    writing = Future[Any]()
    writing.set_exception(Lost("a shard has not written its part within 3,600 s"))
    trainer: Any = object.__new__(ClusterTrainer)
    trainer._progress, trainer._writing, trainer._cut_step = Said(), writing, 40
    trainer._cut_at = time.monotonic() - 3600.0
    trainer._settings = SimpleNamespace(checkpoint_steps=steps, checkpoint_every=every)
    assert [trainer._cut_due(900), trainer._cut_due(901)] == [False, False]
    assert trainer._cut_due(910) is (steps is not None)
