"""Local copies of remote files: downloaded once, verified, evicted when space is needed.

    <directory>/lock                 held while space is reserved, so that two processes do not reserve the same
    <directory>/<key>/lock           shared while the copy is in use, exclusive while it is downloaded or removed
    <directory>/<key>/part, plan     a download in progress, and the version and size it will have
    <directory>/<key>/data           the copy
    <directory>/<key>/manifest       written last: without it there is no copy; its mtime is the last use

The key is a hash of the URI, and only the redacted URI is stored: a URI may hold a password.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from clickline.errors import CacheFull, StorageError
from clickline.progress import Progress, human_size
from clickline.records import SourceFile
from clickline.storage.atomic import put_atomically
from clickline.storage.file_lock import locked
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage
from clickline.storage.storage_errors import translate_errors

_CHUNK = 4 * 2**20
_KEY = re.compile("[0-9a-f]{32}")


class CachePhase(StrEnum):
    """The state of the copies of a set of files."""

    LOCAL = "Local"  # local files need no copy
    NOT_CACHED = "NotCached"
    PARTIAL = "Partial"
    SYNCING = "Syncing"  # a process is downloading one of them now
    READY = "Ready"


@dataclass(frozen=True)
class CacheStatus:
    """The status of a set of files, as `clickline cache status` shows it."""

    files: int
    ready_files: int  # local, or with a complete copy
    total_bytes: int
    cached_bytes: int
    available_bytes: int
    phase: CachePhase
    since: float | None  # unix time of the oldest complete copy


@dataclass(frozen=True)
class ClearResult:
    """What `clear` removed, and what it left because a process is using it."""

    files: int
    size: int
    in_use: int


class FileCache:
    """Local copies of remote files, at most `capacity_bytes` in total. Safe to use from several processes."""

    def __init__(self, directory: Path, capacity_bytes: int, storage: Storage) -> None:
        self._directory = directory
        self._capacity = capacity_bytes
        self._storage = storage
        self._verified: set[tuple[str, str]] = set()  # key and checksum, verified once per process

    @contextmanager
    def local(self, file: SourceFile, progress: Progress | None = None) -> Iterator[Path]:
        """A local path with the file's content, which is not evicted inside the `with` block."""
        progress = progress or Progress()
        if self._storage.is_local(file.uri):
            yield self._storage.local_path(file.uri)
            return
        entry = _Entry(self._directory, file.uri)
        version = file.version
        while True:
            if entry.is_being_fetched():
                progress.log(f"waiting for another process that is downloading {entry.redacted_uri}")
            with entry.locked(shared=True):
                if self._is_valid(entry, version, progress):
                    with suppress(PermissionError):  # a cache filled by another user
                        os.utime(entry.manifest)
                    yield entry.data
                    return
            with entry.locked():
                # Another process may have downloaded it while this one waited for the lock.
                if not self._is_valid(entry, version, Progress()):
                    version = self._fetch(entry, file, progress)

    def status(self, files: Sequence[SourceFile]) -> CacheStatus:
        """How much of these files is cached. Checks only names and sizes."""
        remote = [file for file in files if not self._storage.is_local(file.uri)]
        entries = [_Entry(self._directory, file.uri) for file in remote]
        with translate_errors(str(self._directory), redacted):
            cached = [entry.cached_bytes_of(file) for entry, file in zip(entries, remote, strict=True)]
            complete = [entry.holds(file.version) for entry, file in zip(entries, remote, strict=True)]
            if not remote:
                phase = CachePhase.LOCAL
            elif all(complete):
                phase = CachePhase.READY
            elif any(entry.is_being_fetched() for entry in entries):
                phase = CachePhase.SYNCING
            else:
                phase = CachePhase.PARTIAL if any(cached) or any(complete) else CachePhase.NOT_CACHED
            room = self._capacity - sum(entry.reserved_bytes() for entry in self._entries())
            available = min(max(0, room), self._free_on_disk())
            copied = [
                entry.data.stat().st_mtime for entry, done in zip(entries, complete, strict=True) if done
            ]
        return CacheStatus(
            files=len(files),
            ready_files=len(files) - len(remote) + sum(complete),
            total_bytes=sum(file.size for file in files),
            cached_bytes=sum(cached),
            available_bytes=available,
            phase=phase,
            since=min(copied, default=None),
        )

    def prefetch(self, files: Sequence[SourceFile], progress: Progress | None = None) -> None:
        """Download every file that is not cached yet."""
        remote = [file for file in files if not self._storage.is_local(file.uri)]
        total = sum(file.size for file in remote)
        if total > self._capacity:
            raise CacheFull(
                f"the {len(remote)} files have {human_size(total)} in total and the cache may hold "
                f"{human_size(self._capacity)}: the last would evict the first. "
                "Raise cache.size, or prefetch fewer files."
            )
        for file in remote:
            with self.local(file, progress):
                pass

    def clear(self, files: Sequence[SourceFile] | None = None) -> ClearResult:
        """Remove the copies of these files, or all copies, except those in use."""
        removed, size, in_use = 0, 0, 0
        with translate_errors(str(self._directory), redacted):
            chosen = self._entries() if files is None else [_Entry(self._directory, f.uri) for f in files]
            for entry in chosen:
                if not entry.folder.exists():
                    continue
                reserved, has_content = entry.reserved_bytes(), entry.manifest.exists() or entry.plan.exists()
                if entry.remove_if_unused():
                    removed, size = removed + has_content, size + reserved
                else:
                    in_use += 1
        return ClearResult(removed, size, in_use)

    # One copy

    def _is_valid(self, entry: _Entry, version: str, progress: Progress) -> bool:
        """Whether the copy is complete, of this version, and not corrupt."""
        with translate_errors(str(entry.folder), redacted):
            manifest = _read_json(entry.manifest)
            if manifest.get("version") != version:
                return False
            checksum = str(manifest.get("sha256"))
            intact = _size(entry.data) == manifest.get("size")
            if intact and (entry.key, checksum) not in self._verified:
                content = hashlib.sha256()
                _update_hashes(entry.data, [content])
                intact = content.hexdigest() == checksum
        if not intact:
            progress.log(f"the cached copy of {entry.redacted_uri} is corrupt and is downloaded again")
            return False
        self._verified.add((entry.key, checksum))
        return True

    def _fetch(self, entry: _Entry, listed: SourceFile, progress: Progress) -> str:
        """Download the file's current version, resuming an earlier download; returns that version."""
        file = self._current(listed)
        if file.version != listed.version:
            if self._is_valid(entry, file.version, progress):
                return file.version
            progress.log(
                f"{entry.redacted_uri} has changed since it was listed; downloading its current content"
            )
        if file.size > self._capacity:
            raise CacheFull(
                f"{entry.redacted_uri} is {human_size(file.size)} and the cache may hold {human_size(self._capacity)}. "
                "Raise cache.size, or split the file."
            )
        with translate_errors(str(entry.folder), redacted):
            entry.manifest.unlink(missing_ok=True)
            entry.data.unlink(missing_ok=True)
            plan = {"uri": entry.redacted_uri, "version": file.version, "size": file.size}
            if _read_json(entry.plan) != plan or (_size(entry.part) or 0) > file.size:
                entry.part.unlink(missing_ok=True)
            self._make_room(entry, plan)
            checksum = self._download(entry, file, progress)
            if self._current(listed).version != file.version:
                entry.part.unlink()
                raise StorageError(
                    f"{entry.redacted_uri}: it was overwritten while it was being downloaded. "
                    "Run again when it no longer changes."
                )
            entry.part.rename(entry.data)
            _write(entry.manifest, {**plan, "sha256": checksum, "created": time.time()})
            entry.plan.unlink()
        self._verified.add((entry.key, checksum))
        return file.version

    def _download(self, entry: _Entry, file: SourceFile, progress: Progress) -> str:
        """Append the missing bytes to the partial file; returns the checksum of the complete file."""
        sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        expected_md5 = self._storage.announced_md5(file)
        hashes = [sha256, md5] if expected_md5 else [sha256]
        _update_hashes(entry.part, hashes)
        start = _size(entry.part) or 0
        progress.begin(f"fetching {entry.redacted_uri}", total_bytes=file.size)
        progress.advance(size=start)
        try:
            with entry.part.open("ab") as part:
                for chunk in self._storage.stream(file, start):
                    part.write(chunk)
                    for each in hashes:
                        each.update(chunk)
                    progress.advance(size=len(chunk))
                part.flush()
                os.fsync(part.fileno())
        except OSError:
            entry.part.unlink()  # the disk is probably full: free the space
            raise
        finally:
            progress.end()
        if expected_md5 and md5.hexdigest() != expected_md5:
            entry.part.unlink()
            raise StorageError(
                f"{entry.redacted_uri}: the download does not have the checksum that the store announced. Run again."
            )
        return sha256.hexdigest()

    def _current(self, listed: SourceFile) -> SourceFile:
        file = self._storage.describe(listed.uri)
        if file is None:
            raise StorageError(
                f"{redacted(listed.uri)}: it existed when the input was listed and is gone now. Run again."
            )
        return file

    # Space

    def _make_room(self, entry: _Entry, plan: dict[str, Any]) -> None:
        """Evict the least recently used copies until the file fits, and reserve the space by writing its plan."""
        with _locked(self._directory / "lock"):
            others = [other for other in self._entries() if other.key != entry.key]
            excess = sum(other.reserved_bytes() for other in others) + plan["size"] - self._capacity
            for other in sorted(others, key=_Entry.last_used):
                if excess <= 0:
                    break
                reserved = other.reserved_bytes()
                if other.remove_if_unused():
                    excess -= reserved
            if excess > 0:
                raise CacheFull(
                    f"there is no room for {entry.redacted_uri}, {human_size(plan['size'])}: the cache may hold "
                    f"{human_size(self._capacity)} and the rest is in use by running processes. "
                    "Raise cache.size, or wait until they are done."
                )
            missing = plan["size"] - (_size(entry.part) or 0)
            if missing > self._free_on_disk():
                raise StorageError(
                    f"{self._directory}: the disk is full, {human_size(self._free_on_disk())} are free and "
                    f"{entry.redacted_uri} needs {human_size(missing)} more. "
                    "Free some space, or set cache.dir to another disk."
                )
            _write(entry.plan, plan)

    def _free_on_disk(self) -> int:
        existing = next(folder for folder in (self._directory, *self._directory.parents) if folder.exists())
        return shutil.disk_usage(existing).free

    def _entries(self) -> list[_Entry]:
        """All copies, complete or not. Other files in the folder are not the cache's to remove."""
        if not self._directory.is_dir():
            return []
        return [
            _Entry(self._directory, key=folder.name)
            for folder in self._directory.iterdir()
            if _KEY.fullmatch(folder.name) and folder.is_dir()
        ]


