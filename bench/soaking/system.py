"""The processes of the whole system: started, found by their role, killed, started again as Kubernetes would.

up ─┬─ follow                  the learner, which also publishes
    ├─ serve ── workers        an endpoint that maps the tables
    └─ studio
lookup x 4                     two shards, two replicas each
predictor ── worker            an endpoint that asks the lookup servers
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

from clickline.pipeline.processes import Process, descendants
from soaking.project import LOOKUPS, SHARDS, Project

ROLES = {
    # role: the doors that are closed until it is there again
    "worker": (),
    "serve": ("grpc", "http"),
    "learner": (),
    "publisher": (),
    "studio": (),
    "up": ("grpc", "http"),
    "lookup": (),
    "predictor": ("lookup",),
    "predictor worker": ("lookup",),  # it is the only one
}
_PROGRAM = Path(sys.executable).with_name("clickline")
_TEARDOWN = 10.0  # seconds in which a killed process is gone
_PAUSE = 1.0  # seconds until what ended is started again
_LISTENING = "0A"


@dataclass
class Death:
    """A process that was killed, and what may go wrong because of it."""

    role: str
    pid: int
    at: float  # by the monotonic clock
    ports: frozenset[int]  # of clients that were connected to it
    closed: tuple[str, ...]  # doors that are closed until it is there again
    endpoints: frozenset[str] = frozenset()  # whose port it listened on
    gone: float = 0.0  # when its last socket was closed, by the monotonic clock
    recovered: float | None = None  # seconds
    errors: int = 0
    refused: int = 0


@dataclass
class _Kept:
    """A command that is started again whenever it ends."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    ended_at: float = 0.0
    killed: set[int] = field(default_factory=set)


