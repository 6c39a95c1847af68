"""What a pod's first container does: its directories exist and take files, the compiled kernels lie where Numba may
write, Ray has a token. Whatever is wrong is said here, before a role fails of it half an hour later."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from clickline.errors import ClicklineError, StorageError
from clickline.progress import human_size

_POLL_SECONDS = 1.0
_LOG_SECONDS = 30.0


def check_pod(
    directories: Sequence[Path],
    *,
    kernels: Path | None = None,
    cache: Path | None = None,
    cpu: str | None = None,
    token: Path | None = None,
) -> list[str]:
    """Make the directories and prove that they take files; copy `kernels` to `cache` if that was not done yet; see that
    this machine can run code for `cpu`, a name of LLVM's; make Ray's token once. Harmless when it runs again, or in two
    pods at once. Returns what to tell, a line each."""
    if cpu is not None:
        _check_cpu(cpu)
    told = [_check_writable(directory) for directory in directories]
    if kernels is not None and cache is not None:
        told.append(_copy_kernels(kernels, cache))
    if token is not None:
        told.append(_create_token(token))
    return told


def _check_writable(directory: Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as proof:
            proof.write(b"\0" * 4096)
            proof.flush()
            os.fsync(proof.fileno())
        room = os.statvfs(directory)
    except OSError as error:
        raise StorageError(_explain(directory, error)) from error
    return f"{directory}: takes files, {human_size(room.f_bavail * room.f_frsize)} free"


def _copy_kernels(kernels: Path, cache: Path) -> str:
    """The image's file system is read-only, and Numba reads no cache that it cannot write to: hence a copy. It gets its
    name when it is whole."""
    if not kernels.is_dir():
        return f"{kernels}: no compiled kernels there, each is compiled at its first use"
    if cache.is_dir() and any(cache.iterdir()):
        return f"{cache}: has kernels already"
    _check_writable(cache.parent)
    copy = Path(tempfile.mkdtemp(prefix=f".{cache.name}-", dir=cache.parent))
    try:
        # Contents alone: whoever runs here owns the copies, and may not have what the image's modes say.
        shutil.copytree(kernels, copy / "whole", copy_function=shutil.copyfile)
        (copy / "whole").rename(cache)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return f"{cache}: another container has brought the kernels"
        raise StorageError(_explain(cache, error)) from error
    finally:
        shutil.rmtree(copy)
    return f"{cache}: {sum(1 for _ in cache.rglob('*.nbc'))} compiled kernels from {kernels}"


def _create_token(token: Path) -> str:
    """A link makes the file appear with all of its content, in one pod of all that try."""
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=token.parent, prefix=f".{token.name}-") as draft:
            draft.write(secrets.token_hex(32).encode())
            draft.flush()
            os.fchmod(draft.fileno(), 0o640)
            os.fsync(draft.fileno())
            try:
                os.link(draft.name, token)
            except FileExistsError:
                if token.read_bytes().strip():
                    return f"{token}: has a token already"
                raise StorageError(
                    f"{token} is empty, and must hold Ray's token. Remove it; it is made anew."
                ) from None
    except OSError as error:
        raise StorageError(_explain(token, error)) from error
    return f"{token}: made a token for Ray"


_LEVELS = {
    "x86-64": (),
    "x86-64-v2": ("cx16", "popcnt", "sse4.2", "ssse3"),
    "x86-64-v3": ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}
"""What each level of x86-64 adds to the one before, in LLVM's words."""


def _check_cpu(name: str) -> None:
    """Code for another CPU does not fail with an error, it kills the process."""
    from llvmlite import binding

    if name not in _LEVELS:
        return
    has = binding.get_host_cpu_features()
    levels = list(_LEVELS)
    missing = [
        f for level in levels[: levels.index(name) + 1] for f in _LEVELS[level] if not has.get(f, False)
    ]
    if missing:
        raise ClicklineError(
            f"the kernels of this image are for {name}, and this node's CPU ({binding.get_host_cpu_name()}) has no "
            f"{', '.join(missing)}. Let the pods run on other nodes (deploy.nodes), or build the image with CPU=x86-64."
        )


def _explain(path: Path, error: OSError) -> str:
    """What was found at a path, or at what is there of it, and what to do."""
    there, found = _nearest_existing(path.absolute())
    facts = (
        f"{there} belongs to uid {found.st_uid}, gid {found.st_gid}, with mode {found.st_mode & 0o7777:04o}"
    )
    uid, gid, groups = os.getuid(), os.getgid(), sorted(set(os.getgroups()))
    me = f"this process is uid {uid}, gid {gid}, groups {', '.join(map(str, groups)) or 'none'}"
    match error.errno:
        case errno.EACCES | errno.EPERM:
            remedy = (
                "Set fsGroup (deploy.identity.fs_group) to a group that may write there, or, where the kind of volume "
                f"has no fsGroup (NFS, hostPath), let it belong to this user: chown -R {uid}:{gid}."
            )
        case errno.EROFS:
            remedy = "It is mounted read-only: mount the volume writable, or choose a storage class that allows it."
        case errno.ENOSPC | errno.EDQUOT:
            remedy = "It is full: enlarge the volume, or remove old versions (`clickline versions gc`)."
        case _:
            remedy = "See that the volume is mounted there, and that its storage class gives a file system."
    return f"{path}: {error.strerror or error}; {facts}; {me}. {remedy}"


def _nearest_existing(path: Path) -> tuple[Path, os.stat_result]:
    """The path, or of those above it the first that can be looked at; the root always can."""
    for there in (path, *path.parents):
        with suppress(OSError):
            return there, there.stat()
    raise AssertionError(path)


def await_server(address: str, say: Callable[[str], None]) -> None:
    """Until something takes connections at host:port. Without an end: the cluster may not have room yet for the pods
    that are waited for, and this one is shown as waiting."""
    host, _, port = address.rpartition(":")
    told = -_LOG_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_POLL_SECONDS).close()
        except OSError as error:
            if time.monotonic() - told >= _LOG_SECONDS:
                told = time.monotonic()
                say(f"{address} does not answer yet: {error.strerror or error}")
            time.sleep(_POLL_SECONDS)
        else:
            return
