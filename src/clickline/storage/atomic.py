"""Write a local file so that it is seen whole or not at all, also after a crash or a power cut."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from pathlib import Path


def put_atomically(path: Path, data: bytes | Path) -> None:
    """Put `data` in place of whatever is at `path`. A Path is consumed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (isinstance(data, Path) and _moved(data, path)):
        hidden = path.with_name(hidden_name(path.name))
        try:
            if isinstance(data, Path):
                shutil.copyfile(data, hidden)
            else:
                hidden.write_bytes(data)
            sync(hidden)
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
        if isinstance(data, Path):
            data.unlink()
    sync(path.parent)


def create_atomically(path: Path, data: bytes) -> bool:
    """Put `data` at `path` if nothing is there; False when something is.

    A hard link is the one thing every POSIX disk makes whole and never over another file. Where there are
    none (FAT, some mounts of object stores) this raises ENOTSUP: a file opened with O_EXCL would be seen
    half-written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(hidden_name(path.name))
    try:
        hidden.write_bytes(data)
        sync(hidden)
        try:
            path.hardlink_to(hidden)
        except FileExistsError:
            # NFS may lose its answer and ask again; then the name is there because we made it.
            if hidden.stat().st_nlink < 2:
                return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.EMLINK):
                raise OSError(errno.ENOTSUP, "no hard links") from error
            raise
    finally:
        hidden.unlink(missing_ok=True)
    sync(path.parent)
    return True


def hidden_name(name: str) -> str:
    """A name no glob of ours matches, for a file that is still being written."""
    return f".{name}.{secrets.token_hex(8)}"


def is_hidden_name(name: str) -> bool:
    return bool(re.fullmatch(r"\..+\.[0-9a-f]{16}", name))


def remove_leftovers(folder: Path, *, seconds: float | None = None) -> None:
    """Remove what killed processes were writing below `folder`. The caller knows that nobody writes there now, or that
    nobody writes to a file without a change for so many `seconds`."""
    for path in folder.rglob(".*"):
        if not is_hidden_name(path.name) or path.is_symlink() or not path.is_file():
            continue
        if seconds is None or time.time() - path.stat().st_mtime > seconds:
            path.unlink(missing_ok=True)


def _moved(source: Path, target: Path) -> bool:
    """Whether a rename did it; it cannot from one disk, or one mount, to another."""
    sync(source)
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def sync(path: Path) -> None:
    """What was written to a file, or which names a folder holds, survives a power cut from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
