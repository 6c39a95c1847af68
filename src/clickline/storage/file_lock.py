"""A local file that tells who is at work: locked as long as a process lives, and holding its words about itself."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import Any

_TAKE_SECONDS = 1.0  # a look at the lock holds it for an instant


def take(path: Path) -> int | None:
    """Lock it; free again when the descriptor is closed or the process ends. None: another one has it."""
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _TAKE_SECONDS
    while True:
        try:
            flock(held, LOCK_EX | LOCK_NB)
            return held
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(held)
                return None
            time.sleep(0.02)


def sign(held: int, words: Mapping[str, Any]) -> None:
    """Tell who holds it."""
    os.ftruncate(held, 0)
    os.pwrite(held, json.dumps(words).encode(), 0)


def holder_of(path: Path) -> dict[str, Any] | None:
    """What its holder tells, at first perhaps nothing, or what the one before told. None: nobody holds it."""
    try:
        looking = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        flock(looking, LOCK_SH | LOCK_NB)
        return None
    except BlockingIOError:
        with suppress(ValueError):
            found = json.loads(os.pread(looking, 4096, 0))
            if isinstance(found, dict):
                return found
        return {}
    finally:
        os.close(looking)
