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
from clickline.distributed.session import RaySession  # noqa: E402
from clickline.embedding import Eviction  # noqa: E402
from clickline.errors import ClusterError  # noqa: E402
from clickline.progress import Progress  # noqa: E402
from clickline.training.batches import Position  # noqa: E402
from clickline.training.cluster import driver as driver_module  # noqa: E402
from clickline.training.cluster import monitor as monitor_module  # noqa: E402
from clickline.training.cluster import worker_group as group_module  # noqa: E402
from clickline.training.cluster.async_epoch import AsyncEpoch  # noqa: E402
from clickline.training.cluster.driver import Driver  # noqa: E402
from clickline.training.cluster.embedding_server import EmbeddingServerState  # noqa: E402
from clickline.training.cluster.job import StateLost, TrainingJob  # noqa: E402
from clickline.training.cluster.monitor import Monitor  # noqa: E402
from clickline.training.cluster.policy import Keep, PolicyRules  # noqa: E402
from clickline.training.cluster.role_log import RoleLog  # noqa: E402
from clickline.training.cluster.sync_epoch import SyncEpoch  # noqa: E402
from clickline.training.cluster.work_units import WorkUnit  # noqa: E402
from clickline.training.cluster.worker import WorkerReport, WorkResult  # noqa: E402
from clickline.training.cluster.worker_group import WorkerFailed, WorkerGroup, WorkerHandle  # noqa: E402
from clickline.training.cluster_trainer import ClusterTrainer  # noqa: E402

LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def logs_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[RoleLog] = []

    def open_log(path: Path) -> RoleLog:
        made.append(RoleLog(path))
        return made[-1]

    monkeypatch.setattr(monitor_module, "RoleLog", open_log)
    yield
    for log in made:
        log.close()


class Said(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


def job(folder: Path, **changes: Any) -> TrainingJob:
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
        **{"tables": {}, "model_file": None, "sync": True, "staleness": 8, "scale_lr_by_staleness": False},
        **{
            "rules": PolicyRules(max=4),
            "shards": 2,
            "worker_cpus": 1.0,
            "worker_memory": None,
            "shard_cpus": 0.0,
        },
        **{"shard_memory": LIMIT, "eviction": Eviction(0.5, None, 1.0, 0.1), "total_rows": 1000},
    }
    return TrainingJob(**known | changes)


def monitor(folder: Path, said: Progress | None = None, **changes: Any) -> Monitor:
    (folder / "run" / "cluster").mkdir(parents=True, exist_ok=True)
    return Monitor(job(folder, **changes), said or Progress(), lambda figures: None)


def worker_group(folder: Path) -> WorkerGroup:
    made = WorkerGroup(job(folder), monitor(folder), Progress())
    room = {"cpus": lambda: 4.0, "free_cpus": lambda: 0.0, "has_place": lambda actor: actor.placed}
    made._session = cast("Any", SimpleNamespace(lost=lambda: False, **room))
    return made


def state(memory: float) -> EmbeddingServerState:
    return EmbeddingServerState(10, int(memory * LIMIT), "here", 5, 100, ())


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
    seen = monitor(tmp_path, said, eviction=None)
    for step in range(5):
        seen.shards = (state(0.86 + step / 100), state(0.87 + step / 100))
        seen._check_memory(LIMIT)
    assert [line.split(" uses ")[0] for line in said.lines] == ["cluster: shard 0", "cluster: shard 1"]


def test_a_shard_that_has_forgotten_is_judged_by_what_it_holds_now(tmp_path: Path) -> None:
    seen = monitor(tmp_path)
    seen.shards = (state(0.97), state(0.1))
    seen._check_memory(LIMIT)
    assert seen.crowded == 0
    seen.shard_evicted(0, (state(0.6), state(0.1)))
    seen._check_memory(LIMIT)
    assert seen.crowded is None
    seen.shards = (state(0.96), state(0.1))
    with pytest.raises(ClusterError, match="shard 0 uses"):  # it may not forget twice
        seen._check_memory(LIMIT)
    seen.restarted()
    seen._check_memory(LIMIT)
    assert seen.crowded == 0, "another shard, with the rows of the last cut: it has forgotten nothing"


