"""The load of the serving benchmark: one process, one thread, many connections, no work but sending and counting.

    python load.py < job.json

It speaks just enough HTTP/1.1, gRPC (HTTP/2) and plain framed TCP to send requests that lie ready as bytes and to
see that each answer is whole, so a request costs it some 30 µs where a gRPC library in Python takes five times that
from the cores the server needs too. The values of the answers are checked before, by real clients.

Closed loop: every connection has one request under way. Open loop: requests start at a fixed rate on whichever
connection is free, and their time counts from when they were due, so waiting for a slow server is not left out.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

GIVE_UP = 20.0  # seconds without any answer


class Failed(Exception):
    """The server closed the connection, or answered something else than expected."""


class Connection:
    """One socket with at most one request under way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.socket.setblocking(False)
        self.began = 0.0
        self.unsent = memoryview(b"")
        self.chunk = bytearray(1 << 18)

    def start(self, number: int) -> None:
        """Send request `number`."""
        raise NotImplementedError

    def readable(self) -> bool:
        """Take what has come; whether the answer is whole."""
        raise NotImplementedError

    def send(self, data: memoryview) -> None:
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        self.unsent = data[sent:]

    def writable(self) -> None:
        self.send(self.unsent)

    def receive(self) -> int:
        try:
            count = self.socket.recv_into(self.chunk)
        except BlockingIOError:
            return 0
        if not count:
            raise Failed("the server closed the connection")
        return count


class RawConnection(Connection):
    """Answers of a known length that begin in a known way (in hex); `opening` is sent once, and answered at once."""

    def __init__(self, port: int, bodies: list[bytes], length: int, begins: str, opening: str = "") -> None:
        super().__init__(port)
        self.bodies = [memoryview(body) for body in bodies]
        self.length, self.begins, self.got = length, bytes.fromhex(begins), 0
        if opening:
            self.socket.settimeout(10)
            self.socket.sendall(bytes.fromhex(opening))
            self.receive()
            self.socket.setblocking(False)

    def start(self, number: int) -> None:
        self.got = 0
        self.send(self.bodies[number % len(self.bodies)])

    def readable(self) -> bool:
        count = self.receive()
        if count and not self.got and not self.chunk.startswith(self.begins):
            raise Failed(f"an answer begins with {bytes(self.chunk[: min(count, 80)])!r}")
        self.got += count
        if self.got > self.length:
            raise Failed(f"an answer has {self.got} bytes instead of {self.length}")
        return self.got == self.length


