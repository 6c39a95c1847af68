"""A head and nodes with resources of their own: one leaves in the middle of a run, another joins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Cluster, Training

from clickline.artifacts.checkpoint import Checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]  # two cores may be busy with much else

Exact = Callable[[Training, Checkpoint], None]

# A shard is where there is memory for it, so that a test knows on which hosts there are some.
_SHARD = ("cluster.embedding_server.memory=600MiB", "cluster.embedding_server.cpus=0")
_ROOM_FOR = ("--memory=1", "--memory=700000000", "--memory=1400000000")  # no shard, one, two


def elastic(cluster: Cluster, ads: Path, *settings: str) -> Training:
    return Training(cluster, ads, "train.workers.max=3", "train.checkpoint_steps=20", *settings, brake=0.4)


@pytest.mark.parametrize("sync", ["true", "false"])
def test_a_node_leaves_and_another_joins(cluster: Cluster, ads: Path, exact: Exact, sync: str) -> None:
    cluster.head(1, _ROOM_FOR[2])
    cluster.await_hosts()
    cluster.node("a", 1, _ROOM_FOR[0])
    cluster.await_hosts()
    training = elastic(
        cluster, ads, f"train.sync={sync}"
    )  # shards ask for nothing, and yet are on the head alone
    training.until(lambda: sorted(training.workers().values()) == ["a", "head"] and training.checkpoint_step)
    cluster.hosts["a"].kill()
    training.until(lambda: "left with its node" in training.events())
    cluster.node("b", 1, _ROOM_FOR[0])
    training.until(lambda: sorted(training.workers().values()) == ["b", "head"])
    exact(training, training.finish())
    events = training.events()
    assert events.count("left with its node") == 1
    assert "1 worker continues" in events
    assert "resize: the cluster has capacity: from 1 to 2 workers" in events
    assert "restart" not in events  # nothing had to be trained again
    assert "crashed" not in events
    assert training.status()["generation"] == 0


@pytest.mark.parametrize("sync", ["true", "false"])
def test_embedding_servers_of_a_node_that_leaves_move_to_the_others(
    cluster: Cluster, ads: Path, exact: Exact, sync: str
) -> None:
    cluster.head(1, _ROOM_FOR[0])
    cluster.await_hosts()
    cluster.node("a", 1, _ROOM_FOR[1])
    cluster.node("b", 1, _ROOM_FOR[2])
    cluster.await_hosts()
    training = elastic(cluster, ads, *_SHARD, f"train.sync={sync}", "cluster.max_failures=1")
    training.until(lambda: len(training.workers()) == 3 and training.checkpoint_step)
    assert {training.place("shard-0"), training.place("shard-1")} <= {"a", "b"}
    leaves = training.place("shard-0")
    stays = "ab".replace(leaves, "")
    if leaves == "b":  # the other one would have no room for both
        leaves, stays = "a", "b"
    had_state = leaves in [training.place(role) for role in ("shard-0", "shard-1", "network")]
    before = training.checkpoint_step
    cluster.hosts[leaves].kill()
    training.until(lambda: "left with its node" in training.events())
    training.until(lambda: training.checkpoint_step > before)
    assert training.place("shard-0") == training.place("shard-1") == stays
    exact(training, training.finish())
    assert ("training rolls back to the last checkpoint" in training.events()) == had_state
    assert "crashed" not in training.events()


def test_run_waits_for_a_node_if_its_embedding_servers_do_not_fit(
    cluster: Cluster, ads: Path, exact: Exact
) -> None:
    cluster.head(1, _ROOM_FOR[1])
    cluster.await_hosts()
    cluster.node("a", 1, _ROOM_FOR[1])
    cluster.await_hosts()
    training = elastic(cluster, ads, *_SHARD)
    training.until(lambda: len(training.workers()) == 2 and training.checkpoint_step)
    cluster.hosts["a"].kill()
    training.until(lambda: "waiting for capacity: 1 of 2 embedding servers" in training.output())
    assert training.status()["state"] == "waiting"
    cluster.node("b", 1, _ROOM_FOR[1])
    training.until(lambda: {training.place("shard-0"), training.place("shard-1")} == {"head", "b"})
    exact(training, training.finish())
    assert training.output().count("waiting for capacity: 1 of 2 embedding servers") == 1


def test_run_that_does_not_fit_reports_once_and_starts_when_a_node_joins(
    cluster: Cluster, ads: Path, exact: Exact
) -> None:
    cluster.head(1, _ROOM_FOR[2])
    cluster.await_hosts()
    training = elastic(cluster, ads, *_SHARD, "train.workers.min=3")
    reason = "3 workers of 1 CPUs each must fit before training starts, and the cluster has capacity for 1. It has 1 CPUs"
    training.until(lambda: reason in training.output())
    assert training.status()["state"] == "waiting"
    assert reason in training.status()["message"]
    cluster.node("a", 2, _ROOM_FOR[0])
    training.until(lambda: len(training.workers()) == 3)
    assert sorted(training.workers().values()) == ["a", "a", "head"]
    assert training.status()["message"] == ""
    exact(training, training.finish())
    # Once as long as nothing changes: Ray may announce the CPUs of a node that joins before it says that they are free.
    assert training.output().count(reason) == 1
