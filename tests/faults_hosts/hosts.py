"""Several "hosts" of one machine: Ray nodes with resources of their own, as processes that are killed like a machine.

Every process of a host, Ray's and ours, has the host's mark in its environment: so all of them are found, and nothing
else is ever killed.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.artifacts.checkpoint import Checkpoint, run_result

_BIN = Path(sys.executable).parent
_DOUBLES = Path(__file__).parent / "doubles"
_MARK = "CLICKLINE_TEST_HOST"
_STORE_BYTES = 120_000_000


def wait_until(what: Callable[[], Any], why: Callable[[], str], seconds: float = 150.0) -> Any:
    """What it gives when that is true; polled, up to a deadline."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, why()
        time.sleep(0.1)
    return found


def processes(mark: str) -> list[int]:
    """Pids of all processes whose mark begins with this one."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            continue  # gone meanwhile, or another's
        if not dead and any(one.startswith(wanted) for one in variables):
            found.append(int(folder.name))
    return found


def kill_all(mark: str) -> None:
    """Until none is left: one that starts another may be faster than a single round."""
    until = time.monotonic() + 20
    while pids := processes(mark):
        assert time.monotonic() < until, f"{pids} survive SIGKILL"
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


@dataclass(frozen=True)
class Host:
    """A Ray node."""

    name: str
    mark: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """All of it at once: the raylet, and whatever runs there."""
        kill_all(self.mark)
        self.process.wait(10)

    def runs(self, pid: int) -> bool:
        return pid in processes(self.mark)


class Cluster:
    """A head and nodes that come and go; at the end nothing of it is left."""

    def __init__(self, folder: Path, *, address: str = "127.0.0.1", **settings: str) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self._mark = secrets.token_hex(6)
        self.brake = folder / "brake"
        self._settings = {
            "RAY_raylet_start_wait_time_s": "120",  # on cores that are busy with much else
            "RAY_worker_niceness": "0",  # or what is under test would be the last to run on them
            "CLICKLINE_TEST_BRAKE": str(self.brake),
            "CLICKLINE_TEST_WINDOW": "4096",
            **settings,
        }
        self._host = address
        self._temp = Path("/tmp") / f"cl{self._mark}"  # Ray's sockets have to have short paths
        with socket.socket() as free:
            free.bind(("", 0))
            self.port: int = free.getsockname()[1]
        self.address = f"{address}:{self.port}"

    def environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._mark.ljust(64, "0"),
            "PYTHONPATH": str(_DOUBLES),
            "COLUMNS": "200",
            _MARK: f"{self._mark}/{name}/",
            **self._settings,
        }

    def head(self, cpus: int = 0, *options: str) -> Host:
        begin = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self._temp}"]
        return self._start("head", cpus, [*begin, f"--node-ip-address={self._host}", *options])

    def node(self, name: str, cpus: int, *options: str, inside: Sequence[str] = ()) -> Host:
        """`inside` is what the command begins with, to run it in a network namespace. One after the other: two that
        begin at once take the same names for their sockets."""
        self.await_hosts(*(one.name for one in self.hosts.values() if one.process.poll() is None))
        return self._start(name, cpus, [f"--address={self.address}", *options], inside)

    def _start(self, name: str, cpus: int, options: Sequence[str], inside: Sequence[str] = ()) -> Host:
        log = self.folder / f"ray-{name}.log"
        common = ["--block", f"--num-cpus={cpus}", f"--object-store-memory={_STORE_BYTES}"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*inside, str(_BIN / "ray"), "start", *options, *common, "--disable-usage-stats"],
                env=self.environment(name),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.hosts[name] = Host(name, f"{self._mark}/{name}/", process, log)
        return self.hosts[name]

    def await_hosts(self, *names: str) -> None:
        """Until they have joined."""
        for name in names or tuple(self.hosts):
            host = self.hosts[name]

            def joined(host: Host = host) -> bool:
                assert host.process.poll() is None, host.log.read_text()
                return "Ray runtime started" in host.log.read_text()

            wait_until(joined, host.log.read_text)

    def host_of(self, pid: int) -> str:
        """Where a process runs; empty: nowhere any more."""
        for name, host in self.hosts.items():
            if host.runs(pid):
                return name
        return ""

    def close(self) -> None:
        kill_all(self._mark)
        for host in self.hosts.values():
            host.process.wait(10)
        subprocess.run(["rm", "-rf", str(self._temp)], check=True)


class Training:
    """`clickline train` on a cluster, as a process of its own."""

    def __init__(self, cluster: Cluster, project: Path, *settings: str, brake: float = 0.0) -> None:
        self.cluster = cluster
        self.project = project
        self._out = project / "output.log"
        self.brake(brake)
        sets = [f"cluster.address={cluster.address}", "train.mode=cluster", *settings]
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [str(_BIN / "clickline"), "train", *(word for one in sets for word in ("--set", one))],
                cwd=project,
                env=cluster.environment("driver"),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def brake(self, seconds: float) -> None:
        """How long each step takes at least, from now on: so that something can happen in the middle of a run."""
        new = self.cluster.brake.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self.cluster.brake)

    # ── what is seen ───────────────────────────────────────────────────────────────────────────

    @property
    def run(self) -> Path:
        runs = list((self.project / ".clickline" / "runs").glob("*/cluster"))
        assert len(runs) == 1
        return runs[0].parent

    def output(self) -> str:
        return self._out.read_text()

    def log(self, role: str) -> str:
        path = self.run / "cluster" / "logs" / f"{role}.log"
        return path.read_text() if path.exists() else ""

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run / "cluster" / "status.json").read_text())
        except (AssertionError, FileNotFoundError):
            return {}
        return found

    def workers(self) -> dict[str, str]:
        """The workers that learn, and their hosts."""
        names = [one["name"] for one in self.status().get("workers", []) if one["state"] == "learning"]
        return {name: self.place(name) for name in names}

    def pid(self, role: str) -> int:
        """Of the last process that had the role."""
        lines = [line for line in self.log(role).splitlines() if ", process " in line]
        return int(lines[-1].rpartition(", process ")[2]) if lines else 0

    def place(self, role: str) -> str:
        return self.cluster.host_of(self.pid(role))

    @property
    def checkpoint_step(self) -> int:
        """The step of the last checkpoint; 0: there is none."""
        return ((self.status().get("last_checkpoint") or {}).get("step")) or 0

    def events(self) -> str:
        return "\n".join(f"{one['decision']}: {one['reason']}" for one in self.status().get("events", []))

    def state(self) -> str:
        """All of it, for the message of a test that fails."""
        driver = self.log("driver") if (self.project / ".clickline" / "runs").exists() else ""
        return f"{self.output()}\n--- driver.log\n{driver}\n--- {self.status()}"

    # ── steps of a test ────────────────────────────────────────────────────────────────────────

    def until(self, what: Callable[[], Any], seconds: float = 240.0) -> Any:
        """While it runs."""

        def alive() -> Any:
            found = what()
            assert found or self.process.poll() is None, f"it ended too early\n{self.state()}"
            return found

        return wait_until(alive, self.state, seconds)

    def finish(self, seconds: float = 300.0) -> Checkpoint:
        """At full speed to the end; what it made."""
        self.brake(0)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not come to an end\n{self.state()}") from None
        assert code == 0, self.state()
        made = run_result(self.run)
        assert made is not None
        return made

    def auc(self) -> float:
        report = json.loads((self.run / "report.json").read_text())
        return float(report["evaluation"]["auc"])
