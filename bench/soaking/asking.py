"""The clients of the soak: one process, one thread, many connections, and every answer kept.

    python asking.py JOB.json      commands come as lines of JSON on stdin, what happens goes out as lines on stdout

First every connection has one request under way: that is the peak. After the command {"rates": …} requests begin at a
fixed rate for each door, on whichever connection is free, and their time counts from when they were due.

All requests are probes that lie ready. The same probe answered by the same version has the same bytes, so an answer
is told once, the first time its bytes are seen, and then only counted: the soak checks all of them.

Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import base64
import json
import os
import re
import selectors
import socket
import struct
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a process of its own, started by this file's name

from peers.serving.load import Connection, Failed, GrpcConnection, HttpConnection

PATIENCE = 15.0  # seconds for an answer
LIFE = 10.0  # of a connection, about: so that workers that were started again get some
BACKLOG = 5.0  # seconds by which a request may be late before it is given up
RETRY = 0.1  # seconds between two tries to connect
_STATUS = re.compile(rb"grpc-status.(\d+)", re.DOTALL)
_MESSAGE = re.compile(rb"grpc-message.([ -~]{0,300})", re.DOTALL)


class Again(Exception):
    """The server says that it has not begun this request: a client sends it again, and nobody notices."""


class Refused(Exception):
    """An answer that is an error."""


Asked = dict[str, Any]  # where, headers, body (base64)
Answered = tuple[bytes, str]  # its body; the version, where a header names it


class _Grpc(GrpcConnection):
    """Unary calls of several methods, with their answers."""

    def __init__(self, port: int, asks: list[Asked]) -> None:
        super().__init__(port, [], 0, "")
        host = f"127.0.0.1:{port}"
        self.frames = [self._frames(ask["where"], host, base64.b64decode(ask["body"])) for ask in asks]
        self.leaving, self.busy = False, False
        self.message, self.trailers = bytearray(), b""

    def start(self, number: int) -> None:
        self.busy, self.trailers = True, b""
        self.message.clear()
        super().start(number)

    def readable(self) -> bool:
        buffer = self.buffer
        buffer += memoryview(self.chunk)[: self.receive()]
        place, ended = 0, False
        while len(buffer) - place >= 9:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", buffer, place)
            size = high << 16 | low
            if len(buffer) - place < 9 + size:
                break
            payload = bytes(buffer[place + 9 : place + 9 + size])
            place += 9 + size
            if kind in (self.DATA, self.HEADERS) and stream == self.stream:
                if kind == self.DATA:
                    self.message += payload
                else:
                    self.trailers = payload
                ended |= bool(flags & self.END_STREAM)
            elif kind == self.GO_AWAY:
                self.leaving = True
                if self.busy and self.stream > struct.unpack_from(">I", payload)[0]:
                    raise Again
            elif kind not in (self.DATA, self.HEADERS, 2, 5, 9):
                self._control(kind, flags, stream, payload)
        del buffer[:place]
        self._flush()
        return ended

    def answer(self) -> Answered:
        self.busy = False
        status = _STATUS.search(self.trailers)
        if status is None or status[1] != b"0":
            words = _MESSAGE.search(self.trailers)
            code = "no status" if status is None else f"gRPC status {status[1].decode()}"
            raise Refused(f"{code}: {'' if words is None else words[1].decode()}")
        return bytes(self.message[5:]), ""


class _Http(HttpConnection):
    """HTTP/1.1 requests of several paths, with their answers."""

    def __init__(self, port: int, asks: list[Asked]) -> None:
        super().__init__(port, [], 0, "", {})
        self.leaving, self.busy = False, False
        for ask in asks:
            body = base64.b64decode(ask["body"])
            lines = [
                f"POST {ask['where']} HTTP/1.1",
                f"Host: 127.0.0.1:{port}",
                f"Content-Length: {len(body)}",
            ]
            lines += [f"{name}: {value}" for name, value in ask["headers"].items()]
            self.ready.append(memoryview("\r\n".join([*lines, "", ""]).encode() + body))

    def start(self, number: int) -> None:
        self.busy = True
        super().start(number)

    def readable(self) -> bool:
        self.buffer += memoryview(self.chunk)[: self.receive()]
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        self.head = bytes(self.buffer[:end]).decode("latin-1").lower()
        length = re.search(r"\ncontent-length: *(\d+)", self.head)
        if length is None:
            raise Failed(f"an answer without a length: {self.head!r}")
        self.body_at = end + 4
        return len(self.buffer) >= self.body_at + int(length[1])

    def answer(self) -> Answered:
        self.busy = False
        self.leaving |= "\nconnection: close" in self.head
        body = bytes(self.buffer[self.body_at :])
        if not self.head.startswith("http/1.1 200"):
            raise Refused(f"{self.head.splitlines()[0]}: {body[:300].decode(errors='replace')}")
        version = re.search(r"\nclickline-version: *(\d+)", self.head)
        return body, "" if version is None else version[1]


class _Link:
    """A place for one connection of a door, made anew when it ends."""

    def __init__(self, door: _Door, number: int) -> None:
        self.door = door
        self.number = number
        self.connection: Any = None
        self.ask = -1  # the probe that is under way
        self.began = 0.0
        self.sent = 0.0
        self.opened = 0.0
        self.port = 0
        self.retry_at = 0.0
        self.writing = False


class _Door:
    """A protocol of a server: its probes, its connections, how often it is asked."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.name: str = described["name"]
        self.port: int = described["port"]
        self.kind = {"grpc": _Grpc, "http": _Http}[described["kind"]]
        self.asks: list[Asked] = described["asks"]
        self.links = [_Link(self, number) for number in range(described["connections"])]
        self.closed: int = described["closed"]  # connections of the closed loop
        self.free: deque[_Link] = deque()
        self.again: deque[tuple[int, float]] = deque()  # probes to be sent again, and when they were due
        self.rate = 0.0
        self.due = 0.0
        self.next = 0
        self.count: Counter[str] = Counter()
        self.times: list[int] = []  # in units of 10 µs


