"""The brpc port: passes calls of baidu_std to the endpoints.

In brpc a port speaks every protocol, so the first bytes of a connection decide: baidu_std is answered here, HTTP and
gRPC by the servers of these ports.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from clickline.config.sections import ServeSection
from clickline.errors import Refusal, RequestRefused
from clickline.serving.auth import BearerAuth, server_tls
from clickline.serving.dataplane import Dataplane
from clickline.serving.http2.stream import BufferedBytes
from clickline.serving.ports import bound_socket
from clickline.serving.protocols.paddle_common import FeedRequest
from clickline.serving.protocols.request import Limits, Response
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import RequestMetrics
from clickline.wire import brpc_frames
from clickline.wire.brpc_frames import HEADER_BYTES, MAGIC, NotBrpc, answer_frame, error_frame

ERRORS: Mapping[Refusal, tuple[int, str]] = {
    "invalid": (brpc_frames.EREQUEST, "EREQUEST"),
    "not_found": (brpc_frames.EREQUEST, "EREQUEST"),
    "unauthenticated": (brpc_frames.ERPCAUTH, "ERPCAUTH"),
    "overloaded": (brpc_frames.ELIMIT, "ELIMIT"),
    "late": (brpc_frames.ERPCTIMEDOUT, "ERPCTIMEDOUT"),
    "unavailable": (brpc_frames.ELOGOFF, "ELOGOFF"),
    "internal": (brpc_frames.EINTERNAL, "EINTERNAL"),
}
_METHOD = "inference"
_BACKLOG = 1024
_MAX_CONNECTIONS = 16384  # of one process
_SLOW_SECONDS = 30.0  # for a frame to arrive, or an answer to be read
_LOGOFF_SECONDS = 1.0  # for clients to learn from an ELOGOFF that the server is stopping
_MAX_BUFFERED = 16  # times the largest request: limit of all incomplete frames
_HTTP2, _HTTP1 = b"PRI ", re.compile(rb"[A-Z]{3}[A-Z ]")
_PREFIX = 4  # bytes that decide the protocol

MakeConnection = Callable[[], asyncio.Protocol]


class BrpcServer:
    """The brpc server of one worker process; all workers share the port."""

    def __init__(
        self,
        endpoints: Mapping[str, type[FeedRequest]],
        plane: Dataplane,
        auth: BearerAuth,
        serve: ServeSection,
        metrics: RequestMetrics,
        log: ServerLog,
        http1: MakeConnection,
        http2: MakeConnection,
    ) -> None:
        """`endpoints`: by full service name. `http1` and `http2` make the connections of the other protocols."""
        self._endpoints = {**{name.rpartition(".")[2]: one for name, one in endpoints.items()}, **endpoints}
        self._plane = plane
        self._auth = auth
        self._serve = serve
        self._metrics = metrics
        self._log = log
        self.http1, self.http2 = http1, http2
        self.limits = Limits.of(serve)
        self.connections: set[BrpcConnection] = set()
        self.buffered = BufferedBytes(_MAX_BUFFERED * serve.max_body)
        self._draining = False
        self._server: asyncio.Server | None = None
        self._timeout_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        assert self._serve.brpc_port is not None
        tls = server_tls(self._serve.tls)
        if tls is not None:
            tls.set_alpn_protocols(["http/1.1", "h2"])  # gRPC's clients offer only h2
        bound = bound_socket(self._serve.host, self._serve.brpc_port, "brpc_port", shared=True)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: BrpcConnection(self), sock=bound, ssl=tls, backlog=_BACKLOG
        )
        self._timeout_task = asyncio.create_task(self._check_timeouts())

    async def _check_timeouts(self) -> None:
        while True:
            await asyncio.sleep(_SLOW_SECONDS / 4)
            for connection in list(self.connections):
                connection.check_timeouts(_SLOW_SECONDS)

    async def stop(self, drain: float) -> None:
        """Answer new calls with ELOGOFF, which makes clients use another server, and wait for the open ones."""
        self._draining = True
        if self._server is not None:
            self._server.close()
        if self._timeout_task is not None:
            self._timeout_task.cancel()
        now = monotonic()
        while self.connections and monotonic() < now + drain:
            if monotonic() >= now + min(drain, _LOGOFF_SECONDS):
                for connection in list(self.connections):
                    connection.close_if_idle()
            await asyncio.sleep(0.005)
        for connection in list(self.connections):
            connection.abort()

    def on_call(self, connection: BrpcConnection, meta: Any, rest: bytes) -> None:
        """Answer a call, now or when it is scored."""
        call = meta.correlation_id
        service = meta.request.service_name
        endpoint = self._endpoints.get(service)
        arrived = monotonic()
        try:
            self._authenticate(connection, meta.authentication_data)
            if endpoint is None:
                self._unknown(connection, call, "ENOSERVICE", f"There is no service {service[:200]}.")
                return
            if meta.request.method_name != _METHOD:
                text = f"{service} has no method {meta.request.method_name[:200]}. Available: {_METHOD}."
                self._unknown(connection, call, "ENOMETHOD", text)
                return
            if self._draining:
                raise RequestRefused("unavailable", "The server is stopping. Try another server.")
            request = endpoint(brpc_frames.message_of(meta, rest, self.limits.max_body), self.limits)
            timeout = meta.request.timeout_ms
            deadline = arrived + timeout / 1000 if timeout > 0 else None
            self._plane.submit(request, deadline, self._done(connection, call, request))
            if not request.finished:
                connection.requests.add(request)
        except RequestRefused as refused:
            self.refuse(connection, call, refused, endpoint)
        except Exception as error:  # noqa: BLE001 - a bug ends only the call that meets it
            self.refuse(connection, call, self._plane.internal_error(error, "brpc"), endpoint)

    def _done(
        self, connection: BrpcConnection, call: int, request: FeedRequest
    ) -> Callable[[Response | RequestRefused], None]:
        def done(result: Response | RequestRefused) -> None:
            connection.requests.discard(request)
            if isinstance(result, Response):
                connection.send(answer_frame(call, result.body))
                seconds = monotonic() - request.arrived
                self._metrics.answered(request.protocol, "OK", result.version, result.rows, seconds)
            else:
                self.refuse(connection, call, result, type(request))

        return done

    def _authenticate(self, connection: BrpcConnection, given: bytes) -> None:
        """Check the token, which brpc's clients send only with the first call of a connection."""
        if not connection.authenticated:
            self._auth.check(given if given[:7].lower() == b"bearer " else b"Bearer " + given)
            connection.authenticated = True

    def _unknown(self, connection: BrpcConnection, call: int, name: str, text: str) -> None:
        self._metrics.info_answered("brpc", name)
        connection.send(error_frame(call, getattr(brpc_frames, name), text))

    def refuse(
        self,
        connection: BrpcConnection,
        call: int,
        refused: RequestRefused,
        endpoint: type[FeedRequest] | None,
    ) -> None:
        """Answer a call with an error."""
        code, name = ERRORS[refused.kind]
        body = (
            endpoint.error_body(str(refused)) if endpoint is not None and refused.kind == "invalid" else None
        )
        if body is None:
            connection.send(error_frame(call, code, str(refused)))
        else:
            connection.send(answer_frame(call, body))
        self.count_refused("brpc" if endpoint is None else endpoint.protocol, name, refused)

    def count_refused(self, protocol: str, name: str, refused: RequestRefused) -> None:
        self._metrics.refused(protocol, name, refused.kind)
        self._log.refused(protocol, refused.kind, str(refused))

    def cancel(self, request: FeedRequest) -> None:
        """The client no longer waits for a call."""
        if self._plane.cancel(request):
            self._metrics.info_answered(request.protocol, "CANCELLED")


