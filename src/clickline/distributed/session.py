"""The connection to Ray: an embedded cluster that is started here, or an existing cluster.

An embedded cluster listens on this machine only, with token authentication, and is shut down with its session. Of an
existing cluster nothing is started or stopped; every node must see the same `home` and have the same release of
Clickline.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clickline.distributed.node import accepts_connections, join_cluster
from clickline.distributed.ray_internals import (
    ActorAddress,
    ClusterNode,
    actor_address,
    cluster_nodes,
    free_resources,
    has_auth_token,
    init,
    running_cluster,
    started_processes,
)
from clickline.errors import ClusterError
from clickline.machine import memory_limit
from clickline.progress import Progress, human_size

ROOM_SECONDS = 600.0  # to wait for capacity on a full cluster
_STORE_SHARE = 0.15  # of the memory, for arrays sent between processes
_MAX_STORE = 4 << 30
_MIN_STORE = 256 << 20  # with less, the faster /dev/shm is not worthwhile
_EXIT_SECONDS = 3.0  # for processes of an embedded cluster to end by themselves
_ANSWER_SECONDS = 5.0  # for a live server to accept a connection
_INSPECT_SECONDS = 120.0  # for a node to start a process that checks the shared folder


class RaySession:
    """An open connection to Ray.

    Ray's own calls about the cluster wait for its head, and if that is gone, Ray ends the whole process after 60
    seconds. So this class queries the head with a timeout; without an answer, the last known state is used."""

    def __init__(self) -> None:
        import ray

        self.address: str = ray.get_runtime_context().gcs_address
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self._nodes: list[ClusterNode] = []
        own = next(node for node in self.nodes() if node.id == self.node_id)
        gcs_host, _, gcs_port = self.address.rpartition(":")
        self._endpoints = ((gcs_host.strip("[]"), int(gcs_port)), own.daemon)

    def nodes(self) -> list[ClusterNode]:
        """All nodes, dead ones included."""
        from ray.exceptions import RpcError

        with suppress(RpcError):
            self._nodes = cluster_nodes(_ANSWER_SECONDS)
        return self._nodes

    def cpus(self) -> float:
        """CPUs of all live nodes, in use or not."""
        return sum(node.cpus for node in self.nodes() if node.alive)

    def await_cpus(self, progress: Progress, seconds: float = ROOM_SECONDS) -> None:
        """Wait until a node has CPUs: on Kubernetes, worker pods may start after the driver."""
        reported = False
        until = time.monotonic() + seconds
        while self.cpus() < 1:
            if time.monotonic() > until:
                raise ClusterError(
                    f"the Ray cluster at {self.address} has no CPUs. Waited {seconds:,.0f} s for a node that "
                    "has some. Add one, then run the same command again."
                )
            if self.lost():
                raise ClusterError("the Ray cluster is gone. Run the same command again when it is back.")
            if not reported:
                progress.log(
                    f"the Ray cluster at {self.address} has no CPUs yet: waiting for a node that has some"
                )
                reported = True
            time.sleep(1.0)

    def free_cpus(self) -> float:
        """Unreserved CPUs; 0 while the head does not answer."""
        return sum((node.get("CPU", 0.0) for node in self._free_resources()), 0.0)

    def room_for(self, cpus: float, memory: int | None) -> int:
        """How many processes fit that each reserve this much on one node."""
        request = {"CPU": cpus} if memory is None else {"CPU": cpus, "memory": memory}
        return sum(
            int(min(node.get(name, 0.0) / each for name, each in request.items()) + 1e-6)
            for node in self._free_resources()
        )

    def _free_resources(self) -> list[Mapping[str, float]]:
        """Unreserved resources by node; empty while the head does not answer."""
        from ray.exceptions import RpcError

        try:
            return free_resources(_ANSWER_SECONDS)
        except RpcError:
            return []

    def lost(self) -> bool:
        """Whether the cluster's head or this machine's node is gone, so that the session is unusable.

        Ray itself reports a lost node only after 15 seconds, and for a lost head it ends the whole process after 60. So
        callers check here about once a second, without a call to Ray that could hang."""
        return not all(accepts_connections(endpoint) for endpoint in self._endpoints)

    def has_left(self, actor: Any) -> bool:
        """Whether the node of an actor is gone. Ray itself considers it alive until it has missed several heartbeats;
        until then its actors just do not answer."""
        address = _address_of(actor)
        return any(
            not node.alive or not accepts_connections(node.daemon)
            for node in self.nodes()
            if address is not None and node.id == address.node_id
        )

    def has_place(self, actor: Any) -> bool:
        """Whether an actor is placed on a node; its process may still be starting."""
        address = _address_of(actor)
        return address is not None and address.port != 0


def _address_of(actor: Any) -> ActorAddress | None:
    """None if the head does not answer."""
    from ray.exceptions import RpcError

    try:
        return actor_address(actor, _ANSWER_SECONDS)
    except RpcError:
        return None


@contextmanager
def open_session(
    address: str | None, *, cpus: int | None = None, home: Path | None = None, progress: Progress
) -> Iterator[RaySession]:
    """Connect to the cluster at `address`, or start an embedded one with `cpus` logical CPUs that is shut down at the
    end.

    An existing connection of this process is reused and left open. `home` is the folder, if any, that all nodes of an
    existing cluster must see.
    """
    _set_environment()
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ClusterError(
            f"cluster mode needs the package {error.name}: pip install 'clickline[cluster]'"
        ) from error

    if ray.is_initialized():
        shared = RaySession()
        _check_nodes(shared, home)
        yield shared
        return
    with ExitStack() as stack:
        if address is None:
            stack.callback(_shut_down)
            _start(cpus, progress)
        else:
            head = _check_address(address)
            with _explain_errors(address):
                if address != "auto":
                    stack.enter_context(join_cluster(head))
                stack.callback(_shut_down)
                _init(address=head)
        ray_session = RaySession()
        if address is not None:
            _check_nodes(ray_session, home)
        yield ray_session


# ── settings that Ray takes from the environment ───────────────────────────────────────────────


def _set_environment() -> None:
    """Set defaults that Ray reads on import; variables that the user has set are kept."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Under `uv run` Ray would package the working folder with all logs and send it to every node.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Ray's processes would have the lowest priority on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray hides accelerators from tasks that request none, and warns that this will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def _init(**options: Any) -> None:
    """Connect, and keep this process's handler of SIGTERM, which Ray replaces."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        init(**options)
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)


# ── embedded cluster ───────────────────────────────────────────────────────────────────────────


def _start(cpus: int | None, progress: Progress) -> None:
    if os.environ["RAY_AUTH_MODE"] == "token" and not has_auth_token():
        # For this process and its children only; never written to a file.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        has_auth_token()
    size, folder = _object_store(progress)
    try:
        _init(
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=size,
            local_store=folder,  # not the cluster that a variable or an earlier `ray start` names
        )
    except Exception as error:  # Ray raises many types
        raise ClusterError(
            f"Ray could not be started on this machine: {_first_line(error)}. "
            "Its logs are in /tmp/ray/session_latest/logs."
        ) from error


def _object_store(progress: Progress) -> tuple[int, str]:
    """Size in bytes and folder of the object store."""
    size = min(int(memory_limit() * _STORE_SHARE), _MAX_STORE)
    shared = Path("/dev/shm")
    free = int(shutil.disk_usage(shared).free * 0.9) if shared.is_dir() else 0
    if free >= min(size, _MIN_STORE):
        return min(size, free), str(shared)
    progress.log(
        f"/dev/shm has only {human_size(free)} free: processes exchange data through files in /tmp, which is "
        "slower. In a container, give it more: --shm-size=2g"
    )
    return min(size, _MIN_STORE * 2), "/tmp"


def _shut_down() -> None:
    import ray

    started = started_processes()
    ray.shutdown()
    if started is None:
        return
    processes, logs = started
    for process in processes:  # Ray stops its processes without waiting for them
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ANSWER_SECONDS)
    _kill_leftovers(logs)


def _kill_leftovers(logs: Path) -> None:
    """Kill leftover processes of an embedded cluster, recognized by their open log files. Ray's agents end with their
    raylet, but not if Ctrl-C hits them while they start."""
    until = time.monotonic() + _EXIT_SECONDS
    while leftovers := [process for process in Path("/proc").glob("[0-9]*") if _has_open(process, logs)]:
        if time.monotonic() > until:
            for process in leftovers:
                with suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)
            return
        time.sleep(0.05)


def _has_open(process: Path, folder: Path) -> bool:
    """Whether another process has a file in that folder open."""
    if int(process.name) == os.getpid():
        return False
    with suppress(OSError):  # of another user, or gone
        return any(file.readlink().is_relative_to(folder) for file in (process / "fd").iterdir())
    return False


# ── existing cluster ───────────────────────────────────────────────────────────────────────────


def _check_address(address: str) -> str:
    """The resolved address, checked: it is valid, accepts connections, and there is a token for it."""
    if "://" in address:
        raise ClusterError(
            f"cluster.address is {address}; it must be auto or host:port of the cluster's head: clickline runs on "
            "the cluster's network, not through Ray Client."
        )
    if address != "auto":
        head = _resolve(address)
    else:
        head = address
        _resolve(_local_cluster())
    if os.environ["RAY_AUTH_MODE"] == "token" and not has_auth_token():
        raise ClusterError(
            f"the cluster at {address} needs a token for authentication, and none was found. Set RAY_AUTH_TOKEN to "
            "the token it was started with, or RAY_AUTH_TOKEN_PATH to its file, or save it as ~/.ray/auth_token; "
            "for a cluster without authentication, set RAY_AUTH_MODE=disabled."
        )
    return head


@contextmanager
def _explain_errors(address: str) -> Iterator[None]:
    """Turn Ray's connection errors into helpful messages."""
    try:
        yield
    except ClusterError:
        raise
    except Exception as error:  # Ray raises many types
        raise ClusterError(f"the Ray cluster at {address} cannot be used: {_explain(error)}") from error


