"""HTTP/2 frames (RFC 9113, section 4): from the bytes of a connection, and to bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from time import monotonic

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY_FRAME, RST_STREAM, SETTINGS, PUSH_PROMISE = 0, 1, 2, 3, 4, 5
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 0, 1, 3, 5
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 8, 9, 11

MAX_FRAME = 1 << 20

_HEADER = struct.Struct(">BHBBL")  # the length's high byte and the rest, type, flags, stream


class Http2Error(Exception):
    """The client violated HTTP/2, so the connection is closed (RFC 9113, 5.4.1)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotHttp2(Exception):
    """The connection does not begin with the preface."""


def frame(kind: int, flags: int, id: int, payload: bytes) -> bytes:
    length = len(payload)
    return _HEADER.pack(length >> 16, length & 0xFFFF, kind, flags, id) + payload


def unpadded(payload: bytes) -> bytes:
    """The payload of a frame with the PADDED flag."""
    if not payload or payload[0] >= len(payload):
        raise Http2Error(PROTOCOL_ERROR, "the padding is longer than the payload")
    return payload[1 : len(payload) - payload[0]]


class FrameReader:
    """Splits the bytes of a connection into frames."""

    def __init__(self) -> None:
        self.preface_received = False
        self.incomplete_since = monotonic()  # when the incomplete preface or frame began
        self._partial = bytearray()
        self._needed = 0  # size at which it can be parsed further

    @property
    def incomplete(self) -> bool:
        """Whether the client has begun a preface or frame and not completed it."""
        return not self.preface_received or bool(self._partial)

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield the type, flags, stream and payload of each frame that is complete."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, size, length = 0, len(data), 0
        if not self.preface_received:
            if not data.startswith(PREFACE[:size]):
                raise NotHttp2
            if size < len(PREFACE):
                self._partial += data
                self._needed = len(PREFACE)
                return
            self.preface_received = True
            at = len(PREFACE)
        while size - at >= 9:
            high, low, kind, flags, id = _HEADER.unpack_from(data, at)
            length = high << 16 | low
            if length > MAX_FRAME:
                raise Http2Error(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            if size - at - 9 < length:
                break
            yield kind, flags, id & 0x7FFFFFFF, data[at + 9 : at + 9 + length]
            at += 9 + length
        if at < size:
            self._needed = 9 + length if size - at >= 9 else 9
            self._partial += data[at:]
            self.incomplete_since = monotonic()
