"""What the driver does about processes that are slow, silent or crowded. Ray and the actors are doubles: real processes
get into these situations once in a thousand runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")

from training_doubles import Heard  # noqa: E402

from clickline.artifacts.checkpoint import Position  # noqa: E402
from clickline.distributed import session as session_module  # noqa: E402
from clickline.distributed.session import RaySession  # noqa: E402
from clickline.embedding import Eviction  # noqa: E402
from clickline.errors import ClusterError  # noqa: E402
from clickline.progress import Progress  # noqa: E402
from clickline.training.cluster import cluster_connection as connection_module  # noqa: E402
from clickline.training.cluster import driver as driver_module  # noqa: E402
from clickline.training.cluster import monitor as monitor_module  # noqa: E402
from clickline.training.cluster import stateful_actors as actors_module  # noqa: E402
from clickline.training.cluster.async_epoch import AsyncEpoch  # noqa: E402
from clickline.training.cluster.driver import Driver  # noqa: E402
from clickline.training.cluster.embedding_server import EmbeddingServerState  # noqa: E402
from clickline.training.cluster.job import StateLost, TrainingJob  # noqa: E402
from clickline.training.cluster.leases import WorkUnit  # noqa: E402
from clickline.training.cluster.monitor import Monitor  # noqa: E402
from clickline.training.cluster.policy import Keep, PolicyRules  # noqa: E402
from clickline.training.cluster.role_log import RoleLog  # noqa: E402
from clickline.training.cluster.sync_epoch import SyncEpoch  # noqa: E402
from clickline.training.cluster.worker import WorkResult  # noqa: E402
from clickline.training.cluster.worker_group import WorkerFailed, WorkerGroup, WorkerHandle  # noqa: E402
from clickline.training.cluster.worker_metrics import WorkerReport  # noqa: E402

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
        **{
            "tables": {},
            "model_file": None,
            "sync": True,
            "max_staleness": 8,
            "scale_lr_by_staleness": False,
        },
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


def open_monitor(folder: Path, said: Progress | None = None, **changes: Any) -> Monitor:
    (folder / "run" / "cluster").mkdir(parents=True, exist_ok=True)
    return Monitor(job(folder, **changes), said or Progress(), lambda figures: None)


def worker_group(folder: Path) -> WorkerGroup:
    made = WorkerGroup(job(folder), open_monitor(folder), Progress())
    room = {"cpus": lambda: 4.0, "free_cpus": lambda: 0.0, "has_place": lambda actor: actor.placed}
    made.connection._session = cast("Any", SimpleNamespace(lost=lambda: False, **room))
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


def test_memory_is_reported_once_per_embedding_server(tmp_path: Path) -> None:
    said = Heard()
    monitor = open_monitor(tmp_path, said, eviction=None)
    for step in range(5):
        monitor.shards = (state(0.86 + step / 100), state(0.87 + step / 100))
        monitor._check_memory(LIMIT)
    assert [line.split(" uses ")[0] for line in said.said] == [
        "cluster: embedding server 0",
        "cluster: embedding server 1",
    ]


def test_memory_is_checked_again_after_eviction(tmp_path: Path) -> None:
    monitor = open_monitor(tmp_path)
    monitor.shards = (state(0.97), state(0.1))
    monitor._check_memory(LIMIT)
    assert monitor.crowded == 0
    monitor.shard_evicted(0, (state(0.6), state(0.1)))
    monitor._check_memory(LIMIT)
    assert monitor.crowded is None
    monitor.shards = (state(0.96), state(0.1))
    with pytest.raises(ClusterError, match="embedding server 0 uses"):  # it may not evict twice
        monitor._check_memory(LIMIT)
    monitor.restarted()
    monitor._check_memory(LIMIT)
    assert monitor.crowded == 0, (
        "another server, with the rows of the last checkpoint: it has evicted nothing"
    )


class AsyncGroup:
    """One worker, which finishes its unit if no server is crowded; else it trains until it is paused."""

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
        self.actors = SimpleNamespace(
            dense_step=lambda: 7,
            open_stream=lambda *_: 0,
            close_stream=lambda _: None,
            evict_crowded=self.evict_crowded,
        )
        self.worker = WorkerHandle("worker-0", Role(run_unit=lambda lease: lease), None, 0.0, "here")
        self.workers = {"worker-0": self.worker}
        self.epoch = AsyncEpoch(cast("Any", self), [WorkUnit(0, number) for number in range(3)], None, 1)
        self.under_way: list[int] = []  # units in progress, at each eviction

    def wait(self, tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        ends = self.monitor.crowded is None or self.worker.actor.called[-1] == "pause"
        return (tasks, []) if ends else ([], tasks)

    def worker_result(self, worker: WorkerHandle, task: Any) -> WorkResult:
        return WorkResult("done", 3) if self.monitor.crowded is None else WorkResult("paused", 1)

    def started_workers(self) -> list[WorkerHandle]:
        return [self.worker]

    await_workers = started_workers

    def evict_crowded(self) -> None:
        self.under_way.append(len(self.epoch._tasks))
        self.monitor.crowded = None

    def stop_worker(self, worker: WorkerHandle) -> None:
        del self.workers[worker.name]

    def handle_losses(self) -> None: ...

    def decide(self) -> Keep:
        return Keep()


@pytest.mark.timeout(20)
def test_crowded_server_evicts_in_async_mode_between_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = AsyncGroup()
    monkeypatch.setattr(ray, "wait", made.wait)
    made.monitor.crowded = 0
    pauses = list(made.epoch.run(Position(), lambda _: False, lambda _: None, 0))
    assert (made.under_way, pauses) == ([0], [])
    assert made.epoch.leases.all_done


@pytest.mark.timeout(20)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_worker_on_a_fenced_unit_is_stopped_at_the_end_of_the_epoch(
    monkeypatch: pytest.MonkeyPatch, checkpoint: bool
) -> None:
    """It would never be idle again, and score while it computes. If a checkpoint waited for it, the others continue: else they
    would stop after each batch of the next epoch."""
    made = AsyncGroup()
    made.job.group_seconds = 0.1
    late = WorkerHandle("worker-9", Role(), None, 0.0, "here", lease="one that was fenced")
    made.workers["worker-9"] = late
    made.epoch._tasks["its task"] = late
    called = made.worker.actor.called

    def wait(tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        waits = checkpoint and made.epoch.leases.done == 2 and "pause" not in called
        return [] if waits else [task for task in tasks if task != "its task"], ["its task"]

    monkeypatch.setattr(ray, "wait", wait)

    def checkpoint_due(_: int) -> bool:
        return checkpoint and len(made.epoch._tasks) == 2

    list(made.epoch.run(Position(), checkpoint_due, lambda _: None, 0))
    assert list(made.workers) == ["worker-0"]
    assert [name for name in called if name in ("pause", "resume")] == (
        ["pause", "resume"] if checkpoint else []
    )


def test_partial_unit_is_granted_before_the_prefetched_one() -> None:
    made = AsyncGroup()
    made.epoch._partial, made.worker.ready = {1}, 2
    made.epoch._grant_all()
    assert [lease.unit.number for lease in made.epoch.leases.open] == [1]


# ── workers that are slow, or silent ───────────────────────────────────────────────────────────


def report(rows: int, phases: str) -> WorkerReport:
    return WorkerReport("unit 0, batch 0", 0, rows, 0, None, None, phases, {})


@pytest.mark.parametrize(
    ("rows", "phases", "seconds", "stuck"),
    [
        (0, "request", 60.0, ""),  # it compiles
        (0, "request", 200.0, "request"),
        (0, "read", 60.0, "read"),  # nothing is compiled there
        (512, "request", 60.0, "request"),
        (512, "request", 20.0, ""),
        (512, "pull", 200.0, ""),  # it waits for others
    ],
)
def test_worker_without_rows_yet_has_time_to_compile(
    tmp_path: Path, rows: int, phases: str, seconds: float, stuck: str
) -> None:
    monitor = open_monitor(tmp_path)
    monitor._reports["worker-0"] = report(rows, phases)
    monitor._progressed_at["worker-0"] = time.monotonic() - seconds
    assert monitor.stuck_at("worker-0") == stuck


def test_worker_that_does_not_answer_is_silent_not_stuck(tmp_path: Path) -> None:
    """Its last report is old, whatever phase that names. Otherwise the phase decides why it is given up."""
    monitor = open_monitor(tmp_path)
    monitor._reports["worker-0"] = report(512, "request")
    monitor._progressed_at["worker-0"] = time.monotonic() - 60.0
    monitor._silent_for["worker-0"] = 1.0
    assert monitor.stuck_at("worker-0") == ""


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
def test_placed_worker_that_never_starts_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: bool, waited: int, stays: bool, lost: int
) -> None:
    """One that is not placed is stopped, because there was no capacity after all."""
    monkeypatch.setattr(ray, "wait", lambda tasks, **_: ([], tasks))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    made, actor = worker_group(tmp_path), Role()
    actor.placed = placed
    made.workers["worker-0"] = WorkerHandle("worker-0", actor, None, time.monotonic() - waited)
    made.admit_workers()
    assert ("worker-0" in made.workers, len(made.recovery.losses)) == (stays, lost)


class SyncGroup:
    """Two workers, of which the second has stopped while the first waits for what it reads."""

    def __init__(self) -> None:
        self.job = SimpleNamespace(group_seconds=30.0)
        self.fenced: list[tuple[int, ...]] = []
        self.actors = SimpleNamespace(open_stream=lambda *opened: self.fenced.append(opened))
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

    def worker_result(self, worker: WorkerHandle, task: int) -> WorkResult:
        return WorkResult("broken", 3)


@pytest.mark.timeout(20)
def test_silent_worker_breaks_a_group_that_waits_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SyncGroup()
    first = made.team[0].actor

    def wait(tasks: list[int], **_: Any) -> tuple[list[int], list[int]]:
        return ([0], tasks[1:]) if "leave_group" in first.called else ([], tasks)

    monkeypatch.setattr(ray, "wait", wait)
    ended, _ = SyncEpoch(cast("Any", made))._run_group(made.team, 3, lambda _: False)
    assert ended is None
    assert made.fenced == [(0, 1, 3)], "its part of a batch is refused from now on"


@pytest.mark.parametrize(
    ("phases", "moved", "began", "waits"),
    [
        (("rows", "pull"), (200.0, 190.0), 300.0, True),
        (("rows", "pull"), (200.0, 20.0), 300.0, False),  # one has moved
        (("rows", "read"), (200.0, 190.0), 300.0, False),  # one reads what the other waits for
        (("rows", "pull"), (900.0, 900.0), 20.0, False),  # they did nothing before this
    ],
)
def test_standstill_of_all_workers_is_detected(
    tmp_path: Path,
    phases: tuple[str, str],
    moved: tuple[float, float],
    began: float,
    waits: bool,
) -> None:
    monitor, now, names = open_monitor(tmp_path), time.monotonic(), ["worker-0", "worker-1"]
    for name, what, seconds in zip(names, phases, moved, strict=True):
        monitor._reports[name], monitor._progressed_at[name] = report(512, what), now - seconds
    assert monitor.standstill(names, now - began) == (dict(zip(names, phases, strict=True)) if waits else {})
    monitor._reports.pop("worker-1")
    assert monitor.standstill(names, now - began) == {}, "one has not reported"


def starved(phases: dict[str, str]) -> tuple[SyncEpoch, list[WorkerHandle], list[str]]:
    """A group whose workers wait in these phases for too long; the names of those that are given up."""
    lost: list[str] = []
    made = SimpleNamespace(
        monitor=SimpleNamespace(standstill=lambda *_: phases),
        lose_worker=lambda worker, why, words: lost.append(worker.name),
    )
    return (
        SyncEpoch(cast("Any", made)),
        [WorkerHandle(name, Role(), None, 0.0, "here") for name in phases],
        lost,
    )


def test_worker_whose_rows_do_not_arrive_is_given_up_at_a_standstill() -> None:
    group, team, lost = starved({"worker-0": "pull", "worker-1": "rows"})
    assert group._lose_starved(team, 0.0) == team[1:]
    assert lost == ["worker-1"]


def test_sync_standstill_rolls_back_to_the_last_checkpoint() -> None:
    group, team, lost = starved({"worker-0": "pull", "worker-1": "ack"})
    with pytest.raises(StateLost, match="back to the last checkpoint"):
        group._lose_starved(team, 0.0)
    assert lost == []


@pytest.mark.timeout(20)
def test_async_standstill_rolls_back_to_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = AsyncGroup()
    made.monitor.standstill = lambda workers, since: dict.fromkeys(workers, "weights")
    monkeypatch.setattr(ray, "wait", lambda tasks, **_: ([], tasks))
    with pytest.raises(StateLost, match="back to the last checkpoint"):
        list(made.epoch.run(Position(), lambda _: False, lambda _: None, 0))


def test_worker_that_never_started_is_handled_before_another_is_started() -> None:
    done: list[str] = []
    made = SimpleNamespace(
        monitor=SimpleNamespace(crowded=None),
        admit_workers=lambda: done.append("admit"),
        handle_losses=lambda: done.append("losses"),
        decide=lambda: done.append("decide") or Keep(),
        started_workers=list,
    )
    assert SyncEpoch(cast("Any", made))._reason_to_pause([], False, True) == ""
    assert done == ["admit", "losses", "decide"]


def test_worker_that_fails_to_join_is_retried() -> None:
    """A worker that dies makes the others fail too, which is not their fault."""
    asked: list[str] = []

    def worker_result(worker: WorkerHandle, words: str, seconds: float) -> str:
        asked.append(worker.name)
        if words == "dead":
            raise WorkerFailed(worker.name)
        return words

    made = SimpleNamespace(job=SimpleNamespace(group_seconds=1.0), worker_result=worker_result)
    team = [WorkerHandle(f"worker-{n}", None, None, 0.0, f"host-{n}") for n in range(3)]
    epoch = SyncEpoch(cast("Any", made))
    closed: list[int] = []
    rendezvous = cast("Any", SimpleNamespace(close=lambda: closed.append(len(asked))))
    for _ in range(20):  # losses are counted by the policy, not here
        with pytest.raises(WorkerFailed):
            epoch._await_joined(team, ["lost another one", "dead", "lost another one"], rendezvous)
    assert asked[:3] == ["worker-0", "worker-1", "worker-2"]
    assert closed[0] == 1, "the others stop waiting as soon as one has failed"
    for _ in range(4):
        with pytest.raises(WorkerFailed):
            epoch._await_joined(team, ["", "lost another one.", ""], rendezvous)
    epoch._await_joined(team, ["", "", ""], rendezvous)
    for _ in range(4):
        with pytest.raises(WorkerFailed):
            epoch._await_joined(team, ["lost another one.", "", ""], rendezvous)
    with pytest.raises(
        ClusterError, match=r"failed to connect to each other 5 times: lost another one\. .*host-0, host-1"
    ):
        epoch._await_joined(team, ["lost another one.", "", ""], rendezvous)


# ── waiting ends ───────────────────────────────────────────────────────────────────────────────


def test_long_wait_ends_when_the_cluster_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", silent)
    made = worker_group(tmp_path)
    made.connection._session = cast("Any", SimpleNamespace(lost=lambda: True))
    for wait in (
        made.actors.results,
        lambda answers, seconds: made.worker_result(cast("Any", None), answers, seconds),
    ):
        with pytest.raises(StateLost, match="head or this machine's node is gone"):
            wait([None], actors_module.WORK_SECONDS)


def test_missing_answer_is_awaited_until_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_LOOK_SECONDS", 0.05)
    waits: list[float] = []

    def get(answers: Any, *, timeout: float) -> Any:
        waits.append(timeout)
        time.sleep(timeout)
        return silent()

    monkeypatch.setattr(ray, "get", get)
    made, began = worker_group(tmp_path), time.monotonic()
    with pytest.raises(ray.exceptions.GetTimeoutError):
        made.connection.get(None, 0.2)
    assert time.monotonic() - began >= 0.2
    assert sum(waits) < 0.21
    assert max(waits) <= 0.05


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        ("shard", "an embedding server was lost while it wrote its snapshot"),
        ("cluster", "training rolls back to the last checkpoint"),
        ("disk", "an embedding server did not write its snapshot within"),
    ],
)
def test_snapshot_is_not_awaited_when_its_server_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, reason: str
) -> None:
    """Else the checkpoint's thread would wait for ever, and the rollback to the last checkpoint with it."""
    (tmp_path / "run" / "cluster").mkdir(parents=True)
    monkeypatch.setattr(ray, "wait", lambda parts, **_: ([], parts))
    if gone == "disk":  # the shard answers, and its writer hangs
        monkeypatch.setattr(driver_module, "WORK_SECONDS", 0.0)

    def get(answers: Any, *, timeout: float | None = None) -> Any:
        assert timeout is not None, "this would never end"
        return silent() if gone == "shard" else answers

    monkeypatch.setattr(ray, "get", get)
    driver = Driver(job(tmp_path), Progress(), lambda figures: None)
    driver._group.actors.embedding_servers = [Role()]
    driver._group.connection._session = cast("Any", SimpleNamespace(lost=lambda: gone == "cluster"))
    with pytest.raises(StateLost, match=reason):
        driver.await_snapshots({"tables-00-of-01.bin": object()})