class HttpConnection(Connection):
    """HTTP/1.1 POST; an answer is 200 and has the expected length."""

    def __init__(
        self, port: int, bodies: list[bytes], length: int, path: str, headers: dict[str, str]
    ) -> None:
        super().__init__(port)
        self.length = length
        self.ready = []
        for body in bodies:
            lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self.ready.append(memoryview("\r\n".join([*lines, "", ""]).encode() + body))
        self.buffer = bytearray()

    def start(self, number: int) -> None:
        self.buffer.clear()
        self.send(self.ready[number % len(self.ready)])

    def readable(self) -> bool:
        self.buffer += memoryview(self.chunk)[: self.receive()]
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self.buffer[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            raise Failed(bytes(self.buffer[:600]).decode(errors="replace"))
        place = head.find(b"content-length:")
        if place < 0:
            raise Failed(f"an answer without a length: {head!r}")
        length = int(head[place + 15 :].split(b"\r\n", 1)[0])
        if length != self.length:
            raise Failed(f"an answer has {length} bytes instead of {self.length}")
        return len(self.buffer) >= end + 4 + length


class GrpcConnection(Connection):
    """A unary call a time over HTTP/2. An answer that is no error has a message, of the expected length."""

    PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
    END_STREAM, END_HEADERS, ACK = 1, 4, 1
    FRAME = 16383  # four of them fit the window that HTTP/2 begins with

    def __init__(self, port: int, bodies: list[bytes], length: int, path: str) -> None:
        super().__init__(port)
        self.length = length + 5  # a gRPC message follows a flag and its length
        self.frames = [self._frames(path, f"127.0.0.1:{port}", body) for body in bodies]
        self.stream = -1
        self.window, self.first_window, self.stream_window = 65535, 65535, 65535
        self.waiting: deque[memoryview] = deque()  # DATA frames of this call
        self.buffer = bytearray()
        self.got = 0
        settings = struct.pack(">HIHI", 1, 0, 4, (1 << 31) - 1)  # no header table; any amount of answer
        self.control = bytearray(self.PREFACE + self._frame(self.SETTINGS, 0, 0, settings))
        self.control += self._frame(self.WINDOW, 0, 0, struct.pack(">I", (1 << 31) - 1 - 65535))
        self._flush()

    @staticmethod
    def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload

    def _frames(self, path: str, host: str, body: bytes) -> list[bytearray]:
        def literal(text: str) -> bytes:
            assert len(text) < 127
            return bytes([len(text)]) + text.encode()

        head = b"\x83\x86"  # :method POST, :scheme http
        head += b"\x04" + literal(path) + b"\x01" + literal(host)
        head += b"\x0f\x10" + literal("application/grpc") + b"\x00" + literal("te") + literal("trailers")
        message = b"\x00" + struct.pack(">I", len(body)) + body
        frames = [bytearray(self._frame(self.HEADERS, self.END_HEADERS, 0, head))]
        for first in range(0, len(message), self.FRAME):
            part = message[first : first + self.FRAME]
            last = self.END_STREAM if first + self.FRAME >= len(message) else 0
            frames.append(bytearray(self._frame(self.DATA, last, 0, part)))
        return frames

    def start(self, number: int) -> None:
        self.stream += 2
        self.stream_window, self.got = self.first_window, 0
        frames = self.frames[number % len(self.frames)]
        for frame in frames:
            struct.pack_into(">I", frame, 5, self.stream)
        self.control += frames[0]
        self.waiting.extend(map(memoryview, frames[1:]))
        self._flush()

    def _flush(self) -> None:
        """Send what the windows allow, in one piece."""
        if self.unsent:
            return
        while self.waiting:
            size = len(self.waiting[0]) - 9
            if size > self.window or size > self.stream_window:
                break
            self.window -= size
            self.stream_window -= size
            self.control += self.waiting.popleft()
        if self.control:
            out, self.control = memoryview(self.control), bytearray()
            self.send(out)

    def writable(self) -> None:
        self.send(self.unsent)
        self._flush()

    def readable(self) -> bool:
        buffer = self.buffer
        buffer += memoryview(self.chunk)[: self.receive()]
        place, ended = 0, False
        while len(buffer) - place >= 9:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", buffer, place)
            size = high << 16 | low
            if len(buffer) - place < 9 + size:
                break
            if kind == self.DATA:
                self.got += size
                ended |= bool(flags & self.END_STREAM)
            elif kind == self.HEADERS:
                ended |= bool(flags & self.END_STREAM)
            elif kind not in (2, 5, 9):  # priority, push, continuation: nothing to do
                self._control(kind, flags, stream, bytes(buffer[place + 9 : place + 9 + size]))
            place += 9 + size
        del buffer[:place]
        self._flush()
        if ended and self.got != self.length:
            raise Failed(f"an answer has {self.got} bytes instead of {self.length}; 0 is a gRPC error")
        return ended

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == self.WINDOW:
            (more,) = struct.unpack(">I", payload)
            if stream == 0:
                self.window += more
            elif stream == self.stream:
                self.stream_window += more
        elif kind == self.SETTINGS and not flags & self.ACK:
            for place in range(0, len(payload), 6):
                key, value = struct.unpack_from(">HI", payload, place)
                if key == 4:
                    self.stream_window += value - self.first_window
                    self.first_window = value
            self.control += self._frame(self.SETTINGS, self.ACK, 0, b"")
        elif kind == self.PING and not flags & self.ACK:
            self.control += self._frame(self.PING, self.ACK, 0, payload)
        elif kind in (self.RESET, self.GO_AWAY):
            raise Failed(f"HTTP/2 {'reset' if kind == self.RESET else 'go away'}: {payload!r}")


KINDS: dict[str, type[Any]] = {"grpc": GrpcConnection, "http": HttpConnection, "raw": RawConnection}


def run(connections: list[Connection], seconds: float, warm_up: float, rate: float | None) -> dict[str, Any]:
    """Send until the time is over. What began during the warm-up has no part in the times."""
    free: deque[Connection] = deque(connections)
    busy: dict[socket.socket, Connection] = {}
    times: list[float] = []
    done = 0
    now = time.perf_counter()
    first, number = now + warm_up, 0
    last, heard = first + seconds, now
    due = now
    used = 0.0
    counting = False
    while now < last:
        if not counting and now >= first:
            counting, used = True, cpu_seconds()
        while free and (rate is None or due <= now):
            connection = free.popleft()
            connection.began = now if rate is None else due
            busy[connection.socket] = connection
            connection.start(number)
            number += 1
            due += 0 if rate is None else 1 / rate
        wait = last - now
        if rate is not None and free:
            wait = min(wait, max(0.0, due - now))
        writers = [connection.socket for connection in busy.values() if connection.unsent]
        can_read, can_write, _ = select.select(list(busy), writers, [], max(0.0, min(wait, 1.0)))
        for ready in can_write:
            busy[ready].writable()
        for ready in can_read:
            connection = busy[ready]
            if connection.readable():
                heard = now = time.perf_counter()
                if first <= now <= last:
                    done += 1
                    if connection.began >= first:
                        times.append(now - connection.began)
                del busy[ready]
                free.append(connection)
        now = time.perf_counter()
        if now - heard > GIVE_UP:
            raise Failed(f"no answer for {GIVE_UP:.0f} seconds")
    used = cpu_seconds() - used
    finish(busy)
    if not times:
        raise Failed("not one request was answered in time")
    p50, p99 = np.percentile(times, (50, 99))
    return {
        "requests": done,
        "rate": done / seconds,
        "p50": float(p50),
        "p99": float(p99),
        "worst": max(times),
        "cpu": used / seconds,
        "late": 0.0 if rate is None else max(0.0, (last - due) * rate),  # due, and never started
    }


def finish(busy: dict[socket.socket, Connection]) -> None:
    """Take the answers that are still to come: a server should not see calls that were broken off."""
    deadline = time.perf_counter() + GIVE_UP
    while busy and time.perf_counter() < deadline:
        writers = [connection.socket for connection in busy.values() if connection.unsent]
        can_read, can_write, _ = select.select(list(busy), writers, [], 1.0)
        for ready in can_write:
            busy[ready].writable()
        for ready in can_read:
            if busy[ready].readable():
                del busy[ready]


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def write_bodies(file: Path, bodies: list[bytes]) -> None:
    with file.open("wb") as out:
        for body in bodies:
            out.write(struct.pack("<Q", len(body)) + body)


def read_bodies(file: Path) -> list[bytes]:
    content, place, bodies = file.read_bytes(), 0, []
    while place < len(content):
        (size,) = struct.unpack_from("<Q", content, place)
        bodies.append(content[place + 8 : place + 8 + size])
        place += 8 + size
    return bodies


def main() -> None:
    job = json.load(sys.stdin)
    bodies = read_bodies(Path(job["bodies"]))
    kind = KINDS[job["kind"]]
    try:
        connections = [kind(job["port"], bodies, **job["call"]) for _ in range(job["connections"])]
        told = run(connections, job["seconds"], job["warm_up"], job.get("rate"))
    except Failed as error:
        sys.exit(f"load: {error}")
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
