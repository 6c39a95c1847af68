"""The HTTP port: bytes of requests to the doors of `doors/rest.py` and back, under uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from time import monotonic
from typing import Any, cast

import uvicorn

from clickline.config.sections import ServeSection, TlsSection
from clickline.errors import Refusal, RequestRefused
from clickline.scoring.scorer import Answer
from clickline.serving.auth import Guard
from clickline.serving.dataplane import Dataplane
from clickline.serving.http1 import Http1, Tell
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols.call import Call, Target
from clickline.serving.protocols.http_common import (
    STATUS,
    Door,
    Headers,
    HttpLimits,
    Known,
    Page,
    Reply,
    refusal,
)
from clickline.serving.protocols.http_routes import route
from clickline.serving.server_log import Log
from clickline.serving.server_metrics import Tally

TIMEOUT_HEADER = b"x-request-timeout-ms"
"""How long the client will wait: work that has not begun by then is not begun at all."""

_SLOW_SECONDS = 30.0  # for a request to arrive, or an answer to be taken
_HALF_SECONDS = 1.0  # for requests that are half here when the server stops
_MOST_ARRIVING = 16  # of the largest request: all that may be half here
_BACKLOG = 1024

_log = logging.getLogger(__name__)  # the service's own log hears it

App = Callable[..., Awaitable[None]]


class HttpServer:
    """uvicorn within our own event loop, which has its own idea of signals."""

    def __init__(
        self,
        app: App,
        sockets: list[socket.socket],
        tls: TlsSection | None,
        drain: float,
        tell: Tell = lambda kind, words: None,
    ) -> None:
        """`tell` hears of requests that were refused before `app` could hear of them."""
        self._sockets = sockets
        self._drain = drain
        self._server = _Quiet(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(Http1, tell)),
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
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._running = asyncio.create_task(self._server.serve(self._sockets))
        while not self._server.started:
            if self._running.done():
                await self._running
                raise RuntimeError("the HTTP server ended before it began")
            await asyncio.sleep(0.005)
        self._sweeping = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Take no more connections, let running requests end."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._running is not None:
            self._server.should_exit = True
            await asyncio.wait([self._running], timeout=min(self._drain, _HALF_SECONDS))
            for connection in self._connections():
                connection.hurry()
            await self._running

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SLOW_SECONDS / 4)
            for connection in self._connections():
                try:
                    connection.sweep(_SLOW_SECONDS)
                except Exception:  # noqa: BLE001 - a bug with one must not end the sweeping of all
                    _log.exception("a connection could not be swept")

    def _connections(self) -> list[Http1]:
        return [one for one in self._server.server_state.connections if isinstance(one, Http1)]


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def respond(
    send: Any, status: int, kind: bytes, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    await _send(send, status, ((b"content-type", kind), *headers), body)


async def _send(send: Any, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    """The body also where HEAD was asked: uvicorn leaves it out, and its length is told as for GET."""
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
        self._arriving = 0  # bytes of bodies that are not whole yet
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
        except _Gone:
            return
        except RequestRefused as refused:
            reply = refuse(refused.kind, str(refused))
            self._count(protocol, reply.status, refused)
        except Exception as error:  # noqa: BLE001 - a bug that one request meets is told to that one
            bug = self._plane.bug(error, protocol)
            reply = refuse(bug.kind, str(bug))
            self._count(protocol, reply.status, bug)
        await _send(send, reply.status, reply.headers, reply.body)

    def refused(self, kind: Refusal, words: str) -> None:
        """A request that was never whole was refused."""
        self._count("rest", STATUS[kind], RequestRefused(kind, words))

    def _count(self, protocol: str, status: int, refused: RequestRefused) -> None:
        self._tally.refused(protocol, str(status), refused.kind)
        self._log.refused(protocol, refused.kind, str(refused))

    def _page(self, page: Page) -> Reply:
        current = self._plane.versions.current
        return page.answer(Known(self._plane.versions.names, None if current is None else current.scorer))

    async def _body(self, headers: Headers, receive: Any) -> bytes:
        limit = self._limits.max_body
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told) > limit:
            raise _too_large(limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        if not message["more_body"]:
            return bytes(message["body"])
        pieces, size = [], 0
        try:
            while True:
                pieces.append(message["body"])
                size += len(pieces[-1])
                self._arriving += len(pieces[-1])
                if size > limit:
                    raise _too_large(limit)
                if self._arriving > _MOST_ARRIVING * limit:
                    raise RequestRefused(
                        "overloaded", "Too many large requests are half sent to this server. Try again later."
                    )
                if not message["more_body"]:
                    return b"".join(pieces)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
        finally:
            self._arriving -= size


class _Gone(Exception):
    """The client has gone before its request was whole."""


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
