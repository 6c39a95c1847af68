"""The processes of the whole system: started, found by role, killed, and restarted as Kubernetes would.

up ─┬─ follow                  the trainer, which also publishes
    ├─ serve ── workers        an endpoint that maps the tables
    └─ studio
lookup x 4                     two shards, two replicas each
predictor ── worker            an endpoint that uses the lookup servers
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from clickline.processes import Process, descendants
from soaking.project import LOOKUPS, SHARDS, Project

ROLES = {
    # role: the endpoints that are down until it recovers
    "worker": (),
    "serve": ("grpc", "http"),
    "trainer": (),
    "publisher": (),
    "studio": (),
    "up": ("grpc", "http"),
    "lookup": (),
    "predictor": ("lookup",),
    "predictor worker": ("lookup",),  # it is the only one
}
_PROGRAM = Path(sys.executable).with_name("clickline")
_TEARDOWN = 10.0  # seconds for a killed process to exit
_PAUSE = 1.0  # seconds before a restart
_LISTENING = "0A"


@dataclass
class Death:
    """A killed process, and the errors that it may cause."""

    role: str
    pid: int
    at: float  # by the monotonic clock
    ports: frozenset[int]  # of clients that were connected to it
    closed: tuple[str, ...]  # endpoints that are down until it recovers
    endpoints: frozenset[str] = frozenset()  # whose port it listened on
    gone: float = 0.0  # when its last socket was closed, by the monotonic clock
    recovered: float | None = None  # seconds
    errors: int = 0
    refused: int = 0


@dataclass
class _Service:
    """A command that is restarted whenever it ends."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    ended_at: float = 0.0
    killed: set[int] = field(default_factory=set)


