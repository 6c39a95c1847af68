"""Reads a file as text: decompresses it and splits it into blocks that end at line ends.

    path ──open_decompressed──▶ chunks ──LineBlocks──▶ Block(payload = uint8 array), …

The end of a block depends only on the file's content, not on how the bytes arrived.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.data.readers.byte_scan import NEWLINE, count_byte, find_byte, last_byte
from clickline.data.readers.reader import (
    BLOCK_BYTES,
    CORRUPT_GZIP,
    CORRUPT_ZSTD,
    LINE_TOO_LONG,
    MAX_LINE_BYTES,
    MAX_LISTED_BAD_ROWS,
    TRUNCATED_GZIP,
    TRUNCATED_ZSTD,
    preview,
    unlisted_rows,
)
from clickline.records import BadRow, Block

RowEnd = Callable[[NDArray[np.uint8], bool], int]

_CHUNK = 1 << 20
_COMPRESSED_CHUNK = 1 << 18
_GZIP_MAGIC = b"\x1f\x8b\x08"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # preceded by 0x50..0x5f
_BOM = b"\xef\xbb\xbf"
_REMEDY = "copy or write the file again"


class BrokenStream(Exception):
    """A compressed file is truncated or damaged; raised after everything before the damage was delivered."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def without_traceback(self) -> BrokenStream:
        """The same error without its traceback, whose frames would keep buffers alive."""
        return BrokenStream(self.reason, self.detail)


def open_decompressed(file: str, path: Path) -> Iterator[bytes]:
    """The bytes of a file in chunks, decompressed if it is gzip or zstd. Raises BrokenStream at damage.

    The first bytes decide the format. The extension of `file`, the source's name (`path` may be a copy), counts only
    for a file too short to tell, such as an empty `.gz` left by a failed copy.
    """
    name = file.partition("?")[0] if "://" in file else file
    with path.open("rb") as raw:
        magic = raw.read(4)
    if magic.startswith(_GZIP_MAGIC) or (name.endswith(".gz") and len(magic) < 3):
        return _gzip_chunks(path)
    if magic == _ZSTD_MAGIC or (magic[1:] == _ZSTD_SKIPPABLE and magic[0] >> 4 == 5):
        return _zstd_chunks(path)
    if name.endswith(".zst") and len(magic) < 4:
        return _zstd_chunks(path)
    return _plain_chunks(path)


def compression_ratio(path: Path) -> float:
    """The ratio of decompressed to compressed size, estimated from the beginning of the file."""
    text = 0
    with path.open("rb") as raw, tempfile.NamedTemporaryFile() as head:
        size = head.write(raw.read(_CHUNK))
        head.flush()
        with suppress(BrokenStream):  # expected: only the beginning is there
            for chunk in open_decompressed(head.name, Path(head.name)):
                text += len(chunk)
    return text / size if text else 1.0


def _plain_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw:
        while chunk := raw.read(_CHUNK):
            yield chunk


def _gzip_chunks(path: Path) -> Iterator[bytes]:
    """Decompress any number of gzip members in sequence; zero bytes between or after them are padding."""
    size = path.stat().st_size
    inflater = zlib.decompressobj(wbits=31)
    inside = False  # a member has begun and not ended
    members = 0
    with path.open("rb") as raw:
        while compressed := raw.read(_COMPRESSED_CHUNK):
            while compressed:
                if not inside:
                    if members:
                        compressed = compressed.lstrip(b"\0")
                        if not compressed:
                            break
                    inflater, inside = zlib.decompressobj(wbits=31), True
                before = inflater.copy()
                try:
                    text = inflater.decompress(compressed, _CHUNK)
                except zlib.error as error:
                    good, used = _inflate_until_damage(before, compressed)
                    if good:
                        yield good
                    offset = raw.tell() - len(compressed) + used
                    raise BrokenStream(
                        CORRUPT_GZIP, f"damaged at byte {offset:,} of {size:,} ({error}); {_REMEDY}"
                    ) from error
                if text:
                    yield text
                if inflater.eof:
                    compressed, inside, members = inflater.unused_data, False, members + 1
                else:
                    compressed = inflater.unconsumed_tail
        while inside and (text := inflater.decompress(b"", _CHUNK)):  # what is left in the window
            yield text
    if inside or not members:
        raise BrokenStream(TRUNCATED_GZIP, f"ends at byte {size:,}, in the middle of its data; {_REMEDY}")


