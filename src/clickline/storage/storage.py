"""Every store behind five verbs: list, read, put, create, delete. A local path is a store too."""

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
from clickline.storage.atomic import create_atomically, hidden_name, put_atomically
from clickline.storage.filesystems import Drivers, protocol_of
from clickline.storage.glob_patterns import is_glob, literal
from clickline.storage.storage_errors import explained, is_missing

_CHUNK = 8 * 2**20
_MOST_WHOLE = 256 * 2**20  # bytes of a file that is read whole: a manifest, a list of slots
_HTTP = ("http", "https")
_S3 = ("s3", "s3a")
_RENAMING = ("webhdfs", "hdfs")  # an upload grows in view there, so it is made under a hidden name first
_memory_lock = threading.Lock()


@dataclass(frozen=True)
class _Entry:
    """What a store tells of one name in a folder."""

    uri: str
    folder: bool
    size: int | None  # None: the listing does not say
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
        self._drivers = Drivers(options or {}, credentials_file)
        self._exclusive: set[str] = set()  # buckets that were seen to refuse a second create

    # The five verbs

    def list(self, pattern: str) -> list[SourceFile]:
        """The files a path or glob names, sorted by URI; [] when there is none.

        `*`, `?`, `[…]` stand for names in one folder, `**` for any depth of folders. Like a shell's they
        skip hidden names, and here `_name` is hidden like `.name`: other tools use both for markers and for
        work in progress. A pattern that writes the dot or underscore itself finds them. `[*]`, `[?]` and
        `[[]` are the signs themselves; `inside` writes them so. `[{]` is a brace of the name itself: in the
        patterns of a config a bare one begins {date} or {hour}.
        """
        files = {}
        for entry in self._matches(pattern):
            if not entry.folder:
                file = self._file(entry)
                files[file.uri] = file
        return [files[uri] for uri in sorted(files)]

    def read(self, uri: str) -> bytes:
        """The whole of a small file."""
        file = self.describe(uri)
        if file is None:
            with explained(uri, self._drivers.redact):
                raise IsADirectoryError(uri) if self.folders(uri) else FileNotFoundError(uri)
        if file.size > _MOST_WHOLE:
            raise StorageError(
                self._drivers.redact(
                    f"{uri} has {file.size:,} bytes; up to {_MOST_WHOLE:,} are read. Is it the right file?"
                )
            )
        while True:
            try:
                return b"".join(self.stream(file))
            except StorageError:
                again = self.describe(uri)
                if again is None or again == file:
                    raise
                file = again  # it was replaced between the look and the reading

    def put(self, uri: str, data: bytes | Path) -> None:
        """Write a file so that it is seen whole or not at all. A Path is consumed: moved or uploaded."""
        with explained(uri, self._drivers.redact):
            if self.is_local(uri):
                put_atomically(_local_path(uri), data)
                return
            protocol = protocol_of(uri)
            if protocol in _HTTP:
                raise NotImplementedError
            filesystem = self._drivers.open(uri)
            if protocol in _RENAMING:
                _put_by_renaming(filesystem, protocol, uri, data)
            elif isinstance(data, bytes):
                filesystem.pipe_file(uri, data)
            elif protocol == "memory":
                filesystem.pipe_file(uri, data.read_bytes())  # its put_file shows the file while it grows
            else:
                filesystem.put_file(str(data), uri)
            if isinstance(data, Path):
                data.unlink()

    def create(self, uri: str, data: bytes) -> bool:
        """Write a small file whole if nothing is there; False when something is. Of several callers one wins.

        Drivers repeat a request whose answer got lost, and then find what they wrote themselves: after a False,
        whoever must know looks whether the content is its own.
        """
        with explained(uri, self._drivers.redact):
            if self.is_local(uri):
                try:
                    return create_atomically(_local_path(uri), data)
                except OSError as error:
                    if error.errno != errno.ENOTSUP:
                        raise
                    raise self._cannot_create(
                        uri, "this disk makes no hard links", "another disk, or a store"
                    ) from None
            protocol = protocol_of(uri)
            if protocol in _HTTP:
                raise NotImplementedError
            if protocol == "hdfs":  # pyarrow removes the target of a rename when there is one
                raise self._cannot_create(uri, "hdfs:// cannot", "webhdfs:// for the same cluster")
            filesystem = self._drivers.open(uri)
            if protocol == "webhdfs":
                return _create_by_renaming(filesystem, uri, data)
            if protocol == "memory":
                with _memory_lock:
                    return _created(filesystem, uri, data)
            made = _created(filesystem, uri, data)
            if made and protocol in _S3:
                self._check_exclusive(filesystem, uri, data)
            return made

    def _check_exclusive(self, filesystem: Any, uri: str, data: bytes) -> None:
        """Some stores that speak S3 ignore the condition and overwrite. Once a bucket, the same bytes tell."""
        bucket = filesystem.split_path(uri)[0]
        if bucket in self._exclusive:
            return
        if _created(filesystem, uri, data):
            raise self._cannot_create(
                uri, "it ignores If-None-Match, so it overwrites", "a store with conditional writes"
            )
        self._exclusive.add(bucket)

    def _cannot_create(self, uri: str, reason: str, remedy: str) -> StorageError:
        return StorageError(
            self._drivers.redact(
                f"{uri}: a file must be made here only if there is none, and {reason}. Use {remedy}."
            )
        )

    def delete(self, uri: str) -> None:
        """Remove a file, or a folder with all that is in it. Nothing there is fine."""
        with explained(uri, self._drivers.redact):
            if self.is_local(uri):
                path = _local_path(uri)
                if path.is_dir() and not path.is_symlink():
                    with suppress(FileNotFoundError):  # someone else was faster
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
            with suppress(FileNotFoundError):  # someone else was faster
                if entry.folder:
                    filesystem.rm(uri, recursive=True)
                else:
                    filesystem.rm_file(uri)

    # What sources and the cache need beside them

    def describe(self, uri: str) -> SourceFile | None:
        """Size and version of one file; None when there is no file of that name."""
        with explained(uri, self._drivers.redact):
            entry = self._entry(uri)
        return None if entry is None or entry.folder else self._file(entry)

    def folders(self, pattern: str) -> builtins.list[str]:
        """The folders a path or glob names, sorted."""
        return sorted({entry.uri for entry in self._matches(pattern) if entry.folder})

    def names(self, folder: str) -> builtins.list[str]:
        """What is in a folder, by name, sorted; [] when it does not exist."""
        with explained(folder, self._drivers.redact):
            if self.is_local(folder):  # servers ask every second: no look at each file
                with suppress(FileNotFoundError, NotADirectoryError):
                    return sorted(path.name for path in _local_path(folder).iterdir())
                return []
            return sorted(entry.name for entry in self._children(folder))

    def stream(self, file: SourceFile, start: int = 0) -> Iterator[bytes]:
        """The bytes of a file from `start` on, piece by piece; exactly as many as it has."""
        with explained(file.uri, self._drivers.redact):
            position = start
            if start < file.size:
                for chunk in self._pieces(file, start):
                    position += len(chunk)
                    if position > file.size:  # a server that never ends must not fill memory or disk
                        break
                    yield chunk
            if position != file.size:
                raise StorageError(
                    self._drivers.redact(
                        f"{file.uri}: {position} bytes came, {file.size} were announced. The transfer was "
                        "cut short or the file is being written; run again when it is complete."
                    )
                )

    def announced_md5(self, file: SourceFile) -> str | None:
        """The MD5 of the content, where the store tells it: S3, for an object uploaded in one piece."""
        if protocol_of(file.uri) not in _S3 or not re.fullmatch(r"[0-9a-f]{32}", file.version):
            return None
        with explained(file.uri, self._drivers.redact):
            filesystem = self._drivers.open(file.uri)
            bucket, key, _ = filesystem.split_path(file.uri)
            head = filesystem.call_s3("head_object", Bucket=bucket, Key=key)
        # Encrypted with a key of one's own, an object has an ETag that looks like an MD5 and is none.
        encrypted = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
        return None if encrypted else file.version

    @staticmethod
    def is_local(uri: str) -> bool:
        """Whether a URI is a path of this machine."""
        return protocol_of(uri) == "file"

    @staticmethod
    def join(base: str, *parts: str) -> str:
        """`base/part/part`, for paths and URIs alike."""
        for part in parts:
            base = part if not base else base + part if base.endswith("/") else f"{base}/{part}"
        return base

    @staticmethod
    def inside(folder: str, pattern: str) -> str:
        """The pattern in a folder whose own name is no pattern, whatever signs it holds."""
        return Storage.join(glob.escape(folder), pattern)

    # Listing

    def _matches(self, pattern: str) -> Iterator[_Entry]:
        if self.is_local(pattern):
            pattern = str(_local_path(pattern))
        magic = "*" if protocol_of(pattern) in _HTTP else "*?["  # ? starts the query of an HTTP address
        name = literal(pattern)
        with explained(name, self._drivers.redact):
            exact = None if is_glob(pattern, magic) else name
            if self.is_local(pattern):  # a file may be called data[1].tsv
                exact = next((n for n in (pattern, name) if Path(n).exists()), exact)
            if exact is not None:
                entry = self._entry(exact)
                yield from [] if entry is None else [entry]
                return
            scheme, mark, path = pattern.partition("://") if "://" in pattern else ("", "", pattern)
            segments = path.split("/")
            fixed = next(i for i, segment in enumerate(segments) if is_glob(segment, magic))
            base = scheme + mark + literal("/".join(segments[:fixed]))
            yield from self._expand(base or "/" * path.startswith("/"), segments[fixed:], magic)

    def _expand(self, base: str, segments: builtins.list[str], magic: str) -> Iterator[_Entry]:
        first, rest = segments[0], segments[1:]
        if first == "**":
            if rest:
                yield from self._expand(base, rest, magic)
            for child in self._children(base):
                if child.name.startswith((".", "_")):
                    continue
                if child.folder and not child.link:  # links may go round in circles
                    yield from self._expand(child.uri, segments, magic)
                elif not rest:
                    yield child
        elif is_glob(first, magic):
            for child in self._children(base):
                if not fnmatchcase(child.name, first) or _hidden_from(first, child.name):
                    continue
                if not rest:
                    yield child
                elif child.folder:
                    yield from self._expand(child.uri, rest, magic)
        elif rest:
            yield from self._expand(self.join(base, literal(first)), rest, magic)
        else:
            entry = self._entry(self.join(base, literal(first)))
            yield from [] if entry is None else [entry]

    def _children(self, folder: str) -> builtins.list[_Entry]:
        """What a store lists in a folder; [] when the folder does not exist."""
        if self.is_local(folder):
            return _local_children(folder)
        filesystem = self._drivers.open(folder)
        path = filesystem._strip_protocol(folder).rstrip("/")  # an HTTP address stays whole
        web = protocol_of(folder) in _HTTP
        try:
            found = filesystem.ls(path + "/" if web else path, detail=True)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not is_missing(error):
                raise
            found = []
        if web and not found:
            raise StorageError(
                self._drivers.redact(
                    f"{folder}: the server does not list this folder, or has none, so a pattern with * "
                    "cannot be used. Name each file by its full address."
                )
            )
        entries = []
        for info in found:
            name = info["name"].rstrip("/").rsplit("/", 1)[-1]
            itself = info["name"].rstrip("/") == path  # a marker of the folder, or a file and no folder
            if name and not itself and not (web and name.startswith(("?", "#"))):
                entries.append(_entry(self.join(folder, name), info))
        return entries

    def _entry(self, uri: str) -> _Entry | None:
        """What a store tells of one URI; None when nothing is there."""
        if self.is_local(uri):
            return _local_entry(_local_path(uri))
        filesystem = self._drivers.open(uri)
        try:
            return _entry(uri, filesystem.info(uri))
        except (FileNotFoundError, NotADirectoryError) as error:
            if is_missing(error):
                return None
            raise

    def _file(self, entry: _Entry) -> SourceFile:
        if entry.size is None and protocol_of(entry.uri) in _HTTP:
            entry = self._entry(entry.uri) or entry  # a web page names its files without their sizes
        if entry.size is None:
            raise StorageError(
                self._drivers.redact(
                    f"{entry.uri}: the server does not tell the file's size (no Content-Length). "
                    "Download it yourself and give the local path."
                )
            )
        return SourceFile(entry.uri, entry.size, entry.version or f"{entry.size} bytes")

    # Reading

    def _pieces(self, file: SourceFile, start: int) -> Iterator[bytes]:
        if self.is_local(file.uri):
            with _local_path(file.uri).open("rb") as local:
                local.seek(start)
                while piece := local.read(_CHUNK):
                    yield piece
        elif protocol_of(file.uri) in _HTTP:
            yield from self._web_pieces(file.uri, start)
        else:
            filesystem = self._drivers.open(file.uri)
            with filesystem.open(file.uri, "rb", block_size=_CHUNK, cache_type="none") as remote:
                remote.seek(start)
                while piece := remote.read(_CHUNK):
                    yield piece

    def _web_pieces(self, uri: str, start: int) -> Iterator[bytes]:
        """One GET, streamed. A server that ignores Range sends all, and the beginning is thrown away."""
        headers = {"Accept-Encoding": "identity"}  # the bytes as stored, or sizes and checksums would not fit
        if start:
            headers["Range"] = f"bytes={start}-"
        filesystem = self._drivers.open(uri)
        headers |= filesystem.kwargs.get("headers", {})
        with filesystem.open(uri, "rb", block_size=0, size=1, headers=headers) as remote:
            unwanted = start if remote.r.status == 200 else 0
            while piece := remote.read(_CHUNK):
                if unwanted < len(piece):
                    yield piece[unwanted:]
                unwanted = max(0, unwanted - len(piece))


