"""The processes that Clickline starts: `up` and its children, server workers, the tracking sender, the probe of `plan`.

    ChildProcess       starts a module of this package with a socket, exchanges messages with it, stops it
    ParentConnection   the child's end of that socket; the child exits with its parent
    Backoff            growing delays between restarts
    Process            any process, identified by pid and start time, so that a reused pid is never mistaken for ours

Messages are lines of JSON. When one end exits, however it died, the other sees the end of the stream.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

_READ_BYTES = 1 << 16
_DRAIN_EXIT_SECONDS = 8.0  # after the drain timeout, then exit even if the server still runs


@dataclass(frozen=True)
class Process:
    """One process; the identity stays valid after it has ended and after a reboot."""

    pid: int
    born: str  # boot id of the machine and seconds from boot to the start of the process
    role: str = field(default="", compare=False)

    @classmethod
    def from_pid(cls, pid: int, role: str = "") -> Process | None:
        """The process that has this pid now; None if there is none."""
        born = _start_time(pid)
        return None if born is None else cls(pid, born, role)

    @classmethod
    def current(cls, role: str = "") -> Process:
        return cls(os.getpid(), _start_time(os.getpid()) or "", role)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Process:
        return cls(int(document["pid"]), str(document["born"]), str(document.get("role", "")))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.born

    def send_signal(self, number: int) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def still_alive(processes: Iterable[Process]) -> list[Process]:
    return [process for process in processes if process.alive]


def descendants(pid: int, role: str = "") -> list[Process]:
    """All descendants of a process. Looks at every process of the machine, so call it rarely."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    found = (Process.from_pid(child.pid, role) for child in children)
    return [process for process in found if process is not None]


def wait_then_kill(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Wait `seconds` for the processes to exit, then kill the rest; returns those that were killed."""
    alive = still_alive(processes)
    deadline = time.monotonic() + seconds
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = still_alive(alive)
    for process in alive:
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while still_alive(alive) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def _start_time(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):  # not yet reaped
            return None
        # Relative to the boot: the clock may be set while the process runs.
        return f"{_boot_id()}:{process.create_time() - psutil.boot_time():.2f}"
    except psutil.Error:
        return None


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class ChildProcess:
    """A process that runs `python -P -m MODULE ARGUMENTS FD`, where FD is one end of a socket pair.

    It has its own session: Ctrl-C is for the parent, which stops its children in order."""

    def __init__(
        self,
        *command: str,
        request: Mapping[str, Any],
        output: int = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command`: the module and its arguments. `request`: the first message to the child."""
        self.started = time.monotonic()
        self.socket, theirs = socket.socketpair()
        self._received = b""
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", *command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            self.socket.close()
            raise
        with suppress(OSError):  # it may have exited already
            self.send(request)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lifetime(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started

    def send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for the next message. Raises TimeoutError, or EOFError if the child has exited."""
        self.socket.settimeout(seconds)
        while b"\n" not in self._received:
            data = self.socket.recv(_READ_BYTES)
            if not data:
                raise EOFError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def exit_reason(self) -> str:
        """How a process ended that has exited."""
        code = self.process.returncode
        if code >= 0:
            return f"with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        memory = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        return f"by signal {-code} ({name}){memory}"

    def stop(self, seconds: float) -> int:
        """Close the socket, so that the child exits; kill it after `seconds`. Returns its exit code."""
        self.socket.close()
        return self.wait_or_kill(seconds)

    def wait_or_kill(self, seconds: float) -> int:
        """Wait for the child to exit, then kill it and its descendants. Returns its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            left = descendants(self.pid)
            self.process.kill()
            wait_then_kill(left, 0.0)
            return self.process.wait()


class ParentConnection:
    """The socket of a child process to its parent; `request` is the parent's first message."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self._lines = self.socket.makefile("rb")
        first = self._lines.readline()
        if not first:
            os._exit(1)
        self.request: dict[str, Any] = json.loads(first)

    def send(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Further messages, until the parent closes the socket or ends."""
        with suppress(ConnectionError):
            yield from map(json.loads, self._lines)

    def exit_with_parent(self, drain: float | None = None) -> None:
        """From now on exit when the parent has ended; no further message is read. A server has `drain` seconds to
        finish its requests after the SIGTERM that it gets then; other work exits at once."""
        threading.Thread(target=self._wait_for_the_end, args=(drain,), daemon=True).start()

    def _wait_for_the_end(self, drain: float | None) -> None:
        with suppress(OSError):  # ECONNRESET if the parent died before it had read all messages
            self._lines.read()
        if drain is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(drain + _DRAIN_EXIT_SECONDS)
        os._exit(1)


class Backoff:
    """Delays between attempts: `first`, then twice the previous one, up to `longest`."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def next(self) -> float:
        delay = self._next
        self._next = min(2 * delay, self._longest)
        return delay

    def reset(self) -> None:
        self._next = self._first
