"""Reads a binary file, compressed or not, N bytes at a time; used by the record formats."""

from __future__ import annotations

from pathlib import Path

from clickline.data.readers.text_blocks import BrokenStream, open_decompressed

CRC_MISMATCH = "crc mismatch"
TRUNCATED_FILE = "truncated file"
TOO_LARGE = "record too large"


class ByteSource:
    """The decompressed bytes of one file, read sequentially."""

    def __init__(self, file: str, path: Path) -> None:
        self.broken: BrokenStream | None = None  # why the file ended early, if decompression failed
        self._chunks = open_decompressed(file, path)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end. Memory is allocated as bytes arrive, not up front."""
        pieces = []
        while size > 0:
            if not self._rest:
                try:
                    self._rest = memoryview(next(self._chunks))
                except StopIteration:
                    break
                except BrokenStream as broken:
                    self.broken = broken.without_traceback()
                    break
            piece = self._rest[:size]
            self._rest = self._rest[len(piece) :]
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)