def _local_cluster() -> str:
    """The address of this machine's cluster according to Ray, which may be that of a dead one."""
    try:
        return running_cluster()
    except ConnectionError as error:
        raise ClusterError(
            "cluster.address is auto, and no Ray cluster runs on this machine. Start one (`ray start`), set "
            "host:port, or remove cluster.address to use an embedded cluster."
        ) from error


def _resolve(address: str) -> str:
    """The IP address and port of a host name, if something accepts connections there. Ray itself retries for a long
    time, then ends the process, and makes more DNS queries than needed."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ClusterError(
            f"cluster.address is {address}; it must be auto or host:port of the cluster's head."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS) as found:
            ip = found.getpeername()[0]
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error.strerror or error}. Check that its head is running "
            "(`ray status`) and that cluster.address has its port, usually 6379; or remove cluster.address to use an "
            "embedded cluster."
        ) from error
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _explain(error: BaseException) -> str:
    """What to do about an error, from its whole chain of causes."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    text = " ".join(str(cause) for cause in chain)
    if "uthenticat" in text or "token" in text:
        return (
            "it rejected the token. Set RAY_AUTH_TOKEN to the token it was started with, or RAY_AUTH_TOKEN_PATH to "
            "its file, or save it as ~/.ray/auth_token."
        )
    if "ersion mismatch" in text:
        versions = " ".join(text[text.index("ersion mismatch") :].split()[2:24])
        return f"All nodes need the same versions of Ray and Python. {versions}"
    if "Could not find any running Ray instance" in text:
        return "none runs on this machine. Start one with `ray start`, or remove cluster.address."
    return f"{_first_line(chain[-1])}. Run clickline on one of its nodes."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _inspect_node(file: str | None) -> tuple[bool, str]:
    """Runs on a node: whether it sees the file, and its release of Clickline."""
    return file is None or Path(file).exists(), version("clickline")