class Asking:
    """The loop."""

    def __init__(self, doors: list[_Door]) -> None:
        self._doors = doors
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        os.set_blocking(sys.stdin.fileno(), False)
        self._heard = b""
        self._open = False
        self._over = False
        self._seen: dict[tuple[str, int, Answered], int] = {}
        self._answers: Counter[int] = Counter()

    def run(self) -> None:
        told = swept = time.monotonic()
        while not self._over:
            now = time.monotonic()
            if now - swept > 0.02:
                swept = now
                self._sweep(now)
            if now - told >= 1.0:
                self._tell_second(told, now)
                told = now
            for door in self._doors:
                self._begin(door, now)
            for key, mask in self._selector.select(self._pause(time.monotonic())):
                if key.data is None:
                    self._listen()
                elif key.data.connection is not None:
                    self._serve(key.data, mask)
        self._finish()
        self._tell_second(told, time.monotonic())
        _tell({"counts": sorted(self._answers.items())})

    def _pause(self, now: float) -> float:
        wait = 0.02
        for door in self._doors:
            if door.rate and door.free:
                wait = min(wait, door.due - now)
        return max(0.0, wait)

    # ── requests ───────────────────────────────────────────────────────────────────────────────

    def _begin(self, door: _Door, now: float) -> None:
        while door.again and door.free:
            self._start(door.free.popleft(), *door.again.popleft(), now)
        if not self._open:
            while door.free:
                link = door.free.popleft()
                if link.number < door.closed:
                    self._start(link, self._next(door), now, now)
            return
        while door.rate and door.due <= now:
            if door.free:
                self._start(door.free.popleft(), self._next(door), door.due, now)
            elif now - door.due > BACKLOG or not any(link.connection for link in door.links):
                door.count["given up"] += 1  # nobody is there, or far too slow
            else:
                break
            door.due += 1 / door.rate

    @staticmethod
    def _next(door: _Door) -> int:
        door.next = (door.next + 1) % len(door.asks)
        return door.next

    def _start(self, link: _Link, ask: int, due: float, now: float) -> None:
        link.ask, link.began, link.sent = ask, due, now
        link.door.count["asked"] += 1
        try:
            link.connection.start(ask)
        except OSError as error:
            self._lost(
                link, f"{type(error).__name__} while sending", reset=isinstance(error, ConnectionError)
            )
            return
        self._watch(link)

    def _serve(self, link: _Link, mask: int) -> None:
        connection = link.connection
        try:
            if mask & selectors.EVENT_WRITE:
                connection.writable()
            if mask & selectors.EVENT_READ and connection.readable():
                if link.ask < 0:
                    raise Failed("an answer that nobody asked for")
                self._answered(link)
        except Again:
            link.door.count["sent again"] += 1
            link.door.count["asked"] -= 1
            link.door.again.append((link.ask, link.began))
            link.ask = -1
            self._close(link)
        except (OSError, Failed) as error:
            self._lost(link, str(error) or type(error).__name__, reset=isinstance(error, ConnectionError))
        else:
            if link.connection is not None and connection.leaving and link.ask < 0:
                self._close(link)  # it has said goodbye: the next request goes elsewhere
            elif link.connection is not None:
                self._watch(link)

    def _answered(self, link: _Link) -> None:
        door, ask, now = link.door, link.ask, time.monotonic()
        link.ask = -1
        try:
            answer = link.connection.answer()
        except Refused as refused:
            self._error(link, str(refused), now)
        else:
            door.count["answered"] += 1
            door.times.append(round((now - link.began) * 1e5))
            key = (door.name, ask, answer)
            number = self._seen.get(key)
            if number is None:
                number = self._seen[key] = len(self._seen)
                body = base64.b64encode(answer[0]).decode()
                _tell(
                    {
                        "answer": number,
                        "door": door.name,
                        "ask": ask,
                        "body": body,
                        "version": answer[1],
                        "at": now,
                    }
                )
            self._answers[number] += 1
        old = now - link.opened > LIFE * (0.75 + 0.5 * link.number / len(door.links))
        if link.connection.leaving or old:
            self._close(link)
        else:
            door.free.append(link)

    # ── connections ────────────────────────────────────────────────────────────────────────────

    def _sweep(self, now: float) -> None:
        """Connect who has no connection, give up what takes too long."""
        for door in self._doors:
            for link in door.links:
                if link.connection is None and now >= link.retry_at:
                    self._connect(link, now)
                elif link.ask >= 0 and now - link.sent > PATIENCE:
                    self._lost(link, f"no answer for {PATIENCE:.0f} seconds")

    def _connect(self, link: _Link, now: float) -> None:
        door = link.door
        try:
            connection: Connection = door.kind(door.port, door.asks)
        except OSError as error:
            door.count["refused"] += 1
            link.retry_at = now + RETRY
            if not isinstance(error, ConnectionError):
                self._error(link, f"cannot connect: {error}", now)
            return
        link.connection, link.opened, link.ask = connection, now, -1
        link.port = connection.socket.getsockname()[1]
        link.writing = bool(connection.unsent)
        self._selector.register(connection.socket, _events(connection), link)
        door.free.append(link)

    def _watch(self, link: _Link) -> None:
        """Wait for room to send where something is unsent."""
        if link.connection is not None and bool(link.connection.unsent) != link.writing:
            link.writing = not link.writing
            self._selector.modify(link.connection.socket, _events(link.connection), link)

    def _lost(self, link: _Link, what: str, *, reset: bool = False) -> None:
        """A connection that ended. Without a request under way nobody notices."""
        if link.ask >= 0:
            self._error(link, what, time.monotonic(), reset=reset)
            link.ask = -1
        self._close(link)

    def _close(self, link: _Link) -> None:
        if link in link.door.free:
            link.door.free.remove(link)
        self._selector.unregister(link.connection.socket)
        link.connection.socket.close()
        link.connection = None

    def _finish(self) -> None:
        """Take the answers that are still to come."""
        deadline = time.monotonic() + PATIENCE
        while (
            any(link.ask >= 0 for door in self._doors for link in door.links) and time.monotonic() < deadline
        ):
            for key, mask in self._selector.select(0.1):
                if key.data is not None and key.data.connection is not None:
                    self._serve(key.data, mask)

    # ── what is said ───────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        if not data:  # whoever started us is gone
            self._over = True
        self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            command = json.loads(line)
            self._over |= bool(command.get("stop"))
            if "rates" in command:
                self._open = True
                now = time.monotonic()
                for door in self._doors:
                    door.rate, door.due = command["rates"][door.name], now
                    for link in door.links:  # those beyond the closed loop's were put aside
                        if link.connection is not None and link.ask < 0 and link not in door.free:
                            door.free.append(link)

    @staticmethod
    def _error(link: _Link, what: str, now: float, *, reset: bool = False) -> None:
        _tell(
            {
                "error": what,
                "door": link.door.name,
                "at": now,
                "sent": link.sent,
                "port": link.port,
                "opened": link.opened,
                "reset": reset,  # by the kernel of the server, not by an answer
            }
        )
        link.door.count["errors"] += 1

    def _tell_second(self, since: float, now: float) -> None:
        doors = {}
        for door in self._doors:
            doors[door.name] = {
                **door.count,
                "times": door.times,
                "under way": sum(link.ask >= 0 for link in door.links),
            }
            door.count, door.times = Counter(), []
        _tell({"second": [since, now], "doors": doors})


def _events(connection: Connection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)


def _tell(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    socket.setdefaulttimeout(10)
    Asking([_Door(described) for described in json.loads(Path(sys.argv[1]).read_text())]).run()
