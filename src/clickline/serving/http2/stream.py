"""One gRPC call, and what answers calls."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from clickline.serving.http2.grpc_messages import deadline_of, prefixed

if TYPE_CHECKING:
    from clickline.serving.http2.connection import Http2Connection


class BufferedBytes:
    """Bytes of incomplete requests over all connections of a process."""

    __slots__ = ("bytes", "limit")

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self.limit = limit


class CallHandler(Protocol):
    """Answers the calls of all connections."""

    def on_open(self, stream: Stream) -> None:
        """A call has started and its headers have arrived. May refuse it, or ask for streaming."""

    def on_message(self, stream: Stream, message: bytes) -> None:
        """The complete message of a unary call, or one message of a streaming call."""

    def on_end(self, stream: Stream) -> None:
        """The client has sent all messages of a streaming call."""

    def on_cancel(self, stream: Stream) -> None:
        """The client no longer waits for the answer to this call."""

    @property
    def max_message_bytes(self) -> int:
        """The size limit of one message."""

    @property
    def buffered(self) -> BufferedBytes:
        """The counter that all connections share."""


class Stream:
    """One gRPC call."""

    __slots__ = (
        "answered",
        "blocked_since",
        "body",
        "connection",
        "deadline",
        "ended",
        "headers",
        "id",
        "messages",
        "path",
        "refused",
        "started",
        "streaming",
        "window",
    )

    def __init__(self, connection: Http2Connection, id: int, headers: Mapping[str, str]) -> None:
        self.connection = connection
        self.id = id
        self.headers = headers
        self.path = headers.get(":path", "")
        self.deadline = deadline_of(headers.get("grpc-timeout"))
        self.body: bytes | bytearray = b""
        self.streaming = False  # messages are delivered one by one
        self.messages = 0  # received so far, of a streaming call
        self.refused = False  # further data is discarded
        self.ended = False  # the request is complete
        self.blocked_since = 0.0  # since when the answer waits for the client's window; 0: it does not
        self.window = 0  # bytes that the client accepts beyond the initial window
        self.answered = False  # the response headers have been sent
        self.started = monotonic()

    def reply(self, message: bytes) -> None:
        """Answer a unary call."""
        self.connection.send(self, prefixed(message), last=True)

    def send(self, message: bytes) -> None:
        """Send one of several messages."""
        self.connection.send(self, prefixed(message), last=False)

    def finish(self) -> None:
        """End a call after its messages."""
        self.connection.send(self, b"", last=True)

    def refuse(self, status: int, message: str) -> None:
        """End the call with an error status."""
        self.refused = True
        self.connection.refuse(self, status, message)
