"""The clients of the soak: one process, one thread, many connections, and every answer recorded.

    python clients.py JOB.json      commands are JSON lines on stdin, events are JSON lines on stdout

First every connection has one request in flight, which measures the peak. After the command {"rates": …} requests start
at a fixed rate for each endpoint, on any free connection, and their time counts from when they were due.

All requests are prepared probes. The same probe answered by the same version has the same bytes, so an answer is
reported once, the first time its bytes are seen, and then only counted: the soak checks all of them.

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

sys.path.insert(0, str(Path(__file__).parents[1]))  # a separate process, started by this file's name

from peers.serving.load import Connection, Failed, GrpcConnection, HttpConnection

TIMEOUT = 15.0  # seconds for an answer
LIFE = 10.0  # seconds of a connection, roughly, so that restarted workers get some
BACKLOG = 5.0  # seconds by which a request may be late before it is dropped
RETRY = 0.1  # seconds between attempts to connect
_STATUS = re.compile(rb"grpc-status.(\d+)", re.DOTALL)
_MESSAGE = re.compile(rb"grpc-message.([ -~]{0,300})", re.DOTALL)


class Retry(Exception):
    """The server reports that it has not begun this request: a client retries it transparently."""


class Refused(Exception):
    """An error response."""


Request = dict[str, Any]  # where, headers, body (base64)
RawAnswer = tuple[bytes, str]  # its body; the version, if a header names it


class _Grpc(GrpcConnection):
    """Unary calls of several methods, with their answers."""

    def __init__(self, port: int, requests: list[Request]) -> None:
        super().__init__(port, [], 0, "")
        host = f"127.0.0.1:{port}"
        self.frames = [
            self._frames(request["where"], host, base64.b64decode(request["body"])) for request in requests
        ]
        self.draining, self.busy = False, False
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
                self.draining = True
                if self.busy and self.stream > struct.unpack_from(">I", payload)[0]:
                    raise Retry
            elif kind not in (self.DATA, self.HEADERS, 2, 5, 9):
                self._control(kind, flags, stream, payload)
        del buffer[:place]
        self._flush()
        return ended

    def answer(self) -> RawAnswer:
        self.busy = False
        status = _STATUS.search(self.trailers)
        if status is None or status[1] != b"0":
            message = _MESSAGE.search(self.trailers)
            code = "no status" if status is None else f"gRPC status {status[1].decode()}"
            raise Refused(f"{code}: {'' if message is None else message[1].decode()}")
        return bytes(self.message[5:]), ""


class _Http(HttpConnection):
    """HTTP/1.1 requests of several paths, with their answers."""

    def __init__(self, port: int, requests: list[Request]) -> None:
        super().__init__(port, [], 0, "", {})
        self.draining, self.busy = False, False
        for request in requests:
            body = base64.b64decode(request["body"])
            lines = [
                f"POST {request['where']} HTTP/1.1",
                f"Host: 127.0.0.1:{port}",
                f"Content-Length: {len(body)}",
            ]
            lines += [f"{name}: {value}" for name, value in request["headers"].items()]
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

    def answer(self) -> RawAnswer:
        self.busy = False
        self.draining |= "\nconnection: close" in self.head
        body = bytes(self.buffer[self.body_at :])
        if not self.head.startswith("http/1.1 200"):
            raise Refused(f"{self.head.splitlines()[0]}: {body[:300].decode(errors='replace')}")
        version = re.search(r"\nclickline-version: *(\d+)", self.head)
        return body, "" if version is None else version[1]


class _Link:
    """One connection of an endpoint, reopened when it closes."""

    def __init__(self, endpoint: _Endpoint, number: int) -> None:
        self.endpoint = endpoint
        self.number = number
        self.connection: Any = None
        self.ask = -1  # the probe in flight
        self.began = 0.0
        self.sent = 0.0
        self.opened = 0.0
        self.port = 0
        self.retry_at = 0.0
        self.writing = False


class _Endpoint:
    """An endpoint of a server: its probes, its connections and its request rate."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.name: str = described["name"]
        self.port: int = described["port"]
        self.kind = {"grpc": _Grpc, "http": _Http}[described["kind"]]
        self.requests: list[Request] = described["requests"]
        self.links = [_Link(self, number) for number in range(described["connections"])]
        self.closed: int = described["closed"]  # connections of the closed loop
        self.free: deque[_Link] = deque()
        self.again: deque[tuple[int, float]] = deque()  # probes to retry, and when they were due
        self.rate = 0.0
        self.due = 0.0
        self.next = 0
        self.count: Counter[str] = Counter()
        self.times: list[int] = []  # in units of 10 µs


