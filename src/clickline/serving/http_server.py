"""The HTTP port: passes requests to the endpoints of `protocols/`, under uvicorn."""

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
from clickline.serving.auth import BearerAuth
from clickline.serving.dataplane import Dataplane
from clickline.serving.http1 import Http1Protocol, OnRefused
from clickline.serving.protocols.http_common import STATUS, Headers, error_response
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.request import Limits, Response
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import RequestMetrics

TIMEOUT_HEADER = b"x-request-timeout-ms"
"""How long the client waits: a request whose scoring has not begun by then is not scored."""

_SLOW_SECONDS = 30.0  # for a request to arrive, or an answer to be read
_PARTIAL_SECONDS = 1.0  # for incomplete requests to arrive when the server stops
_MAX_BUFFERED = 16  # times the largest request: limit of all incomplete requests
_BACKLOG = 1024

_log = logging.getLogger(__name__)  # handled by ServerLog

App = Callable[..., Awaitable[None]]


class HttpServer:
    """uvicorn in the server's event loop, without its signal handlers."""

    def __init__(
        self,
        app: App,
        sockets: list[socket.socket],
        tls: TlsSection | None,
        drain: float,
        on_refused: OnRefused = lambda kind, message: None,
    ) -> None:
        """`on_refused` is called for requests that were refused before they reached `app`."""
        self._sockets = sockets
        self._drain = drain
        self._server = _ServerWithoutSignals(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(Http1Protocol, on_refused)),
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
        self._timeout_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._running = asyncio.create_task(self._server.serve(self._sockets))
        while not self._server.started:
            if self._running.done():
                await self._running
                raise RuntimeError("the HTTP server failed to start")
            await asyncio.sleep(0.005)
        self._timeout_task = asyncio.create_task(self._check_timeouts())

    def connection(self) -> asyncio.Protocol:
        """A further connection, accepted on another port."""
        config, state = self._server.config, self._server.server_state
        made: asyncio.Protocol = config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]
        return made

    async def stop(self) -> None:
        """Accept no more connections, and let running requests finish."""
        if self._timeout_task is not None:
            self._timeout_task.cancel()
        if self._running is not None:
            self._server.should_exit = True
            await asyncio.wait([self._running], timeout=min(self._drain, _PARTIAL_SECONDS))
            for connection in self._connections():
                connection.finish_drain()
            await self._running

    async def _check_timeouts(self) -> None:
        while True:
            await asyncio.sleep(_SLOW_SECONDS / 4)
            for connection in self._connections():
                try:
                    connection.check_timeouts(_SLOW_SECONDS)
                except Exception:  # noqa: BLE001 - a bug with one connection must not stop the checks of the others
                    _log.exception("checking a connection's timeouts failed")

    def _connections(self) -> list[Http1Protocol]:
        return [
            protocol
            for protocol in self._server.server_state.connections
            if isinstance(protocol, Http1Protocol)
        ]


class _ServerWithoutSignals(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def respond(
    send: Any, status: int, kind: bytes, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    await _send(send, status, ((b"content-type", kind), *headers), body)


async def _send(send: Any, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a response. For HEAD uvicorn drops the body and keeps the length that GET would have."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class HttpEndpoints:
    """The ASGI application of the HTTP port."""

    def __init__(
        self, plane: Dataplane, auth: BearerAuth, serve: ServeSection, metrics: RequestMetrics, log: ServerLog
    ) -> None:
        self._plane = plane
        self._auth = auth
        self._metrics = metrics
        self._log = log
        self._buffered = 0  # bytes of incomplete bodies
        self._limits = Limits.of(serve)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        arrived = monotonic()
        found = route(scope["method"], scope["path"])
        protocol, refuse = (
            ("rest", error_response) if isinstance(found, Response) else (found.protocol, found.refuse)
        )
        headers = dict(scope["headers"])
        try:
            if scope["path"] != "/health" and not scope["path"].startswith(
                "/v2/health/"
            ):  # probes have no token
                self._auth.check(headers.get(b"authorization"))
            deadline = _deadline(headers, arrived)
            body = await self._body(headers, receive)
            if isinstance(found, Response):
                response = found
            elif found.endpoint is None:
                response = found.description(self._plane.versions)
            else:
                response = await self._plane.answer(found.request(body, headers, self._limits), deadline)
            if response.rows:  # scored
                seconds = monotonic() - arrived
                self._metrics.answered(
                    protocol, str(response.status), response.version, response.rows, seconds
                )
            else:
                self._metrics.info_answered(protocol, str(response.status))
        except _Disconnected:
            return
        except RequestRefused as refused:
            response = refuse(refused.kind, str(refused))
            self._count_refused(protocol, response.status, refused)
        except Exception as error:  # noqa: BLE001 - a bug is reported to the request that meets it
            bug = self._plane.internal_error(error, protocol)
            response = refuse(bug.kind, str(bug))
            self._count_refused(protocol, response.status, bug)
        await _send(send, response.status, response.headers, response.body)

    def refused(self, kind: Refusal, message: str) -> None:
        """Count a request that was refused before it was complete."""
        self._count_refused("rest", STATUS[kind], RequestRefused(kind, message))

    def _count_refused(self, protocol: str, status: int, refused: RequestRefused) -> None:
        self._metrics.refused(protocol, str(status), refused.kind)
        self._log.refused(protocol, refused.kind, str(refused))

    async def _body(self, headers: Headers, receive: Any) -> bytes:
        limit = self._limits.max_body
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        if not message["more_body"]:
            return bytes(message["body"])
        pieces, size = [], 0
        try:
            while True:
                pieces.append(message["body"])
                size += len(pieces[-1])
                self._buffered += len(pieces[-1])
                if size > limit:
                    raise _too_large(limit)
                if self._buffered > _MAX_BUFFERED * limit:
                    raise RequestRefused(
                        "overloaded", "Too many large requests are half sent to this server. Try again later."
                    )
                if not message["more_body"]:
                    return b"".join(pieces)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Disconnected
        finally:
            self._buffered -= size


class _Disconnected(Exception):
    """The client disconnected before its request was complete."""


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(
        "invalid", f"The body is larger than {limit} bytes (serve.max_body). Send fewer rows at once."
    )


def _deadline(headers: Headers, arrived: float) -> float | None:
    timeout = headers.get(TIMEOUT_HEADER)
    if timeout is None:
        return None
    if not timeout.isdigit() or len(timeout) > 9:
        start = timeout[:20].decode("latin-1")
        raise RequestRefused(
            "invalid", f'{TIMEOUT_HEADER.decode()} is "{start}"; it must be a whole number of milliseconds.'
        )
    return arrived + int(timeout) / 1000