class BrpcConnection(asyncio.Protocol):
    """The connection of one client."""

    def __init__(self, server: BrpcServer) -> None:
        self._server = server
        self.requests: set[FeedRequest] = set()  # not answered yet
        self.authenticated = False
        self._is_brpc = False  # as its first bytes show
        self._buffer = bytearray()  # an incomplete frame
        self._buffered = 0  # its bytes that the server has counted
        self._skipped = 0  # bytes of a frame that was refused for its size, still to arrive
        self._incomplete_since = 0.0  # since when a frame is incomplete; 0: none is
        self._blocked_since = 0.0  # since when the client does not read its socket; 0: it does
        self._transport: Any = None

    # ── the transport ──────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if len(self._server.connections) >= _MAX_CONNECTIONS:
            transport.abort()
            return
        self._server.connections.add(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._count_buffered(0)
        for request in self.requests:
            self._server.cancel(request)
        self.requests.clear()

    def pause_writing(self) -> None:
        """The client does not read its answers, so stop reading its calls."""
        self._blocked_since = monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._blocked_since = 0.0
        self._transport.resume_reading()

    def check_timeouts(self, seconds: float) -> None:
        """Close the connection if a frame is incomplete, or an answer unread, for longer than `seconds`."""
        before = monotonic() - seconds
        if 0 < self._incomplete_since <= before or 0 < self._blocked_since <= before:
            what = "An answer was not read" if self._blocked_since else "A frame did not arrive"
            self._close("late", f"{what} within {seconds:.0f} seconds.")

    def close_if_idle(self) -> None:
        if not self.requests and not self._transport.get_write_buffer_size():
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _close(self, kind: Refusal, message: str) -> None:
        """Close a connection that cannot be used further, and count it."""
        self._server.count_refused("brpc", "CLOSED", RequestRefused(kind, message))
        self.abort()

    def send(self, frame: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame)

    # ── frames ─────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        view: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            view = self._buffer
        try:
            if not self._is_brpc and not self._recognize(bytes(view)):
                return
            self._keep_from(self._read_frames(view), view)
        except NotBrpc as error:
            self._close("invalid", f"A connection was closed: {error}.")

    def _recognize(self, first: bytes) -> bool:
        """Whether the first bytes are those of baidu_std. A connection of another protocol is handed over."""
        prefix = first[:_PREFIX]
        if prefix == MAGIC:
            self._is_brpc = True
            return True
        if len(prefix) < _PREFIX and prefix.isalpha() and prefix.isupper():
            self._keep_from(0, first)
            return False
        if not _HTTP1.fullmatch(prefix):
            raise NotBrpc("its first bytes are not those of baidu_std, HTTP or gRPC")
        connection = self._server.http2() if prefix == _HTTP2 else self._server.http1()
        self.connection_lost(None)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(first)
        return False

    def _read_frames(self, data: bytes | bytearray) -> int:
        """Handle the complete frames, and return where the incomplete one begins."""
        at = 0
        while True:
            if self._skipped:
                step = min(self._skipped, len(data) - at)
                self._skipped -= step
                at += step
            begin = at + HEADER_BYTES
            if len(data) < begin or self._transport.is_closing():
                return at
            size, meta_size = brpc_frames.read_header(data, at)
            too_large = size > self._server.limits.max_body + brpc_frames.MAX_META
            if len(data) < begin + (meta_size if too_large else size):
                return at
            meta = brpc_frames.read_meta(bytes(data[begin : begin + meta_size]))
            if too_large:
                self._skipped = HEADER_BYTES + size
                self._server.refuse(self, meta.correlation_id, self._too_large(size), None)
                continue
            at = begin + size
            self._server.on_call(self, meta, bytes(data[begin + meta_size : at]))

    def _too_large(self, size: int) -> RequestRefused:
        limit = self._server.limits.max_body
        return RequestRefused(
            "invalid",
            f"The call has {size} bytes; {limit} are allowed (serve.max_body). Send fewer rows at once.",
        )

    def _keep_from(self, at: int, view: bytes | bytearray) -> None:
        """Buffer the incomplete frame that begins at `at`."""
        if view is self._buffer:
            del self._buffer[:at]
        else:
            self._buffer = bytearray(view[at:])
        if not self._buffer and not self._skipped:
            self._incomplete_since = 0.0
        elif at or not self._incomplete_since:
            self._incomplete_since = monotonic()
        self._count_buffered(len(self._buffer))
        if self._server.buffered.bytes > self._server.buffered.limit:
            self._close("overloaded", "Too many large calls are half sent to this server. Try again later.")

    def _count_buffered(self, size: int) -> None:
        self._server.buffered.bytes += size - self._buffered
        self._buffered = size
