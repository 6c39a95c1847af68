"""Whichever process dies, at whatever moment: each row is trained once, and each id is counted once per row."""

from __future__ import annotations

import os
import re
import signal

import pytest
from cluster_run import BOTH, SETTINGS, ClusterRun, Fault, leftover_processes, poll

WORKER = "clickline.training.cluster.worker:TrainWorker"
SYNC_WORKER = "clickline.training.cluster.sync_worker:SyncWorker"
ASYNC_WORKER = "clickline.training.cluster.async_worker:AsyncWorker"
CLIENT = "clickline.training.cluster.embedding_client:EmbeddingClient"
TABLES = "clickline.embedding.sharded_tables:ShardTables"
EMBEDDING_SERVER = "clickline.training.cluster.embedding_server"
DENSE_SERVER = "clickline.training.cluster.dense_parameter_server:DenseParameterServer"
TRAINER = "clickline.training.cluster_trainer"
LATER = 130  # a call after the first checkpoint

pytestmark = pytest.mark.timeout(700)


def case(name: str, mode: str, *faults: Fault, mark: str = "faults"):
    return pytest.param(mode, faults, id=f"{name}-{mode}", marks=getattr(pytest.mark, mark))


def in_both(name: str, *faults: Fault, slow: str = "") -> list:
    return [case(name, mode, *faults, mark="slow" if mode == slow else "faults") for mode in BOTH]


# ── workers ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        *in_both("between-pull-and-push", Fault(CLIENT, "pool", 40), slow="sync"),
        *in_both("between-push-and-ack", Fault(CLIENT, "push", 40, after=True)),
        *in_both("reading", Fault("clickline.training.batches:Batches", "_window", 2)),
        *in_both("first-step", Fault(CLIENT, "pool", 1)),
        case("last-steps", "sync", Fault(CLIENT, "push", 245)),
        case("sending-its-state-to-a-checkpoint", "sync", Fault(WORKER, "state", 1)),
        case("resuming-after-a-checkpoint", "async", Fault(ASYNC_WORKER, "resume", 1)),
        case("pausing", "sync", Fault(WORKER, "pause", 1)),
        case("pausing", "async", Fault(WORKER, "pause", 1)),
        case(
            "forming-the-group",
            "sync",
            Fault("clickline.training.cluster.process_group:ProcessGroup", "_form", 1),
        ),
        case(
            "broadcasting-the-network",
            "sync",
            Fault("clickline.training.cluster.process_group:ProcessGroup", "broadcast", 1),
        ),
        *in_both("scoring", Fault(WORKER, "score", 1)),
    ],
)
def test_a_worker_dies(project, reference, mode, faults):
    others = leftover_processes()  # of tests before, in this process
    run = ClusterRun(project, mode, reference(mode))
    [hit] = run.inject(*faults)
    run.start()
    run.assert_exact()
    assert hit.exists()
    lost = [reason for reason in run.decisions("resize") if re.match(r"worker-\d crashed", reason)]
    assert len(lost) == 1, run.output()
    assert "1 worker continues" in lost[0]
    assert run.decisions("restart") == []
    poll("the end of all processes", lambda: set(leftover_processes()) <= set(others), 60)


@pytest.mark.parametrize(("mode", "faults"), in_both("the-only-worker", Fault(CLIENT, "push", LATER)))
def test_the_only_worker_dies(project, reference, mode, faults):
    run = ClusterRun(project, mode, reference(mode), **{"train.workers.min": 1, "train.workers.max": 1})
    [hit] = run.inject(*faults)
    run.start()
    run.assert_exact()
    assert hit.exists()
    [reason] = run.decisions("restart")
    assert "no worker is left" in reason


@pytest.mark.faults
@pytest.mark.parametrize("mode", BOTH)
def test_a_worker_dies_as_it_starts(project, reference, mode):
    run = ClusterRun(project, mode, reference(mode))
    [hit] = run.inject(Fault(WORKER, "__init__", 1, after=True))
    run.start()
    run.assert_exact()
    assert hit.exists()
    assert run.decisions("restart") == []  # the other one continues, even if it has not started yet


