"""A local lock file that names its owner: locked while a process lives, with JSON about that process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import Any

_ACQUIRE_SECONDS = 1.0  # read_owner holds the lock for an instant


def acquire(path: Path) -> int | None:
    """Lock the file until the descriptor is closed or the process ends. None: another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _ACQUIRE_SECONDS
    while True:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.02)


def write_owner(descriptor: int, owner: Mapping[str, Any]) -> None:
    """Write the owner into a file that we hold."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def read_owner(path: Path) -> dict[str, Any] | None:
    """What the owner wrote; at first it may be empty, or still from the previous owner. None: it is not locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        flock(descriptor, LOCK_SH | LOCK_NB)
        return None
    except BlockingIOError:
        with suppress(ValueError):
            owner = json.loads(os.pread(descriptor, 4096, 0))
            if isinstance(owner, dict):
                return owner
        return {}
    finally:
        os.close(descriptor)
