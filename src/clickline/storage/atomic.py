"""Write a local file so that it is seen whole or not at all, also after a crash or a power cut."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from pathlib import Path

__all__ = ["hidden_name", "put_atomically", "remove_leftovers"]


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
            _sync(hidden)
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
        if isinstance(data, Path):
            data.unlink()
    _sync(path.parent)


def hidden_name(name: str) -> str:
    """A name no glob of ours matches, for a file that is still being written."""
    return f".{name}.{secrets.token_hex(8)}"


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes were writing below `folder`; the caller knows that nobody writes there now."""
    for path in folder.rglob(".*"):
        if re.fullmatch(r"\..+\.[0-9a-f]{16}", path.name) and path.is_file():
            path.unlink()


def _moved(source: Path, target: Path) -> bool:
    """Whether a rename did it; it cannot from one disk, or one mount, to another."""
    _sync(source)
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _sync(path: Path) -> None:
    """What was written to a file, or which names a folder holds, survives a power cut from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
