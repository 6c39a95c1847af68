"""Files over a pipe: each gets its name at the other end when all of it is there and its checksum is right.

    {"files": 2, "bytes": 30, "single": false}     what will come; single: one file that was named itself
    {"name": "20260101/a.tsv", "size": 10}         then the bytes, then their SHA-256 and a line feed
    …
    {"end": true}

The end is said, not seen: Kubernetes before 1.30 cannot close the standard input of a process in a pod.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from clickline.errors import ClusterError, StorageError
from clickline.progress import human_size
from clickline.storage.atomic import is_temporary_name, remove_leftovers, temporary_name

CHUNK = 256 << 10
_PART_SECONDS = 86_400  # a pod for data lives no longer, so what is older has lost its writer
_MAX_LINE = 64 << 10


class ByteReader(Protocol):
    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""

    def readline(self, size: int, /) -> bytes: ...


class ByteWriter(Protocol):
    def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True)
class TransferTotal:
    files: int
    bytes: int
    single: bool


_Named = tuple[str, Path]
Files = list[_Named]
"""Name at the other end, and place here."""


def list_files(path: Path) -> Files:
    """A file, or all files below a folder, in the order of their names. Links count as what they lead to."""
    try:
        if path.is_file():
            return [(path.name, path)]
        return sorted(_below(path, PurePosixPath()))
    except OSError as error:
        raise StorageError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error


def _below(folder: Path, inside: PurePosixPath, above: tuple[str, ...] = ()) -> Iterator[_Named]:
    """`above` are the folders that this one lies in, as they really are: a link back to one of them has no end."""
    here = os.path.realpath(folder)
    if here in above:
        raise StorageError(
            f"{folder} is a link to a folder that it lies in. Remove it, or name a folder without it."
        )
    for one in sorted(folder.iterdir()):
        name = inside / one.name
        if one.is_dir():
            if one.name != "lost+found":  # of the file system, closed to all but root
                yield from _below(one, name, (*above, here))
        elif one.is_symlink() and not one.exists():
            raise StorageError(
                f"{one} is a link to {one.readlink()}, which does not exist. Mend or remove it."
            )
        elif one.is_file() and not is_temporary_name(one.name):
            yield name.as_posix(), one


def transfer_total(path: Path, files: Files) -> TransferTotal:
    return TransferTotal(len(files), sum(place.stat().st_size for _, place in files), path.is_file())


def send(files: Files, total: TransferTotal, out: ByteWriter, sent: Callable[[int], None]) -> None:
    """Write them; `sent` hears of every chunk."""
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


def _write_header(out: ByteWriter, document: dict[str, Any]) -> None:
    out.write(json.dumps(document).encode() + b"\n")


def receive(
    stream: ByteReader,
    folder_for: Callable[[TransferTotal], Path],
    got: Callable[[int], None] = lambda size: None,
    *,
    clears: bool = False,
) -> TransferTotal:
    """Read what `send` writes into a folder that is chosen once the total is known. Returns what has arrived.

    `clears`: parts of files whose writer was killed are removed first. That is for the volume, which pods of ours fill;
    a folder of the user's may hold anything.
    """
    said = _read_header(stream)
    try:
        total = TransferTotal(said["files"], said["bytes"], said["single"])
    except KeyError as error:
        raise StorageError(f"what comes is not what `clickline deploy data` sends: {said!r}") from error
    folder = folder_for(total)
    files = size = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if clears:
            remove_leftovers(folder, seconds=_PART_SECONDS)
        free = shutil.disk_usage(folder).free
        if total.bytes > free:
            raise StorageError(
                f"{folder} has {human_size(free)} free, and {human_size(total.bytes)} are to come. Enlarge the volume, "
                "or remove what is not needed."
            )
        while "end" not in (said := _read_header(stream)):
            _receive_file(stream, _safe_path(folder, said["name"]), said["size"], got)
            files, size = files + 1, size + said["size"]
    except OSError as error:
        raise StorageError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}. "
            f"{files} of {total.files} files are there."
        ) from error
    if files != total.files:
        raise StorageError(f"{files} files came, and {total.files} were announced. Send them again.")
    return TransferTotal(files, size, total.single)


def _receive_file(stream: ByteReader, place: Path, size: int, got: Callable[[int], None]) -> None:
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
                got(len(data))
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
    """Names come from the other side: none leads out of the folder."""
    pure = PurePosixPath(name)
    place = folder.joinpath(*pure.parts)
    if pure.is_absolute() or ".." in pure.parts or not name:
        raise StorageError(f"a file named {name!r} was sent: it would lie outside of {folder}")
    if not place.parent.resolve().is_relative_to(folder.resolve()):
        raise StorageError(
            f"{place.parent} is a link that leads out of {folder}. Remove it, or send elsewhere."
        )
    return place


def _read_header(stream: ByteReader) -> dict[str, Any]:
    line = stream.readline(_MAX_LINE)
    if not line:
        raise ClusterError("the stream ended before all files were there. Send them again.")
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise StorageError(f"what comes is not what `clickline deploy data` sends: {line[:80]!r}")
    return said
