"""Writes local files atomically: readers see all of a file or none of it, even after a crash or a power cut."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from pathlib import Path


def put_atomically(path: Path, data: bytes | Path) -> None:
    """Write `data` to `path`, replacing an existing file. If `data` is a Path, that file is moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (isinstance(data, Path) and _try_rename(data, path)):
        temporary = path.with_name(temporary_name(path.name))
        try:
            if isinstance(data, Path):
                shutil.copyfile(data, temporary)
            else:
                temporary.write_bytes(data)
            fsync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if isinstance(data, Path):
            data.unlink()
    fsync(path.parent)


def create_atomically(path: Path, data: bytes) -> bool:
    """Write `data` to `path` if nothing exists there; returns False if something does.

    It creates a hard link, which every POSIX disk does atomically and never over another file. Without hard links
    (FAT, some mounts of object stores) this raises ENOTSUP: a file opened with O_EXCL would be visible
    half-written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(temporary_name(path.name))
    try:
        temporary.write_bytes(data)
        fsync(temporary)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            # NFS may lose its answer and try again; then the name exists because we created it.
            if temporary.stat().st_nlink < 2:
                return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.EMLINK):
                raise OSError(errno.ENOTSUP, "no hard links") from error
            raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)
    return True


def temporary_name(name: str) -> str:
    """A name that none of our globs matches, for a file that is still being written."""
    return f".{name}.{secrets.token_hex(8)}"


def is_temporary_name(name: str) -> bool:
    return bool(re.fullmatch(r"\..+\.[0-9a-f]{16}", name))


def remove_leftovers(folder: Path, *, seconds: float | None = None) -> None:
    """Remove the temporary files of killed processes below `folder`. The caller ensures that no process writes there
    now, or that every process changes its file at least every `seconds`."""
    for path in folder.rglob(".*"):
        if not is_temporary_name(path.name) or path.is_symlink() or not path.is_file():
            continue
        if seconds is None or time.time() - path.stat().st_mtime > seconds:
            path.unlink(missing_ok=True)


def _try_rename(source: Path, target: Path) -> bool:
    """Move a file by renaming it; False if it is on another disk or mount."""
    fsync(source)
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
