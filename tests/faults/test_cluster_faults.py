"""Whatever dies at whatever moment: every row is learned once, every id is counted once a row."""

from __future__ import annotations

import os
import re
import signal

import pytest
from cluster_run import BOTH, SETTINGS, ClusterRun, Fault, poll, roles_left

WORKER = "clickline.training.cluster.worker:Worker"
TABLES = "clickline.embedding.sharded_tables:ShardTables"
SHARD = "clickline.training.cluster.embedding_server"
HOLDER = "clickline.training.cluster.dense_parameter_server:Holder"
TRAINER = "clickline.training.cluster_trainer"
LATER = 130  # a call that comes after the first cut

pytestmark = pytest.mark.timeout(700)


def case(name: str, mode: str, *faults: Fault, mark: str = "faults"):
    return pytest.param(mode, faults, id=f"{name}-{mode}", marks=getattr(pytest.mark, mark))


def in_both(name: str, *faults: Fault, slow: str = "") -> list:
    return [case(name, mode, *faults, mark="slow" if mode == slow else "faults") for mode in BOTH]


# ── workers ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        *in_both("between-pull-and-push", Fault(WORKER, "_pool", 40), slow="sync"),
        *in_both("between-push-and-ack", Fault(WORKER, "_push", 40, after=True)),
        *in_both("reading", Fault("clickline.training.batches:Batches", "_window", 2)),
        *in_both("first-step", Fault(WORKER, "_pool", 1)),
        case("last-steps", "sync", Fault(WORKER, "_push", 245)),
        case("giving-the-state-to-a-cut", "sync", Fault(WORKER, "state", 1)),
        case("going-on-after-a-cut", "async", Fault(WORKER, "resume", 1)),
        case("asked-to-pause", "sync", Fault(WORKER, "pause", 1)),
        case("asked-to-pause", "async", Fault(WORKER, "pause", 1)),
        case(
            "forming-the-group", "sync", Fault("clickline.training.cluster.process_group:Group", "_form", 1)
        ),
        case(
            "sharing-the-network", "sync", Fault("clickline.training.cluster.process_group:Group", "share", 1)
        ),
        *in_both("scoring", Fault(WORKER, "score", 1)),
    ],
)
def test_a_worker_dies(project, calm, mode, faults):
    others = roles_left()  # of tests before, in this process
    run = ClusterRun(project, mode, calm(mode))
    [struck] = run.strike(*faults)
    run.start()
    run.ends_exact()
    assert struck.exists()
    lost = [reason for reason in run.decided("resize") if re.match(r"worker-\d crashed", reason)]
    assert len(lost) == 1, run.told()
    assert "1 worker goes on" in lost[0]
    assert run.decided("restart") == []
    poll("an end of all roles", lambda: set(roles_left()) <= set(others), 60)


@pytest.mark.parametrize(("mode", "faults"), in_both("the-only-worker", Fault(WORKER, "_push", LATER)))
def test_the_only_worker_dies(project, calm, mode, faults):
    run = ClusterRun(project, mode, calm(mode), **{"train.workers.min": 1, "train.workers.max": 1})
    [struck] = run.strike(*faults)
    run.start()
    run.ends_exact()
    assert struck.exists()
    [reason] = run.decided("restart")
    assert "no worker is left" in reason


@pytest.mark.faults
@pytest.mark.parametrize("mode", BOTH)
def test_a_worker_dies_as_it_starts(project, calm, mode):
    run = ClusterRun(project, mode, calm(mode))
    [struck] = run.strike(Fault(WORKER, "__init__", 1, after=True))
    run.start()
    run.ends_exact()
    assert struck.exists()
    assert run.decided("restart") == []  # the other one goes on, though it may not be there yet


@pytest.mark.faults
@pytest.mark.parametrize(
    ("faults", "words"),
    [
        pytest.param([Fault(WORKER, "take", 1, do="fail")], "crashed", id="raises"),
        # Of each worker the first: so the group's first window is among them.
        pytest.param([Fault(WORKER, "take", 1, do="drop")] * 2, "no longer moved", id="lost-on-the-way"),
    ],
)
def test_rows_that_are_not_handed_over_cost_a_worker_and_not_the_run(project, calm, faults, words):
    """One worker waits for rows, and the others for its part of a batch."""
    run = ClusterRun(project, "sync", calm("sync"))
    watch = SETTINGS["clickline.training.cluster.monitor"]
    run.hurry({"clickline.training.cluster.monitor": {**watch, "STANDSTILL_SECONDS": 15.0}})
    struck = run.strike(*faults)
    run.start()
    run.ends_exact()
    assert all(file.exists() for file in struck)
    [lost] = [reason for reason in run.decided("resize") if re.match(r"worker-\d", reason)]
    assert re.match(rf"worker-\d {words}", lost), run.told()
    assert "1 worker goes on" in lost
    assert run.decided("restart") == []


