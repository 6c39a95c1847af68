"""One interface to every store: list, read, put, create, delete. A local path is a store too."""

from __future__ import annotations

import builtins
import errno
import glob
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clickline.errors import StorageError
from clickline.records import SourceFile
from clickline.storage.atomic import create_atomically, put_atomically, temporary_name
from clickline.storage.filesystems import FileSystems, protocol_of
from clickline.storage.glob_patterns import is_glob, unescape
from clickline.storage.storage_errors import is_missing, translate_errors

_CHUNK = 8 * 2**20
_MAX_READ = 256 * 2**20  # bytes of a file that is read at once: a manifest, a list of slots
_HTTP = ("http", "https")
_S3 = ("s3", "s3a")
_RENAME_PROTOCOLS = (
    "webhdfs",
    "hdfs",
)  # uploads are visible while they grow, so they get a temporary name first
_memory_lock = threading.Lock()


@dataclass(frozen=True)
class _Entry:
    """What a store reports about one name in a folder."""

    uri: str
    folder: bool
    size: int | None  # None: not in the listing
    version: str
    link: bool = False

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rsplit("/", 1)[-1]


class Storage:
    """Files anywhere: plain paths and file://, s3://, gs://, webhdfs://, hdfs://, http(s)://, memory://.

    `options` are fsspec's, by protocol, without secrets. Credentials come from the environment or from
    `credentials_file`, YAML or JSON of the same shape. Every failure is a StorageError.
    """

    def __init__(
        self, options: Mapping[str, Mapping[str, Any]] | None = None, credentials_file: Path | None = None
    ) -> None:
        self._drivers = FileSystems(options or {}, credentials_file)
        self._exclusive: set[str] = set()  # buckets known to refuse a second create

    # The five operations

    def list(self, pattern: str) -> list[SourceFile]:
        """The files that match a path or glob, sorted by URI; [] if there is none.

        `*`, `?`, `[…]` match names in one folder, `**` any depth of folders. As in a shell, they skip hidden
        names; here `_name` is hidden like `.name`: other tools use both for markers and work in progress. A
        pattern that begins with the dot or underscore matches them. `[*]`, `[?]` and `[[]` are escapes for the
        characters themselves; `pattern_in` writes them. `[{]` is a literal brace: in the patterns of a config a
        bare one begins {date} or {hour}.
        """
        files = {}
        for entry in self._matches(pattern):
            if not entry.folder:
                file = self._file(entry)
                files[file.uri] = file
        return [files[uri] for uri in sorted(files)]

    def read(self, uri: str) -> bytes:
        """The content of a small file."""
        file = self.describe(uri)
        if file is None:
            with translate_errors(uri, self._drivers.redact):
                raise IsADirectoryError(uri) if self.folders(uri) else FileNotFoundError(uri)
        if file.size > _MAX_READ:
            raise self._error(
                f"{uri} has {file.size:,} bytes; up to {_MAX_READ:,} are read. Is it the right file?"
            )
        while True:
            try:
                return b"".join(self.stream(file))
            except StorageError:
                again = self.describe(uri)
                if again is None or again == file:
                    raise
                file = again  # it was replaced after it was described

    def put(self, uri: str, data: bytes | Path) -> None:
        """Write a file atomically. If `data` is a Path, that file is moved or uploaded, and then removed."""
        with translate_errors(uri, self._drivers.redact):
            if self.is_local(uri):
                put_atomically(self.local_path(uri), data)
                return
            protocol = protocol_of(uri)
            if protocol in _HTTP:
                raise NotImplementedError
            filesystem = self._drivers.open(uri)
            if protocol in _RENAME_PROTOCOLS:
                _put_by_renaming(filesystem, protocol, uri, data)
            elif isinstance(data, bytes):
                filesystem.pipe_file(uri, data)
            elif protocol == "memory":
                filesystem.pipe_file(
                    uri, data.read_bytes()
                )  # its put_file shows the file while it is written
            else:
                filesystem.put_file(str(data), uri)
            if isinstance(data, Path):
                data.unlink()

    def create(self, uri: str, data: bytes) -> bool:
        """Write a small file atomically if nothing exists there; False if something does. One of several callers wins.

        Drivers repeat a request whose answer was lost, and then find what they wrote themselves: after False, a
        caller that must know compares the content with its own.
        """
        with translate_errors(uri, self._drivers.redact):
            if self.is_local(uri):
                try:
                    return create_atomically(self.local_path(uri), data)
                except OSError as error:
                    if error.errno != errno.ENOTSUP:
                        raise
                    raise self._cannot_create(
                        uri, "this disk has no hard links", "another disk, or a remote store"
                    ) from None
            protocol = protocol_of(uri)
            if protocol in _HTTP:
                raise NotImplementedError
            if protocol == "hdfs":  # pyarrow removes an existing target of a rename
                raise self._cannot_create(
                    uri, "hdfs:// does not support that", "webhdfs:// for the same cluster"
                )
            filesystem = self._drivers.open(uri)
            if protocol == "webhdfs":
                return _create_by_renaming(filesystem, uri, data)
            if protocol == "memory":
                with _memory_lock:
                    return _create_exclusively(filesystem, uri, data)
            created = _create_exclusively(filesystem, uri, data)
            if created and protocol in _S3:
                self._check_exclusive(filesystem, uri, data)
            return created

    def _check_exclusive(self, filesystem: Any, uri: str, data: bytes) -> None:
        """Check, once per bucket, by writing the same bytes again, that an S3 store does not ignore the condition."""
        bucket = filesystem.split_path(uri)[0]
        if bucket in self._exclusive:
            return
        if _create_exclusively(filesystem, uri, data):
            raise self._cannot_create(
                uri, "the store ignores If-None-Match and overwrites", "a store with conditional writes"
            )
        self._exclusive.add(bucket)

    def _cannot_create(self, uri: str, reason: str, remedy: str) -> StorageError:
        return self._error(
            f"{uri}: a file must be created here only if none exists, but {reason}. Use {remedy}."
        )

    def _error(self, message: str) -> StorageError:
        return StorageError(self._drivers.redact(message))

    def delete(self, uri: str) -> None:
        """Remove a file, or a folder with its content. It is no error if nothing exists."""
        with translate_errors(uri, self._drivers.redact):
            if self.is_local(uri):
                path = self.local_path(uri)
                if path.is_dir() and not path.is_symlink():
                    with suppress(FileNotFoundError):  # another process was faster
                        shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                return
            if protocol_of(uri) in _HTTP:
                raise NotImplementedError
            entry = self._entry(uri)
            if entry is None:
                return
            filesystem = self._drivers.open(uri)
            with suppress(FileNotFoundError):  # another process was faster
                if entry.folder:
                    filesystem.rm(uri, recursive=True)
                else:
                    filesystem.rm_file(uri)

    # What log_files and the cache need besides

    def describe(self, uri: str) -> SourceFile | None:
        """Size and version of one file; None if there is no such file."""
        with translate_errors(uri, self._drivers.redact):
            entry = self._entry(uri)
        return None if entry is None or entry.folder else self._file(entry)

    def folders(self, pattern: str) -> builtins.list[str]:
        """The folders that match a path or glob, sorted."""
        return sorted({entry.uri for entry in self._matches(pattern) if entry.folder})

    def names(self, folder: str) -> builtins.list[str]:
        """The names in a folder, sorted; [] if it does not exist."""
        with translate_errors(folder, self._drivers.redact):
            if self.is_local(folder):  # servers call this every second: no stat of each file
                with suppress(FileNotFoundError, NotADirectoryError):
                    return sorted(path.name for path in self.local_path(folder).iterdir())
                return []
            return sorted(entry.name for entry in self._children(folder))

    def sizes(self, folder: str, pattern: str = "*") -> dict[str, int]:
        """The sizes of the files in a folder, by name."""
        return {
            file.uri.rpartition("/")[2]: file.size for file in self.list(self.pattern_in(folder, pattern))
        }

    def stream(self, file: SourceFile, start: int = 0) -> Iterator[bytes]:
        """The bytes of a file from `start`, in chunks; exactly as many as the file has."""
        with translate_errors(file.uri, self._drivers.redact):
            position = start
            if start < file.size:
                for chunk in self._chunks(file, start):
                    position += len(chunk)
                    if position > file.size:  # a server that never stops must not fill memory or disk
                        break
                    yield chunk
            if position != file.size:
                raise self._error(
                    f"{file.uri}: {position} bytes arrived, {file.size} were expected. The transfer was "
                    "interrupted, or the file is being written; run again when it is complete."
                )

    def announced_md5(self, file: SourceFile) -> str | None:
        """The MD5 of the content, if the store knows it: S3, for an object uploaded in one part."""
        if protocol_of(file.uri) not in _S3 or not re.fullmatch(r"[0-9a-f]{32}", file.version):
            return None
        with translate_errors(file.uri, self._drivers.redact):
            filesystem = self._drivers.open(file.uri)
            bucket, key, _ = filesystem.split_path(file.uri)
            head = filesystem.call_s3("head_object", Bucket=bucket, Key=key)
        # An object encrypted with a customer key has an ETag that looks like an MD5 but is none.
        encrypted = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
        return None if encrypted else file.version

    @staticmethod
    def is_local(uri: str) -> bool:
        """Whether a URI is a path on this machine."""
        return protocol_of(uri) == "file"

    @staticmethod
    def local_path(uri: str) -> Path:
        """The path of a local URI."""
        return Path(uri.removeprefix("file://")).expanduser()

    @staticmethod
    def join(base: str, *parts: str) -> str:
        """`base/part/part`, for paths and URIs alike."""
        for part in parts:
            base = part if not base else base + part if base.endswith("/") else f"{base}/{part}"
        return base

    @staticmethod
    def pattern_in(folder: str, pattern: str) -> str:
        """A pattern inside a folder; wildcard characters in the folder's own name are escaped."""
        return Storage.join(glob.escape(folder), pattern)

    # Listing

    def _matches(self, pattern: str) -> Iterator[_Entry]:
        if self.is_local(pattern):
            pattern = str(self.local_path(pattern))
        wildcards = "*" if protocol_of(pattern) in _HTTP else "*?["  # ? starts the query of an HTTP URL
        name = unescape(pattern)
        with translate_errors(name, self._drivers.redact):
            exact = None if is_glob(pattern, wildcards) else name
            if self.is_local(pattern):  # a file may be called data[1].tsv
                exact = next((n for n in (pattern, name) if Path(n).exists()), exact)
            if exact is not None:
                entry = self._entry(exact)
                yield from [] if entry is None else [entry]
                return
            scheme, separator, path = pattern.partition("://") if "://" in pattern else ("", "", pattern)
            segments = path.split("/")
            fixed = next(i for i, segment in enumerate(segments) if is_glob(segment, wildcards))
            base = scheme + separator + unescape("/".join(segments[:fixed]))
            yield from self._expand(base or "/" * path.startswith("/"), segments[fixed:], wildcards)

    def _expand(self, base: str, segments: builtins.list[str], wildcards: str) -> Iterator[_Entry]:
        first, rest = segments[0], segments[1:]
        if first == "**":
            if rest:
                yield from self._expand(base, rest, wildcards)
            for child in self._children(base):
                if child.name.startswith((".", "_")):
                    continue
                if child.folder and not child.link:  # links may form cycles
                    yield from self._expand(child.uri, segments, wildcards)
                elif not rest:
                    yield child
        elif is_glob(first, wildcards):
            for child in self._children(base):
                if not fnmatchcase(child.name, first) or _skips_hidden(first, child.name):
                    continue
                if not rest:
                    yield child
                elif child.folder:
                    yield from self._expand(child.uri, rest, wildcards)
        elif rest:
            yield from self._expand(self.join(base, unescape(first)), rest, wildcards)
        else:
            entry = self._entry(self.join(base, unescape(first)))
            yield from [] if entry is None else [entry]

    def _children(self, folder: str) -> builtins.list[_Entry]:
        """The entries of a folder; [] if it does not exist."""
        if self.is_local(folder):
            return _local_children(folder)
        filesystem = self._drivers.open(folder)
        path = filesystem._strip_protocol(folder).rstrip("/")  # an HTTP URL is not changed
        web = protocol_of(folder) in _HTTP
        try:
            found = filesystem.ls(path + "/" if web else path, detail=True)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not is_missing(error):
                raise
            found = []
        if web and not found:
            raise self._error(
                f"{folder}: the server does not list this folder, or it does not exist, so a pattern with * "
                "cannot be used. Give the full URL of each file."
            )
        entries = []
        for info in found:
            name = info["name"].rstrip("/").rsplit("/", 1)[-1]
            itself = info["name"].rstrip("/") == path  # a marker of the folder, or a file
            if name and not itself and not (web and name.startswith(("?", "#"))):
                entries.append(_entry(self.join(folder, name), info))
        return entries

    def _entry(self, uri: str) -> _Entry | None:
        """What a store reports about one URI; None if nothing exists there."""
        if self.is_local(uri):
            return _local_entry(self.local_path(uri))
        filesystem = self._drivers.open(uri)
        try:
            return _entry(uri, filesystem.info(uri))
        except (FileNotFoundError, NotADirectoryError) as error:
            if is_missing(error):
                return None
            raise

    def _file(self, entry: _Entry) -> SourceFile:
        if entry.size is None and protocol_of(entry.uri) in _HTTP:
            entry = self._entry(entry.uri) or entry  # a web page lists files without their sizes
        if entry.size is None:
            raise self._error(
                f"{entry.uri}: the server does not send the file's size (Content-Length). "
                "Download it and give the local path."
            )
        return SourceFile(entry.uri, entry.size, entry.version or f"{entry.size} bytes")

    # Reading

    def _chunks(self, file: SourceFile, start: int) -> Iterator[bytes]:
        if self.is_local(file.uri):
            with self.local_path(file.uri).open("rb") as local:
                local.seek(start)
                while chunk := local.read(_CHUNK):
                    yield chunk
        elif protocol_of(file.uri) in _HTTP:
            yield from self._web_chunks(file.uri, start)
        else:
            filesystem = self._drivers.open(file.uri)
            with filesystem.open(file.uri, "rb", block_size=_CHUNK, cache_type="none") as remote:
                remote.seek(start)
                while chunk := remote.read(_CHUNK):
                    yield chunk

    def _web_chunks(self, uri: str, start: int) -> Iterator[bytes]:
        """One streamed GET. A server that ignores Range sends everything, and the beginning is skipped."""
        headers = {"Accept-Encoding": "identity"}  # the bytes as stored, so that size and checksum match
        if start:
            headers["Range"] = f"bytes={start}-"
        filesystem = self._drivers.open(uri)
        headers |= filesystem.kwargs.get("headers", {})
        with filesystem.open(uri, "rb", block_size=0, size=1, headers=headers) as remote:
            to_skip = start if remote.r.status == 200 else 0
            while chunk := remote.read(_CHUNK):
                if to_skip < len(chunk):
                    yield chunk[to_skip:]
                to_skip = max(0, to_skip - len(chunk))


