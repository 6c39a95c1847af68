"""The gRPC port: calls to the doors and back, with health and reflection beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Protocol

from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from clickline.config.sections import ServeSection
from clickline.errors import Refusal, RequestRefused
from clickline.scoring.scorer import Answer
from clickline.serving.auth import Guard, server_tls
from clickline.serving.dataplane import Dataplane, Job, Outcome
from clickline.serving.http2 import Arriving, Connection, Stream
from clickline.serving.open_versions import ScorerLike, Versions
from clickline.serving.ports import bound_socket
from clickline.serving.protocols.call import Call, Limits, Target
from clickline.serving.server_log import Log
from clickline.serving.server_metrics import Tally
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
_SLOW_SECONDS = 30.0  # for a request to arrive, or an answer to be taken
_GOODBYE_SECONDS = 1.0  # for clients to hear that we leave, and for requests that are half here
_MOST_ARRIVING = 16  # of the largest request: all that may be half here
_MOST_QUESTIONS = 1000  # of one client about what is served, in one call


class GrpcDoor(Protocol):
    """A method that scores rows: a module of `doors/`."""

    def target(self, body: bytes) -> Target: ...
    def decode(self, body: bytes, model: Any, limits: Limits) -> Call: ...
    def encode(self, call: Call, answer: Any) -> bytes: ...


GrpcPage = Callable[[bytes, Versions], bytes]
"""A method that tells what the server knows."""


class _GrpcWork:
    __slots__ = ("_body", "_door", "_limits", "protocol")

    def __init__(self, protocol: str, door: GrpcDoor, body: bytes, limits: Limits) -> None:
        self.protocol = protocol
        self._door = door
        self._body = body
        self._limits = limits

    def target(self) -> Target:
        return self._door.target(self._body)

    def decode(self, scorer: ScorerLike) -> Call:
        return self._door.decode(self._body, scorer, self._limits)

    def encode(self, call: Call, answer: Answer) -> bytes:
        return self._door.encode(call, answer)


class GrpcServer:
    """Speaks gRPC on one port, beside other processes that do the same."""

    def __init__(
        self,
        doors: Mapping[str, tuple[str, GrpcDoor]],
        pages: Mapping[str, tuple[str, GrpcPage]],
        plane: Dataplane,
        guard: Guard,
        serve: ServeSection,
        tally: Tally,
        log: Log,
    ) -> None:
        """`doors` and `pages`: by full method name, each with the protocol's name for metrics and logs."""
        self._doors = doors
        self._pages = pages
        self._plane = plane
        self._guard = guard
        self._serve = serve
        self._tally = tally
        self._log = log
        self._limits = Limits(max_rows=serve.max_rows, ignore_unknown=serve.unknown_fields == "ignore")
        self._jobs: dict[Stream, Job] = {}
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._health = _Health(("", *METHODS))
        names = (*METHODS, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        self._reflection = reflection.ReflectionServicer(names, pool=_Pools())
        self._sweeping: asyncio.Task[None] | None = None
        self.arriving = Arriving(_MOST_ARRIVING * serve.max_body)

    async def start(self) -> None:
        tls = server_tls(self._serve.tls)
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        bound = bound_socket(self._serve.host, self._serve.grpc_port, "grpc_port", shared=True)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self, self._connections), sock=bound, ssl=tls, backlog=_BACKLOG
        )
        self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SLOW_SECONDS / 4)
            for connection in list(self._connections):
                try:
                    connection.sweep(_SLOW_SECONDS)
                except Exception as error:  # noqa: BLE001 - a bug with one must not end the sweeping of all
                    self._log.unexpected(error, "sweeping", "grpc")

    def serving(self, ready: bool) -> None:
        """What the health service says, for the server as a whole and for each service."""
        self._health.set(ready)

    async def stop(self, drain: float) -> None:
        """Take no more calls, wait for running ones to end."""
        self._health.end()
        if self._server is not None:
            self._server.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._connections):
            connection.leave()
        now = monotonic()
        hurry, deadline = now + min(drain, _GOODBYE_SECONDS), now + drain
        while self._connections and monotonic() < deadline:
            if monotonic() >= hurry:
                for connection in list(self._connections):
                    connection.hurry()
                if not self._jobs and not any(connection.busy for connection in self._connections):
                    break  # who still has a connection has nothing to hear
            await asyncio.sleep(0.005)
        for connection in list(self._connections):
            connection.abort()

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    @property
    def most_bytes(self) -> int:
        return self._serve.max_body

    def opened(self, stream: Stream) -> None:
        path = stream.path
        if path in (
            _CHECK,
            _WATCH,
        ):  # open without a token: probes have none, and it tells nothing but yes or no
            return
        known = path in self._doors or path in self._pages or path == _REFLECTION
        if not self._guard.open:
            try:
                self._guard.check(stream.headers.get("authorization", "").encode("latin-1"))
            except RequestRefused as refused:
                self._refuse("grpc", refused, stream)
                return
        if not known:
            self._tally.told("grpc", "UNIMPLEMENTED")
            stream.refuse(_UNIMPLEMENTED, f"There is no method {path[:200]} here.")
        stream.streaming = path == _REFLECTION

    def message(self, stream: Stream, message: bytes) -> None:
        path = stream.path
        door = self._doors.get(path)
        if door is not None:
            self._ask(stream, *door, message)
        elif path in self._pages:
            self._tell(stream, *self._pages[path], message)
        elif path == _REFLECTION:
            self._reflect(stream, message)
        else:
            self._health.ask(stream, message, watch=path == _WATCH)

    def ended(self, stream: Stream) -> None:
        stream.finish()

    def gone(self, stream: Stream) -> None:
        job = self._jobs.pop(stream, None)
        if job is not None and self._plane.give_up(job):
            self._tally.told(job.work.protocol, "CANCELLED")
        self._health.forget(stream)

    def _ask(self, stream: Stream, protocol: str, door: GrpcDoor, body: bytes) -> None:
        arrived = monotonic()

        def done(outcome: Outcome | RequestRefused) -> None:
            self._jobs.pop(stream, None)
            if isinstance(outcome, Outcome):
                stream.reply(outcome.reply)
                self._tally.answered(protocol, "OK", outcome.version, outcome.rows, monotonic() - arrived)
            else:
                self._refuse(protocol, outcome, stream)

        try:
            most = self._serve.max_body
            if len(body) > most:
                raise RequestRefused(
                    "invalid",
                    f"The request has {len(body)} bytes; {most} are allowed (serve.max_body). Send fewer rows at once.",
                )
            work = _GrpcWork(protocol, door, body, self._limits)
            job = self._plane.submit(work, stream.deadline, done)
            if not job.over:
                self._jobs[stream] = job
        except RequestRefused as refused:
            self._refuse(protocol, refused, stream)

    def _tell(self, stream: Stream, protocol: str, page: GrpcPage, body: bytes) -> None:
        try:
            reply = page(body, self._plane.versions)
        except RequestRefused as refused:
            self._refuse(protocol, refused, stream)
            return
        except Exception as error:  # noqa: BLE001 - a bug that one call meets ends one call
            self._refuse(protocol, self._plane.bug(error, protocol), stream)
            return
        self._tally.told(protocol, "OK")
        stream.reply(reply)

    def _reflect(self, stream: Stream, message: bytes) -> None:
        if stream.messages > _MOST_QUESTIONS:
            stream.refuse(8, f"{_MOST_QUESTIONS} questions were answered in this call. Begin another one.")
            return
        try:
            asked = reflection_pb2.ServerReflectionRequest.FromString(message)
        except Exception:  # noqa: BLE001 - protobuf's own, of one kind
            stream.refuse(3, "The message is no ServerReflectionRequest.")
            return
        try:
            for answer in self._reflection.ServerReflectionInfo(iter([asked]), None):
                stream.send(answer.SerializeToString())
        except Exception as error:  # noqa: BLE001 - of a question that gRPC's own code does not expect
            self._refuse("grpc", self._plane.bug(error, "grpc"), stream)

    def _refuse(self, protocol: str, refused: RequestRefused, stream: Stream) -> None:
        status, name = STATUS[refused.kind]
        self._tally.refused(protocol, name, refused.kind)
        self._log.refused(protocol, refused.kind, str(refused))
        stream.refuse(status, str(refused))


