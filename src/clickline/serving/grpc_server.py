"""The gRPC port: passes calls to the endpoints, and serves health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from clickline.config.sections import ServeSection
from clickline.errors import Refusal, RequestRefused
from clickline.serving.auth import BearerAuth, server_tls
from clickline.serving.dataplane import Dataplane
from clickline.serving.http2.connection import Http2Connection
from clickline.serving.http2.stream import BufferedBytes, Stream
from clickline.serving.open_versions import OpenVersions
from clickline.serving.ports import bound_socket
from clickline.serving.protocols.request import Limits, Request, Response
from clickline.serving.server_log import ServerLog
from clickline.serving.server_metrics import RequestMetrics
from clickline.wire.messages import METHODS, POOL

STATUS: Mapping[Refusal, tuple[int, str]] = {
    "invalid": (3, "INVALID_ARGUMENT"),
    "not_found": (5, "NOT_FOUND"),
    "unauthenticated": (16, "UNAUTHENTICATED"),
    "overloaded": (8, "RESOURCE_EXHAUSTED"),
    "late": (4, "DEADLINE_EXCEEDED"),
    "unavailable": (14, "UNAVAILABLE"),
    "internal": (13, "INTERNAL"),
}
_NOT_FOUND, _UNIMPLEMENTED = 5, 12

_CHECK, _WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_BACKLOG = 1024
_SLOW_SECONDS = 30.0  # for a request to arrive, or an answer to be read
_GOAWAY_SECONDS = 1.0  # for clients to read our GOAWAY, and for incomplete requests to arrive
_MAX_BUFFERED = 16  # times the largest request: limit of all incomplete requests
_MAX_REFLECTION_REQUESTS = 1000  # in one reflection call


GrpcInfoEndpoint = Callable[[bytes, OpenVersions], bytes]
"""A method about the server or the model: metadata, status, health."""


class GrpcServer:
    """The gRPC server of one worker process; all workers share the port."""

    def __init__(
        self,
        endpoints: Mapping[str, type[Request]],
        info_endpoints: Mapping[str, tuple[str, GrpcInfoEndpoint]],
        plane: Dataplane,
        auth: BearerAuth,
        serve: ServeSection,
        metrics: RequestMetrics,
        log: ServerLog,
    ) -> None:
        """`endpoints` and `info_endpoints`: by full method name; the latter with the protocol's name for metrics and
        logs."""
        self._endpoints = endpoints
        self._info_endpoints = info_endpoints
        self._plane = plane
        self._auth = auth
        self._serve = serve
        self._metrics = metrics
        self._log = log
        self._limits = Limits.of(serve)
        self._requests: dict[Stream, Request] = {}
        self._connections: set[Http2Connection] = set()
        self._server: asyncio.Server | None = None
        self._health = _Health(("", *METHODS))
        names = (*METHODS, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        self._reflection = reflection.ReflectionServicer(names, pool=_Pools())
        self._timeout_task: asyncio.Task[None] | None = None
        self.buffered = BufferedBytes(_MAX_BUFFERED * serve.max_body)

    async def start(self) -> None:
        tls = server_tls(self._serve.tls)
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        bound = bound_socket(self._serve.host, self._serve.grpc_port, "grpc_port", shared=True)
        self._server = await asyncio.get_running_loop().create_server(
            self.connection, sock=bound, ssl=tls, backlog=_BACKLOG
        )
        self._timeout_task = asyncio.create_task(self._check_timeouts())

    def connection(self) -> Http2Connection:
        """A further connection, of this port or another."""
        return Http2Connection(self, self._connections)

    async def _check_timeouts(self) -> None:
        while True:
            await asyncio.sleep(_SLOW_SECONDS / 4)
            for connection in list(self._connections):
                try:
                    connection.check_timeouts(_SLOW_SECONDS)
                except Exception as error:  # noqa: BLE001 - a bug with one connection must not stop the checks of the others
                    self._log.unexpected(error, "checking timeouts", "grpc")

    def serving(self, ready: bool) -> None:
        """Set what the health service reports, for the server and for each service."""
        self._health.set(ready)

    async def stop(self, drain: float) -> None:
        """Accept no more calls, and wait up to `drain` seconds for the open ones."""
        self._health.stop()
        if self._server is not None:
            self._server.close()
        if self._timeout_task is not None:
            self._timeout_task.cancel()
        for connection in list(self._connections):
            connection.start_drain()
        now = monotonic()
        incomplete_until, deadline = now + min(drain, _GOAWAY_SECONDS), now + drain
        while self._connections and monotonic() < deadline:
            if monotonic() >= incomplete_until:
                for connection in list(self._connections):
                    connection.finish_drain()
                if not self._requests and not any(connection.busy for connection in self._connections):
                    break  # the remaining connections wait for no answer
            await asyncio.sleep(0.005)
        for connection in list(self._connections):
            connection.abort()

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    @property
    def max_message_bytes(self) -> int:
        return self._serve.max_body

    def on_open(self, stream: Stream) -> None:
        path = stream.path
        if path in (
            _CHECK,
            _WATCH,
        ):  # need no token: probes have none, and the answer reveals nothing
            return
        known = path in self._endpoints or path in self._info_endpoints or path == _REFLECTION
        if not self._auth.allow_all:
            try:
                self._auth.check(stream.headers.get("authorization", "").encode("latin-1"))
            except RequestRefused as refused:
                self._refuse("grpc", refused, stream)
                return
        if not known:
            self._metrics.info_answered("grpc", "UNIMPLEMENTED")
            stream.refuse(_UNIMPLEMENTED, f"There is no method {path[:200]}.")
        stream.streaming = path == _REFLECTION

    def on_message(self, stream: Stream, message: bytes) -> None:
        path = stream.path
        endpoint = self._endpoints.get(path)
        if endpoint is not None:
            self._predict(stream, endpoint(message, self._limits))
        elif path in self._info_endpoints:
            self._describe(stream, *self._info_endpoints[path], message)
        elif path == _REFLECTION:
            self._reflect(stream, message)
        else:
            self._health.answer(stream, message, watch=path == _WATCH)

    def on_end(self, stream: Stream) -> None:
        stream.finish()

    def on_cancel(self, stream: Stream) -> None:
        request = self._requests.pop(stream, None)
        if request is not None and self._plane.cancel(request):
            self._metrics.info_answered(request.protocol, "CANCELLED")
        self._health.forget(stream)

    def _predict(self, stream: Stream, request: Request) -> None:
        def done(result: Response | RequestRefused) -> None:
            self._requests.pop(stream, None)
            if isinstance(result, Response):
                stream.reply(result.body)
                seconds = monotonic() - request.arrived
                self._metrics.answered(request.protocol, "OK", result.version, result.rows, seconds)
            else:
                self._refuse(request.protocol, result, stream)

        try:
            size, limit = len(request.body), self._limits.max_body
            if size > limit:
                raise RequestRefused(
                    "invalid",
                    f"The request has {size} bytes; {limit} are allowed (serve.max_body). Send fewer rows at once.",
                )
            self._plane.submit(request, stream.deadline, done)
            if not request.finished:
                self._requests[stream] = request
        except RequestRefused as refused:
            self._refuse(request.protocol, refused, stream)

    def _describe(self, stream: Stream, protocol: str, endpoint: GrpcInfoEndpoint, body: bytes) -> None:
        try:
            reply = endpoint(body, self._plane.versions)
        except RequestRefused as refused:
            self._refuse(protocol, refused, stream)
            return
        except Exception as error:  # noqa: BLE001 - a bug ends only the call that meets it
            self._refuse(protocol, self._plane.internal_error(error, protocol), stream)
            return
        self._metrics.info_answered(protocol, "OK")
        stream.reply(reply)

    def _reflect(self, stream: Stream, message: bytes) -> None:
        if stream.messages > _MAX_REFLECTION_REQUESTS:
            stream.refuse(
                8, f"{_MAX_REFLECTION_REQUESTS} requests were answered in this call. Start another call."
            )
            return
        try:
            request = reflection_pb2.ServerReflectionRequest.FromString(message)
        except Exception:  # noqa: BLE001 - protobuf raises several types
            stream.refuse(3, "The message is not a ServerReflectionRequest.")
            return
        try:
            for answer in self._reflection.ServerReflectionInfo(iter([request]), None):
                stream.send(answer.SerializeToString())
        except Exception as error:  # noqa: BLE001 - a request that gRPC's own code does not expect
            self._refuse("grpc", self._plane.internal_error(error, "grpc"), stream)

    def _refuse(self, protocol: str, refused: RequestRefused, stream: Stream) -> None:
        status, name = STATUS[refused.kind]
        self._metrics.refused(protocol, name, refused.kind)
        self._log.refused(protocol, refused.kind, str(refused))
        stream.refuse(status, str(refused))


class _Health:
    """The gRPC health service, with one state for all services."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._ready = False
        self._watchers: set[Stream] = set()

    def set(self, ready: bool) -> None:
        if ready != self._ready:
            self._ready = ready
            for stream in list(self._watchers):
                stream.send(self._status())

    def stop(self) -> None:
        """Report NOT_SERVING for good, and end all watches."""
        self.set(False)
        for stream in list(self._watchers):
            stream.finish()
        self._watchers.clear()

    def answer(self, stream: Stream, message: bytes, *, watch: bool) -> None:
        try:
            name = health_pb2.HealthCheckRequest.FromString(message).service
        except Exception:  # noqa: BLE001 - protobuf raises several types
            stream.refuse(3, "The message is not a HealthCheckRequest.")
            return
        if watch:  # the protocol lets clients wait for unknown services
            known = name in self._names
            stream.send(self._status() if known else _status(3))
            if known:
                self._watchers.add(stream)
        elif name in self._names:
            stream.reply(self._status())
        else:
            stream.refuse(_NOT_FOUND, f"There is no service {name[:200]}.")

    def forget(self, stream: Stream) -> None:
        self._watchers.discard(stream)

    def _status(self) -> bytes:
        return _status(1 if self._ready else 2)


def _status(status: int) -> bytes:
    content: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return content


class _Pools:
    """Descriptors from two pools: our messages have their own, health and reflection use protobuf's default."""

    def __getattr__(self, name: str) -> Any:
        def find(*arguments: Any) -> Any:
            try:
                return getattr(POOL, name)(*arguments)
            except KeyError:
                return getattr(descriptor_pool.Default(), name)(*arguments)

        return find
