"""This machine as a node of a Ray cluster, with nothing to give, for as long as a driver runs on it.

A driver talks to a node of Ray on its own machine. Where there is none, as in a pod of its own, one is started that
takes no work: no CPUs, and memory enough for nothing.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from clickline.errors import ClusterError

_START_SECONDS = 120.0
_ANSWER_SECONDS = 5.0
_STORE_BYTES = 96 << 20  # the network's weights on their way to and from the driver

# It ends with its parent, also with one that is killed: PR_SET_PDEATHSIG is 1.
_RAY = (
    "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "from ray.scripts.scripts import main; main()"
)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Connect this machine to the cluster whose head is at `address`, unless it is a node of it already; the head's own
    machine is one, or will be in a moment."""
    if _is_head(address) or _is_node(address):
        yield
        return
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _RAY, "start", f"--address={address}", "--block"),
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
                    said = output.read().decode(errors="replace").strip().splitlines()[-5:]
                    raise ClusterError(
                        f"this machine could not join the Ray cluster at {address}: {' '.join(said)} "
                        "It must be reachable from the cluster's nodes, with the same releases of Ray and Python."
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
    from ray._private.services import get_node_ip_address

    host, _, port = address.rpartition(":")
    own = get_node_ip_address(address)  # type: ignore[no-untyped-call]
    return any(place[4][0] == own for place in socket.getaddrinfo(host.strip("[]"), port))


def _is_node(address: str) -> bool:
    """Whether a living node of the cluster is here; it is called, as Ray believes in a lost one for a while."""
    from ray._private.services import get_node_ip_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

    own = get_node_ip_address(address)  # type: ignore[no-untyped-call]
    nodes = GcsClient(address=address).get_all_node_info(timeout=_ANSWER_SECONDS)
    return any(
        node.state == GcsNodeInfo.ALIVE
        and node.node_manager_address == own
        and answers((own, node.node_manager_port))
        for node in nodes.values()
    )


def answers(place: tuple[str, int]) -> bool:
    """Whether somebody takes connections there."""
    with suppress(OSError), socket.create_connection(place, timeout=_ANSWER_SECONDS):
        return True
    return False