def _hidden_from(segment: str, name: str) -> bool:
    """Whether a glob must pass over a name: it is hidden, and the pattern does not write its first sign."""
    return name.startswith((".", "_")) and not segment.startswith(name[0])


def _entry(uri: str, info: Mapping[str, Any]) -> _Entry:
    return _Entry(uri, info["type"] == "directory", info.get("size"), _version(info))


def _version(info: Mapping[str, Any]) -> str:
    """What changes with the content: the ETag (or Google's generation), else the time of modification."""
    for field in ("ETag", "etag", "generation"):
        if info.get(field):
            return str(info[field]).strip('"')
    for field in ("LastModified", "Last-Modified", "modificationTime", "mtime", "updated", "created"):
        moment = info.get(field)
        if moment:
            return str(moment.timestamp() if isinstance(moment, datetime) else moment)
    return ""


# Local files


def _local_path(uri: str) -> Path:
    return Path(uri.removeprefix("file://")).expanduser()


def _local_entry(path: Path) -> _Entry | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _Entry(str(path), path.is_dir(), status.st_size, str(status.st_mtime_ns), path.is_symlink())


def _local_children(folder: str) -> list[_Entry]:
    try:
        paths = sorted(_local_path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry for entry in map(_local_entry, paths) if entry is not None]


