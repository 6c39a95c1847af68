"""The gRPC port: bytes of requests to the doors and back, with health and reflection beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from clickline.config.sections import ServeSection
from clickline.errors import ClicklineError, Refusal, RequestRefused
from clickline.scoring.scorer import Answer
from clickline.stages.serve.access import Guard
from clickline.stages.serve.dataplane import Dataplane
from clickline.stages.serve.doors.calls import Call, Limits, Target
from clickline.stages.serve.logs import Log
from clickline.stages.serve.measures import Tally
from clickline.stages.serve.versions import ScorerLike, Versions
from clickline.wire.messages import METHODS, POOL

__all__ = ["STATUS", "GrpcDoor", "GrpcPage", "GrpcServer"]

STATUS: Mapping[Refusal, grpc.StatusCode] = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "late": grpc.StatusCode.DEADLINE_EXCEEDED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "internal": grpc.StatusCode.INTERNAL,
}

# gRPC itself refuses larger messages, as RESOURCE_EXHAUSTED and in its own words. So it takes some more than we do,
# and what is a little too large is refused in ours.
_READ_BEYOND = 2

# gRPC gives each request a thread, from before its message has arrived. So there are more of them than requests may
# be inside: those that are refused need one for a moment, those that arrive slowly for longer.
_MORE_THREADS = 64


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
        self._plane = plane
        self._serve = serve
        self._tally = tally
        self._log = log
        self._limits = Limits(max_rows=serve.max_rows, ignore_unknown=serve.unknown_fields == "ignore")
        self._health = health.HealthServicer()
        threads = plane.capacity + _MORE_THREADS
        self._server = grpc.server(
            ThreadPoolExecutor(threads, "grpc"),
            maximum_concurrent_rpcs=threads,  # what would find no thread is refused, instead of waiting for one
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", serve.max_body * _READ_BEYOND),
                ("grpc.max_send_message_length", -1),
            ],
        )
        methods = {name: self._door(*door) for name, door in doors.items()}
        methods |= {name: self._page(*page) for name, page in pages.items()}
        shown = _Collected()
        names = (*METHODS, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.ReflectionServicer(names, pool=_Pools()), shown
        )
        self._server.add_generic_rpc_handlers([_Guarded(guard, methods, shown.handlers, self._refuse)])
        # Health stays open without a token: probes have none, and it tells nothing but yes or no.
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def start(self) -> None:
        host = f"[{self._serve.host}]" if ":" in self._serve.host else self._serve.host
        address = f"{host}:{self._serve.grpc_port}"
        tls = self._serve.tls
        try:
            if tls is None:
                self._server.add_insecure_port(address)
            else:
                pair = (Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())
                self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except (RuntimeError, OSError) as error:
            raise ClicklineError(f"gRPC cannot listen on {address}: {error}") from error
        self._server.start()

    def serving(self, ready: bool) -> None:
        """What the health service says, for the server as a whole and for each service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in (health.OVERALL_HEALTH, *METHODS):
            self._health.set(name, status)

    def stop(self, drain: float) -> None:
        """Take no more requests, wait for running ones to end."""
        self._health.enter_graceful_shutdown()
        self._server.stop(drain).wait()

    def _door(self, protocol: str, door: GrpcDoor) -> grpc.RpcMethodHandler:
        plane, tally, limits, most = self._plane, self._tally, self._limits, self._serve.max_body

        def handle(body: bytes, context: Any) -> bytes:
            arrived = monotonic()
            left = context.time_remaining()
            deadline = None if left is None else arrived + left
            try:
                if len(body) > most:
                    raise RequestRefused(
                        "invalid",
                        f"The request has {len(body)} bytes; {most} are allowed (serve.max_body). Send fewer rows at "
                        "once.",
                    )
                plane.admit()
                work = _GrpcWork(protocol, door, body, limits)
                outcome = plane.answer(work, deadline, lambda: not context.is_active())
            except RequestRefused as refused:
                self._refuse(protocol, refused, context)
            tally.answered(protocol, "OK", outcome.version, outcome.rows, monotonic() - arrived)
            reply: bytes = outcome.reply
            return reply

        return grpc.unary_unary_rpc_method_handler(handle)

    def _page(self, protocol: str, page: GrpcPage) -> grpc.RpcMethodHandler:
        def handle(body: bytes, context: Any) -> bytes:
            try:
                reply = page(body, self._plane.versions)
            except RequestRefused as refused:
                self._refuse(protocol, refused, context)
            self._tally.told(protocol, "OK")
            return reply

        return grpc.unary_unary_rpc_method_handler(handle)

    def _refuse(self, protocol: str, refused: RequestRefused, context: Any) -> NoReturn:
        """Ends the call."""
        status = STATUS[refused.kind]
        self._tally.refused(protocol, status.name, refused.kind)
        self._log.refused(protocol, refused.kind, str(refused))
        context.abort(status, str(refused))
        raise AssertionError("abort does not return")


class _Guarded(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a method; whoever has no token gets one that refuses."""

    def __init__(
        self,
        guard: Guard,
        methods: Mapping[str, grpc.RpcMethodHandler],
        others: list[grpc.GenericRpcHandler],
        refuse: Callable[[str, RequestRefused, Any], NoReturn],
    ) -> None:
        self._guard = guard
        self._methods = methods
        self._others = others
        self._refuse = refuse

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        found = self._methods.get(details.method)
        if found is None:
            found = next((one for other in self._others if (one := other.service(details))), None)
        if found is None or self._guard.open:
            return found
        given = dict(details.invocation_metadata).get("authorization", "")
        try:
            self._guard.check(given if isinstance(given, bytes) else given.encode())
        except RequestRefused as refused:
            return self._refusing(refused)
        return found

    def _refusing(self, refused: RequestRefused) -> grpc.RpcMethodHandler:
        def handle(messages: Any, context: Any) -> NoReturn:  # does not wait for any message
            self._refuse("grpc", refused, context)

        return grpc.stream_unary_rpc_method_handler(handle)


class _Collected:
    """Takes handlers as a server would, so that they can be put behind the guard."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """They are among the generic ones too."""


class _Pools:
    """Our messages are in a pool of their own, those of health and reflection in protobuf's."""

    def __getattr__(self, name: str) -> Any:
        def find(*arguments: Any) -> Any:
            try:
                return getattr(POOL, name)(*arguments)
            except KeyError:
                return getattr(descriptor_pool.Default(), name)(*arguments)

        return find
