"""Slow, silent and endless HTTP/1 clients on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop
from standin import StandIn

from clickline.config.sections import ServeSection
from clickline.serving import http1
from clickline.serving.auth import BearerAuth
from clickline.serving.dataplane import Dataplane
from clickline.serving.http_server import HttpEndpoints, HttpServer
from clickline.serving.open_versions import OpenVersions
from clickline.serving.ports import bound_socket
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import RequestMetrics
from servers.waiting import eventually

MAX_BODY = 1 << 20
HEAD = b"POST /v1/models/ctr:predict HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"instances": [{"I1": 0}]}'
COMPLETE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


class Running:
    """The HTTP port in a thread, with version 5."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.metrics = RequestMetrics()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        assert self._up.wait(20)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        versions = OpenVersions(("ctr",), lambda scorer: None)
        versions.add(StandIn(5))
        versions.switch(5)
        log = ServerLog("test", lambda line: self.lines.append(json.loads(line)))
        plane = Dataplane(versions, log, queue=64)
        serve = ServeSection(max_body=MAX_BODY)
        self.endpoints = HttpEndpoints(plane, BearerAuth(None), serve, self.metrics, log)
        bound = bound_socket("127.0.0.1", 0, "http_port")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # an unread answer is noticed soon
        self.port = bound.getsockname()[1]
        self.server = HttpServer(self.endpoints, [bound], None, 10.0, self.endpoints.refused)
        await self.server.start()
        self._up.set()
        await self._stop.wait()
        await self.server.stop()

    def check_timeouts(self, seconds: float) -> None:
        self.loop.call_soon_threadsafe(
            lambda: [one.check_timeouts(seconds) for one in self.server._connections()]
        )

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        self.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@pytest.fixture
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


def receive(connection: socket.socket, until: bytes = b"never received") -> bytes:
    """Receive until the data contains `until`, or the connection closes."""
    got = b""
    while until not in got:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            break
        if not piece:
            break
        got += piece
    return got