def _inflate_until_damage(inflater: Any, compressed: bytes) -> tuple[bytes, int]:
    """Decode byte by byte up to the damage; returns the text and the number of input bytes used."""
    good = bytearray()
    for used in range(len(compressed)):
        try:
            good += inflater.decompress(compressed[used : used + 1])
        except zlib.error:
            return bytes(good), used
    return bytes(good), len(compressed)


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Decompress any number of zstd frames. Arrow decodes them, so the base install needs no other package."""
    import pyarrow as pa

    size = path.stat().st_size
    if size == 0:
        raise BrokenStream(TRUNCATED_ZSTD, f"ends at byte 0, in the middle of its data; {_REMEDY}")
    delivered = 0
    with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, "zstd") as stream:
        try:
            while chunk := stream.read_buffer(_CHUNK):  # `read` leaks its bytes when it fails
                yield chunk.to_pybytes()
                delivered += len(chunk)
            return
        except OSError as error:
            if error.errno is not None:  # the disk failed, not the content
                raise
            failure, offset = str(error), raw.tell()
    # The failed read lost what it had decoded: decode again up to there, then byte by byte.
    tail = bytearray()
    with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, "zstd") as stream:
        try:
            while delivered:
                delivered -= len(stream.read_buffer(min(delivered, _CHUNK)))
            while byte := stream.read_buffer(1):
                tail += byte
        except OSError:
            pass
    if tail:
        yield bytes(tail)
    if "runcated" in failure:
        raise BrokenStream(TRUNCATED_ZSTD, f"ends at byte {size:,}, in the middle of its data; {_REMEDY}")
    raise BrokenStream(CORRUPT_ZSTD, f"damaged before byte {offset:,} of {size:,} ({failure}); {_REMEDY}")


def _last_line_end(data: NDArray[np.uint8], last: bool) -> int:
    """The end of the last complete line; at the end of the file the rest is a line too."""
    return len(data) if last else last_byte(data, NEWLINE) + 1


class LineBlocks:
    """The text of one file as blocks of about `block_bytes`, each ending at the end of a row.

    `row_end(data, last)` returns the end of the last complete row in `data` (0: none); `last` means that the
    file ends there. A broken stream delivers its complete lines; the partial line is reported as bad.
    """

    def __init__(
        self,
        file: str,
        path: Path,
        *,
        row_end: RowEnd = _last_line_end,
        block_bytes: int = BLOCK_BYTES,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._file = file
        self._row_end = row_end
        self._block_bytes = min(
            block_bytes, max_line_bytes
        )  # so that no block can hold a line that is too long
        self._max_line_bytes = max_line_bytes
        self._chunks = open_decompressed(file, path)
        self._chunk = memoryview(b"")  # the rest of the last chunk, not yet in `_text`
        self._text: NDArray[np.uint8] = np.empty(0, np.uint8)  # read, but not in a block yet
        self._line = 1  # of the first byte of `_text`
        self._ended = False  # nothing follows `_text`
        self._broken: BrokenStream | None = None
        self._partial: NDArray[np.uint8] = np.empty(0, np.uint8)  # the line in which the stream broke
        self._read(len(_BOM))
        if self._text.tobytes() == _BOM:
            self._text = self._text[:0]

    def first_line(self) -> bytes:
        """The first nonempty line, without its line end; empty if there is none. It is not consumed."""
        while True:
            self._read(self._block_bytes)
            end = find_byte(self._text, NEWLINE, 0)
            if end == len(self._text) and not self._ended:
                self._read(self._max_line_bytes + 1)
                end = find_byte(self._text, NEWLINE, 0)
            line = self._text[:end].tobytes().removesuffix(b"\r")
            if line or end == len(self._text):
                return line
            self.skip_line()

    def skip_line(self) -> None:
        """Skip the line that `first_line` returned."""
        self._text = self._text[find_byte(self._text, NEWLINE, 0) + 1 :]
        self._line += 1

    def __iter__(self) -> Iterator[Block]:
        bad: list[BadRow] = []
        while True:
            end = self._next_row_end()
            if end > 0:
                yield Block(self._file, self._line, self._text[:end], end, tuple(bad))
                bad.clear()
                self._line += count_byte(self._text[:end], NEWLINE)
                self._text = self._text[end:]
            elif len(self._text):
                bad.append(self._skip_long_line())
            else:
                break
        if self._broken:
            text = preview(self._partial.tobytes())
            bad.append(BadRow(self._file, self._line, self._broken.reason, self._broken.detail, text))
        if bad:
            yield Block(self._file, self._line, self._text, 0, tuple(bad))

    def _next_row_end(self) -> int:
        """The end of the next block in `_text`; 0 if nothing is left, or only a line that is too long."""
        size = self._block_bytes
        while True:
            self._read(size)
            window = self._text[:size]
            end = self._row_end(window, self._ended and len(window) == len(self._text))
            if end or len(self._text) < size:
                return end
            if size > self._max_line_bytes:
                break
            size = min(2 * size, self._max_line_bytes + 1)
        first = find_byte(window, NEWLINE, 0)  # a multi-line row without an end: deliver its first line
        return 0 if first == len(window) else first + 1

    def _skip_long_line(self) -> BadRow:
        line, beginning, size = self._line, preview(self._text[:1000].tobytes()), 0
        while True:
            end = find_byte(self._text, NEWLINE, 0)
            size += end
            found = end < len(self._text)
            self._text = self._text[end + 1 :]
            if found or self._ended:
                break
            self._read(self._block_bytes)
        self._line += 1
        detail = f"{size:,} bytes without a line end, at most {self._max_line_bytes:,} are read"
        return BadRow(self._file, line, LINE_TOO_LONG, detail, beginning)

    def _read(self, size: int) -> None:
        """Extend `_text` to `size` bytes, if the file has that many."""
        filled = len(self._text)
        if filled >= size or self._ended:
            return
        text = np.empty(size, np.uint8)
        text[:filled] = self._text
        while filled < size:
            if not self._chunk:
                self._chunk = self._next_chunk()
                if not self._chunk:
                    break
            taken = min(len(self._chunk), size - filled)
            text[filled : filled + taken] = self._chunk[:taken]
            self._chunk = self._chunk[taken:]
            filled += taken
        self._text = text[:filled]
        if self._broken:
            complete = last_byte(self._text, NEWLINE) + 1
            self._text, self._partial = self._text[:complete], self._text[complete:]

    def _next_chunk(self) -> memoryview:
        try:
            return memoryview(next(self._chunks))
        except StopIteration:
            self._ended = True
        except BrokenStream as broken:
            self._ended, self._broken = True, broken.without_traceback()
        return memoryview(b"")


def bad_rows(
    block: Block,
    data: NDArray[np.uint8],
    bad_L4: NDArray[np.int64],
    describe: Callable[[int], tuple[str, str]],
) -> list[BadRow]:
    """The bad rows that a kernel recorded as (line, start, end, code); `describe` maps a code to reason and detail.

    A block may hold millions of them, so after the first thousand they are only counted.
    """
    rows = []
    for line, start, end, code in bad_L4[:MAX_LISTED_BAD_ROWS].tolist():
        reason, detail = describe(code)
        rows.append(
            BadRow(block.file, line, reason, detail, preview(data[start : min(end, start + 1000)].tobytes()))
        )
    more: dict[str, BadRow] = {}
    codes, firsts, counts = np.unique(bad_L4[MAX_LISTED_BAD_ROWS:, 3], return_index=True, return_counts=True)
    for code, first, count in zip(codes.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        reason, _ = describe(code)
        line = int(bad_L4[MAX_LISTED_BAD_ROWS + first, 0])
        if known := more.get(reason):
            line, count = min(line, known.line), count + known.count
        more[reason] = unlisted_rows(block.file, line, reason, count)
    return rows + list(more.values())
