"""A file as text: decompressed, and cut into blocks that end where a line ends.

    path ──open_stream──▶ chunks ──LineBlocks──▶ Block(payload = uint8 array), …

Where a block ends depends on the file's content alone, never on how the bytes happened to arrive.
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
    SHOWN_BAD_ROWS,
    TRUNCATED_GZIP,
    TRUNCATED_ZSTD,
    shown,
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
    """A compressed file is cut off or damaged; raised after everything before the fault was delivered."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def alone(self) -> BrokenStream:
        """The same without its traceback, whose frames would hold the buffers of the one who keeps it."""
        return BrokenStream(self.reason, self.detail)


def open_stream(file: str, path: Path) -> Iterator[bytes]:
    """The bytes of a file in chunks, decompressed if it is gzip or zstd. Raises BrokenStream at a fault.

    The first bytes decide. The name counts only for a file too short to have any, such as an empty
    `.gz`, which is the rest of a failed copy: the name `file` of its source, for `path` may be a copy.
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


def expansion(path: Path) -> float:
    """How many times larger a file's text is than the file, judged by its beginning."""
    text = 0
    with path.open("rb") as raw, tempfile.NamedTemporaryFile() as head:
        size = head.write(raw.read(_CHUNK))
        head.flush()
        with suppress(BrokenStream):  # of course: it is cut off
            for chunk in open_stream(head.name, Path(head.name)):
                text += len(chunk)
    return text / size if text else 1.0


def _plain_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw:
        while chunk := raw.read(_CHUNK):
            yield chunk


def _gzip_chunks(path: Path) -> Iterator[bytes]:
    """Any number of gzip members one after the other; zero bytes between or after them are padding."""
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
                    good, used = _inflate_until_fault(before, compressed)
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
        while inside and (text := inflater.decompress(b"", _CHUNK)):  # what the window still holds
            yield text
    if inside or not members:
        raise BrokenStream(TRUNCATED_GZIP, f"ends at byte {size:,}, in the middle of its data; {_REMEDY}")