class Clients:
    """The event loop of all clients."""

    def __init__(self, endpoints: list[_Endpoint]) -> None:
        self._endpoints = endpoints
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        os.set_blocking(sys.stdin.fileno(), False)
        self._input = b""
        self._open = False
        self._stopping = False
        self._seen: dict[tuple[str, int, RawAnswer], int] = {}
        self._answers: Counter[int] = Counter()

    def run(self) -> None:
        reported = maintained = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if now - maintained > 0.02:
                maintained = now
                self._maintain(now)
            if now - reported >= 1.0:
                self._report_second(reported, now)
                reported = now
            for endpoint in self._endpoints:
                self._begin(endpoint, now)
            for key, mask in self._selector.select(self._pause(time.monotonic())):
                if key.data is None:
                    self._listen()
                elif key.data.connection is not None:
                    self._serve(key.data, mask)
        self._finish()
        self._report_second(reported, time.monotonic())
        _report({"counts": sorted(self._answers.items())})

    def _pause(self, now: float) -> float:
        wait = 0.02
        for endpoint in self._endpoints:
            if endpoint.rate and endpoint.free:
                wait = min(wait, endpoint.due - now)
        return max(0.0, wait)

    # ── requests ───────────────────────────────────────────────────────────────────────────────

    def _begin(self, endpoint: _Endpoint, now: float) -> None:
        while endpoint.again and endpoint.free:
            self._start(endpoint.free.popleft(), *endpoint.again.popleft(), now)
        if not self._open:
            while endpoint.free:
                link = endpoint.free.popleft()
                if link.number < endpoint.closed:
                    self._start(link, self._next(endpoint), now, now)
            return
        while endpoint.rate and endpoint.due <= now:
            if endpoint.free:
                self._start(endpoint.free.popleft(), self._next(endpoint), endpoint.due, now)
            elif now - endpoint.due > BACKLOG or not any(link.connection for link in endpoint.links):
                endpoint.count["given up"] += 1  # the server is down, or far too slow
            else:
                break
            endpoint.due += 1 / endpoint.rate

    @staticmethod
    def _next(endpoint: _Endpoint) -> int:
        endpoint.next = (endpoint.next + 1) % len(endpoint.requests)
        return endpoint.next

    def _start(self, link: _Link, ask: int, due: float, now: float) -> None:
        link.ask, link.began, link.sent = ask, due, now
        link.endpoint.count["asked"] += 1
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
                    raise Failed("an unexpected answer")
                self._answered(link)
        except Retry:
            link.endpoint.count["sent again"] += 1
            link.endpoint.count["asked"] -= 1
            link.endpoint.again.append((link.ask, link.began))
            link.ask = -1
            self._close(link)
        except (OSError, Failed) as error:
            self._lost(link, str(error) or type(error).__name__, reset=isinstance(error, ConnectionError))
        else:
            if link.connection is not None and connection.draining and link.ask < 0:
                self._close(link)  # the server is draining: the next request uses another connection
            elif link.connection is not None:
                self._watch(link)

    def _answered(self, link: _Link) -> None:
        endpoint, ask, now = link.endpoint, link.ask, time.monotonic()
        link.ask = -1
        try:
            answer = link.connection.answer()
        except Refused as refused:
            self._error(link, str(refused), now)
        else:
            endpoint.count["answered"] += 1
            endpoint.times.append(round((now - link.began) * 1e5))
            key = (endpoint.name, ask, answer)
            number = self._seen.get(key)
            if number is None:
                number = self._seen[key] = len(self._seen)
                body = base64.b64encode(answer[0]).decode()
                _report(
                    {
                        "answer": number,
                        "endpoint": endpoint.name,
                        "ask": ask,
                        "body": body,
                        "version": answer[1],
                        "at": now,
                    }
                )
            self._answers[number] += 1
        old = now - link.opened > LIFE * (0.75 + 0.5 * link.number / len(endpoint.links))
        if link.connection.draining or old:
            self._close(link)
        else:
            endpoint.free.append(link)

    # ── connections ────────────────────────────────────────────────────────────────────────────

    def _maintain(self, now: float) -> None:
        """Reconnect closed connections, and time out slow requests."""
        for endpoint in self._endpoints:
            for link in endpoint.links:
                if link.connection is None and now >= link.retry_at:
                    self._connect(link, now)
                elif link.ask >= 0 and now - link.sent > TIMEOUT:
                    self._lost(link, f"no answer for {TIMEOUT:.0f} seconds")

    def _connect(self, link: _Link, now: float) -> None:
        endpoint = link.endpoint
        try:
            connection: Connection = endpoint.kind(endpoint.port, endpoint.requests)
        except OSError as error:
            endpoint.count["refused"] += 1
            link.retry_at = now + RETRY
            if not isinstance(error, ConnectionError):
                self._error(link, f"cannot connect: {error}", now)
            return
        link.connection, link.opened, link.ask = connection, now, -1
        link.port = connection.socket.getsockname()[1]
        link.writing = bool(connection.unsent)
        self._selector.register(connection.socket, _events(connection), link)
        endpoint.free.append(link)

    def _watch(self, link: _Link) -> None:
        """Watch for writability while something is unsent."""
        if link.connection is not None and bool(link.connection.unsent) != link.writing:
            link.writing = not link.writing
            self._selector.modify(link.connection.socket, _events(link.connection), link)

    def _lost(self, link: _Link, what: str, *, reset: bool = False) -> None:
        """Handle a lost connection; an error only if a request was in flight."""
        if link.ask >= 0:
            self._error(link, what, time.monotonic(), reset=reset)
            link.ask = -1
        self._close(link)

    def _close(self, link: _Link) -> None:
        if link in link.endpoint.free:
            link.endpoint.free.remove(link)
        self._selector.unregister(link.connection.socket)
        link.connection.socket.close()
        link.connection = None

    def _finish(self) -> None:
        """Wait for the outstanding answers."""
        deadline = time.monotonic() + TIMEOUT
        while (
            any(link.ask >= 0 for endpoint in self._endpoints for link in endpoint.links)
            and time.monotonic() < deadline
        ):
            for key, mask in self._selector.select(0.1):
                if key.data is not None and key.data.connection is not None:
                    self._serve(key.data, mask)

    # ── commands and events ────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        if not data:  # the parent process has ended
            self._stopping = True
        self._input += data
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            command = json.loads(line)
            self._stopping |= bool(command.get("stop"))
            if "rates" in command:
                self._open = True
                now = time.monotonic()
                for endpoint in self._endpoints:
                    endpoint.rate, endpoint.due = command["rates"][endpoint.name], now
                    for link in endpoint.links:  # connections that the closed loop did not use
                        if link.connection is not None and link.ask < 0 and link not in endpoint.free:
                            endpoint.free.append(link)

    @staticmethod
    def _error(link: _Link, what: str, now: float, *, reset: bool = False) -> None:
        _report(
            {
                "error": what,
                "endpoint": link.endpoint.name,
                "at": now,
                "sent": link.sent,
                "port": link.port,
                "opened": link.opened,
                "reset": reset,  # by the server's kernel, not by a response
            }
        )
        link.endpoint.count["errors"] += 1

    def _report_second(self, since: float, now: float) -> None:
        endpoints = {}
        for endpoint in self._endpoints:
            endpoints[endpoint.name] = {
                **endpoint.count,
                "times": endpoint.times,
                "under way": sum(link.ask >= 0 for link in endpoint.links),
            }
            endpoint.count, endpoint.times = Counter(), []
        _report({"second": [since, now], "endpoints": endpoints})


def _events(connection: Connection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)


def _report(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    socket.setdefaulttimeout(10)
    Clients([_Endpoint(described) for described in json.loads(Path(sys.argv[1]).read_text())]).run()