@pytest.mark.faults
@pytest.mark.parametrize(
    ("faults", "message"),
    [
        pytest.param([Fault(SYNC_WORKER, "receive_rows", 1, do="fail")], "crashed", id="raises"),
        # The first call of each worker, so that the first window is among them.
        pytest.param(
            [Fault(SYNC_WORKER, "receive_rows", 1, do="drop")] * 2,
            "stopped making progress",
            id="lost-in-transit",
        ),
    ],
)
def test_rows_that_are_not_delivered_cost_a_worker_not_the_run(project, reference, faults, message):
    """One worker waits for rows, and the others for its part of a batch."""
    run = ClusterRun(project, "sync", reference("sync"))
    monitor = SETTINGS["clickline.training.cluster.monitor"]
    run.set_constants({"clickline.training.cluster.monitor": {**monitor, "STANDSTILL_SECONDS": 15.0}})
    hit = run.inject(*faults)
    run.start()
    run.assert_exact()
    assert all(file.exists() for file in hit)
    [lost] = [reason for reason in run.decisions("resize") if re.match(r"worker-\d", reason)]
    assert re.match(rf"worker-\d {message}", lost), run.output()
    assert "1 worker continues" in lost
    assert run.decisions("restart") == []


@pytest.mark.faults
@pytest.mark.parametrize("mode", BOTH)
def test_both_workers_die_one_after_the_other(project, reference, mode):
    run = ClusterRun(project, mode, reference(mode))
    hit = run.inject(Fault(CLIENT, "pool", 40), Fault(CLIENT, "push", 60))
    run.start()
    run.assert_exact()
    assert all(file.exists() for file in hit)


# ── stateful actors ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        *in_both("counting", Fault(TABLES, "find", LATER)),
        *in_both("between-count-and-apply", Fault(TABLES, "apply", LATER)),
        *in_both("after-apply", Fault(TABLES, "apply", LATER, after=True)),
        *in_both("before-the-first-checkpoint", Fault(TABLES, "apply", 5)),
        *in_both("taking-a-snapshot", Fault(EMBEDDING_SERVER, "begin_snapshot", 2)),
        *in_both("writing-its-snapshot", Fault(EMBEDDING_SERVER, "_write", 2)),
        case("snapshot-written", "sync", Fault(EMBEDDING_SERVER, "_write", 2, after=True)),
        case("writing-the-last-snapshot", "async", Fault(EMBEDDING_SERVER, "_write", 1, after=True)),
        case("restoring", "sync", Fault(TABLES, "apply", LATER), Fault(EMBEDDING_SERVER, "load_snapshot", 1)),
        case(
            "restoring", "async", Fault(TABLES, "apply", LATER), Fault(EMBEDDING_SERVER, "load_snapshot", 1)
        ),
        case("lookup-for-scoring", "sync", Fault(TABLES, "lookup", 1)),
        case("dense-server-before-a-step", "async", Fault(DENSE_SERVER, "_apply", LATER)),
        case("dense-server-after-a-step", "async", Fault(DENSE_SERVER, "_apply", LATER, after=True)),
    ],
)
def test_a_stateful_actor_dies(project, reference, mode, faults):
    run = ClusterRun(project, mode, reference(mode))
    hit = run.inject(*faults)
    run.start()
    run.assert_exact()
    assert all(file.exists() for file in hit)
    reasons = run.decisions("restart")
    assert len(reasons) == len(faults), run.output()
    assert all("rolls back to the last checkpoint" in reason for reason in reasons)
    assert reasons[0].startswith("network crashed" if faults[0].place == DENSE_SERVER else "shard-")
    assert run.status()["generation"] == len(faults)


