"""The connection to Ray: one that is started here for the work at hand, or an existing cluster.

An embedded Ray listens on this machine alone, with token authentication, and goes when its session ends. Of an existing
cluster nothing is started or stopped, and every node must see the same `home` and have the same release of Clickline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from clickline.distributed.node import answers, joined
from clickline.errors import ClusterError
from clickline.machine import memory_limit
from clickline.progress import Progress, human_size

ROOM_SECONDS = 600.0  # to wait for a cluster that is full
_STORE_SHARE = 0.15  # of the memory, for arrays on their way between processes
_LARGEST_STORE = 4 << 30
_SMALLEST_STORE = 256 << 20  # less than this is not worth the faster /dev/shm
_LEAVE_SECONDS = 3.0  # for processes of our own Ray to end by themselves
_ANSWER_SECONDS = 5.0  # in which a server that is there takes a connection
_LOOK_SECONDS = 120.0  # in which a node starts a process that looks for the shared folder


class Node(NamedTuple):
    """A machine of the cluster, as Ray sees it."""

    id: str
    host: str
    cpus: float
    memory: int
    alive: bool
    daemon: tuple[str, int]  # where Ray's own process there listens


class Session:
    """A connection to Ray that stands.

    A call to Ray about the cluster waits for its head, and when that is gone, Ray ends the whole process after 60
    seconds. So the head is asked here with a time limit; without an answer, what was known last still holds."""

    def __init__(self, *, embedded: bool) -> None:
        import ray

        self.embedded = embedded
        self.address: str = ray.get_runtime_context().gcs_address
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self._nodes: list[Node] = []
        own = next(node for node in self.nodes() if node.id == self.node_id)
        gcs_host, _, gcs_port = self.address.rpartition(":")
        self._pulse = ((gcs_host.strip("[]"), int(gcs_port)), own.daemon)

    def nodes(self) -> list[Node]:
        """All nodes that ever were, the living and the gone."""
        from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]
        from ray.exceptions import RpcError

        with suppress(RpcError):
            self._nodes = [
                Node(
                    node.node_id.hex(),
                    node.node_manager_hostname or node.node_manager_address,
                    float(node.resources_total.get("CPU", 0.0)),
                    int(node.resources_total.get("memory", 0)),
                    node.state == GcsNodeInfo.ALIVE,
                    (node.node_manager_address, node.node_manager_port),
                )
                for node in _head().get_all_node_info(timeout=_ANSWER_SECONDS).values()
            ]
        return self._nodes

    def cpus(self) -> float:
        """CPUs of all living nodes, in use or not."""
        return sum(node.cpus for node in self.nodes() if node.alive)

    def await_cpus(self, progress: Progress, seconds: float = ROOM_SECONDS) -> None:
        """Until some node has a CPU to give: on Kubernetes workers may come after their driver."""
        told = False
        until = time.monotonic() + seconds
        while self.cpus() < 1:
            if time.monotonic() > until:
                raise ClusterError(
                    f"the Ray cluster at {self.address} has no CPUs. Waited {seconds:,.0f} s for a node that has. Add "
                    "one, then run the same command again."
                )
            if self.lost():
                raise ClusterError("the Ray cluster is gone. Run the same command again when it is back.")
            if not told:
                progress.say(
                    f"the Ray cluster at {self.address} has no CPUs yet: waiting for a node that has"
                )
                told = True
            time.sleep(1.0)

    def free_cpus(self) -> float:
        """CPUs that nothing has reserved; none while the head does not answer."""
        return sum((node.get("CPU", 0.0) for node in self._free()), 0.0)

    def room_for(self, cpus: float, memory: int | None) -> int:
        """How many processes find a place that reserve so much each, all of it on one node."""
        wanted = {"CPU": cpus} if memory is None else {"CPU": cpus, "memory": memory}
        return sum(
            int(min(node.get(name, 0.0) / each for name, each in wanted.items()) + 1e-6)
            for node in self._free()
        )

    def _free(self) -> list[Mapping[str, float]]:
        """What nothing has reserved, for each node; none while the head does not answer."""
        from ray.exceptions import RpcError

        try:
            reply = _head().get_all_resource_usage(timeout=_ANSWER_SECONDS)
        except RpcError:
            return []
        return [node.resources_available for node in reply.resource_usage_data.batch]

    def lost(self) -> bool:
        """Whether the cluster's head or this machine's own node is gone, so that this session cannot go on.

        Ray itself tells a lost node only after 15 seconds, and for a lost head it ends the whole process after 60:
        so whoever works with it asks here every second or so, without a call to Ray that could hang."""
        return not all(answers(place) for place in self._pulse)

    def has_left(self, actor: Any) -> bool:
        """Whether the node is gone that an actor runs on. Ray itself calls it alive until it has missed its heart
        beats for a while; meanwhile its actors are just not there."""
        address = _address_of(actor)
        return any(
            not node.alive or not answers(node.daemon)
            for node in self.nodes()
            if address is not None and node.id == address.node_id.hex()
        )

    def has_place(self, actor: Any) -> bool:
        """Whether an actor has a process; it may still be starting there."""
        address = _address_of(actor)
        return address is not None and address.port != 0


def _address_of(actor: Any) -> Any:
    """Of an actor that waits, the node that was asked for a process, and no port. None: the head does not tell."""
    from ray.exceptions import RpcError

    async def ask() -> Any:
        return await _head().async_get_all_actor_info(actor_id=actor._actor_id, timeout=_ANSWER_SECONDS)

    with ThreadPoolExecutor(1) as apart:  # in this thread a loop may run: that of a notebook
        try:
            answer = apart.submit(asyncio.run, ask()).result()
        except RpcError:
            return None
    return next((found.address for found in answer.values()), None)


def _head() -> Any:
    """The cluster's head, to be asked with a time limit."""
    from ray._private import worker

    return worker.global_worker.gcs_client  # type: ignore[attr-defined]