def _check_nodes(ray_session: RaySession, home: Path | None) -> None:
    """Check that every live node sees `home` and has this release; raises ClusterError with those that do not."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    marker = None
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
        marker = home / f".seen-{secrets.token_hex(8)}"
        marker.touch()
    try:
        inspect = ray.remote(num_cpus=0, max_retries=2)(_inspect_node)
        checks = {
            node: inspect.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
            ).remote(None if marker is None else str(marker))
            for node in ray_session.nodes()
            if node.alive
        }
        problems = []
        until = time.monotonic() + _INSPECT_SECONDS
        for node, answer in checks.items():
            try:
                visible, release = ray.get(answer, timeout=max(until - time.monotonic(), 1.0))
            except ray.exceptions.GetTimeoutError:
                problems.append(f"{node.host} did not answer within {_INSPECT_SECONDS:.0f} s")
                continue
            except ray.exceptions.RayError as error:
                if any(now.id == node.id and now.alive for now in ray_session.nodes()):
                    problems.append(f"{node.host} cannot run clickline: {_last_line(error)}")
                continue
            if release != version("clickline"):
                problems.append(f"{node.host} has clickline {release}, this process {version('clickline')}")
            elif not visible:
                problems.append(f"{node.host} does not see {home}")
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)
    if problems:
        raise ClusterError(
            f"the cluster's nodes differ: {'; '.join(problems)}. `home` must be one folder that all nodes see "
            "under the same path, and all nodes need the same release of clickline."
        )


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].rstrip(".")