# Object stores


def _created(filesystem: Any, uri: str, data: bytes) -> bool:
    """Whether a conditional write found nothing there."""
    for _ in range(20):
        try:
            filesystem.pipe_file(uri, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            response = getattr(error.__cause__, "response", None) or {}
            code = response.get("Error", {}).get("Code")
            if code in ("PreconditionFailed", "412"):  # s3fs knows Amazon's wording of it, others differ
                return False
            if code != "ConditionalRequestConflict":
                raise
            conflict = error  # another write is under way, and S3 asks to try again
            time.sleep(0.05)
        else:
            return True
    raise conflict


# Hadoop


def _put_by_renaming(filesystem: Any, protocol: str, uri: str, data: bytes | Path) -> None:
    folder, _, name = uri.rstrip("/").rpartition("/")
    hidden = f"{folder}/{hidden_name(name)}"
    try:
        if isinstance(data, bytes):
            filesystem.pipe_file(hidden, data)
        else:
            filesystem.put_file(str(data), hidden)
        source, target = (filesystem._strip_protocol(address) for address in (hidden, uri))
        if protocol == "webhdfs":
            _rename_over(filesystem, source, target)
        else:
            if filesystem.exists(target):
                filesystem.rm_file(target)
            filesystem.mv(source, target)
    except BaseException:
        with suppress(OSError, RuntimeError):
            filesystem.rm_file(hidden)
        raise


def _create_by_renaming(filesystem: Any, uri: str, data: bytes) -> bool:
    folder, _, name = uri.rstrip("/").rpartition("/")
    hidden = f"{folder}/{hidden_name(name)}"
    made = False
    try:
        filesystem.pipe_file(hidden, data)
        source, target = (filesystem._strip_protocol(address) for address in (hidden, uri))
        made = _renamed(filesystem, source, target)
        if not made and not filesystem.exists(target):
            raise OSError(f"the name node refused to rename {source} to {target}")
    finally:
        if not made:
            with suppress(OSError, RuntimeError):
                filesystem.rm_file(hidden)
    return made


def _rename_over(filesystem: Any, source: str, target: str) -> None:
    """Rename over what may be there. fsspec's own `mv` cannot, and takes a refusal for success."""
    if _renamed(filesystem, source, target, renameoptions="OVERWRITE"):
        return
    # A gateway (HttpFS) that ignores the option: for a moment there is no file, but never a torn one.
    filesystem.rm_file(target)
    if not _renamed(filesystem, source, target):
        raise OSError(f"the name node refused to rename {source} to {target}")


def _renamed(filesystem: Any, source: str, target: str, **options: str) -> bool:
    """Whether the name node did it; without options it never does over an existing file."""
    answer = filesystem._call("RENAME", method="put", path=source, destination=target, **options)
    return not answer.content or bool(json.loads(answer.content).get("boolean"))
