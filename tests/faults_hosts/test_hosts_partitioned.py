"""A worker whose host was partitioned from the network comes back, and what it then sends is refused.

The host is a network namespace with two lines: one to the head, one to the host of the shards. Both are cut; then only
the one to the shards comes back, so that what the worker sends arrives before it can learn that it was given up.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Cluster, Training

from clickline.artifacts.checkpoint import Checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]  # two cores may be busy with much else


class Lines:
    """A network namespace, and two bridges of this machine that it is plugged into."""

    def __init__(self) -> None:
        self.name = f"cl{secrets.token_hex(3)}"
        block = int.from_bytes(os.urandom(1))
        self.here = [f"10.{213 + line}.{block}.1" for line in range(2)]
        self.there = [f"10.{213 + line}.{block}.2" for line in range(2)]
        self._made: list[tuple[str, ...]] = []

    def lay(self) -> None:
        self._make(("netns", "add", self.name), ("netns", "del", self.name))
        _ip("-n", self.name, "link", "set", "lo", "up")
        for line in range(2):
            bridge, plug, end = (f"{self.name}{kind}{line}" for kind in "bpe")
            self._make(("link", "add", bridge, "type", "bridge"), ("link", "del", bridge))
            _ip("addr", "add", f"{self.here[line]}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            self._make(
                ("link", "add", plug, "type", "veth", "peer", "name", end, "netns", self.name),
                ("link", "del", plug),
            )
            _ip("link", "set", plug, "master", bridge, "up")
            _ip("-n", self.name, "addr", "add", f"{self.there[line]}/24", "dev", end)
            _ip("-n", self.name, "link", "set", end, "up")
        # It leads nowhere, but Ray finds out by it which of its addresses is seen by others.
        _ip("-n", self.name, "route", "add", "default", "via", self.here[0])

    def cut(self, line: int) -> None:
        _ip("link", "set", f"{self.name}p{line}", "down")

    def mend(self, line: int) -> None:
        _ip("link", "set", f"{self.name}p{line}", "up")

    def remove(self) -> None:
        for undo in reversed(self._made):
            subprocess.run(["ip", *undo], check=False, capture_output=True)

    def _make(self, do: tuple[str, ...], undo: tuple[str, ...]) -> None:
        _ip(*do)
        self._made.append(undo)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


@pytest.fixture
def lines() -> Iterator[Lines]:
    if shutil.which("ip") is None:
        pytest.skip("`ip` is not installed: apt-get install iproute2")
    made = Lines()
    try:
        try:
            made.lay()
        except AssertionError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        made.remove()


@pytest.fixture
def parted(lines: Lines, tmp_path: Path) -> Iterator[Cluster]:
    """A head without CPUs, a host with the shards and a worker, and one behind the lines with a worker."""
    made = Cluster(
        tmp_path,
        address=lines.here[0],
        CLICKLINE_TEST_GROUP="8",
        RAY_health_check_period_ms="1000",
        # What was sent waits in a connection that neither end closes.
        RAY_grpc_keepalive_time_ms="120000",
        RAY_grpc_keepalive_timeout_ms="120000",
        RAY_grpc_client_keepalive_timeout_ms="120000",
    )
    try:
        made.head(0, "--memory=1")
        made.await_hosts()
        made.node("near", 1, f"--node-ip-address={lines.here[1]}", "--memory=1400000000")
        made.node(
            "far",
            1,
            f"--node-ip-address={lines.there[0]}",
            "--memory=1",
            inside=("ip", "netns", "exec", lines.name),
        )
        made.await_hosts()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("sync", ["true", "false"])
def test_late_messages_of_a_partitioned_worker_are_refused(
    parted: Cluster,
    lines: Lines,
    ads: Path,
    exact: Callable[[Training, Checkpoint], None],
    sync: str,
) -> None:
    training = Training(
        parted,
        ads,
        f"train.sync={sync}",
        "train.workers.max=2",
        "train.checkpoint_steps=20",
        "cluster.embedding_server.memory=600MiB",
        "cluster.embedding_server.cpus=0",
        brake=0.4,
    )
    training.until(
        lambda: sorted(training.workers().values()) == ["far", "near"] and training.checkpoint_step
    )
    [away] = [name for name, host in training.workers().items() if host == "far"]
    lines.cut(0)
    lines.cut(1)
    training.until(lambda: f"{away} " in training.events())
    step = training.status()["metrics"]["step"]
    training.until(lambda: training.status()["metrics"]["step"] > step)  # the others continue
    assert parted.hosts["far"].runs(training.pid(away))  # it lives, and knows nothing
    before = {shard: training.log(shard).count("refused") for shard in ("shard-0", "shard-1")}
    lines.mend(1)
    training.until(lambda: all(training.log(shard).count("refused") > n for shard, n in before.items()))
    lines.mend(0)
    exact(training, training.finish())
    assert "restart" not in training.events()
