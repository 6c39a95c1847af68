"""An HTTP/2 server in a thread, and raw frames to send to it."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time

import uvloop

from clickline.serving.http2.connection import Http2Connection
from clickline.serving.http2.stream import BufferedBytes, Stream

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
