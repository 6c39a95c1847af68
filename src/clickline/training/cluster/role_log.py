"""What a role of a cluster run tells of itself: lines in a file of its own that all machines see, and its memory."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path


class RoleLog:
    """Lines with their time, each whole: a role may die at any moment."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def say(self, message: str) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00")
        self._file.write("".join(f"{stamp}Z {line}\n" for line in message.splitlines()))

    def close(self) -> None:
        self._file.close()


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