def _inflate_until_fault(inflater: Any, compressed: bytes) -> tuple[bytes, int]:
    """What can be decoded before the damage, byte by byte, and how many bytes of input that took."""
    good = bytearray()
    for used in range(len(compressed)):
        try:
            good += inflater.decompress(compressed[used : used + 1])
        except zlib.error:
            return bytes(good), used
    return bytes(good), len(compressed)


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Any number of zstd frames. Arrow decodes them, so that the base install needs no further package."""
    import pyarrow as pa

    size = path.stat().st_size
    if size == 0:
        raise BrokenStream(TRUNCATED_ZSTD, f"ends at byte 0, in the middle of its data; {_REMEDY}")
    delivered = 0
    with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, "zstd") as stream:
        try:
            while chunk := stream.read_buffer(_CHUNK):  # `read` never frees its bytes when it fails
                yield chunk.to_pybytes()
                delivered += len(chunk)
            return
        except OSError as error:
            if error.errno is not None:  # the disk's fault, not the content's
                raise
            fault, offset = str(error), raw.tell()
    # The read that failed took what it had decoded with it: decode again up to there, then in single bytes.
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
    if "runcated" in fault:
        raise BrokenStream(TRUNCATED_ZSTD, f"ends at byte {size:,}, in the middle of its data; {_REMEDY}")
    raise BrokenStream(CORRUPT_ZSTD, f"damaged before byte {offset:,} of {size:,} ({fault}); {_REMEDY}")


def _last_line_end(data: NDArray[np.uint8], last: bool) -> int:
    """Where the last whole line ends; at the end of the file the rest is a line too."""
    return len(data) if last else last_byte(data, NEWLINE) + 1


class LineBlocks:
    """The text of one file as blocks of about `block_bytes`, each ending where a row ends.

    `row_end(data, last)` finds the end of the last whole row in `data` (0: none); `last` says that the
    file ends there. A stream that breaks delivers its whole lines; the partial one is told in the fault.
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
        self._block_bytes = min(block_bytes, max_line_bytes)  # so that no block can hold too long a line
        self._max_line_bytes = max_line_bytes
        self._chunks = open_stream(file, path)
        self._chunk = memoryview(b"")  # what of the last chunk is not in `_text` yet
        self._text: NDArray[np.uint8] = np.empty(0, np.uint8)  # read, and not in a block yet
        self._line = 1  # of the first byte of `_text`
        self._ended = False  # nothing comes after `_text`
        self._broken: BrokenStream | None = None
        self._partial: NDArray[np.uint8] = np.empty(0, np.uint8)  # the line in which the stream broke
        self._read(len(_BOM))
        if self._text.tobytes() == _BOM:
            self._text = self._text[:0]

    def first_line(self) -> bytes:
        """The first line that is not empty, without its line end; empty when there is none. It stays."""
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
        """Leave out the line that `first_line` showed."""
        self._text = self._text[find_byte(self._text, NEWLINE, 0) + 1 :]
        self._line += 1

    def __iter__(self) -> Iterator[Block]:
        faults: list[BadRow] = []
        while True:
            end = self._next_row_end()
            if end > 0:
                yield Block(self._file, self._line, self._text[:end], end, tuple(faults))
                faults.clear()
                self._line += count_byte(self._text[:end], NEWLINE)
                self._text = self._text[end:]
            elif len(self._text):
                faults.append(self._skip_long_line())
            else:
                break
        if self._broken:
            text = shown(self._partial.tobytes())
            faults.append(BadRow(self._file, self._line, self._broken.reason, self._broken.detail, text))
        if faults:
            yield Block(self._file, self._line, self._text, 0, tuple(faults))

    def _next_row_end(self) -> int:
        """The end of the next block in `_text`; 0 when nothing is left, or only a line that is too long."""
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
        first = find_byte(window, NEWLINE, 0)  # a row of several lines that does not end: give out its first
        return 0 if first == len(window) else first + 1

    def _skip_long_line(self) -> BadRow:
        line, beginning, size = self._line, shown(self._text[:1000].tobytes()), 0
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
        """Make `_text` `size` bytes long, if the file has as many."""
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
            whole = last_byte(self._text, NEWLINE) + 1
            self._text, self._partial = self._text[:whole], self._text[whole:]

    def _next_chunk(self) -> memoryview:
        try:
            return memoryview(next(self._chunks))
        except StopIteration:
            self._ended = True
        except BrokenStream as broken:
            self._ended, self._broken = True, broken.alone()
        return memoryview(b"")


def bad_rows(
    block: Block,
    data: NDArray[np.uint8],
    bad_L4: NDArray[np.int64],
    describe: Callable[[int], tuple[str, str]],
) -> list[BadRow]:
    """The bad rows a kernel noted as (line, start, end, code); `describe` gives a code's reason and detail.

    A block may hold millions of them, so past the first thousand only their number is kept.
    """
    rows = []
    for line, start, end, code in bad_L4[:SHOWN_BAD_ROWS].tolist():
        reason, detail = describe(code)
        rows.append(
            BadRow(block.file, line, reason, detail, shown(data[start : min(end, start + 1000)].tobytes()))
        )
    more: dict[str, BadRow] = {}
    codes, firsts, counts = np.unique(bad_L4[SHOWN_BAD_ROWS:, 3], return_index=True, return_counts=True)
    for code, first, count in zip(codes.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        reason, _ = describe(code)
        line = int(bad_L4[SHOWN_BAD_ROWS + first, 0])
        if known := more.get(reason):
            line, count = min(line, known.line), count + known.count
        detail = f"{count:,} more rows of this kind in this part of the file, not shown"
        more[reason] = BadRow(block.file, line, reason, detail, count=count)
    return rows + list(more.values())
