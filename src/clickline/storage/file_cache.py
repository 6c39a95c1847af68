"""Remote files on the local disk: fetched once, verified, evicted when the room is needed.

    <directory>/lock                 held while room is made, so that two processes do not both take it
    <directory>/<key>/lock           shared while the copy is in use, exclusive while it is fetched or removed
    <directory>/<key>/part, plan     a download on its way, and the version and size it will have
    <directory>/<key>/data           the copy
    <directory>/<key>/manifest       written last, without it there is no copy; its mtime is the last use

The key is a hash of the URI, and only `shown(uri)` is written down: an address may hold a password.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from clickline.errors import CacheFull, StorageError
from clickline.progress import Progress, human_size
from clickline.records import SourceFile
from clickline.storage.atomic import put_atomically
from clickline.storage.redaction import shown
from clickline.storage.storage import Storage
from clickline.storage.storage_errors import explained

_READ = 4 * 2**20
_KEY = re.compile("[0-9a-f]{32}")


class Phase(StrEnum):
    """How far the copies of a set of files are."""

    LOCAL = "Local"  # local files need no copy
    NOT_CACHED = "NotCached"
    PARTIAL = "Partial"
    SYNCING = "Syncing"  # a process is fetching one of them now
    READY = "Ready"


@dataclass(frozen=True)
class CacheStatus:
    """What `clickline data status` shows of a set of files."""

    files: int
    total_bytes: int
    cached_bytes: int
    available_bytes: int
    phase: Phase


@dataclass(frozen=True)
class Cleared:
    """What `clear` removed, and what it left because someone is using it."""

    files: int
    size: int
    in_use: int


class Cache:
    """Local copies of remote files, at most `capacity_bytes` of them. Safe under several processes."""

    def __init__(self, directory: Path, capacity_bytes: int, storage: Storage) -> None:
        self._directory = directory
        self._capacity = capacity_bytes
        self._storage = storage
        self._verified: set[tuple[str, str]] = set()  # key and checksum, once a process

    @contextmanager
    def local(self, file: SourceFile, progress: Progress | None = None) -> Iterator[Path]:
        """A local path with the file's content; until the block is left it cannot be evicted."""
        progress = progress or Progress()
        if self._storage.is_local(file.uri):
            yield Path(file.uri.removeprefix("file://"))
            return
        entry = _Entry(self._directory, file.uri)
        version = file.version
        while True:
            if entry.is_being_fetched():
                progress.say(f"waiting for another process that is fetching {entry.shown}")
            with entry.locked(fcntl.LOCK_SH):
                if self._is_good(entry, version, progress):
                    with suppress(PermissionError):  # a cache that another user filled
                        os.utime(entry.manifest)
                    yield entry.data
                    return
            with entry.locked(fcntl.LOCK_EX):
                # Another process may have fetched it while this one waited for the lock.
                if not self._is_good(entry, version, Progress()):
                    version = self._fetch(entry, file, progress)

    def status(self, files: Sequence[SourceFile]) -> CacheStatus:
        """How much of these files is here. Looks at names and sizes only."""
        remote = [file for file in files if not self._storage.is_local(file.uri)]
        entries = [_Entry(self._directory, file.uri) for file in remote]
        with explained(str(self._directory), shown):
            cached = [entry.progress_of(file) for entry, file in zip(entries, remote, strict=True)]
            complete = [entry.holds(file.version) for entry, file in zip(entries, remote, strict=True)]
            if not remote:
                phase = Phase.LOCAL
            elif all(complete):
                phase = Phase.READY
            elif any(entry.is_being_fetched() for entry in entries):
                phase = Phase.SYNCING
            else:
                phase = Phase.PARTIAL if any(cached) or any(complete) else Phase.NOT_CACHED
            room = self._capacity - sum(entry.claim() for entry in self._entries())
            available = min(max(0, room), self._free_on_disk())
        return CacheStatus(len(files), sum(file.size for file in files), sum(cached), available, phase)

    def warm(self, files: Sequence[SourceFile], progress: Progress | None = None) -> None:
        """Fetch every file that is not here yet."""
        remote = [file for file in files if not self._storage.is_local(file.uri)]
        total = sum(file.size for file in remote)
        if total > self._capacity:
            raise CacheFull(
                f"the {len(remote)} files are {human_size(total)} together and the cache may hold "
                f"{human_size(self._capacity)}: the last would push out the first. "
                "Raise cache.size, or warm fewer files."
            )
        for file in remote:
            with self.local(file, progress):
                pass

    def clear(self, files: Sequence[SourceFile] | None = None) -> Cleared:
        """Remove the copies of these files, or of all; those in use stay."""
        removed, size, in_use = 0, 0, 0
        with explained(str(self._directory), shown):
            chosen = self._entries() if files is None else [_Entry(self._directory, f.uri) for f in files]
            for entry in chosen:
                if not entry.folder.exists():
                    continue
                claim, has_content = entry.claim(), entry.manifest.exists() or entry.plan.exists()
                if entry.remove_if_unused():
                    removed, size = removed + has_content, size + claim
                else:
                    in_use += 1
        return Cleared(removed, size, in_use)

    # One copy

    def _is_good(self, entry: _Entry, version: str, progress: Progress) -> bool:
        """Whether the copy is whole, of this version and uncorrupted."""
        with explained(str(entry.folder), shown):
            manifest = _document(entry.manifest)
            if manifest.get("version") != version:
                return False
            checksum = str(manifest.get("sha256"))
            intact = _size(entry.data) == manifest.get("size")
            if intact and (entry.key, checksum) not in self._verified:
                content = hashlib.sha256()
                _hash_into(entry.data, [content])
                intact = content.hexdigest() == checksum
        if not intact:
            progress.say(f"the cached copy of {entry.shown} is corrupt and is fetched again")
            return False
        self._verified.add((entry.key, checksum))
        return True

    def _fetch(self, entry: _Entry, listed: SourceFile, progress: Progress) -> str:
        """Download what the store has now, on from where an earlier download stopped; returns its version."""
        file = self._now(listed)
        if file.version != listed.version:
            if self._is_good(entry, file.version, progress):
                return file.version
            progress.say(f"{entry.shown} has changed since it was listed; its present content is fetched")
        if file.size > self._capacity:
            raise CacheFull(
                f"{entry.shown} is {human_size(file.size)} and the cache may hold {human_size(self._capacity)}. "
                "Raise cache.size, or cut the file into smaller ones."
            )
        with explained(str(entry.folder), shown):
            entry.manifest.unlink(missing_ok=True)
            entry.data.unlink(missing_ok=True)
            plan = {"uri": entry.shown, "version": file.version, "size": file.size}
            if _document(entry.plan) != plan or (_size(entry.part) or 0) > file.size:
                entry.part.unlink(missing_ok=True)
            self._make_room(entry, plan)
            checksum = self._download(entry, file, progress)
            if self._now(listed).version != file.version:
                entry.part.unlink()
                raise StorageError(
                    f"{entry.shown}: it was overwritten while it was being fetched. "
                    "Run again when it no longer changes."
                )
            entry.part.rename(entry.data)
            _write(entry.manifest, {**plan, "sha256": checksum, "created": time.time()})
            entry.plan.unlink()
        self._verified.add((entry.key, checksum))
        return file.version

    def _download(self, entry: _Entry, file: SourceFile, progress: Progress) -> str:
        """Add what is missing to the part; returns the checksum of the whole."""
        sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        announced = self._storage.announced_md5(file)
        hashes = [sha256, md5] if announced else [sha256]
        _hash_into(entry.part, hashes)
        start = _size(entry.part) or 0
        progress.begin(f"fetching {entry.shown}", total_bytes=file.size)
        progress.advance(size=start)
        try:
            with entry.part.open("ab") as part:
                for piece in self._storage.stream(file, start):
                    part.write(piece)
                    for each in hashes:
                        each.update(piece)
                    progress.advance(size=len(piece))
                part.flush()
                os.fsync(part.fileno())
        except OSError:
            entry.part.unlink()  # the disk is full, most likely: do not leave it so
            raise
        finally:
            progress.end()
        if announced and md5.hexdigest() != announced:
            entry.part.unlink()
            raise StorageError(
                f"{entry.shown}: what came does not have the checksum the store announced. Run again."
            )
        return sha256.hexdigest()

    def _now(self, listed: SourceFile) -> SourceFile:
        file = self._storage.describe(listed.uri)
        if file is None:
            raise StorageError(
                f"{shown(listed.uri)}: it was there when the input was listed and is gone now. Run again."
            )
        return file

    # Room for all

    def _make_room(self, entry: _Entry, plan: dict[str, Any]) -> None:
        """Evict what was used longest ago until the file fits, and claim the room by writing its plan."""
        with _locked(self._directory / "lock", fcntl.LOCK_EX):
            others = [other for other in self._entries() if other.key != entry.key]
            excess = sum(other.claim() for other in others) + plan["size"] - self._capacity
            for other in sorted(others, key=_Entry.last_used):
                if excess <= 0:
                    break
                claim = other.claim()
                if other.remove_if_unused():
                    excess -= claim
            if excess > 0:
                raise CacheFull(
                    f"{entry.shown} is {human_size(plan['size'])} and finds no room: the cache may hold "
                    f"{human_size(self._capacity)} and the rest is in use by running work. "
                    "Raise cache.size, or wait until that work is done."
                )
            missing = plan["size"] - (_size(entry.part) or 0)
            if missing > self._free_on_disk():
                raise StorageError(
                    f"{self._directory}: the disk is full, {human_size(self._free_on_disk())} are free and "
                    f"{entry.shown} needs {human_size(missing)} more. "
                    "Free some space, or set cache.dir to another disk."
                )
            _write(entry.plan, plan)

    def _free_on_disk(self) -> int:
        existing = next(folder for folder in (self._directory, *self._directory.parents) if folder.exists())
        return shutil.disk_usage(existing).free

    def _entries(self) -> list[_Entry]:
        """All copies, whole or not. What else lies in the folder is not the cache's to remove."""
        if not self._directory.is_dir():
            return []
        return [
            _Entry(self._directory, key=folder.name)
            for folder in self._directory.iterdir()
            if _KEY.fullmatch(folder.name) and folder.is_dir()
        ]