class System:
    """All processes of the soak."""

    def __init__(self, project: Project, chosen: random.Random) -> None:
        self._project, self._random = project, chosen
        self.problems: list[str] = []  # processes that exited on their own, and the like
        ports = project.ports
        self._services = [_Service("up", ["up", "--follow"], project.folder / "up.log")]
        replicas = [
            [f"127.0.0.1:{ports.lookup[LOOKUPS.index(one)]}" for one in LOOKUPS if one[0] == shard]
            for shard in range(SHARDS)
        ]
        for number, (shard, replica) in enumerate(LOOKUPS):
            command = ["lookup", "--shard", str(shard), "--port", str(ports.lookup[number])]
            command += ["--set", f"serve.metrics_port={ports.lookup_metrics[number]}"]
            self._services.append(
                _Service(f"lookup {shard}.{replica}", command, project.folder / f"lookup-{number}.log")
            )
        command = ["serve"]
        for key, value in {
            "grpc_port": ports.predictor_grpc,
            "http_port": ports.predictor_http,
            "metrics_port": ports.predictor_metrics,
            "processes": 1,
            "lookup": json.dumps({"shards": replicas, "on_missing_shard": "unavailable", "timeout_ms": 2000}),
        }.items():
            command += ["--set", f"serve.{key}={value}"]
        self._services.append(_Service("predictor", command, project.folder / "predictor.log"))

    # ── start and stop ─────────────────────────────────────────────────────────────────────────

    def restart_ended(self) -> None:
        """Start what does not run. Called repeatedly."""
        for service in self._services:
            if service.process is not None:
                code = service.process.poll()
                if code is None:
                    continue
                if service.process.pid not in service.killed:
                    self.problems.append(
                        f"{service.name} exited on its own with {code}: {_tail(service.log)}"
                    )
                service.process, service.ended_at = None, time.monotonic()
            if time.monotonic() - service.ended_at >= _PAUSE:
                with service.log.open("ab") as log:
                    service.process = subprocess.Popen(
                        [str(_PROGRAM), *service.command],
                        cwd=self._project.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )

    def end(self, seconds: float = 60.0) -> None:
        """Stop everything by SIGTERM, as an operator would, and record what does not stop cleanly."""
        known = {one.pid: one for one in self._all()}
        running = [service for service in self._services if service.process is not None]
        for service in running:
            assert service.process is not None
            service.process.terminate()
        for service in running:
            assert service.process is not None
            try:
                code = service.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.problems.append(f"{service.name} did not end within {seconds:.0f} s of SIGTERM")
                service.process.kill()
                service.process.wait()
            else:
                if code:
                    self.problems.append(
                        f"{service.name} ended with {code} after SIGTERM: {_tail(service.log)}"
                    )
            service.process = None
        left = [one for one in known.values() if one.alive]
        for one in left:
            self.problems.append(f"process {one.pid} ({_command(one.pid)}) is still running at the end")
            one.send_signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill everything at once, whatever happened."""
        known = list(self._all())
        for service in self._services:
            if service.process is not None:
                service.process.kill()
                service.process.wait()
        for one in known:
            one.send_signal(signal.SIGKILL)

    def _all(self) -> Iterator[Process]:
        for service in self._services:
            if service.process is not None:
                found = Process.from_pid(service.process.pid)
                if found is not None:
                    yield found
                yield from descendants(service.process.pid)

    # ── roles ──────────────────────────────────────────────────────────────────────────────────

    def pids(self) -> dict[str, list[int]]:
        """The running processes of each role."""
        found: dict[str, list[int]] = {role: [] for role in ROLES}
        for service in self._services:
            if service.process is None or service.process.poll() is not None:
                continue
            pid = service.process.pid
            found[service.name.split()[0]].append(pid)
            if service.name == "predictor":
                found["predictor worker"] += _children(pid)
            if service.name != "up":
                continue
            for child in _children(pid):
                command = _command(child)
                if "clickline.studio" in command:
                    found["studio"].append(child)
                elif "pipeline.child_process follow" in command:
                    found["trainer"].append(child)
                elif "pipeline.child_process serve" in command:
                    found["serve"].append(child)
                    found["worker"] += _children(child)
        return found

    def trainers(self) -> int:
        """The number of trainer processes of this project, whatever their parent."""
        count = 0
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (
                    "pipeline.child_process follow" in _command(int(path.name))
                    and (path / "cwd").readlink() == self._project.folder
                ):
                    count += 1
        return count

    def rss(self) -> dict[tuple[str, int], int]:
        """Private memory in bytes of each process, by role and pid."""
        found = {}
        for role, pids in self.pids().items():
            for pid in pids:
                with suppress(OSError, IndexError):
                    text = Path(f"/proc/{pid}/status").read_text()
                    found[role, pid] = int(text.split("RssAnon:")[1].split()[0]) * 1024
        return found

    # ── killing ────────────────────────────────────────────────────────────────────────────────

    def kill(self, role: str) -> Death | None:
        """Kill -9 a process of a role; None if there is none, or no publication is in progress."""
        pids = self.pids()["trainer" if role == "publisher" else role]
        if not pids or (role == "publisher" and not self._publishing()):
            return None
        pid = self._random.choice(pids)
        if role == "publisher":
            time.sleep(self._random.uniform(0.0, 0.3))  # anywhere between the first byte and the pointer
        ports = _clients_of(pid, self._client_ports())
        for service in self._services:
            if service.process is not None and service.process.pid == pid:
                service.killed.add(pid)
        named = {"grpc": self._project.ports.grpc, "http": self._project.ports.http}
        named["lookup"] = self._project.ports.predictor_grpc
        endpoints = frozenset(name for name, port in named.items() if _listening([pid], port))
        death = Death(role, pid, time.monotonic(), ports, ROLES[role], endpoints)
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            death.ports |= _clients_of(pid, self._client_ports())  # also those accepted since
            # The kernel frees the memory first, and meanwhile queues connections that are never accepted.
            select.select([process], [], [], _TEARDOWN)
            os.close(process)
        death.gone = time.monotonic()
        return death

    def _publishing(self) -> bool:
        return any(path.is_dir() for path in (self._project.registry / "drafts").glob("*"))

    def recovered(self, death: Death) -> bool:
        """Whether another process has taken over its work."""
        ports, pids = self._project.ports, self.pids()
        if death.role in ("trainer", "publisher"):
            return any(
                path.stat().st_mtime > time.time() - (time.monotonic() - death.at) + 0.5
                for path in (self._project.home / "follow/hours").glob("*.json")
            )
        if death.pid in pids[death.role]:
            return False
        if death.role == "studio":
            return _answers(ports.studio, "/")
        if death.role == "lookup":
            return len(pids["lookup"]) == len(LOOKUPS) and all(
                _answers(port, "/readyz") for port in ports.lookup_metrics
            )
        if death.role.startswith("predictor"):
            return bool(_listening(pids["predictor worker"], ports.predictor_grpc)) and _answers(
                ports.predictor_metrics, "/readyz"
            )
        return len(_listening(pids["worker"], ports.grpc)) == 2 and _answers(ports.metrics, "/readyz")

    def ready(self) -> bool:
        """Whether all servers answer."""
        ports = self._project.ports
        admin = (ports.metrics, ports.predictor_metrics, *ports.lookup_metrics)
        return all(_answers(port, "/readyz") for port in admin) and _answers(ports.studio, "/")

    def _client_ports(self) -> set[int]:
        ports = self._project.ports
        return {ports.grpc, ports.http, ports.predictor_grpc}


# ── /proc ──────────────────────────────────────────────────────────────────────────────────────


def _children(pid: int) -> list[int]:
    """Child processes, without Python's own helpers."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return [child for child in found if "resource_tracker" not in _command(child) and Process.from_pid(child)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    found = set()
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", str(path.readlink()))
                if match:
                    found.add(match[1])
    return found


def _connections() -> Iterator[tuple[int, int, str, str]]:
    """Local and remote port, state and inode of each TCP socket."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        yield int(columns[1].split(":")[1], 16), int(columns[2].split(":")[1], 16), columns[3], columns[9]


def _clients_of(pid: int, served: set[int]) -> frozenset[int]:
    """Ports of the clients that are connected to a process, or wait to be accepted by any process."""
    held = _sockets(pid)
    return frozenset(
        remote
        for local, remote, state, inode in _connections()
        if local in served and state != _LISTENING and (inode in held or inode == "0")
    )


def _listening(pids: list[int], port: int) -> list[int]:
    """The processes that listen on a port."""
    inodes = {inode for local, _, state, inode in _connections() if local == port and state == _LISTENING}
    return [pid for pid in pids if _sockets(pid) & inodes]


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-600:].strip() if log.exists() else ""


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False
