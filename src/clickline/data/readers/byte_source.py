"""A binary file as bytes asked for by number: what the record formats read from, compressed or not."""

from __future__ import annotations

from pathlib import Path

from clickline.data.readers.text_blocks import BrokenStream, open_stream

CRC_MISMATCH = "crc mismatch"
TRUNCATED_FILE = "truncated file"
TOO_LARGE = "record too large"


class ByteSource:
    """The decompressed bytes of one file, front to back."""

    def __init__(self, file: str, path: Path) -> None:
        self.broken: BrokenStream | None = None  # why the file ended early, if its compression broke
        self._chunks = open_stream(file, path)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end. Asks for memory as bytes arrive, not up front."""
        pieces = []
        while size > 0:
            if not self._rest:
                try:
                    self._rest = memoryview(next(self._chunks))
                except StopIteration:
                    break
                except BrokenStream as broken:
                    self.broken = broken.alone()
                    break
            piece = self._rest[:size]
            self._rest = self._rest[len(piece) :]
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)