class _Entry:
    """The folder of one remote file."""

    def __init__(self, directory: Path, uri: str = "", key: str = "") -> None:
        self.key = key or hashlib.sha256(uri.encode()).hexdigest()[:32]
        self.shown = shown(uri)
        self.folder = directory / self.key
        self.data = self.folder / "data"
        self.part = self.folder / "part"
        self.plan = self.folder / "plan"
        self.manifest = self.folder / "manifest"
        self._lock = self.folder / "lock"

    def locked(self, kind: int) -> AbstractContextManager[bool]:
        return _locked(self._lock, kind)

    def is_being_fetched(self) -> bool:
        if not self._lock.exists():
            return False
        with self.locked(fcntl.LOCK_SH | fcntl.LOCK_NB) as free:
            return not free

    def holds(self, version: str) -> bool:
        manifest = _document(self.manifest)
        return manifest.get("version") == version and manifest.get("size") == _size(self.data)

    def progress_of(self, file: SourceFile) -> int:
        """Bytes of this version that are here."""
        if self.holds(file.version):
            return file.size
        return (_size(self.part) or 0) if _document(self.plan).get("version") == file.version else 0

    def claim(self) -> int:
        """Bytes it takes, or will take when its download is done."""
        return max(_size(self.data) or 0, _size(self.part) or 0, int(_document(self.plan).get("size", 0)))

    def last_used(self) -> float:
        for sign in (self.manifest, self.plan):
            with suppress(FileNotFoundError):
                return sign.stat().st_mtime
        return 0.0

    def remove_if_unused(self) -> bool:
        """Whether nobody held it, so that it is gone now."""
        with self.locked(fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            if free:
                self.manifest.unlink(missing_ok=True)  # first: a removal cut short leaves no copy behind
                for file in self.folder.iterdir():
                    if file != self._lock:
                        file.unlink()
                self._lock.unlink()  # last: from here on others may lock, and fill, the folder anew
                with suppress(OSError):
                    self.folder.rmdir()
            return free


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[bool]:
    """Hold a lock on a file; False if it is taken and `kind` says not to wait. The dead hold none."""
    handle = _acquired(path, kind)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _acquired(path: Path, kind: int) -> int | None:
    with explained(str(path), shown):
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # its folder was removed in between
            try:
                fcntl.flock(handle, kind)
                if os.fstat(handle).st_ino == path.stat().st_ino:
                    return handle
            except BlockingIOError:
                os.close(handle)
                return None
            except FileNotFoundError:
                pass  # the lock of a folder that was removed while this process waited: take the new one
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)


def _document(path: Path) -> dict[str, Any]:
    """A small JSON file; empty when it is absent or broken."""
    with suppress(FileNotFoundError, ValueError):
        tree = json.loads(path.read_bytes())
        return tree if isinstance(tree, dict) else {}
    return {}


def _write(path: Path, tree: dict[str, Any]) -> None:
    put_atomically(path, json.dumps(tree).encode())


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _hash_into(path: Path, hashes: Sequence[hashlib._Hash]) -> None:
    """Feed a file, if there is one, to each hash."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        while piece := file.read(_READ):
            for each in hashes:
                each.update(piece)
