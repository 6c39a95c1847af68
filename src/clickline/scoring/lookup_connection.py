"""A predictor's connection to one lookup server."""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

from clickline.wire.frames import (
    HELLO,
    LOOKUP,
    MAX_WORDS,
    OK,
    STATUS,
    Frame,
    Garbled,
    Inbox,
    ask_status,
    hello,
    read_json,
    read_words,
)


class Endpoint(NamedTuple):
    """Where a server is, its name resolved."""

    family: int
    address: Any


def resolve(host: str, port: int) -> Endpoint:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return Endpoint(family, address)


class Connection:
    """One connection, used by one thread at a time. The server answers in the order of the requests, so what is owed is
    a queue; an answer that nobody waits for any more is received and dropped when the connection is used again."""

    def __init__(
        self,
        endpoint: Endpoint,
        host: str,
        token: str | None,
        tls: ssl.SSLContext | None,
        seconds: float,
    ) -> None:
        """Connect and say hello, which may take so many seconds."""
        until = time.monotonic() + seconds
        self.used = time.monotonic()
        self.reused = False
        self.late_answers = 0
        self.inbox = Inbox(MAX_WORDS)
        self._owed: deque[tuple[int, int]] = deque()  # request and size of its answer
        self._unsent = memoryview(b"")
        self._socket = socket.socket(endpoint.family, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.connect(endpoint.address)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
            self.told = self._exchange(hello(token), HELLO, 0, until)
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
    def owes(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._owed)

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, request: int, frame: memoryview, answer: int) -> None:
        """Send a lookup, as much of it as goes; `flush` sends the rest. `answer`: size of its answer."""
        self.used = time.monotonic()
        self._owed.append((request, answer))
        self._unsent = frame
        self.flush()

    def flush(self) -> bool:
        """Whether all is sent."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return False
        return True

    def receive(self, wanted: int | None) -> Frame | None:
        """The answer to a request, once it is here; answers before it are dropped. It stays until `inbox.done`."""
        while self._owed:
            request, size = self._owed[0]
            self.inbox.limit = max(size, MAX_WORDS)
            frame = self.inbox.frame()
            if frame is None:
                try:
                    received = self.inbox.receive(self._socket)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return None
                if not received:
                    raise ConnectionResetError("it ended the connection")
                continue
            if (frame.kind, frame.request) != (LOOKUP, request) or (
                frame.status == OK and frame.size != size
            ):
                raise Garbled(f"an answer that does not fit its request: {frame}")
            self._owed.popleft()
            if request == wanted:
                return frame
            self.late_answers += 1
            self.inbox.done()
        return None

    # ── what waits ─────────────────────────────────────────────────────────────────────────────

    def status(self, request: int, seconds: float) -> dict[str, Any]:
        """What the server says of itself. Not on a connection that lookups use."""
        return self._exchange(ask_status(request), STATUS, request, time.monotonic() + seconds)

    def _exchange(self, frame: bytes, kind: int, request: int, until: float) -> dict[str, Any]:
        self._socket.settimeout(_left(until))
        self._socket.sendall(frame)
        while (found := self.inbox.frame()) is None:
            self._socket.settimeout(_left(until))
            if not self.inbox.receive(self._socket):
                raise ConnectionResetError("it ended the connection")
        body = self.inbox.body()
        if (found.kind, found.request) != (kind, request):
            raise Garbled(f"an answer that does not fit its request: {found}")
        if found.status != OK:
            raise ConnectionRefusedError(read_words(body))
        document = read_json(body)
        del body
        self.inbox.done()
        return document


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
