"""Joins this machine to a Ray cluster as a node without resources, for as long as a driver runs on it.

A driver needs a Ray node on its own machine. If there is none, as in a separate pod, one is started that accepts no
work: it has no CPUs and hardly any memory.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from clickline.distributed.ray_internals import RAY_COMMAND, cluster_nodes
from clickline.errors import ClusterError

_START_SECONDS = 120.0
_ANSWER_SECONDS = 5.0
_STORE_BYTES = 96 << 20  # for the network's weights, sent to and from the driver


@contextmanager
def join_cluster(address: str) -> Iterator[None]:
    """Make this machine a node of the cluster whose head is at `address`, unless it already is one; the head's own
    machine is, or will be in a moment."""
    if _is_head(address) or _is_node(address):
        yield
        return
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", RAY_COMMAND, "start", f"--address={address}", "--block"),
                *("--num-cpus=0", "--num-gpus=0", "--memory=1", f"--object-store-memory={_STORE_BYTES}"),
                *("--disable-usage-stats", "--include-log-monitor=false", "--log-style=record"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            until = time.monotonic() + _START_SECONDS
            while not _is_node(address):
                if process.poll() is not None or time.monotonic() > until:
                    output.seek(0)
                    output_tail = output.read().decode(errors="replace").strip().splitlines()[-5:]
                    raise ClusterError(
                        f"this machine could not join the Ray cluster at {address}: {' '.join(output_tail)} "
                        "It must be reachable from the cluster's nodes and have the same versions of Ray and Python."
                    )
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_ANSWER_SECONDS * 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_head(address: str) -> bool:
    import ray

    host, _, port = address.rpartition(":")
    own_ip = ray.util.get_node_ip_address(address)  # type: ignore[no-untyped-call]
    return any(endpoint[4][0] == own_ip for endpoint in socket.getaddrinfo(host.strip("[]"), port))


def _is_node(address: str) -> bool:
    """Whether this machine is a live node. The node is contacted, because Ray lists a lost one for a while."""
    import ray

    own_ip = ray.util.get_node_ip_address(address)  # type: ignore[no-untyped-call]
    return any(
        node.alive and node.daemon[0] == own_ip and accepts_connections(node.daemon)
        for node in cluster_nodes(_ANSWER_SECONDS, address)
    )


def accepts_connections(endpoint: tuple[str, int]) -> bool:
    """Whether a server accepts connections at this endpoint."""
    with suppress(OSError), socket.create_connection(endpoint, timeout=_ANSWER_SECONDS):
        return True
    return False
