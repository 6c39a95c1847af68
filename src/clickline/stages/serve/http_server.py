"""The HTTP port: bytes of requests to the doors of `doors/rest.py` and back, under uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from time import monotonic
from typing import Any

import uvicorn

from clickline.config.sections import ServeSection, TlsSection
from clickline.errors import RequestRefused
from clickline.scoring.scorer import Answer
from clickline.stages.serve.access import Guard
from clickline.stages.serve.dataplane import Dataplane
from clickline.stages.serve.doors.calls import Call, Target
from clickline.stages.serve.doors.rest import Door, Headers, HttpLimits, Known, Page, Reply, refusal, route
from clickline.stages.serve.logs import Log
from clickline.stages.serve.measures import Tally
from clickline.stages.serve.versions import ScorerLike

__all__ = ["TIMEOUT_HEADER", "HttpDoors", "HttpServer", "listening_socket", "respond"]

TIMEOUT_HEADER = b"x-request-timeout-ms"
"""How long the client will wait: work that has not begun by then is not begun at all."""

_BODY_SECONDS = 30.0  # for a body to arrive
_BACKLOG = 1024

App = Callable[..., Awaitable[None]]


class HttpServer:
    """uvicorn within our own event loop, which has its own idea of signals."""

    def __init__(self, app: App, sockets: list[socket.socket], tls: TlsSection | None, drain: float) -> None:
        self._sockets = sockets
        self._server = _Quiet(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(drain)),
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
            )
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._running = asyncio.create_task(self._server.serve(self._sockets))
        while not self._server.started:
            if self._running.done():
                await self._running
                raise RuntimeError("the HTTP server ended before it began")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Take no more connections, let running requests end."""
        if self._running is not None:
            self._server.should_exit = True
            await self._running


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening_socket(host: str, port: int, *, shared: bool) -> socket.socket:
    """A socket bound to a port, which other processes of ours may be bound to as well."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


async def respond(
    send: Any, status: int, kind: bytes, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    await _send(send, status, ((b"content-type", kind), *headers), body)


async def _send(send: Any, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class _HttpWork:
    """A request to a door."""

    __slots__ = ("_body", "_door", "_headers", "_limits", "protocol")

    def __init__(self, door: Door, body: bytes, headers: Headers, limits: HttpLimits) -> None:
        self.protocol = door.protocol
        self._door = door
        self._body = body
        self._headers = headers
        self._limits = limits

    def target(self) -> Target:
        return self._door.target

    def decode(self, scorer: ScorerLike) -> Call:
        return self._door.decode(self._body, self._headers, scorer, self._limits)

    def encode(self, call: Call, answer: Answer) -> Reply:
        return self._door.encode(call, answer)


class HttpDoors:
    """The ASGI application of the HTTP port."""

    def __init__(self, plane: Dataplane, guard: Guard, serve: ServeSection, tally: Tally, log: Log) -> None:
        self._plane = plane
        self._guard = guard
        self._tally = tally
        self._log = log
        self._limits = HttpLimits(
            max_rows=serve.max_rows,
            ignore_unknown=serve.unknown_fields == "ignore",
            max_body=serve.max_body,
        )

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        arrived = monotonic()
        found = route(scope["method"], scope["path"])
        protocol = "rest" if isinstance(found, Reply) else found.protocol
        refuse = refusal if isinstance(found, Reply) else found.refuse
        headers = dict(scope["headers"])
        try:
            if not scope["path"].startswith("/v2/health/"):  # probes have no token
                self._guard.check(headers.get(b"authorization"))
            deadline = _deadline(headers, arrived)
            body = await self._body(headers, receive)
            if isinstance(found, Door):
                work = _HttpWork(found, body, headers, self._limits)
                outcome = await self._plane.answer(work, deadline)
                reply: Reply = outcome.reply
                seconds = monotonic() - arrived
                self._tally.answered(protocol, str(reply.status), outcome.version, outcome.rows, seconds)
            else:
                reply = found if isinstance(found, Reply) else self._page(found)
                self._tally.told(protocol, str(reply.status))
        except RequestRefused as refused:
            reply = refuse(refused.kind, str(refused))
            self._tally.refused(protocol, str(reply.status), refused.kind)
            self._log.refused(protocol, refused.kind, str(refused))
        body = b"" if scope["method"] == "HEAD" else reply.body
        await _send(send, reply.status, reply.headers, body)

    def _page(self, page: Page) -> Reply:
        current = self._plane.versions.current
        return page.answer(Known(self._plane.versions.names, None if current is None else current.scorer))

    async def _body(self, headers: Headers, receive: Any) -> bytes:
        limit = self._limits.max_body
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told) > limit:
            raise _too_large(limit)
        message = await receive()
        if not message.get("more_body"):
            return bytes(message.get("body", b""))
        pieces, size = [message["body"]], len(message["body"])
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while message.get("more_body"):
                    message = await receive()
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise RequestRefused(
                "late", f"The body did not arrive within {_BODY_SECONDS:.0f} seconds."
            ) from None
        return b"".join(pieces)


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(
        "invalid", f"The body is larger than {limit} bytes (serve.max_body). Send fewer rows at once."
    )


def _deadline(headers: Headers, arrived: float) -> float | None:
    told = headers.get(TIMEOUT_HEADER)
    if told is None:
        return None
    if not told.isdigit() or len(told) > 9:
        shown = told[:20].decode("latin-1")
        raise RequestRefused(
            "invalid", f'{TIMEOUT_HEADER.decode()} is "{shown}"; a whole number of milliseconds is allowed.'
        )
    return arrived + int(told) / 1000
