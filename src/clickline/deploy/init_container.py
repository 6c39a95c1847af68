"""The init container of every pod: makes sure that its directories are writable, that the compiled kernels are where
Numba can write, and that Ray has a token. It reports what is wrong before a role fails of it half an hour later."""

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
    """Create the directories and check that they are writable; copy `kernels` to `cache` unless done before; check that
    this machine can run code for `cpu`, an LLVM name; create Ray's token once. It can run again, and in two pods at
    once. Returns lines to log."""
    if cpu is not None:
        _check_cpu(cpu)
    lines = [_check_writable(directory) for directory in directories]
    if kernels is not None and cache is not None:
        lines.append(_copy_kernels(kernels, cache))
    if token is not None:
        lines.append(_create_token(token))
    return lines


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
    return f"{directory}: writable, {human_size(room.f_bavail * room.f_frsize)} free"


def _copy_kernels(kernels: Path, cache: Path) -> str:
    """Copy the kernels: the image's file system is read-only, and Numba uses no cache that it cannot write to. The copy
    gets its name once it is complete."""
    if not kernels.is_dir():
        return f"{kernels}: no compiled kernels; each is compiled when first used"
    if cache.is_dir() and any(cache.iterdir()):
        return f"{cache}: has kernels already"
    _check_writable(cache.parent)
    copy = Path(tempfile.mkdtemp(prefix=f".{cache.name}-", dir=cache.parent))
    try:
        # Contents only: the copies belong to this user, who may not be able to set the image's modes.
        shutil.copytree(kernels, copy / "kernels", copy_function=shutil.copyfile)
        (copy / "kernels").rename(cache)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return f"{cache}: another container has copied the kernels"
        raise StorageError(_explain(cache, error)) from error
    finally:
        shutil.rmtree(copy)
    return f"{cache}: {sum(1 for _ in cache.rglob('*.nbc'))} compiled kernels from {kernels}"


def _create_token(token: Path) -> str:
    """Create the token file. A hard link makes it appear complete, in exactly one of the pods that try."""
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
                    f"{token} is empty, and must contain Ray's token. Delete it; it is created again."
                ) from None
    except OSError as error:
        raise StorageError(_explain(token, error)) from error
    return f"{token}: created a token for Ray"


_LEVELS = {
    "x86-64": (),
    "x86-64-v2": ("cx16", "popcnt", "sse4.2", "ssse3"),
    "x86-64-v3": ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}
"""The CPU features that each level of x86-64 adds to the one before, by their LLVM names."""


def _check_cpu(name: str) -> None:
    """Fail with a message: code for another CPU would kill the process without one."""
    from llvmlite import binding

    if name not in _LEVELS:
        return
    features = binding.get_host_cpu_features()
    levels = list(_LEVELS)
    missing = [
        f for level in levels[: levels.index(name) + 1] for f in _LEVELS[level] if not features.get(f, False)
    ]
    if missing:
        raise ClicklineError(
            f"the kernels of this image are for {name}, and this node's CPU ({binding.get_host_cpu_name()}) lacks "
            f"{', '.join(missing)}. Run the pods on other nodes (deploy.nodes), or build the image with CPU=x86-64."
        )


def _explain(path: Path, error: OSError) -> str:
    """Owner and mode of a path or its nearest existing parent, who this process is, and what to do."""
    existing, stat = _nearest_existing(path.absolute())
    facts = (
        f"{existing} belongs to uid {stat.st_uid}, gid {stat.st_gid}, with mode {stat.st_mode & 0o7777:04o}"
    )
    uid, gid, groups = os.getuid(), os.getgid(), sorted(set(os.getgroups()))
    me = f"this process is uid {uid}, gid {gid}, groups {', '.join(map(str, groups)) or 'none'}"
    match error.errno:
        case errno.EACCES | errno.EPERM:
            remedy = (
                "Set fsGroup (deploy.identity.fs_group) to a group that may write there or, if the kind of volume "
                f"ignores fsGroup (NFS, hostPath), make this user its owner: chown -R {uid}:{gid}."
            )
        case errno.EROFS:
            remedy = "It is mounted read-only: mount the volume writable, or choose a storage class that allows it."
        case errno.ENOSPC | errno.EDQUOT:
            remedy = "It is full: enlarge the volume, or remove old versions (`clickline versions gc`)."
        case _:
            remedy = (
                "Check that the volume is mounted there, and that its storage class provides a file system."
            )
    return f"{path}: {error.strerror or error}; {facts}; {me}. {remedy}"


def _nearest_existing(path: Path) -> tuple[Path, os.stat_result]:
    """The path or its nearest parent that can be read; the root always can."""
    for existing in (path, *path.parents):
        with suppress(OSError):
            return existing, existing.stat()
    raise AssertionError(path)


def await_server(address: str, log: Callable[[str], None]) -> None:
    """Wait until host:port accepts connections. Without a time limit: the cluster may not have room yet for the pods
    that it waits for, and `deploy status` shows this one as waiting."""
    host, _, port = address.rpartition(":")
    logged = -_LOG_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_POLL_SECONDS).close()
        except OSError as error:
            if time.monotonic() - logged >= _LOG_SECONDS:
                logged = time.monotonic()
                log(f"{address} does not accept connections yet: {error.strerror or error}")
            time.sleep(_POLL_SECONDS)
        else:
            return