@pytest.mark.faults
@pytest.mark.parametrize("mode", BOTH)
def test_both_workers_die_one_after_the_other(project, calm, mode):
    run = ClusterRun(project, mode, calm(mode))
    struck = run.strike(Fault(WORKER, "_pool", 40), Fault(WORKER, "_push", 60))
    run.start()
    run.ends_exact()
    assert all(file.exists() for file in struck)


# ── keepers of state ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        *in_both("counting", Fault(TABLES, "find", LATER)),
        *in_both("between-count-and-apply", Fault(TABLES, "apply", LATER)),
        *in_both("after-apply", Fault(TABLES, "apply", LATER, after=True)),
        *in_both("before-the-first-cut", Fault(TABLES, "apply", 5)),
        *in_both("cutting", Fault(SHARD, "begin_snapshot", 2)),
        *in_both("writing-its-part", Fault(SHARD, "_write", 2)),
        case("part-written", "sync", Fault(SHARD, "_write", 2, after=True)),
        case("writing-the-last-part", "async", Fault(SHARD, "_write", 1, after=True)),
        case("restoring", "sync", Fault(TABLES, "apply", LATER), Fault(SHARD, "load_snapshot", 1)),
        case("restoring", "async", Fault(TABLES, "apply", LATER), Fault(SHARD, "load_snapshot", 1)),
        case("looking-for-scores", "sync", Fault(TABLES, "lookup", 1)),
        case("network-before-a-step", "async", Fault(HOLDER, "_learn", LATER)),
        case("network-after-a-step", "async", Fault(HOLDER, "_learn", LATER, after=True)),
    ],
)
def test_a_keeper_of_state_dies(project, calm, mode, faults):
    run = ClusterRun(project, mode, calm(mode))
    struck = run.strike(*faults)
    run.start()
    run.ends_exact()
    assert all(file.exists() for file in struck)
    reasons = run.decided("restart")
    assert len(reasons) == len(faults), run.told()
    assert all("goes back to the last cut" in reason for reason in reasons)
    assert reasons[0].startswith("network crashed" if faults[0].place == HOLDER else "shard-")
    assert run.status()["generation"] == len(faults)


# ── the driver ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        *in_both("between-parts-and-manifest", Fault(TRAINER, "finish_checkpoint", 2)),
        *in_both("after-the-manifest", Fault(TRAINER, "finish_checkpoint", 1, after=True)),
        case("twice", "sync", Fault(TRAINER, "finish_checkpoint", 2), Fault(TRAINER, "finish_checkpoint", 1)),
        case(
            "forming-a-smaller-group",
            "sync",
            Fault("clickline.training.cluster.sync_epoch:Together", "_form", 2),
            Fault(WORKER, "_push", LATER),
        ),
        case(
            "giving-units-back",
            "async",
            Fault("clickline.training.cluster.worker_group:Crew", "lose", 1),
            Fault(WORKER, "_push", 60),
        ),
        *in_both("measuring", Fault("clickline.training.training_run:Epochs", "_measure", 1)),
        *in_both(
            "starting-shards", Fault("clickline.training.cluster.worker_group:Crew", "_await_keepers", 1)
        ),
    ],
)
def test_the_driver_dies_and_the_same_command_goes_on(project, calm, mode, faults):
    run = ClusterRun(project, mode, calm(mode))
    struck = run.strike(*faults)
    deaths = sum("worker" not in fault.place for fault in faults)
    for _ in range(deaths):
        run.start()
        assert run.wait().code == -signal.SIGKILL, run.told()
    run.start()
    run.ends_exact()
    assert all(file.exists() for file in struck)


@pytest.mark.faults
@pytest.mark.parametrize("mode", BOTH)
def test_the_driver_is_killed_twice_anywhere(project, calm, mode):
    run = ClusterRun(project, mode, calm(mode))
    run.start()
    run.await_cut()
    run.await_step(100)
    run.kill()
    first = run.cut_step()
    run.start()
    run.await_step(first + 50)
    run.kill()
    assert run.cut_step() >= first > 0
    run.start()
    run.ends_exact()


@pytest.mark.faults
def test_the_one_worker_that_was_given_the_network_dies_before_the_others_have_it(project, calm):
    """After a restart at a cut; the others have a network that has learned nothing."""
    run = ClusterRun(project, "sync", calm("sync"))
    run.strike(Fault(TRAINER, "finish_checkpoint", 2))
    run.start()
    assert run.wait().code == -signal.SIGKILL
    assert run.cut_step() > 0
    [struck] = run.strike(Fault("clickline.training.cluster.worker", "_pack", 1))
    run.start()
    run.ends_exact()
    assert struck.exists()
    assert run.decided("restart") == []


