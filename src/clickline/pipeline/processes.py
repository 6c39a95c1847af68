"""Processes identified by pid and start time, so that a reused pid is never mistaken for ours."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """One process; the identity stays valid after it has ended and after a reboot."""

    pid: int
    born: str  # boot id of the machine and start time by the kernel's clock
    role: str = field(default="", compare=False)

    @classmethod
    def from_pid(cls, pid: int, role: str = "") -> Process | None:
        """The process that has this pid now; None if there is none."""
        born = _start_time(pid)
        return None if born is None else cls(pid, born, role)

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


def descendants(pid: int, role: str = "") -> Iterator[Process]:
    """All descendants of a process."""
    for thread in _list_dir(Path(f"/proc/{pid}/task")):
        with suppress(OSError):
            for child in (thread / "children").read_text().split():
                process = Process.from_pid(int(child), role)
                if process is not None:
                    yield process
                    yield from descendants(process.pid, role)


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
        # The name, in parentheses, may contain anything, so parse what follows it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else f"{_boot_id()}:{started}"  # Z, X: dead, but not yet reaped


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _list_dir(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
