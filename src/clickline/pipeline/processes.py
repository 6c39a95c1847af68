"""Processes, told apart by pid and by when they began: a pid that was given to somebody else is never ours."""

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
    """One process, as long as the machine runs and after."""

    pid: int
    born: str  # which boot of the machine, and the kernel's clock then
    role: str = field(default="", compare=False)

    @classmethod
    def of(cls, pid: int, role: str = "") -> Process | None:
        """The process that has this pid now."""
        born = _born(pid)
        return None if born is None else cls(pid, born, role)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Process:
        return cls(int(document["pid"]), str(document["born"]), str(document.get("role", "")))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def alive(self) -> bool:
        return _born(self.pid) == self.born

    def send(self, number: int) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def living(processes: Iterable[Process]) -> list[Process]:
    return [process for process in processes if process.alive]


def descendants(pid: int, role: str = "") -> Iterator[Process]:
    """The children of a process, their children, and so on."""
    for thread in _listed(Path(f"/proc/{pid}/task")):
        with suppress(OSError):
            for child in (thread / "children").read_text().split():
                found = Process.of(int(child), role)
                if found is not None:
                    yield found
                    yield from descendants(found.pid, role)


def end_all(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Wait so long for them to end by themselves, then kill; returns those that were killed."""
    left = living(processes)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = living(left)
    for process in left:
        process.send(signal.SIGKILL)
    gone = time.monotonic() + 5.0
    while living(left) and time.monotonic() < gone:
        time.sleep(0.01)
    return left


def _born(pid: int) -> str | None:
    try:
        # The name, in parentheses, may hold anything; what follows it is plain.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else f"{_boot()}:{started}"  # Z, X: dead, its parent has not looked yet


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
