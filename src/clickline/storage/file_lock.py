"""Locks between processes of one machine: held on a local file or folder until released or the process ends.

`locked` is for a block of code. `acquire`, `write_owner` and `read_owner` are for a lock that is held while a process
lives and names that process in JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import Any

_ACQUIRE_SECONDS = 1.0  # read_owner holds the lock for an instant


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a folder, or of a file, which is created with its folder. Yields False if another process holds
    it and `wait` is false."""
    descriptor = _lock(path, (LOCK_SH if shared else LOCK_EX) | (0 if wait else LOCK_NB))
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path, kind: int) -> int | None:
    while True:
        descriptor = _open(path)
        try:
            flock(descriptor, kind)
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the file was removed while this process waited: lock the new one


def _open(path: Path) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its folder was removed meanwhile
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


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