@pytest.mark.faults
@pytest.mark.parametrize(("shards", "mode"), [(2, "sync"), (5, "sync"), (2, "async"), (5, "async")])
def test_a_checkpoint_of_three_shards_goes_on_with_another_number(project, calm, shards, mode):
    run = ClusterRun(project, mode, calm(mode))
    run.start(**{"train.embedding_servers": 3})
    run.await_cut()
    run.kill()
    assert len(run.checkpoint.tables) == 3
    run.start(**{"train.embedding_servers": shards})
    run.ends_exact()
    assert len(run.checkpoint.tables) == shards


# ── Ray itself ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "program"),
    [("sync", "raylet"), ("sync", "gcs_server"), ("async", "raylet"), ("async", "gcs_server")],
)
def test_the_whole_node_dies(project, calm, mode, program):
    run = ClusterRun(project, mode, calm(mode))
    run.start()
    run.await_cut()
    os.kill(run.child(program), signal.SIGKILL)
    run.ends_exact()
    assert "node is gone" in run.decided("restart")[0]
    assert "going on from step" in (project / "stderr.txt").read_text()


# ── workers that are cut off ───────────────────────────────────────────────────────────────────


@pytest.mark.faults
def test_a_worker_that_comes_back_is_fenced_and_joins_again_sync(project, calm):
    """It is silent for longer than the group waits, and sends its gradients when nobody wants them any more."""
    run = ClusterRun(project, "sync", calm("sync"))
    stopped, refused = run.strike(
        Fault(WORKER, "_push", 60, do="stop"),
        Fault("clickline.training.cluster.streams:Streams", "of", do="note"),
    )
    run.start()
    pid = int(poll("a worker that stops", lambda: stopped.exists() and stopped.read_text()))
    poll("a group that misses it", lambda: "broken at step" in run.log("worker-0") + run.log("worker-1"))
    poll("its token given away", lambda: "stream 0: token 2" in run.log("shard-1"))
    os.kill(pid, signal.SIGCONT)
    run.ends_exact()
    assert "what token 1 sent was not taken" in refused.read_text()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [(WORKER, "_push", 60), ("clickline.training.batches:Batches", "read_window", 1)],
    ids=["learning", "reading"],
)
def test_a_worker_that_stays_away_is_given_up_sync(project, calm, place, name, call):
    """The group misses it when it sums; before, the others wait for rows that it should read."""
    run = ClusterRun(project, "sync", calm("sync"))
    [stopped] = run.strike(Fault(place, name, call, do="stop"))
    run.start()
    pid = int(poll("a worker that stops", lambda: stopped.exists() and stopped.read_text()))
    poll("a decision", lambda: any("was cut off" in reason for reason in run.decided("resize")))
    run.await_step(100)
    os.kill(pid, signal.SIGCONT)
    run.ends_exact()


@pytest.mark.faults
def test_a_silent_worker_is_given_up_and_nobody_waits_for_it_async(project, calm):
    """The others would wait for its gradient: they may not be too far ahead of it."""
    run = ClusterRun(project, "async", calm("async"))
    [stopped] = run.strike(Fault(WORKER, "_push", 60, do="stop"))
    run.start()
    pid = int(poll("a worker that stops", lambda: stopped.exists() and stopped.read_text()))
    poll("a decision", lambda: any("was cut off" in reason for reason in run.decided("resize")))
    run.await_step(150)
    os.kill(pid, signal.SIGCONT)
    run.ends_exact()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [(WORKER, "_pool", 60), ("clickline.training.batches:Batches", "read_window", 2)],
    ids=["computing", "reading"],
)
def test_a_worker_that_answers_but_hangs_holds_up_nobody_async(project, calm, place, name, call):
    """The others would wait for it, and so would a cut."""
    run = ClusterRun(project, "async", calm("async"))
    [held] = run.strike(Fault(place, name, call, do="hold"))
    run.start()
    poll("a worker that hangs", held.exists)
    poll("a decision", lambda: any("no longer moved" in reason for reason in run.decided("resize")))
    run.ends_exact()
    assert run.decided("restart") == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        ("clickline.embedding.remote_tables:RemoteTables", "begin_lookup", 1),
        ("clickline.training.batches:Batches", "read_window", 2),
    ],
    ids=["asking-first", "reading"],
)
def test_a_worker_that_answers_but_hangs_is_given_up_sync(project, calm, place, name, call):
    """All others wait for its part, or for the rows that it reads: none of them is to blame."""
    run = ClusterRun(project, "sync", calm("sync"))
    run.hurry(
        {
            "clickline.training.cluster.sync_epoch": {"READ_SECONDS": 10.0},
            "clickline.training.cluster.monitor": {"_FIRST_SECONDS": 20.0},
        }
    )
    [held] = run.strike(Fault(place, name, call, do="hold"))
    run.start()
    poll("a worker that hangs", held.exists)
    poll("a decision", lambda: any("no longer moved" in reason for reason in run.decided("resize")))
    run.ends_exact()
    assert run.decided("restart") == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("sync", Fault(TABLES, "apply", LATER, do="hold")),
        ("async", Fault(TABLES, "apply", LATER, do="hold")),
        ("async", Fault(HOLDER, "_learn", LATER, do="hold")),
    ],
    ids=["shard-sync", "shard-async", "network-async"],
)
def test_a_keeper_of_state_that_hangs_is_given_up(project, calm, mode, fault):
    run = ClusterRun(project, mode, calm(mode))
    [held] = run.strike(fault)
    run.start()
    run.ends_exact()
    assert held.exists()
    [reason] = run.decided("restart")
    assert "was cut off (it did not answer in time)" in reason


