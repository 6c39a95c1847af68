"""Transfers files over a pipe. A file gets its name at the other end once it is complete and its checksum matches.

    {"files": 2, "bytes": 30, "single": false}     the total; single: a file, not a folder, was named
    {"name": "20260101/a.tsv", "size": 10}         then the bytes, their SHA-256 and a line feed
    …
    {"end": true}

The end is explicit, because Kubernetes before 1.30 cannot close the stdin of a process in a pod.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from clickline.deploy.exec_process import ExecProcess
from clickline.errors import ClusterError, StorageError
from clickline.progress import human_size
from clickline.storage.atomic import is_temporary_name, remove_leftovers, temporary_name

CHUNK = 256 << 10
_PART_SECONDS = 86_400  # the data pod lives no longer, so older partial files have lost their writer
_MAX_LINE = 64 << 10

Stream = BinaryIO | ExecProcess


@dataclass(frozen=True)
class TransferTotal:
    """How much is transferred."""

    files: int
    bytes: int
    single: bool


_Named = tuple[str, Path]
Files = list[_Named]
"""Names at the other end, and paths here."""


def list_files(path: Path) -> Files:
    """A file, or all files in a folder and below it, sorted by name. Links are followed."""
    try:
        if path.is_file():
            return [(path.name, path)]
        return sorted(_below(path, PurePosixPath()))
    except OSError as error:
        raise StorageError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error


def _below(folder: Path, inside: PurePosixPath, above: tuple[str, ...] = ()) -> Iterator[_Named]:
    """`above` are the real paths of the parent folders, to detect a link back to one of them."""
    here = os.path.realpath(folder)
    if here in above:
        raise StorageError(
            f"{folder} is a link to one of its parent folders. Remove it, or name a folder without it."
        )
    for one in sorted(folder.iterdir()):
        name = inside / one.name
        if one.is_dir():
            if one.name != "lost+found":  # of the file system, readable by root only
                yield from _below(one, name, (*above, here))
        elif one.is_symlink() and not one.exists():
            raise StorageError(
                f"{one} is a link to {one.readlink()}, which does not exist. Fix or remove it."
            )
        elif one.is_file() and not is_temporary_name(one.name):
            yield name.as_posix(), one


def transfer_total(path: Path, files: Files) -> TransferTotal:
    return TransferTotal(len(files), sum(place.stat().st_size for _, place in files), path.is_file())


def send(files: Files, total: TransferTotal, out: Stream, sent: Callable[[int], None]) -> None:
    """Write the files to `out`; `sent` is called with the size of every chunk."""
    _write_header(out, asdict(total))
    for name, place in files:
        with place.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            _write_header(out, {"name": name, "size": left})
            digest = sha256()
            while left:
                data = file.read(min(CHUNK, left))
                if not data:
                    raise StorageError(f"{place} became shorter while it was read. Send it again.")
                digest.update(data)
                out.write(data)
                left -= len(data)
                sent(len(data))
            out.write(f"{digest.hexdigest()}\n".encode())
    _write_header(out, {"end": True})


def _write_header(out: Stream, document: dict[str, Any]) -> None:
    out.write(json.dumps(document).encode() + b"\n")


def receive(
    stream: Stream,
    folder_for: Callable[[TransferTotal], Path],
    received: Callable[[int], None] = lambda size: None,
    *,
    clears: bool = False,
) -> TransferTotal:
    """Read what `send` writes into the folder that `folder_for` chooses for the total. Returns what has arrived.

    `clears`: first remove partial files whose writer was killed. Only for the data volume, which our own pods write; a
    local folder may contain anything.
    """
    header = _read_header(stream)
    try:
        total = TransferTotal(header["files"], header["bytes"], header["single"])
    except KeyError as error:
        raise StorageError(f"not a transfer of `clickline deploy data`: {header!r}") from error
    folder = folder_for(total)
    files = size = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if clears:
            remove_leftovers(folder, seconds=_PART_SECONDS)
        free = shutil.disk_usage(folder).free
        if total.bytes > free:
            raise StorageError(
                f"{folder} has {human_size(free)} free, and {human_size(total.bytes)} are needed. Enlarge the volume, "
                "or delete files that are not needed."
            )
        while "end" not in (header := _read_header(stream)):
            _receive_file(stream, _safe_path(folder, header["name"]), header["size"], received)
            files, size = files + 1, size + header["size"]
    except OSError as error:
        raise StorageError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}. "
            f"{files} of {total.files} files have arrived."
        ) from error
    if files != total.files:
        raise StorageError(f"{files} files arrived, and {total.files} were announced. Send them again.")
    return TransferTotal(files, size, total.single)


def _receive_file(stream: Stream, place: Path, size: int, received: Callable[[int], None]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(temporary_name(place.name))
    digest, left = sha256(), size
    try:
        with part.open("xb") as file:
            while left:
                data = stream.read(min(CHUNK, left))
                if not data:
                    raise ClusterError(
                        f"the stream ended within {place.name}: {left} of {size} bytes are missing."
                    )
                file.write(data)
                digest.update(data)
                left -= len(data)
                received(len(data))
            file.flush()
            os.fsync(file.fileno())
        if stream.readline(_MAX_LINE).strip().decode(errors="replace") != digest.hexdigest():
            raise StorageError(
                f"{place.name} did not arrive as it was sent: its checksum differs. Send it again."
            )
        part.rename(place)
    finally:
        part.unlink(missing_ok=True)


def _safe_path(folder: Path, name: str) -> Path:
    """The path of a received name, which must not lead out of the folder."""
    pure = PurePosixPath(name)
    place = folder.joinpath(*pure.parts)
    if pure.is_absolute() or ".." in pure.parts or not name:
        raise StorageError(f"a file named {name!r} was sent: it would be outside of {folder}")
    if not place.parent.resolve().is_relative_to(folder.resolve()):
        raise StorageError(
            f"{place.parent} is a link that leads out of {folder}. Remove it, or send elsewhere."
        )
    return place


def _read_header(stream: Stream) -> dict[str, Any]:
    line = stream.readline(_MAX_LINE)
    if not line:
        raise ClusterError("the stream ended before all files had arrived. Send them again.")
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise StorageError(f"not a transfer of `clickline deploy data`: {line[:80]!r}")
    return header