# ── the driver ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        *in_both("between-snapshots-and-manifest", Fault(TRAINER, "finish_checkpoint", 2)),
        *in_both("after-the-manifest", Fault(TRAINER, "finish_checkpoint", 1, after=True)),
        case("twice", "sync", Fault(TRAINER, "finish_checkpoint", 2), Fault(TRAINER, "finish_checkpoint", 1)),
        case(
            "forming-a-smaller-group",
            "sync",
            Fault("clickline.training.cluster.sync_epoch:SyncEpoch", "_form_group", 2),
            Fault(CLIENT, "push", LATER),
        ),
        case(
            "returning-units",
            "async",
            Fault("clickline.training.cluster.worker_group:WorkerGroup", "lose_worker", 1),
            Fault(CLIENT, "push", 60),
        ),
        *in_both("evaluating", Fault("clickline.training.training_run:TrainingRun", "_evaluate_epoch", 1)),
        *in_both(
            "starting-embedding-servers",
            Fault("clickline.training.cluster.stateful_actors:StatefulActors", "_await_started", 1),
        ),
    ],
)
def test_the_driver_dies_and_the_same_command_resumes(project, reference, mode, faults):
    run = ClusterRun(project, mode, reference(mode))
    hit = run.inject(*faults)
    deaths = sum(fault.place != CLIENT for fault in faults)
    for _ in range(deaths):
        run.start()
        assert run.wait().code == -signal.SIGKILL, run.output()
    run.start()
    run.assert_exact()
    assert all(file.exists() for file in hit)


@pytest.mark.faults
@pytest.mark.parametrize("mode", BOTH)
def test_the_driver_is_killed_twice_anywhere(project, reference, mode):
    run = ClusterRun(project, mode, reference(mode))
    run.start()
    run.await_checkpoint()
    run.await_step(100)
    run.kill()
    first = run.checkpoint_step()
    run.start()
    run.await_step(first + 50)
    run.kill()
    assert run.checkpoint_step() >= first > 0
    run.start()
    run.assert_exact()


@pytest.mark.faults
def test_the_worker_that_loads_the_network_dies_before_broadcasting_it(project, reference):
    """After a restart from a checkpoint: the others have an untrained network."""
    run = ClusterRun(project, "sync", reference("sync"))
    run.inject(Fault(TRAINER, "finish_checkpoint", 2))
    run.start()
    assert run.wait().code == -signal.SIGKILL
    assert run.checkpoint_step() > 0
    [hit] = run.inject(Fault("clickline.training.cluster.sync_worker", "_pack", 1))
    run.start()
    run.assert_exact()
    assert hit.exists()
    assert run.decisions("restart") == []


@pytest.mark.faults
@pytest.mark.parametrize(("shards", "mode"), [(2, "sync"), (5, "sync"), (2, "async"), (5, "async")])
def test_a_checkpoint_of_three_embedding_servers_resumes_with_another_number(
    project, reference, shards, mode
):
    run = ClusterRun(project, mode, reference(mode))
    run.start(**{"train.embedding_servers": 3})
    run.await_checkpoint()
    run.kill()
    assert len(run.checkpoint.tables) == 3
    run.start(**{"train.embedding_servers": shards})
    run.assert_exact()
    assert len(run.checkpoint.tables) == shards


# ── Ray itself ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "program"),
    [("sync", "raylet"), ("sync", "gcs_server"), ("async", "raylet"), ("async", "gcs_server")],
)
def test_the_whole_node_dies(project, reference, mode, program):
    run = ClusterRun(project, mode, reference(mode))
    run.start()
    run.await_checkpoint()
    os.kill(run.child(program), signal.SIGKILL)
    run.assert_exact()
    assert "node is gone" in run.decisions("restart")[0]
    assert "resuming from step" in (project / "stderr.txt").read_text()


# ── workers that hang or are slow ──────────────────────────────────────────────────────────────