@contextmanager
def session(
    address: str | None, *, cpus: int | None = None, home: Path | None = None, progress: Progress
) -> Iterator[Session]:
    """Connect to the cluster at `address`, or to one of our own with `cpus` logical CPUs that goes afterwards.

    A connection that this process has already is used, and left as it is. `home` is the folder that all nodes of an
    existing cluster must see, if there is one.
    """
    _before_import()
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ClusterError(
            f"cluster mode needs the package {error.name}: pip install 'clickline[cluster]'"
        ) from error

    if ray.is_initialized():
        shared = Session(embedded=False)
        _check_nodes(shared, home)
        yield shared
        return
    with ExitStack() as ends:
        if address is None:
            ends.callback(_end)
            _start(cpus, progress)
        else:
            place = _checked(address)
            with _understood(address):
                if address != "auto":
                    ends.enter_context(joined(place))
                ends.callback(_end)
                _init(address=place)
        opened = Session(embedded=address is None)
        if address is not None:
            _check_nodes(opened, home)
        yield opened


# ── settings that Ray takes from the environment ───────────────────────────────────────────────


def _before_import() -> None:
    """What the user has set stays."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Under `uv run` Ray would pack the working folder, logs and all, and send it to every node.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Ray's processes would give way to everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray hides the accelerators from what asks for none, and warns that it will not for ever.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def _has_token() -> bool:
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")  # reads the variables anew: Ray may have been loaded before they were set
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()  # it remembers what it did not find
    return bool(loader.has_token(ignore_auth_mode=True))


def _init(**options: Any) -> None:
    """`ray.init` without what it does to a process beyond the connection: a handler of SIGTERM, lines on stdout."""
    import ray
    from ray._private import worker

    # A thread of Ray prints every trouble of any node, with twenty lines of log; what matters of it we say ourselves.
    worker.listen_error_messages = lambda *_: None
    ours = threading.current_thread() is threading.main_thread()
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
    finally:
        if ours:
            signal.signal(signal.SIGTERM, terminate)


# ── a Ray of our own ───────────────────────────────────────────────────────────────────────────


def _start(cpus: int | None, progress: Progress) -> None:
    from ray._private import ray_constants

    if os.environ["RAY_AUTH_MODE"] == "token" and not _has_token():
        # One for this process and its children, of which no file tells.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        _has_token()
    size, folder = _object_store(progress)
    # Ray takes 127.0.0.1 for the address that others see, and listens on all of them, where clusters are enabled.
    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        _init(
            address="local",  # not one that a variable or an earlier `ray start` names
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=size,
            _plasma_directory=folder,
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # of many kinds, plain ones too
        raise ClusterError(
            f"Ray could not be started on this machine: {_first_line(error)}. "
            "Its logs are in /tmp/ray/session_latest/logs."
        ) from error
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters


def _object_store(progress: Progress) -> tuple[int, str]:
    """How many bytes, and where they lie."""
    size = min(int(memory_limit() * _STORE_SHARE), _LARGEST_STORE)
    shared = Path("/dev/shm")
    room = int(shutil.disk_usage(shared).free * 0.9) if shared.is_dir() else 0
    if room >= min(size, _SMALLEST_STORE):
        return min(size, room), str(shared)
    progress.say(
        f"/dev/shm has room for {human_size(room)} only: what processes hand each other goes through files in "
        "/tmp, which is slower. In a container, give it more: --shm-size=2g"
    )
    return min(size, _SMALLEST_STORE * 2), "/tmp"


def _end() -> None:
    import ray
    from ray._private import worker

    node: Any = worker._global_node
    started: list[Any] = (
        [] if node is None else [info.process for own in node.all_processes.values() for info in own]
    )
    logs = Path(node.get_logs_dir_path()).resolve() if started else None
    ray.shutdown()
    for process in started:  # Ray ends its processes without a look at how they ended
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ANSWER_SECONDS)
    if logs is not None:
        _end_left(logs)


def _end_left(logs: Path) -> None:
    """End what is left of a cluster of our own, known by the logs that it has open. Ray's agents end with the daemon
    that started them, but not when Ctrl-C meets them while they start."""
    until = time.monotonic() + _LEAVE_SECONDS
    while left := [process for process in Path("/proc").glob("[0-9]*") if _has_open(process, logs)]:
        if time.monotonic() > until:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)
            return
        time.sleep(0.05)


def _has_open(process: Path, folder: Path) -> bool:
    """Whether another process has a file of that folder open."""
    if int(process.name) == os.getpid():
        return False
    with suppress(OSError):  # it is another user's, or gone
        return any(file.readlink().is_relative_to(folder) for file in (process / "fd").iterdir())
    return False


# ── an existing cluster ────────────────────────────────────────────────────────────────────────


def _checked(address: str) -> str:
    """Where it is, in numbers: it is an address, something answers there, and there is a token to call it with."""
    if "://" in address:
        raise ClusterError(
            f"cluster.address is {address}; auto or host:port of the cluster's head is expected: clickline works "
            "beside the cluster's nodes, not through Ray's client."
        )
    if address != "auto":
        place = _reach(address)
    else:
        place = address
        _reach(_last_started())
    if os.environ["RAY_AUTH_MODE"] == "token" and not _has_token():
        raise ClusterError(
            f"the cluster at {address} is called with token authentication, and there is no token here. Put the one it "
            "was started with into RAY_AUTH_TOKEN, or its file into RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token; "
            "for a cluster that was started without, set RAY_AUTH_MODE=disabled."
        )
    return place


@contextmanager
def _understood(address: str) -> Iterator[None]:
    """What Ray says against a connection, in words that help."""
    try:
        yield
    except ClusterError:
        raise
    except Exception as error:  # of many kinds, plain ones too
        raise ClusterError(f"the Ray cluster at {address} cannot be used: {_why(error)}") from error


def _last_started() -> str:
    """Where Ray will look for the cluster of this machine. The file that tells it stays when a cluster dies."""
    from ray._private.services import get_ray_address_from_environment

    try:
        found: str = get_ray_address_from_environment("auto", None)
    except ConnectionError as error:
        raise ClusterError(
            "cluster.address is auto, and no Ray cluster runs on this machine. Start one (`ray start`), name one "
            "by host:port, or leave it out for a cluster of this machine's own."
        ) from error
    return found


def _reach(address: str) -> str:
    """The address that a name stands for, where something answers: Ray itself tries for a long time and then ends the
    process, and asks name servers for more than it needs."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ClusterError(
            f"cluster.address is {address}; auto or host:port of the cluster's head is expected."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS) as found:
            number = found.getpeername()[0]
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error.strerror or error}. Look whether its head runs "
            "(`ray status`) and cluster.address names its port, usually 6379; or leave it out for a cluster of this "
            "machine's own."
        ) from error
    return f"[{number}]:{port}" if ":" in number else f"{number}:{port}"


