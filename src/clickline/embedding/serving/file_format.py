"""The file format of a shard of the serving table: written sequentially, read through mmap.

    preamble   magic, format number; 64 bytes
    per part   rows (see packed_rows.py), then their directory; each begins at a multiple of 64
    footer     JSON: precision, shard i of n, for each part its shape, counts and where its sections begin,
               and the SHA-256 of everything before the footer
    trailer    length and CRC-32 of the footer, magic

The directory splits a shard's range of `mix(id)` into equal buckets of about one row. Entry b, a u32, is the number
of the first row at or after bucket b; so a bucket's rows are between two neighbouring entries, and an id is found
with one cache miss in the directory and one in the rows.

The footer comes last because the counts are known only then. They determine where sections begin, so a footer that
matches the file's size cannot point outside it. Kernels clamp entries that are too large to the number of rows:
whatever the bits are, nothing outside the rows is read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.raw_memory import address
from clickline.embedding.serving.packed_rows import (
    PRECISIONS,
    RowBlock,
    is_tombstone,
    mix_ids,
    pack,
    row_type,
    shard_bounds,
)
from clickline.errors import ArtifactError
from clickline.records import PartShape, Precision
from clickline.validation import document_of, validate

FORMAT = 1
_MAGIC = b"CLKFROZE"
_PREAMBLE = struct.Struct("<8sI52x")
_TRAILER = struct.Struct("<QI4x8s")
_ALIGN = 64
_ROWS_PER_BUCKET = 1
_MAX_ROWS = 2**32 - 2  # a directory entry is 32 bits
_PIECE_ROWS = 1 << 16  # read back at once to build the directory
_PIECE_BUCKETS = 1 << 20
_FOOTER_BYTES = 500  # an estimate
_MAX_DIM = 1 << 16  # a longer row would exceed any lookup response
_MAX_SHARDS = 99_999  # five digits in the file name


@dataclass(frozen=True)
class FileSection:
    """The positions of a part's rows and directory in the file."""

    rows: int  # with weights
    tombstones: int
    buckets: int
    rows_at: int
    directory_at: int
    end: int

    @property
    def entries(self) -> int:
        return self.rows + self.tombstones


@dataclass(frozen=True)
class _Footer:
    """The content of a footer."""

    precision: Precision
    shard: int
    shards: int
    parts: tuple[PartShape, ...]
    sections: tuple[FileSection, ...]
    content: str  # SHA-256 of everything before the footer


@dataclass(frozen=True)
class ShardFile:
    """A written shard file."""

    name: str
    size: int
    sha256: str
    rows: int
    tombstones: int


class PackedPiece(NamedTuple):
    """Packed rows of one part and shard."""

    part: int
    shard: int
    packed_N: NDArray[np.void]


def shard_name(shard: int, shards: int) -> str:
    return f"table-{shard:05d}-of-{shards:05d}.bin"


def write_shards(
    folder: Path, parts: Sequence[PartShape], precision: Precision, shards: int, blocks: Iterable[RowBlock]
) -> tuple[ShardFile, ...]:
    """Write a table from its rows: part after part, ascending in `mix(id)`. Memory does not grow with the rows. The
    caller makes the folder's files durable and visible."""
    if shards < 1 or precision not in PRECISIONS:
        raise ValueError(
            f"{shards} shards of {precision!r}: at least 1 shard of {', '.join(PRECISIONS)} is required"
        )
    return write_packed(
        folder, parts, precision, shards, range(shards), _packed_pieces(parts, precision, shards, blocks)
    )


def write_packed(
    folder: Path,
    parts: Sequence[PartShape],
    precision: Precision,
    shards: int,
    wanted: Sequence[int],
    pieces: Iterable[PackedPiece],
) -> tuple[ShardFile, ...]:
    """Write the shards `wanted` of `shards` files from packed rows: part after part, shard after shard."""
    writers = [_Writer(folder, tuple(parts), precision, shard, shards) for shard in wanted]
    remaining = iter(pieces)
    piece = next(remaining, None)
    for part in range(len(parts)):
        for writer in writers:
            with writer.part(part):
                while piece is not None and (piece.part, piece.shard) == (part, writer.shard):
                    writer.add(piece.packed_N)
                    piece = next(remaining, None)
    if piece is not None:
        raise ArtifactError(f"rows of part {piece.part} of {len(parts)} are out of order. Publish again.")
    return tuple(writer.finish() for writer in writers)


