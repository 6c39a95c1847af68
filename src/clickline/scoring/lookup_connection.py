"""A predictor's connection to one lookup server."""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

from clickline.wire.lookup_frames import (
    HELLO,
    LOOKUP,
    MAX_MESSAGE,
    OK,
    STATUS,
    FrameHeader,
    ProtocolError,
    ReceiveBuffer,
    hello,
    read_json,
    read_message,
    status_request,
)


class SocketAddress(NamedTuple):
    """A server's address, with its host name resolved."""

    family: int
    address: Any


def resolve(host: str, port: int) -> SocketAddress:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return SocketAddress(family, address)


class LookupConnection:
    """One connection, used by one thread at a time. The server answers in request order, so pending answers form a
    queue; an answer that is no longer waited for is received and dropped when the connection is used again."""

    def __init__(
        self,
        address: SocketAddress,
        host: str,
        token: str | None,
        tls: ssl.SSLContext | None,
        seconds: float,
    ) -> None:
        """Connect and exchange hellos within this many seconds."""
        deadline = time.monotonic() + seconds
        self.last_used = time.monotonic()
        self.reused = False
        self.late_answers = 0
        self.buffer = ReceiveBuffer(MAX_MESSAGE)
        self._pending: deque[tuple[int, int]] = deque()  # request number and answer size
        self._unsent = memoryview(b"")
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.connect(address.address)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
            self.server_status = self._exchange(hello(token), HELLO, 0, deadline)
            self._socket.setblocking(False)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    # ── lookups ────────────────────────────────────────────────────────────────────────────────

    @property
    def has_pending(self) -> bool:
        """Whether an answer is still pending."""
        return bool(self._pending)

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, request: int, frame: memoryview, answer: int) -> None:
        """Send as much of a lookup as the socket accepts; `flush` sends the rest. `answer`: the size of its answer."""
        self.last_used = time.monotonic()
        self._pending.append((request, answer))
        self._unsent = frame
        self.flush()

    def flush(self) -> bool:
        """Send the rest; returns whether everything is sent."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return False
        return True

    def receive(self, wanted: int | None) -> FrameHeader | None:
        """The answer to a request, if it has arrived; earlier ones are dropped. It stays until `buffer.release`."""
        while self._pending:
            request, size = self._pending[0]
            self.buffer.limit = max(size, MAX_MESSAGE)
            frame = self.buffer.frame()
            if frame is None:
                try:
                    received = self.buffer.receive(self._socket)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return None
                if not received:
                    raise ConnectionResetError("the server closed the connection")
                continue
            if (frame.kind, frame.request) != (LOOKUP, request) or (
                frame.status == OK and frame.size != size
            ):
                raise ProtocolError(f"an answer that does not match its request: {frame}")
            self._pending.popleft()
            if request == wanted:
                return frame
            self.late_answers += 1
            self.buffer.release()
        return None

    # ── blocking ─────────────────────────────────────────────────────────────────────────────

    def status(self, request: int, seconds: float) -> dict[str, Any]:
        """The status that the server reports. Not for a connection that is used for lookups."""
        return self._exchange(status_request(request), STATUS, request, time.monotonic() + seconds)

    def _exchange(self, frame: bytes, kind: int, request: int, deadline: float) -> dict[str, Any]:
        self._socket.settimeout(_seconds_left(deadline))
        self._socket.sendall(frame)
        while (header := self.buffer.frame()) is None:
            self._socket.settimeout(_seconds_left(deadline))
            if not self.buffer.receive(self._socket):
                raise ConnectionResetError("the server closed the connection")
        body = self.buffer.body()
        if (header.kind, header.request) != (kind, request):
            raise ProtocolError(f"an answer that does not match its request: {header}")
        if header.status != OK:
            raise ConnectionRefusedError(read_message(body))
        document = read_json(body)
        del body
        self.buffer.release()
        return document


def _seconds_left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds
