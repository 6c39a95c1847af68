"""An HTTP/2 server in a thread, and raw frames to send to it."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable

import uvloop

from clickline.serving.http2.connection import Http2Connection
from clickline.serving.http2.frames import PREFACE
from clickline.serving.http2.stream import BufferedBytes, Stream

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
STREAM_CLOSED, CALM = 5, 11
MAX_MESSAGE = 1 << 20


class Echo:
    """Echoes messages; /test/Big answers with much more, /test/Wait never, /test/Each message by message, and
    /test/Count only counts them."""

    max_message_bytes = MAX_MESSAGE

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.waiting: list[Stream] = []
        self.counted = 0
        self.buffered = BufferedBytes(16 * MAX_MESSAGE)

    def on_open(self, stream: Stream) -> None:
        stream.streaming = stream.path in ("/test/Each", "/test/Count")
        if stream.path == "/test/Nowhere":
            stream.refuse(12, "not here: 50 % ü")

    def on_message(self, stream: Stream, message: bytes) -> None:
        if stream.path == "/test/Each":
            stream.send(message)
        elif stream.path == "/test/Count":
            self.counted += 1
        elif stream.path == "/test/Wait":
            self.waiting.append(stream)
        elif stream.path == "/test/Deadline":
            left = -1.0 if stream.deadline is None else stream.deadline - time.monotonic()
            stream.reply(b"%.3f" % left)
        else:
            stream.reply(message * (500_000 if stream.path == "/test/Big" else 1))

    def on_end(self, stream: Stream) -> None:
        stream.finish()

    def on_cancel(self, stream: Stream) -> None:
        self.cancelled.append(stream.path)


class Server:
    """An HTTP/2 server with its own event loop in a thread."""

    def __init__(self) -> None:
        self.echo = Echo()
        self.connections: set[Http2Connection] = set()
        self.port = 0
        self.errors: list[object] = []
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        assert self._up.wait(20)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self._stop = asyncio.Event()
        server = await self._loop.create_server(
            lambda: Http2Connection(self.echo, self.connections), "127.0.0.1", 0
        )
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._stop.wait()
        server.close()
        for connection in list(self.connections):
            connection.start_drain()
        await asyncio.sleep(0.05)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0.05)

    def on_loop(self, call: object) -> None:
        self._loop.call_soon_threadsafe(call)  # type: ignore[arg-type]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">BHBBL", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


ECHO = b"\x83\x86" + literal(b":path", b"/test/Echo") + literal(b"te", b"trailers")
MESSAGE = b"\0\0\0\0\2hi"


def path(method: str) -> bytes:
    return b"\x83\x86" + literal(b":path", f"/test/{method}".encode())


class Peer:
    """A client that sends arbitrary frames."""

    def __init__(self, server: Server, settings: bytes = b"") -> None:
        self.received: list[tuple[int, int, int, bytes]] = []  # kind, flags, stream, payload
        self.closed = False
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self._partial = b""
        self.send(PREFACE + frame(SETTINGS, 0, 0, settings))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive_until(self, enough: Callable[[], bool], seconds: float = 20.0) -> None:
        """Receive frames until `enough`, or until the server closes."""
        deadline = time.monotonic() + seconds
        while not enough() and not self.closed:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                piece = self._socket.recv(1 << 20)
            except ConnectionResetError:
                piece = b""
            self.closed = not piece
            self._partial += piece
            while len(self._partial) >= 9:
                high, low, kind, flags, stream = struct.unpack_from(">BHBBL", self._partial)
                size = 9 + (high << 16 | low)
                if len(self._partial) < size:
                    break
                self.received.append((kind, flags, stream, self._partial[9:size]))
                self._partial = self._partial[size:]

    def ping(self) -> None:
        """Wait until the server has handled everything sent before."""
        mark = struct.pack(">Q", len(self.received))
        self.send(frame(PING, 0, 0, mark))
        self.receive_until(lambda: (PING, 1, 0, mark) in self.received)

    def goaway(self) -> tuple[int, bytes]:
        """Code and message of the server's GOAWAY."""
        self.receive_until(lambda: self.closed)
        payload = next(payload for kind, _, _, payload in self.received if kind == GOAWAY)
        return int.from_bytes(payload[4:8], "big"), payload[8:]

    def trailers(self, stream: int) -> bytes:
        """The trailers of a call."""
        self.receive_until(
            lambda: any(one[:3] == (HEADERS, END_HEADERS | END_STREAM, stream) for one in self.received)
        )
        return next(one[3] for one in self.received if one[:3] == (HEADERS, END_HEADERS | END_STREAM, stream))

    def reset(self, stream: int) -> int:
        """The code of a call's RST_STREAM."""
        self.receive_until(lambda: any(one[0] == RST and one[2] == stream for one in self.received))
        return next(
            int.from_bytes(one[3], "big") for one in self.received if one[0] == RST and one[2] == stream
        )


def ask(stream: int, headers: bytes = ECHO, message: bytes = MESSAGE) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, message)


def exchange(server: Server, *parts: bytes, until: bytes) -> bytes:
    """Send the parts, and return what the server sends until it contains `until` or the connection closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.002)  # so that they usually arrive in pieces; nothing depends on it
        received = b""
        while until not in received:
            piece = connection.recv(65536)
            if not piece:
                break
            received += piece
        return received