def _skips_hidden(segment: str, name: str) -> bool:
    """Whether a glob skips a name: it is hidden, and the pattern does not begin with its first character."""
    return name.startswith((".", "_")) and not segment.startswith(name[0])


def _entry(uri: str, info: Mapping[str, Any]) -> _Entry:
    return _Entry(uri, info["type"] == "directory", info.get("size"), _version(info))


def _version(info: Mapping[str, Any]) -> str:
    """A value that changes with the content: the ETag (or Google's generation), else the modification time."""
    for field in ("ETag", "etag", "generation"):
        if info.get(field):
            return str(info[field]).strip('"')
    for field in ("LastModified", "Last-Modified", "modificationTime", "mtime", "updated", "created"):
        moment = info.get(field)
        if moment:
            return str(moment.timestamp() if isinstance(moment, datetime) else moment)
    return ""


# Local files


def _local_entry(path: Path) -> _Entry | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _Entry(str(path), path.is_dir(), status.st_size, str(status.st_mtime_ns), path.is_symlink())


def _local_children(folder: str) -> list[_Entry]:
    try:
        paths = sorted(Storage.local_path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry for entry in map(_local_entry, paths) if entry is not None]


# Object stores


def _create_exclusively(filesystem: Any, uri: str, data: bytes) -> bool:
    """Write only if nothing exists; returns whether it was written."""
    for _ in range(20):
        try:
            filesystem.pipe_file(uri, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            response = getattr(error.__cause__, "response", None) or {}
            code = response.get("Error", {}).get("Code")
            if code in ("PreconditionFailed", "412"):  # s3fs knows only Amazon's wording
                return False
            if code != "ConditionalRequestConflict":
                raise
            conflict = error  # another write is in progress, and S3 asks to retry
            time.sleep(0.05)
        else:
            return True
    raise conflict


# Hadoop


def _put_by_renaming(filesystem: Any, protocol: str, uri: str, data: bytes | Path) -> None:
    folder, _, name = uri.rstrip("/").rpartition("/")
    temporary = f"{folder}/{temporary_name(name)}"
    try:
        if isinstance(data, bytes):
            filesystem.pipe_file(temporary, data)
        else:
            filesystem.put_file(str(data), temporary)
        source, target = (filesystem._strip_protocol(address) for address in (temporary, uri))
        if protocol == "webhdfs":
            _rename_over(filesystem, source, target)
        else:
            if filesystem.exists(target):
                filesystem.rm_file(target)
            filesystem.mv(source, target)
    except BaseException:
        with suppress(OSError, RuntimeError):
            filesystem.rm_file(temporary)
        raise


def _create_by_renaming(filesystem: Any, uri: str, data: bytes) -> bool:
    folder, _, name = uri.rstrip("/").rpartition("/")
    temporary = f"{folder}/{temporary_name(name)}"
    created = False
    try:
        filesystem.pipe_file(temporary, data)
        source, target = (filesystem._strip_protocol(address) for address in (temporary, uri))
        created = _rename(filesystem, source, target)
        if not created and not filesystem.exists(target):
            raise OSError(f"the name node refused to rename {source} to {target}")
    finally:
        if not created:
            with suppress(OSError, RuntimeError):
                filesystem.rm_file(temporary)
    return created


def _rename_over(filesystem: Any, source: str, target: str) -> None:
    """Rename, replacing an existing file. fsspec's own `mv` cannot, and treats a refusal as success."""
    if _rename(filesystem, source, target, renameoptions="OVERWRITE"):
        return
    # A gateway (HttpFS) that ignores the option: for a moment there is no file, but never a partial one.
    filesystem.rm_file(target)
    if not _rename(filesystem, source, target):
        raise OSError(f"the name node refused to rename {source} to {target}")


def _rename(filesystem: Any, source: str, target: str, **options: str) -> bool:
    """Rename a file; False if the name node refuses, as it does for an existing target without the option."""
    answer = filesystem._call("RENAME", method="put", path=source, destination=target, **options)
    return not answer.content or bool(json.loads(answer.content).get("boolean"))