class System:
    """Everything that runs."""

    def __init__(self, project: Project, chosen: random.Random) -> None:
        self._project, self._random = project, chosen
        self.troubles: list[str] = []  # processes that ended by themselves, and the like
        ports = project.ports
        self._kept = [_Kept("up", ["up", "--follow"], project.folder / "up.log")]
        replicas = [
            [f"127.0.0.1:{ports.lookup[LOOKUPS.index(one)]}" for one in LOOKUPS if one[0] == shard]
            for shard in range(SHARDS)
        ]
        for number, (shard, replica) in enumerate(LOOKUPS):
            command = ["lookup", "--shard", str(shard), "--port", str(ports.lookup[number])]
            command += ["--set", f"serve.metrics_port={ports.lookup_metrics[number]}"]
            self._kept.append(
                _Kept(f"lookup {shard}.{replica}", command, project.folder / f"lookup-{number}.log")
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
        self._kept.append(_Kept("predictor", command, project.folder / "predictor.log"))

    # ── starting and ending ────────────────────────────────────────────────────────────────────

    def tend(self) -> None:
        """Start what does not run. Called again and again."""
        for kept in self._kept:
            if kept.process is not None:
                code = kept.process.poll()
                if code is None:
                    continue
                if kept.process.pid not in kept.killed:
                    self.troubles.append(f"{kept.name} ended by itself with {code}: {_tail(kept.log)}")
                kept.process, kept.ended_at = None, time.monotonic()
            if time.monotonic() - kept.ended_at >= _PAUSE:
                with kept.log.open("ab") as log:
                    kept.process = subprocess.Popen(
                        [str(_PROGRAM), *kept.command],
                        cwd=self._project.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )

    def end(self, seconds: float = 60.0) -> None:
        """By SIGTERM, as an operator would; whoever does not end well is a trouble."""
        known = {one.pid: one for one in self._all()}
        running = [kept for kept in self._kept if kept.process is not None]
        for kept in running:
            assert kept.process is not None
            kept.process.terminate()
        for kept in running:
            assert kept.process is not None
            try:
                code = kept.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.troubles.append(f"{kept.name} did not end within {seconds:.0f} s of SIGTERM")
                kept.process.kill()
                kept.process.wait()
            else:
                if code:
                    self.troubles.append(f"{kept.name} ended with {code} after SIGTERM: {_tail(kept.log)}")
            kept.process = None
        left = [one for one in known.values() if one.alive]
        for one in left:
            self.troubles.append(f"process {one.pid} ({_command(one.pid)}) is left at the end")
            one.send_signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """At once, whatever happened."""
        known = list(self._all())
        for kept in self._kept:
            if kept.process is not None:
                kept.process.kill()
                kept.process.wait()
        for one in known:
            one.send_signal(signal.SIGKILL)

    def _all(self) -> Iterator[Process]:
        for kept in self._kept:
            if kept.process is not None:
                found = Process.from_pid(kept.process.pid)
                if found is not None:
                    yield found
                yield from descendants(kept.process.pid)

    # ── who is who ─────────────────────────────────────────────────────────────────────────────

    def pids(self) -> dict[str, list[int]]:
        """The processes of each role that live now."""
        found: dict[str, list[int]] = {role: [] for role in ROLES}
        for kept in self._kept:
            if kept.process is None or kept.process.poll() is not None:
                continue
            pid = kept.process.pid
            found[kept.name.split()[0]].append(pid)
            if kept.name == "predictor":
                found["predictor worker"] += _children(pid)
            if kept.name != "up":
                continue
            for child in _children(pid):
                words = _command(child)
                if "clickline.studio" in words:
                    found["studio"].append(child)
                elif "pipeline.child follow" in words:
                    found["learner"].append(child)
                elif "pipeline.child serve" in words:
                    found["serve"].append(child)
                    found["worker"] += _children(child)
        return found

    def learners(self) -> int:
        """Processes that learn in this project, whoever their parent is."""
        count = 0
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (
                    "pipeline.child follow" in _command(int(path.name))
                    and (path / "cwd").readlink() == self._project.folder
                ):
                    count += 1
        return count

    def rss(self) -> dict[tuple[str, int], int]:
        """Memory of its own, in bytes, of each process by role and pid."""
        found = {}
        for role, pids in self.pids().items():
            for pid in pids:
                with suppress(OSError, IndexError):
                    text = Path(f"/proc/{pid}/status").read_text()
                    found[role, pid] = int(text.split("RssAnon:")[1].split()[0]) * 1024
        return found

    # ── killing ────────────────────────────────────────────────────────────────────────────────

    def kill(self, role: str) -> Death | None:
        """Kill -9 a process of a role; None if none is there, or a publisher is not at work, now."""
        pids = self.pids()["learner" if role == "publisher" else role]
        if not pids or (role == "publisher" and not self._publishing()):
            return None
        pid = self._random.choice(pids)
        if role == "publisher":
            time.sleep(self._random.uniform(0.0, 0.3))  # anywhere between the first byte and the pointer
        ports = _clients_of(pid, self._doors())
        for kept in self._kept:
            if kept.process is not None and kept.process.pid == pid:
                kept.killed.add(pid)
        named = {"grpc": self._project.ports.grpc, "http": self._project.ports.http}
        named["lookup"] = self._project.ports.predictor_grpc
        endpoints = frozenset(name for name, port in named.items() if _listening([pid], port))
        death = Death(role, pid, time.monotonic(), ports, ROLES[role], endpoints)
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            death.ports |= _clients_of(pid, self._doors())  # also those it accepted since
            # The kernel frees the memory first, and meanwhile connects clients that nobody will accept.
            select.select([process], [], [], _TEARDOWN)
            os.close(process)
        death.gone = time.monotonic()
        return death

    def _publishing(self) -> bool:
        return any(path.is_dir() for path in (self._project.registry / "drafts").glob("*"))

    def recovered(self, death: Death) -> bool:
        """Whether its work is done by another process by now."""
        ports, pids = self._project.ports, self.pids()
        if death.role in ("learner", "publisher"):
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
        """Whether everything answers."""
        ports = self._project.ports
        admin = (ports.metrics, ports.predictor_metrics, *ports.lookup_metrics)
        return all(_answers(port, "/readyz") for port in admin) and _answers(ports.studio, "/")

    def _doors(self) -> set[int]:
        ports = self._project.ports
        return {ports.grpc, ports.http, ports.predictor_grpc}


# ── what the kernel knows ──────────────────────────────────────────────────────────────────────


def _children(pid: int) -> list[int]:
    """Those that run a program of ours: no helper of Python's own."""
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
        words = line.split()
        yield int(words[1].split(":")[1], 16), int(words[2].split(":")[1], 16), words[3], words[9]


def _clients_of(pid: int, doors: set[int]) -> frozenset[int]:
    """Ports of the clients that are connected to a process, or still wait for some process to accept them."""
    held = _sockets(pid)
    return frozenset(
        remote
        for local, remote, state, inode in _connections()
        if local in doors and state != _LISTENING and (inode in held or inode == "0")
    )


def _listening(pids: list[int], port: int) -> list[int]:
    """Those of the processes that listen on a port."""
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