@pytest.mark.timeout(20)
def test_long_restore_survives_one_failed_query_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def wait(tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += 100.0
        made.actors.embedding_servers[0].placed = now != 800.0
        return (tasks, []) if now > 1500 else ([], tasks)

    monkeypatch.setattr(actors_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda answers, **_: answers)
    made = worker_group(tmp_path)
    made.actors.embedding_servers = [Role(state=lambda: state(0.5)), Role(state=lambda: state(0.5))]
    made.actors._await_started(2000.0)
    assert made.monitor.shards == (state(0.5), state(0.5))


@pytest.mark.timeout(20)
def test_unplaced_embedding_servers_are_awaited_for_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def wait(tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += 100.0
        return [], tasks

    monkeypatch.setattr(actors_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda answers, **_: answers)
    made = worker_group(tmp_path)
    made.actors.embedding_servers = [Role(), Role()]
    made.actors.embedding_servers[1].placed = False
    with pytest.raises(ClusterError, match=r"1 of 2 embedding servers do not fit.*Waited 700 s"):
        made.actors._await_started(10.0)


# ── room ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cpus", "memory", "fit"),
    [(1.0, None, 4), (2.0, None, 1), (4.0, None, 0), (0.5, None, 8), (1.0, 4, 3), (1.0, 100, 0)],
)
def test_capacity_is_what_fits_on_single_nodes(
    monkeypatch: pytest.MonkeyPatch, cpus: float, memory: int | None, fit: int
) -> None:
    """Otherwise workers are requested again and again that can never be placed."""
    free = [{"CPU": 1.0, "memory": 4.0}, {"CPU": 3.0, "memory": 9.0}, {"memory": 90.0}]
    monkeypatch.setattr(session_module, "free_resources", lambda seconds: free)
    assert RaySession.__new__(RaySession).room_for(cpus, memory) == fit


@pytest.mark.timeout(20)
def test_cluster_without_cpus_is_not_awaited_forever(tmp_path: Path) -> None:
    opened = cast("Any", SimpleNamespace(address="10.0.0.1:6379", cpus=lambda: 0.0, lost=lambda: False))
    with pytest.raises(ClusterError, match=r"10\.0\.0\.1:6379 has no CPUs\. Waited 0 s"):
        RaySession.await_cpus(opened, Progress(), 0.0)