@pytest.mark.faults
def test_suspended_worker_is_fenced_and_rejoins_sync(project, reference):
    """It is silent for longer than the group waits, and sends its gradients when it is fenced."""
    run = ClusterRun(project, "sync", reference("sync"))
    stopped, refused = run.inject(
        Fault(CLIENT, "push", 60, do="stop"),
        Fault("clickline.training.cluster.streams:BatchStreams", "owned_by", do="note"),
    )
    run.start()
    pid = int(poll("a worker that stops", lambda: stopped.exists() and stopped.read_text()))
    poll("a broken group", lambda: "broken at step" in run.log("worker-0") + run.log("worker-1"))
    poll("a new token", lambda: "stream 0: token 2" in run.log("shard-1"))
    os.kill(pid, signal.SIGCONT)
    run.assert_exact()
    assert "the message of token 1 was refused" in refused.read_text()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [(CLIENT, "push", 60), ("clickline.training.batches:Batches", "read_window", 1)],
    ids=["training", "reading"],
)
def test_suspended_worker_is_given_up_sync(project, reference, place, name, call):
    """The group notices in all-reduce, or earlier, when the others wait for rows that it should read."""
    run = ClusterRun(project, "sync", reference("sync"))
    [stopped] = run.inject(Fault(place, name, call, do="stop"))
    run.start()
    pid = int(poll("a worker that stops", lambda: stopped.exists() and stopped.read_text()))
    poll("a decision", lambda: any("became unreachable" in reason for reason in run.decisions("resize")))
    run.await_step(100)
    os.kill(pid, signal.SIGCONT)
    run.assert_exact()


@pytest.mark.faults
def test_suspended_worker_is_given_up_and_blocks_no_other_async(project, reference):
    """The others would wait for its gradient: staleness is bounded."""
    run = ClusterRun(project, "async", reference("async"))
    [stopped] = run.inject(Fault(CLIENT, "push", 60, do="stop"))
    run.start()
    pid = int(poll("a worker that stops", lambda: stopped.exists() and stopped.read_text()))
    poll("a decision", lambda: any("became unreachable" in reason for reason in run.decisions("resize")))
    run.await_step(150)
    os.kill(pid, signal.SIGCONT)
    run.assert_exact()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [(CLIENT, "pool", 60), ("clickline.training.batches:Batches", "read_window", 2)],
    ids=["computing", "reading"],
)
def test_stuck_worker_blocks_no_other_async(project, reference, place, name, call):
    """The others would wait for it, and so would a checkpoint."""
    run = ClusterRun(project, "async", reference("async"))
    [held] = run.inject(Fault(place, name, call, do="hold"))
    run.start()
    poll("a worker that hangs", held.exists)
    poll("a decision", lambda: any("stopped making progress" in reason for reason in run.decisions("resize")))
    run.assert_exact()
    assert run.decisions("restart") == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        ("clickline.embedding.remote_tables:RemoteTables", "begin_lookup", 1),
        ("clickline.training.batches:Batches", "read_window", 2),
    ],
    ids=["first-lookup", "reading"],
)
def test_stuck_worker_is_given_up_sync(project, reference, place, name, call):
    """All others wait for its part, or for the rows that it reads; none of them is given up."""
    run = ClusterRun(project, "sync", reference("sync"))
    run.set_constants(
        {
            "clickline.training.cluster.sync_epoch": {"READ_SECONDS": 10.0},
            "clickline.training.cluster.monitor": {"_FIRST_SECONDS": 20.0},
        }
    )
    [held] = run.inject(Fault(place, name, call, do="hold"))
    run.start()
    poll("a worker that hangs", held.exists)
    poll("a decision", lambda: any("stopped making progress" in reason for reason in run.decisions("resize")))
    run.assert_exact()
    assert run.decisions("restart") == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("sync", Fault(TABLES, "apply", LATER, do="hold")),
        ("async", Fault(TABLES, "apply", LATER, do="hold")),
        ("async", Fault(DENSE_SERVER, "_apply", LATER, do="hold")),
    ],
    ids=["embedding-server-sync", "embedding-server-async", "dense-server-async"],
)
def test_hanging_stateful_actor_is_given_up(project, reference, mode, fault):
    run = ClusterRun(project, mode, reference(mode))
    [held] = run.inject(fault)
    run.start()
    run.assert_exact()
    assert held.exists()
    [reason] = run.decisions("restart")
    assert "became unreachable (it did not answer in time)" in reason