class _Entry:
    """The folder of one remote file in the cache."""

    def __init__(self, directory: Path, uri: str = "", key: str = "") -> None:
        self.key = key or hashlib.sha256(uri.encode()).hexdigest()[:32]
        self.redacted_uri = redacted(uri)
        self.folder = directory / self.key
        self.data = self.folder / "data"
        self.part = self.folder / "part"
        self.plan = self.folder / "plan"
        self.manifest = self.folder / "manifest"
        self._lock = self.folder / "lock"

    def locked(self, *, shared: bool = False, wait: bool = True) -> AbstractContextManager[bool]:
        return _locked(self._lock, shared=shared, wait=wait)

    def is_being_fetched(self) -> bool:
        if not self._lock.exists():
            return False
        with self.locked(shared=True, wait=False) as free:
            return not free

    def holds(self, version: str) -> bool:
        manifest = _read_json(self.manifest)
        return manifest.get("version") == version and manifest.get("size") == _size(self.data)

    def cached_bytes_of(self, file: SourceFile) -> int:
        """Cached bytes of this version."""
        if self.holds(file.version):
            return file.size
        return (_size(self.part) or 0) if _read_json(self.plan).get("version") == file.version else 0

    def reserved_bytes(self) -> int:
        """Bytes it takes, or will take when its download is complete."""
        return max(_size(self.data) or 0, _size(self.part) or 0, int(_read_json(self.plan).get("size", 0)))

    def last_used(self) -> float:
        for file in (self.manifest, self.plan):
            with suppress(FileNotFoundError):
                return file.stat().st_mtime
        return 0.0

    def remove_if_unused(self) -> bool:
        """Remove the copy unless a process uses it; returns whether it was removed."""
        with self.locked(wait=False) as free:
            if free:
                self.manifest.unlink(missing_ok=True)  # first: an interrupted removal leaves no valid copy
                for file in self.folder.iterdir():
                    if file != self._lock:
                        file.unlink()
                self._lock.unlink()  # last: from here on another process may lock and fill the folder again
                with suppress(OSError):
                    self.folder.rmdir()
            return free


@contextmanager
def _locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """`locked`, with a StorageError if the file cannot be opened."""
    with ExitStack() as stack:
        with translate_errors(str(path), redacted):
            free = stack.enter_context(locked(path, shared=shared, wait=wait))
        yield free


def _read_json(path: Path) -> dict[str, Any]:
    """A small JSON file; empty if it is missing or damaged."""
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


def _update_hashes(path: Path, hashes: Sequence[hashlib._Hash]) -> None:
    """Update each hash with the content of a file, if it exists."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            for each in hashes:
                each.update(chunk)