@pytest.mark.faults
def test_a_shard_that_stops_as_it_writes_a_cut_is_given_up(project, calm):
    """Nobody waits for a cut that will never be written."""
    run = ClusterRun(project, "sync", calm("sync"))
    [stopped] = run.strike(Fault(SHARD, "_write", 1, do="stop"))
    run.start()
    run.ends_exact()
    assert stopped.exists()
    assert len(run.decided("restart")) == 1


@pytest.mark.faults
def test_a_shard_that_hangs_as_it_restores_is_given_up(project, calm):
    run = ClusterRun(project, "sync", calm("sync"))
    run.hurry({"clickline.training.cluster.worker_group": {"_RESTORE_SECONDS": 60.0}})
    struck, held = run.strike(Fault(TABLES, "apply", LATER), Fault(SHARD, "load_snapshot", 1, do="hold"))
    run.start()
    run.ends_exact()
    assert struck.exists() and held.exists()
    crashed, silent = run.decided("restart")
    assert "crashed" in crashed and "was cut off (it did not answer in time)" in silent


@pytest.mark.faults
def test_the_unit_of_a_straggler_is_leased_again_and_what_it_sends_late_is_refused_async(project, calm):
    run = ClusterRun(project, "async", calm("async"), **{"train.checkpoint_steps": 1000})
    held, refused = run.strike(
        Fault("clickline.training.batches:Batches", "read_window", 2, do="hold"),
        Fault("clickline.training.cluster.streams:Streams", "of", do="note"),
    )
    run.start()
    poll("a new lease", lambda: any("which is slow" in reason for reason in run.decided("lease")))
    held.with_suffix(".release").touch()
    run.ends_exact()
    assert "was not taken" in refused.read_text()


# ── faults that stay, and wishes ───────────────────────────────────────────────────────────────


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "batch", "place"),
    [("sync", 45, r"step 45"), ("async", 30, r"unit \d, batch 30")],
    ids=BOTH,
)
def test_a_place_that_fails_again_and_again_ends_the_run_with_its_name(project, calm, mode, batch, place):
    run = ClusterRun(project, mode, calm(mode), **{"train.checkpoint_steps": 15})  # one before it fails
    run.strike(Fault(WORKER, "_push", batch, do="raise"), Fault(WORKER, "_pool", do="slow"))  # or too soon
    run.start()
    ended = run.wait()
    assert ended.code == 1, run.told()
    assert "ZeroDivisionError: a fault of the test" in ended.errors
    assert re.search(f"^{place} failed 3 times with no progress between", ended.errors, re.MULTILINE), (
        ended.errors
    )
    assert run.cut_step() > 0
    run.relent()
    run.start()
    run.ends_exact()


@pytest.mark.faults
@pytest.mark.parametrize("mode", BOTH)
def test_workers_go_and_come_as_asked(project, calm, mode):
    run = ClusterRun(project, mode, calm(mode))
    run.strike(Fault(WORKER, "_pool", do="slow"))  # so that it still learns when the second one is there
    run.start()
    run.await_step(30)
    run.command("scale", "--workers", "1")
    poll("one worker", lambda: len(run.roles("worker")) == 1)
    run.command("scale", "--workers", "2")
    poll("two workers", lambda: len(run.roles("worker")) == 2)
    run.ends_exact()
    fewer, more = [reason for reason in run.decided("resize") if "clickline scale" in reason]
    assert "`clickline scale` asks for 1 worker, and 2 run" in fewer
    assert "from 1 to 2 workers; `clickline scale` asks for 2" in more