def _why(error: BaseException) -> str:
    """What to do about it, from the whole chain: the cause is what tells."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    text = " ".join(str(one) for one in chain)
    if "uthenticat" in text or "token" in text:
        return (
            "it does not take this token. Put the one it was started with into RAY_AUTH_TOKEN, or its file into "
            "RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token."
        )
    if "ersion mismatch" in text:
        versions = " ".join(text[text.index("ersion mismatch") :].split()[2:24])
        return f"Ray and Python must be of the same version everywhere. {versions}"
    if "Could not find any running Ray instance" in text:
        return "none runs on this machine. Start it with `ray start`, or leave cluster.address out."
    return f"{_first_line(chain[-1])}. Run clickline on one of its nodes."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _look(file: str | None) -> tuple[bool, str]:
    """In a process of a node: whether it sees the file, and the release of Clickline it has."""
    return file is None or Path(file).exists(), version("clickline")


def _check_nodes(opened: Session, home: Path | None) -> None:
    """Every living node sees `home` and has this release; those that do not are named."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    mark = None
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
        mark = home / f".seen-{secrets.token_hex(8)}"
        mark.touch()
    try:
        look = ray.remote(num_cpus=0, max_retries=2)(_look)
        asked = {
            node: look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
            ).remote(None if mark is None else str(mark))
            for node in opened.nodes()
            if node.alive
        }
        complaints = []
        until = time.monotonic() + _LOOK_SECONDS
        for node, answer in asked.items():
            try:
                seen, release = ray.get(answer, timeout=max(until - time.monotonic(), 1.0))
            except ray.exceptions.GetTimeoutError:
                complaints.append(f"{node.host} did not answer within {_LOOK_SECONDS:.0f} s")
                continue
            except ray.exceptions.RayError as error:
                if any(now.id == node.id and now.alive for now in opened.nodes()):
                    complaints.append(f"{node.host} cannot run clickline: {_last_line(error)}")
                continue
            if release != version("clickline"):
                complaints.append(f"{node.host} has clickline {release}, this process {version('clickline')}")
            elif not seen:
                complaints.append(f"{node.host} does not see {home}")
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    if complaints:
        raise ClusterError(
            f"the cluster's nodes are not alike: {'; '.join(complaints)}. `home` must be one folder that all nodes see "
            "under the same path, and all need the same release of clickline."
        )


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].rstrip(".")