@pytest.mark.faults
def test_embedding_server_that_stops_while_writing_a_snapshot_is_given_up(project, reference):
    """A snapshot that will never be written is not awaited."""
    run = ClusterRun(project, "sync", reference("sync"))
    [stopped] = run.inject(Fault(EMBEDDING_SERVER, "_write", 1, do="stop"))
    run.start()
    run.assert_exact()
    assert stopped.exists()
    assert len(run.decisions("restart")) == 1


@pytest.mark.faults
def test_embedding_server_that_hangs_while_restoring_is_given_up(project, reference):
    run = ClusterRun(project, "sync", reference("sync"))
    run.set_constants({"clickline.training.cluster.stateful_actors": {"_RESTORE_SECONDS": 60.0}})
    hit, held = run.inject(
        Fault(TABLES, "apply", LATER), Fault(EMBEDDING_SERVER, "load_snapshot", 1, do="hold")
    )
    run.start()
    run.assert_exact()
    assert hit.exists() and held.exists()
    crashed, silent = run.decisions("restart")
    assert "crashed" in crashed and "became unreachable (it did not answer in time)" in silent


@pytest.mark.faults
def test_unit_of_a_straggler_is_leased_again_and_its_late_messages_are_refused_async(project, reference):
    run = ClusterRun(project, "async", reference("async"), **{"train.checkpoint_steps": 1000})
    held, refused = run.inject(
        Fault("clickline.training.batches:Batches", "read_window", 2, do="hold"),
        Fault("clickline.training.cluster.streams:BatchStreams", "owned_by", do="note"),
    )
    run.start()
    poll("a new lease", lambda: any("a straggler" in reason for reason in run.decisions("lease")))
    held.with_suffix(".release").touch()
    run.assert_exact()
    assert "was refused" in refused.read_text()


# ── faults that persist, and scaling ───────────────────────────────────────────────────────────


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "batch", "place"),
    [("sync", 45, r"step 45"), ("async", 30, r"unit \d, batch 30")],
    ids=BOTH,
)
def test_location_that_keeps_failing_ends_the_run_with_its_name(project, reference, mode, batch, place):
    run = ClusterRun(
        project, mode, reference(mode), **{"train.checkpoint_steps": 15}
    )  # at least one before it fails
    run.inject(
        Fault(CLIENT, "push", batch, do="raise"), Fault(CLIENT, "pool", do="slow")
    )  # or it fails too early
    run.start()
    ended = run.wait()
    assert ended.code == 1, run.output()
    assert "ZeroDivisionError: a fault of the test" in ended.errors
    assert re.search(f"^{place} failed 3 times without progress in between", ended.errors, re.MULTILINE), (
        ended.errors
    )
    assert run.checkpoint_step() > 0
    run.clear_faults()
    run.start()
    run.assert_exact()


@pytest.mark.faults
@pytest.mark.parametrize("mode", BOTH)
def test_workers_scale_down_and_up_on_request(project, reference, mode):
    run = ClusterRun(project, mode, reference(mode))
    run.inject(Fault(CLIENT, "pool", do="slow"))  # so that it still trains when the second one has started
    run.start()
    run.await_step(30)
    run.command("scale", "--workers", "1")
    poll("one worker", lambda: len(run.roles("worker")) == 1)
    run.command("scale", "--workers", "2")
    poll("two workers", lambda: len(run.roles("worker")) == 2)
    run.assert_exact()
    fewer, more = [reason for reason in run.decisions("resize") if "clickline scale" in reason]
    assert "`clickline scale` requests 1 worker, and 2 run" in fewer
    assert "from 1 to 2 workers; `clickline scale` requests 2" in more