@pytest.mark.parametrize("endless", [b"x-more: " + b"y" * 8000 + b"\r\n", b"y" * 8000])
def test_endless_headers_are_refused(server: Running, endless: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(HEAD + b"x-first: ")
        sent = 0
        try:
            for _ in range(2000):  # 16 MB, if they were accepted
                connection.sendall(endless)
                sent += len(endless)
        except OSError:
            pass
        assert sent < 8_000_000
    eventually(lambda: any("The headers are larger" in line.get("message", "") for line in server.lines))


def test_endless_trailers_are_discarded(server: Running) -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n"
    with server.connect() as connection:
        connection.sendall(chunked)
        for number in range(50):
            connection.sendall(b"x-%d: y\r\n" % number)
        eventually(lambda: len(server.server._connections()) == 1)
        connection.sendall(b"\r\n")
        assert b"200 OK" in receive(connection, b"predictions")
        (protocol,) = server.server._connections()
        assert len(protocol.scope["headers"]) == 2 and list(protocol.headers) == []


@pytest.mark.parametrize(
    "begun", [b"", HEAD, HEAD + b"content-length: 99\r\n\r\n", COMPLETE[:-3], COMPLETE + HEAD]
)
def test_request_that_does_not_arrive_times_out(server: Running, begun: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(begun)
        if begun.startswith(COMPLETE):
            receive(connection, b"predictions")
        eventually(lambda: len(server.server._connections()) == 1)
        (protocol,) = server.server._connections()
        eventually(lambda: bool(protocol._request_since) and (not begun or protocol._requests > 0))
        server.check_timeouts(1000.0)
        server.check_timeouts(0.0)
        received = receive(connection)
    assert (b"504" in received and b"did not arrive" in received) == bool(begun)
    eventually(lambda: not server.server._connections())


def test_idle_keep_alive_connection_is_not_closed(server: Running) -> None:
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(COMPLETE)
            assert b"200 OK" in receive(connection, b"predictions")
            server.check_timeouts(0.0)


def test_client_answered_before_its_body_arrives_is_not_answered_twice(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % (2 * MAX_BODY) + b"x" * 1000)
        first = receive(connection, b"serve.max_body")
        assert b"400" in first
        server.check_timeouts(0.0)
        assert receive(connection).count(b"HTTP/1.1") == 0


def test_disconnected_client_is_not_counted_as_refused(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(COMPLETE[:-3])
        eventually(lambda: bool(server.server._connections()))
    eventually(lambda: not server.server._connections())
    with server.connect() as connection:
        connection.sendall(COMPLETE)
        assert b"200 OK" in receive(connection, b"predictions")
    assert server.lines == []
    assert server.metrics.counts == {("requests", "tfserving_rest", "200"): 1, ("rows", "tfserving_rest"): 1}


def test_incomplete_bodies_are_buffered_up_to_a_limit(server: Running) -> None:
    half = HEAD + b"content-length: %d\r\n\r\n" % MAX_BODY + b" " * (MAX_BODY - 1000)
    connections = [server.connect() for _ in range(18)]
    try:
        for n, connection in enumerate(connections):
            connection.sendall(half)
            if n < 16:
                eventually(lambda n=n: server.endpoints._buffered == (n + 1) * (MAX_BODY - 1000))  # type: ignore[misc]
            else:
                assert b"429" in receive(connection, b"half sent")
        assert server.endpoints._buffered <= 17 * MAX_BODY
    finally:
        for connection in connections:
            connection.close()
    eventually(lambda: server.endpoints._buffered == 0)


def test_connections_are_limited(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "_MAX_CONNECTIONS", 1)
    with server.connect() as first:
        first.sendall(COMPLETE)
        assert b"200 OK" in receive(first, b"predictions")
        with server.connect() as second:
            assert receive(second) == b""
        first.sendall(COMPLETE)
        assert b"200 OK" in receive(first, b"predictions")


def test_unread_answer_times_out(server: Running) -> None:
    rows = b",".join([b"{}"] * 6000)
    body = b'{"instances": [' + rows + b"]}"
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request)
        eventually(
            lambda: bool(server.server._connections()) and server.server._connections()[0]._blocked_since > 0
        )
        server.check_timeouts(1000.0)
        assert server.server._connections()
        server.check_timeouts(0.0)
        eventually(lambda: not server.server._connections())


def test_incomplete_request_does_not_delay_shutdown(server: Running) -> None:
    with server.connect() as idle, server.connect() as half, server.connect() as headless:
        half.sendall(COMPLETE[:-3])
        headless.sendall(HEAD)
        eventually(lambda: len(server.server._connections()) == 3)
        began = time.monotonic()
        server.stop()
        received = receive(half)
        assert b"503" in received and b"The server is stopping" in received and b"retry-after" in received
        receive(idle), receive(headless)
        server.close()
        assert time.monotonic() - began < 5  # not the ten seconds of the drain timeout


def test_request_completed_during_shutdown_is_answered(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(COMPLETE[:-3])
        eventually(lambda: bool(server.server._connections()))
        server.stop()
        eventually(lambda: server.server._server.should_exit)  # within the second of grace
        connection.sendall(COMPLETE[-3:])
        assert b"200 OK" in receive(connection)


def test_request_sent_during_shutdown_is_answered_as_the_last(server: Running) -> None:
    """A keep-alive connection is not closed at once: what the client is sending would be lost."""
    with server.connect() as kept, server.connect() as idle:
        for connection in (kept, idle):
            connection.sendall(COMPLETE)
            received = b""
            while b"predictions" not in received:
                received += connection.recv(65536)
            assert b"connection: close" not in received
        server.stop()
        eventually(
            lambda: server.server._server.should_exit and not server.server._server.servers[0].is_serving()
        )
        kept.sendall(COMPLETE)
        received = receive(kept)
        assert b"200 OK" in received and b"connection: close" in received
        assert receive(idle) == b""  # closed after a second


UPGRADE = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
)


@pytest.mark.parametrize("pieces", [1, 7], ids=["at once", "in pieces"])
def test_client_that_offers_http2_is_answered_in_http1(server: Running, pieces: int) -> None:
    """Java's client and curl --http2 do this; further requests on the same connection have no upgrade header."""
    requests = COMPLETE.replace(b"host: x\r\n", b"host: x\r\n" + UPGRADE) + COMPLETE
    with server.connect() as connection:
        size = -(-len(requests) // pieces)
        for start in range(0, len(requests), size):
            connection.sendall(requests[start : start + size])
        answers = b""
        while answers.count(b"predictions") < 2:
            got = connection.recv(65536)
            assert got, answers
            answers += got
        assert answers.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("path", [b"x:80", b"/v1/models/ctr"])
def test_connect_method_is_refused(server: Running, path: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(b"CONNECT " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 400 " in receive(connection)