class AsyncGroup:
    """One worker, which comes to the end of its unit if no shard is crowded; else it learns until it is paused."""

    def __init__(self) -> None:
        self.job = SimpleNamespace(group_seconds=30.0)
        log = SimpleNamespace(write=lambda line: None)
        self.monitor = SimpleNamespace(
            crowded=None,
            log=log,
            poll=lambda *_: True,
            lose_silent_workers=lambda *_: [],
            stuck_at=lambda _: "",
            standstill=lambda *_: {},
            step=lambda known: known,
        )
        self.dense_server = Role(step=lambda: 7, open_stream=lambda *_: 0)
        self.embedding_servers = [Role(open_stream=lambda *_: (0, 0))]
        self.worker = WorkerHandle("worker-0", Role(run_unit=lambda lease: lease), None, 0.0, "here")
        self.workers = {"worker-0": self.worker}
        self.epoch = AsyncEpoch(
            cast("Any", self), [WorkUnit(0, number, (), 10) for number in range(3)], None, 1
        )
        self.under_way: list[int] = []  # units, whenever a shard forgot

    def wait(self, tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        ends = self.monitor.crowded is None or self.worker.actor.called[-1] == "pause"
        return (tasks, []) if ends else ([], tasks)

    def worker_result(self, worker: WorkerHandle, task: Any) -> WorkResult:
        return WorkResult("done", 3) if self.monitor.crowded is None else WorkResult("paused", 1)

    def started_workers(self) -> list[WorkerHandle]:
        return [self.worker]

    await_workers = started_workers

    def actor_results(self, answers: list[Any]) -> list[Any]:
        return answers

    def evict_crowded(self) -> None:
        self.under_way.append(len(self.epoch._tasks))
        self.monitor.crowded = None

    def stop_worker(self, worker: WorkerHandle) -> None:
        del self.workers[worker.name]

    def handle_losses(self) -> None: ...

    def decide(self) -> Keep:
        return Keep()


@pytest.mark.timeout(20)
def test_a_crowded_shard_forgets_in_async_mode_too_and_not_in_the_middle_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = AsyncGroup()
    monkeypatch.setattr(ray, "wait", made.wait)
    made.monitor.crowded = 0
    pauses = list(made.epoch.run(Position(), lambda _: False, lambda _: None, 0))
    assert (made.under_way, pauses) == ([0], [])
    assert made.epoch.leases.all_done


@pytest.mark.timeout(20)
@pytest.mark.parametrize("cut", [False, True])
def test_who_is_still_at_a_unit_of_another_when_the_epoch_ends_is_let_go(
    monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """It would never be idle again, and score while it computes. If a cut waited for it, the others go on: else they
    would stop after each batch of the next epoch."""
    made = AsyncGroup()
    made.job.group_seconds = 0.1
    late = WorkerHandle("worker-9", Role(), None, 0.0, "here", lease="one that was fenced")
    made.workers["worker-9"] = late
    made.epoch._tasks["its task"] = late
    called = made.worker.actor.called

    def wait(tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        waits = cut and made.epoch.leases.done == 2 and "pause" not in called
        return [] if waits else [task for task in tasks if task != "its task"], ["its task"]

    monkeypatch.setattr(ray, "wait", wait)

    def checkpoint_due(_: int) -> bool:
        return cut and len(made.epoch._tasks) == 2

    list(made.epoch.run(Position(), checkpoint_due, lambda _: None, 0))
    assert list(made.workers) == ["worker-0"]
    assert [name for name in called if name in ("pause", "resume")] == (["pause", "resume"] if cut else [])


def test_a_unit_that_was_left_in_a_batch_goes_before_the_one_a_worker_has_ready() -> None:
    made = AsyncGroup()
    made.epoch._partial, made.worker.ready = {1}, 2
    made.epoch._grant_all()
    assert [lease.unit.number for lease in made.epoch.leases.open] == [1]


# ── workers that are slow, or silent ───────────────────────────────────────────────────────────


def report(rows: int, doing: str) -> WorkerReport:
    return WorkerReport("unit 0, batch 0", 0, rows, 0, None, None, doing, {})


@pytest.mark.parametrize(
    ("rows", "doing", "seconds", "stuck"),
    [
        (0, "request", 60.0, ""),  # it compiles
        (0, "request", 200.0, "request"),
        (0, "read", 60.0, "read"),  # nothing is compiled there
        (512, "request", 60.0, "request"),
        (512, "request", 20.0, ""),
        (512, "pull", 200.0, ""),  # it waits for others
    ],
)
def test_who_has_learned_nothing_yet_has_time_to_compile(
    tmp_path: Path, rows: int, doing: str, seconds: float, stuck: str
) -> None:
    seen = monitor(tmp_path)
    seen._reports["worker-0"] = report(rows, doing)
    seen._progressed_at["worker-0"] = time.monotonic() - seconds
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
    made, actor = worker_group(tmp_path), Role()
    actor.placed = placed
    made.workers["worker-0"] = WorkerHandle("worker-0", actor, None, time.monotonic() - waited)
    made.admit_workers()
    assert ("worker-0" in made.workers, len(made.losses)) == (stays, lost)


class SyncGroup:
    """Two workers, of which the second has stopped while the first waits for what it reads."""

    def __init__(self) -> None:
        self.job = SimpleNamespace(group_seconds=30.0)
        self.embedding_servers = [Role(open_stream=lambda *_: (0, 0))]
        self.team = [
            WorkerHandle(f"worker-{n}", Role(run_sync=lambda *_, n=n: n), None, 0.0, "here") for n in range(2)
        ]
        self.monitor = SimpleNamespace(
            poll=lambda *_: True,
            stuck_at=lambda *_: "",
            standstill=lambda *_: {},
            lose_silent_workers=lambda *_: self.team[1:],
        )
        self.acted: list[str] = []

    def actor_results(self, answers: list[Any]) -> list[Any]:
        return answers

    def worker_result(self, worker: WorkerHandle, task: int) -> WorkResult:
        return WorkResult("broken", 3)


@pytest.mark.timeout(20)
def test_a_silent_member_breaks_a_group_that_waits_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SyncGroup()
    first = made.team[0].actor

    def wait(tasks: list[int], **_: Any) -> tuple[list[int], list[int]]:
        return ([0], tasks[1:]) if "leave_group" in first.called else ([], tasks)

    monkeypatch.setattr(ray, "wait", wait)
    ended, _ = SyncEpoch(cast("Any", made))._run_group(made.team, 3, lambda _: False)
    assert ended is None
    assert made.embedding_servers[0].called == ["open_stream"], "its part of a batch is refused from now on"


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
    seen, now, names = monitor(tmp_path), time.monotonic(), ["worker-0", "worker-1"]
    for name, what, seconds in zip(names, doing, moved, strict=True):
        seen._reports[name], seen._progressed_at[name] = report(512, what), now - seconds
    assert seen.standstill(names, now - began) == (dict(zip(names, doing, strict=True)) if waits else {})
    seen._reports.pop("worker-1")
    assert seen.standstill(names, now - began) == {}, "nobody knows what it does"


def starved(doing: dict[str, str]) -> tuple[SyncEpoch, list[WorkerHandle], list[str]]:
    """A group whose members wait for this, for too long; who of them is given up."""
    lost: list[str] = []
    made = SimpleNamespace(
        monitor=SimpleNamespace(standstill=lambda *_: doing),
        lose_worker=lambda worker, why, words: lost.append(worker.name),
    )
    return (
        SyncEpoch(cast("Any", made)),
        [WorkerHandle(name, Role(), None, 0.0, "here") for name in doing],
        lost,
    )


def test_worker_whose_rows_do_not_come_is_given_up_when_all_wait() -> None:
    group, team, lost = starved({"worker-0": "pull", "worker-1": "rows"})
    assert group._lose_starved(team, 0.0) == team[1:]
    assert lost == ["worker-1"]


def test_batch_that_no_shard_answers_sends_everything_back_to_the_last_cut() -> None:
    group, team, lost = starved({"worker-0": "pull", "worker-1": "ack"})
    with pytest.raises(StateLost, match="back to the last cut"):
        group._lose_starved(team, 0.0)
    assert lost == []


@pytest.mark.timeout(20)
def test_async_workers_that_all_wait_send_everything_back_to_the_last_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = AsyncGroup()
    made.monitor.standstill = lambda workers, since: dict.fromkeys(workers, "weights")
    monkeypatch.setattr(ray, "wait", lambda tasks, **_: ([], tasks))
    with pytest.raises(StateLost, match="back to the last cut"):
        list(made.epoch.run(Position(), lambda _: False, lambda _: None, 0))


def test_who_did_not_come_is_a_loss_before_another_one_is_started() -> None:
    done: list[str] = []
    made = SimpleNamespace(
        monitor=SimpleNamespace(crowded=None),
        admit_workers=lambda: done.append("welcome"),
        handle_losses=lambda: done.append("losses"),
        decide=lambda: done.append("decide") or Keep(),
        here=list,
    )
    assert SyncEpoch(cast("Any", made))._reason_to_pause([], False, True) == ""
    assert done == ["welcome", "losses", "decide"]


def test_who_joins_in_vain_is_not_lost_and_all_are_asked() -> None:
    """A member that dies leaves the others with an error of their own, which says nothing against them."""
    asked: list[str] = []

    def worker_result(worker: WorkerHandle, words: str, seconds: float) -> str:
        asked.append(worker.name)
        if words == "dead":
            raise WorkerFailed(worker.name)
        return words

    made = SimpleNamespace(job=SimpleNamespace(group_seconds=1.0), ask=ask)
    team = [WorkerHandle(f"worker-{n}", None, None, 0.0, f"host-{n}") for n in range(3)]
    together = SyncEpoch(cast("Any", made))
    for _ in range(20):  # what is lost is the policy's
        with pytest.raises(WorkerFailed):
            together._await_joined(team, ["lost another one", "dead", "lost another one"])
    assert asked[:3] == ["worker-0", "worker-1", "worker-2"]
    for _ in range(4):
        with pytest.raises(WorkerFailed):
            together._await_joined(team, ["", "lost another one.", ""])
    together._await_joined(team, ["", "", ""])
    for _ in range(4):
        with pytest.raises(WorkerFailed):
            together._await_joined(team, ["lost another one.", "", ""])
    with pytest.raises(
        ClusterError, match=r"did not find each other 5 times: lost another one\. .*host-0, host-1"
    ):
        together._await_joined(team, ["lost another one.", "", ""])


# ── waiting ends ───────────────────────────────────────────────────────────────────────────────


def test_a_long_wait_ends_when_the_cluster_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", silent)
    made = worker_group(tmp_path)
    made._session = cast("Any", SimpleNamespace(lost=lambda: True))
    for wait in (
        made.actor_results,
        lambda answers, seconds: made.worker_result(cast("Any", None), answers, seconds),
    ):
        with pytest.raises(StateLost, match="head or this machine's node is gone"):
            wait([None], group_module.WORK_SECONDS)


def test_an_answer_that_does_not_come_is_waited_for_as_long_as_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_LOOK_SECONDS", 0.05)
    waits: list[float] = []

    def get(answers: Any, *, timeout: float) -> Any:
        waits.append(timeout)
        time.sleep(timeout)
        return silent()

    monkeypatch.setattr(ray, "get", get)
    made, began = worker_group(tmp_path), time.monotonic()
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
    driver._group.embedding_servers = [Role()]
    driver._group._session = cast("Any", SimpleNamespace(lost=lambda: gone == "cluster"))
    with pytest.raises(StateLost, match=reason):
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

    monkeypatch.setattr(group_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda answers, **_: answers)
    made = worker_group(tmp_path)
    made.embedding_servers = [Role(state=lambda: state(0.5)), Role(state=lambda: state(0.5))]
    made._await_actors(2000.0)
    assert made.monitor.shards == (state(0.5), state(0.5))


@pytest.mark.timeout(20)
def test_shards_that_find_no_place_are_waited_for_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def wait(tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += 100.0
        return [], tasks

    monkeypatch.setattr(group_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda answers, **_: answers)
    made = worker_group(tmp_path)
    made.embedding_servers = [Role(), Role()]
    made.embedding_servers[1].placed = False
    with pytest.raises(ClusterError, match=r"1 of 2 shards found no place.*Waited 700 s"):
        made._await_actors(10.0)


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
    assert RaySession.__new__(RaySession).room_for(cpus, memory) == fit


@pytest.mark.timeout(20)
def test_cluster_that_never_has_a_cpu_is_not_waited_for_without_end(tmp_path: Path) -> None:
    opened = cast("Any", SimpleNamespace(address="10.0.0.1:6379", cpus=lambda: 0.0, lost=lambda: False))
    with pytest.raises(ClusterError, match=r"10\.0\.0\.1:6379 has no CPUs\. Waited 0 s"):
        RaySession.await_cpus(opened, Progress(), 0.0)


def test_checkpoint_that_a_lost_shard_did_not_write_is_told_once() -> None:
    said, writing = Said(), Future[Any]()
    writing.set_exception(StateLost("a shard was lost while it wrote its part"))
    trainer: Any = object.__new__(ClusterTrainer)
    trainer._progress, trainer._writing, trainer._cut_step, trainer._cut_at = said, writing, 40, float("inf")
    trainer._settings = SimpleNamespace(checkpoint_steps=None, checkpoint_every=60.0)
    assert [trainer._checkpoint_due(41), trainer._checkpoint_due(42)] == [False, False]
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
    writing.set_exception(StateLost("a shard has not written its part within 3,600 s"))
    trainer: Any = object.__new__(ClusterTrainer)
    trainer._progress, trainer._writing, trainer._cut_step = Said(), writing, 40
    trainer._cut_at = time.monotonic() - 3600.0
    trainer._settings = SimpleNamespace(checkpoint_steps=steps, checkpoint_every=every)
    assert [trainer._checkpoint_due(900), trainer._checkpoint_due(901)] == [False, False]
    assert trainer._checkpoint_due(910) is (steps is not None)