class _Health:
    """The health service: one state for all services."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._ready = False
        self._watching: set[Stream] = set()

    def set(self, ready: bool) -> None:
        if ready != self._ready:
            self._ready = ready
            for stream in list(self._watching):
                stream.send(self._status())

    def end(self) -> None:
        """No, and for good: whoever watches is told, and let go."""
        self.set(False)
        for stream in list(self._watching):
            stream.finish()
        self._watching.clear()

    def ask(self, stream: Stream, message: bytes, *, watch: bool) -> None:
        try:
            name = health_pb2.HealthCheckRequest.FromString(message).service
        except Exception:  # noqa: BLE001 - protobuf's own, of one kind
            stream.refuse(3, "The message is no HealthCheckRequest.")
            return
        if watch:  # an unknown service may come one day, says the protocol
            known = name in self._names
            stream.send(self._status() if known else _status(3))
            if known:
                self._watching.add(stream)
        elif name in self._names:
            stream.reply(self._status())
        else:
            stream.refuse(_NOT_FOUND, f"There is no service {name[:200]} here.")

    def forget(self, stream: Stream) -> None:
        self._watching.discard(stream)

    def _status(self) -> bytes:
        return _status(1 if self._ready else 2)


def _status(status: int) -> bytes:
    content: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return content


class _Pools:
    """Our messages are in a pool of their own, those of health and reflection in protobuf's."""

    def __getattr__(self, name: str) -> Any:
        def find(*arguments: Any) -> Any:
            try:
                return getattr(POOL, name)(*arguments)
            except KeyError:
                return getattr(descriptor_pool.Default(), name)(*arguments)

        return find
