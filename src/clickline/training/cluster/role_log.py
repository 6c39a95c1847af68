"""The log file of one process of a cluster run; the file is on storage that all machines see."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path


class RoleLog:
    """Timestamped lines, each written at once: the process may die at any moment."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, message: str) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00")
        self._file.write("".join(f"{stamp}Z {line}\n" for line in message.splitlines()))

    def close(self) -> None:
        self._file.close()