def files_bytes(parts: Sequence[PartShape], precision: Precision, shards: int, rows: Sequence[int]) -> int:
    """The approximate total size of a table's files with `rows` rows of each part."""
    sections = _lay_out(parts, precision, [(-(-count // shards), 0) for count in rows])
    return shards * ((sections[-1].end if sections else _PREAMBLE.size) + _FOOTER_BYTES + _TRAILER.size)


def _packed_pieces(
    parts: Sequence[PartShape], precision: Precision, shards: int, blocks: Iterable[RowBlock]
) -> Iterator[PackedPiece]:
    """Pack blocks and split them at shard boundaries."""
    bounds = shard_bounds(shards)
    part, last = 0, -1
    for block in blocks:
        if not part <= block.part < len(parts):
            raise ArtifactError(
                f"rows of part {block.part} came after part {part} of {len(parts)}. Publish again."
            )
        if block.part > part:
            part, last = block.part, -1
        if not block.ids_N.size:
            continue
        mixed_N = mix_ids(block.ids_N)
        if int(mixed_N[0]) <= last or not (mixed_N[1:] > mixed_N[:-1]).all():
            raise ArtifactError(
                f"rows of part {part} are out of order, or an id occurs twice. Write the snapshot again."
            )
        last = int(mixed_N[-1])
        packed_N = pack(block, parts[part], precision)
        bounds_at = [0, *np.searchsorted(mixed_N, bounds).tolist(), packed_N.size]
        for shard in range(shards):
            if bounds_at[shard] < bounds_at[shard + 1]:
                yield PackedPiece(part, shard, packed_N[bounds_at[shard] : bounds_at[shard + 1]])


class _Writer:
    """Writes one file. It is open only while rows are added: there may be more shards than file descriptors."""

    def __init__(
        self, folder: Path, parts: tuple[PartShape, ...], precision: Precision, shard: int, shards: int
    ) -> None:
        self.shard = shard
        self._parts, self._precision, self._shards = parts, precision, shards
        self._path = folder / shard_name(shard, shards)
        self._path.unlink(missing_ok=True)
        self._digest = hashlib.sha256()
        self._counts: list[tuple[int, int]] = []
        self._size = 0
        self._file: IO[bytes]
        with self._path.open("xb") as self._file:
            self._write(_PREAMBLE.pack(_MAGIC, FORMAT))

    @contextmanager
    def part(self, part: int) -> Iterator[None]:
        """A context to add a part's rows in; writes their directory at the end."""
        self._rows = self._tombstones = 0
        kind = row_type(self._parts[part], self._precision)
        with self._path.open("ab+") as self._file:
            yield
            if self._rows + self._tombstones > _MAX_ROWS:
                raise ArtifactError(
                    f"{self._path.name} has {self._rows + self._tombstones} rows; a file holds at most {_MAX_ROWS}. "
                    "Raise publish.shards."
                )
            self._counts.append((self._rows, self._tombstones))
            section = _lay_out(self._parts, self._precision, self._counts)[part]
            self._align()
            self._file.flush()
            for entries in _directory(self._file, section, kind, self._shards):
                self._write(entries)
            self._align()

    def add(self, packed_N: NDArray[np.void]) -> None:
        tombstones = int(is_tombstone(packed_N).sum())
        self._tombstones += tombstones
        self._rows += packed_N.size - tombstones
        self._write(packed_N.view(np.uint8).data)

    def finish(self) -> ShardFile:
        sections = tuple(_lay_out(self._parts, self._precision, self._counts))
        digest = self._digest.hexdigest()
        content = _Footer(self._precision, self.shard, self._shards, self._parts, sections, digest)
        footer = json.dumps(document_of(content), sort_keys=True).encode()
        with self._path.open("ab") as self._file:
            self._write(footer)
            self._write(_TRAILER.pack(len(footer), zlib.crc32(footer), _MAGIC))
        return ShardFile(
            self._path.name,
            self._size,
            self._digest.hexdigest(),
            sum(rows for rows, _ in self._counts),
            sum(tombstones for _, tombstones in self._counts),
        )

    def _write(self, payload: bytes | memoryview) -> None:
        self._file.write(payload)
        self._digest.update(payload)
        self._size += len(payload)

    def _align(self) -> None:
        self._write(bytes(-self._size % _ALIGN))


def _lay_out(
    parts: Sequence[PartShape], precision: Precision, counts: Sequence[tuple[int, int]]
) -> list[FileSection]:
    """The sections of a file, given the (rows, tombstones) counts of its first parts."""
    sections, at = [], _PREAMBLE.size
    for shape, (rows, tombstones) in zip(parts, counts, strict=False):
        entries = rows + tombstones
        buckets = max(1, entries // _ROWS_PER_BUCKET)
        directory_at = _aligned(at + entries * row_type(shape, precision).itemsize)
        end = _aligned(directory_at + 4 * (buckets + 1))
        sections.append(FileSection(rows, tombstones, buckets, at, directory_at, end))
        at = end
    return sections


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN


def _directory(
    file: IO[bytes], section: FileSection, kind: np.dtype[Any], shards: int
) -> Iterator[memoryview]:
    """The directory of the rows just written, in pieces."""
    bucket = 0  # the next one to write
    for first in range(0, section.entries, _PIECE_ROWS):
        count = min(_PIECE_ROWS, section.entries - first)
        payload = os.pread(file.fileno(), count * kind.itemsize, section.rows_at + first * kind.itemsize)
        ids_N = np.frombuffer(payload, dtype=kind)["id"]
        within_N = (mix_ids(ids_N) * np.uint64(shards)) >> np.uint64(32)
        buckets_N = (within_N * np.uint64(section.buckets)) >> np.uint64(32)
        while bucket <= (stop := int(buckets_N[-1])):
            wanted = np.arange(bucket, min(stop + 1, bucket + _PIECE_BUCKETS), dtype=np.uint64)
            yield (np.searchsorted(buckets_N, wanted) + first).astype("<u4").view(np.uint8).data
            bucket += wanted.size
    while bucket <= section.buckets:
        count = min(section.buckets + 1 - bucket, _PIECE_BUCKETS)
        yield np.full(count, section.entries, dtype="<u4").view(np.uint8).data
        bucket += count


class MappedShard:
    """A file's sections in shared, read-only memory, unmapped with the last reference."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < _PREAMBLE.size + _TRAILER.size:
                    raise ArtifactError(f"{path} is truncated: it has {self.size} bytes. {_REMEDY}")
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be opened: {error}") from error
        if len(pages) != self.size:
            raise ArtifactError(f"{path} changed its size while being opened. {_REMEDY}")
        self._bytes = np.frombuffer(pages, dtype=np.uint8)
        footer, footer_at = _read_footer(path, pages)
        self.precision, self.shard, self.shards = footer.precision, footer.shard, footer.shards
        self.parts, self.sections, self.content = footer.parts, footer.sections, footer.content
        counts = [(section.rows, section.tombstones) for section in self.sections]
        valid = 0 <= self.shard < self.shards <= _MAX_SHARDS and len(counts) == len(self.parts)
        valid = valid and all(0 < part.dim <= _MAX_DIM for part in self.parts)
        valid = valid and all(0 <= count <= _MAX_ROWS for both in counts for count in both)
        expected = tuple(_lay_out(self.parts, self.precision, counts)) if valid else ()
        if not valid or self.sections != expected:
            raise ArtifactError(f"the footer of {path} is inconsistent. {_REMEDY}")
        if (expected[-1].end if expected else _PREAMBLE.size) != footer_at:
            raise ArtifactError(f"the size of {path} does not match its rows: {self.size} bytes. {_REMEDY}")

    def rows(self, part: int) -> NDArray[np.void]:
        """The packed rows of a part."""
        section, kind = self.sections[part], row_type(self.parts[part], self.precision)
        return self._bytes[section.rows_at : section.rows_at + section.entries * kind.itemsize].view(kind)

    @property
    def address(self) -> int:
        return address(self._bytes)


_REMEDY = "Fetch it again, or publish again."


def _read_footer(path: Path, pages: mmap.mmap) -> tuple[_Footer, int]:
    """The footer and where it begins."""
    magic, number = _PREAMBLE.unpack_from(pages)
    if magic != _MAGIC:
        raise ArtifactError(f"{path} is not a serving table. {_REMEDY}")
    if number != FORMAT:
        raise ArtifactError(f"{path} has format {number}; this release reads {FORMAT}. Publish again.")
    size, checksum, magic = _TRAILER.unpack_from(pages, len(pages) - _TRAILER.size)
    footer_at = len(pages) - _TRAILER.size - size
    if magic != _MAGIC or footer_at < _PREAMBLE.size:
        raise ArtifactError(f"{path} is truncated: its end is missing. {_REMEDY}")
    text = pages[footer_at : footer_at + size]
    if zlib.crc32(text) != checksum:
        raise ArtifactError(f"the footer of {path} is damaged. {_REMEDY}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the footer of {path} is invalid: {error}. {_REMEDY}") from error
    return validate(_Footer, document, f"the footer of {path}"), footer_at
