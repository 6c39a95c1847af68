"""Flow control (RFC 9113, 5.2): answers go out as far as the client's windows allow, and wait for the rest."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any

from clickline.serving.http2.frames import DATA, FLOW_CONTROL_ERROR, PROTOCOL_ERROR, Http2Error, frame
from clickline.serving.http2.stream import Stream

MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65535
_MAX_UNSENT = 1 << 24  # bytes of answers queued for a client whose window is full


class SendWindows:
    """The windows of one client, and the answers that wait for them."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.frame_size = 16384  # the client's maximum
        self._initial = DEFAULT_WINDOW  # bytes that the client accepts on each new stream
        self._connection = DEFAULT_WINDOW  # and on this connection
        # Answers that do not fit yet: data, and the trailers that follow.
        self._queued: dict[Stream, deque[tuple[memoryview, bytes]]] = {}
        self._queued_bytes = 0

    @property
    def waiting(self) -> list[Stream]:
        """The calls whose answers wait."""
        return list(self._queued)

    def set_initial(self, size: int) -> None:
        if size > MAX_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is too large")
        self._initial = size

    def extend(self, size: int) -> None:
        """Extend the connection's window."""
        if not size:
            raise Http2Error(PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
        self._connection += size
        if self._connection > MAX_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "the connection's window is out of range")

    def extend_stream(self, stream: Stream, size: int) -> bool:
        """Extend a call's window. False: it became too large."""
        stream.window += size
        return self._initial + stream.window <= MAX_WINDOW

    def fits(self, stream: Stream, size: int) -> bool:
        """Whether an answer can be sent at once, in one frame."""
        return size <= self.frame_size and size <= self._initial + stream.window and size <= self._connection

    def full(self, size: int) -> bool:
        """Whether too many bytes wait already for so many more."""
        return self._queued_bytes > 0 and self._queued_bytes + size > _MAX_UNSENT

    def send(self, stream: Stream, head: bytes, data: bytes, tail: bytes) -> bool:
        """Send part of an answer that fits, in one write, or queue it. Returns whether the tail was sent."""
        size = len(data)
        if not stream.blocked_since and self.fits(stream, size):
            stream.window -= size
            self._connection -= size
            self.transport.write(head + (frame(DATA, 0, stream.id, data) if size else b"") + tail)
            return bool(tail)
        self.transport.write(head)
        if not stream.blocked_since:
            stream.blocked_since = monotonic()
        self._queued.setdefault(stream, deque()).append((memoryview(data), tail))
        self._queued_bytes += size
        return self.send_queued(stream)

    def send_queued(self, stream: Stream) -> bool:
        """Send as much of one call's queued answer as the windows allow. Returns whether its tail was sent."""
        pieces = self._queued[stream]
        while pieces:
            data, tail = pieces[0]
            while data:
                size = min(len(data), self.frame_size, self._initial + stream.window, self._connection)
                if size <= 0:
                    pieces[0] = (data, tail)
                    return False
                self.transport.write(frame(DATA, 0, stream.id, bytes(data[:size])))
                data = data[size:]
                stream.window -= size
                self._connection -= size
                self._queued_bytes -= size
            pieces.popleft()
            if tail:
                self.transport.write(tail)
                return True
        del self._queued[stream]
        stream.blocked_since = 0.0
        return False

    @property
    def closed(self) -> bool:
        """Whether the client accepts no more bytes on this connection."""
        return self._connection <= 0

    def forget(self, stream: Stream) -> None:
        """Drop what waits for a call that has ended."""
        if stream.blocked_since:
            self._queued_bytes -= sum(len(data) for data, _ in self._queued.pop(stream))

    def clear(self) -> None:
        self._queued.clear()
