"""All that Clickline uses of Ray outside its public API, and why. No other module imports Ray's private modules.

cluster_nodes, free_resources, actor_address
    `ray.nodes()` and `ray.available_resources()` have no time limit, and Ray ends the whole process once its head has
    been gone for 60 s. `ray.util.state` has a time limit but needs the dashboard. For resources per node, an actor's
    port, and the nodes of a cluster that this process has not joined there is no public function at all.
has_auth_token
    Public are only the variables that a token may come from; that none of them holds one, Ray reports by failing.
init
    `ray.init` has no public option against the thread that prints the errors of all nodes to stderr, for a cluster
    that listens on 127.0.0.1 only, or for the folder of the object store.
started_processes
    `ray.shutdown()` does not wait for the processes that it stops.
running_cluster
    Which cluster `ray.init("auto")` connects to is known only afterwards, and if that is dead, it ends the process.
RAY_COMMAND
    Ray's command line as a child that ends with this process. The `ray` script need not be on the PATH.

`make ray-versions` runs the tests of this module with the Ray of constraints.txt and with the minor release before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

# PR_SET_PDEATHSIG is 1: the child ends with its parent, also if that is killed.
RAY_COMMAND = (
    "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "from ray.scripts.scripts import main; main()"
)
"""A program for `python -c` that takes the arguments of the command `ray`."""


class ClusterNode(NamedTuple):
    """A machine of the cluster, as Ray sees it."""

    id: str
    host: str
    cpus: float
    memory: int
    alive: bool
    daemon: tuple[str, int]  # where Ray's own process on it listens


class ActorAddress(NamedTuple):
    """Where an actor runs. While it waits: the node that was asked for a process, and port 0."""

    node_id: str
    port: int


def cluster_nodes(seconds: float, address: str | None = None) -> list[ClusterNode]:
    """All nodes that ever joined this process's cluster, or the one whose head is at `address`. Raises RpcError if the
    head does not answer in time."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

    client = _gcs_client() if address is None else GcsClient(address=address)
    return [
        ClusterNode(
            node.node_id.hex(),
            node.node_manager_hostname or node.node_manager_address,
            float(node.resources_total.get("CPU", 0.0)),
            int(node.resources_total.get("memory", 0)),
            node.state == GcsNodeInfo.ALIVE,
            (node.node_manager_address, node.node_manager_port),
        )
        for node in client.get_all_node_info(timeout=seconds).values()
    ]


def free_resources(seconds: float) -> list[Mapping[str, float]]:
    """The unreserved resources of each node. Raises RpcError if the head does not answer in time."""
    reply = _gcs_client().get_all_resource_usage(timeout=seconds)
    return [node.resources_available for node in reply.resource_usage_data.batch]


def actor_address(actor: Any, seconds: float) -> ActorAddress | None:
    """None if the head does not know it. Raises RpcError if the head does not answer in time."""

    async def request() -> Any:
        return await _gcs_client().async_get_all_actor_info(actor_id=actor._actor_id, timeout=seconds)

    with ThreadPoolExecutor(1) as thread:  # this thread may already run an event loop: a notebook's does
        reply = thread.submit(asyncio.run, request()).result()
    return next(
        (ActorAddress(info.address.node_id.hex(), info.address.port) for info in reply.values()), None
    )


def _gcs_client() -> Any:
    from ray._private import worker

    return worker.global_worker.gcs_client  # type: ignore[attr-defined]


def has_auth_token() -> bool:
    """Whether Ray finds a token in its variables or files."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")  # reads the variables again: Ray may have been loaded before they were set
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()  # it also remembers that it found none
    return bool(loader.has_token(ignore_auth_mode=True))


def init(*, local_store: str | None = None, **options: Any) -> None:
    """`ray.init` without output. `local_store` starts a cluster that only this machine can reach, with its object store
    in that folder."""
    import ray
    from ray._private import ray_constants, worker

    worker.listen_error_messages = lambda *_: None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if local_store is None:
        ray.init(**quiet, **options)
        return
    # Where clusters are enabled, Ray replaces 127.0.0.1 by the address that others see, and listens on all.
    enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        ray.init("local", _node_ip_address="127.0.0.1", _plasma_directory=local_store, **quiet, **options)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled


def started_processes() -> tuple[list[Popen[bytes]], Path] | None:
    """The processes of the cluster that this process started, and the folder of their logs. None: it started none."""
    from ray._private import worker

    node: Any = worker._global_node
    processes = [] if node is None else [info.process for own in node.all_processes.values() for info in own]
    return (processes, Path(node.get_logs_dir_path()).resolve()) if processes else None


def running_cluster() -> str:
    """The address that `ray.init("auto")` connects to; its cluster may be dead. Raises ConnectionError if there is
    none."""
    from ray._private.services import get_ray_address_from_environment

    address: str = get_ray_address_from_environment("auto", None)
    return address
