"""Requests over a gRPC channel, waiting or not; what goes wrong, in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from clickline.client.error_messages import late, no_tls, read_authority, unreachable, untrusted
from clickline.client.request import Address, Ask, Failed, Reply
from clickline.errors import ClicklineError, Refusal, RequestRefused

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a client is a connection of its own
    ("grpc.enable_retries", 0),  # we try again ourselves
    ("grpc.initial_reconnect_backoff_ms", 20),  # else a channel that failed refuses for a second, unasked
    ("grpc.min_reconnect_backoff_ms", 1000),  # the shortest time to let a connection come about
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
_KINDS: dict[grpc.StatusCode, Refusal] = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.OUT_OF_RANGE: "invalid",
    grpc.StatusCode.FAILED_PRECONDITION: "invalid",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.PERMISSION_DENIED: "unauthenticated",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.DEADLINE_EXCEEDED: "late",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
}
# gRPC's own words where no server has spoken.
_OWN_WORDS = re.compile(
    r"failed to connect|errors resolving|DNS resolution|ipv[46]:|Socket closed|Connection reset|Broken pipe"
    r"|recvmsg|sendmsg|GOAWAY|RST_STREAM|Stream removed|[Tt]ransport closed|Endpoint clos|keepalive"
)
_NOT_HTTP2 = re.compile(r"parsing HTTP/2|http1|SETTINGS frame", re.IGNORECASE)


class _Setup:
    """What both kinds of channel are opened with."""

    def __init__(self, address: Address, token: str | None, tls: bool | str, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self.metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        self._tls = bool(tls)
        self._roots = read_authority(tls).encode() if isinstance(tls, str) else None

    def open(self, secure: Callable[..., Any], insecure: Callable[..., Any]) -> Any:
        options: Sequence[tuple[str, int]] = _OPTIONS
        if not self._tls:
            return insecure(str(self.address), options)
        return secure(str(self.address), grpc.ssl_channel_credentials(self._roots), options)

    def failed(self, error: grpc.RpcError) -> Failed:
        code, words = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in words:
            return late(self.address, self.timeout)
        if code is grpc.StatusCode.UNAVAILABLE and _OWN_WORDS.search(words):
            return self._unreachable(words)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Failed(
                ClicklineError(
                    f"{self.address} does not know this request: {words} Is it a clickline server?"
                )
            )
        if "larger than max" in words:  # of gRPC itself, which calls it exhaustion; again would not help
            return Failed(RequestRefused("invalid", f"{words} Send fewer rows at once."))
        kind = _KINDS.get(code, "internal")
        return Failed(RequestRefused(kind, words), again=kind in ("overloaded", "unavailable"))

    def _unreachable(self, words: str) -> Failed:
        if _NOT_HTTP2.search(words):
            return Failed(
                ClicklineError(
                    f"{self.address} does not speak gRPC; it may be an HTTP port. Use the server's gRPC port "
                    "(serve.grpc_port, by default 8500), or the protocol http."
                )
            )
        if "CERTIFICATE_VERIFY_FAILED" in words or "Hostname Verification" in words:
            return untrusted(self.address, words)
        if "WRONG_VERSION_NUMBER" in words:
            return no_tls(self.address)
        reason = words.rpartition("last error: ")[2].rpartition(f"{self.address}: ")[2]
        if "[" not in reason:  # of a list that was cut
            reason = reason.rstrip("]. ")
        return unreachable(self.address, reason, "serve.grpc_port")


class Grpc:
    """A channel that callers wait for; safe to use from several threads."""

    def __init__(self, address: Address, token: str | None, tls: bool | str, timeout: float) -> None:
        self._setup = _Setup(address, token, tls, timeout)
        self._channel = self._setup.open(grpc.secure_channel, grpc.insecure_channel)
        self._methods: dict[str, Any] = {}

    def call(self, ask: Ask[Any], seconds: float) -> Reply:
        method = self._methods.get(ask.where)
        if method is None:
            method = self._methods[ask.where] = self._channel.unary_unary(ask.where)
        try:
            return Reply(method(ask.body or b"", timeout=seconds, metadata=self._setup.metadata))
        except grpc.RpcError as error:
            raise self._setup.failed(error) from error

    def close(self) -> None:
        self._channel.close()


class AsyncGrpc:
    """A channel in an event loop, opened by the first call."""

    def __init__(self, address: Address, token: str | None, tls: bool | str, timeout: float) -> None:
        self._setup = _Setup(address, token, tls, timeout)
        self._channel: Any = None
        self._methods: dict[str, Any] = {}

    async def call(self, ask: Ask[Any], seconds: float) -> Reply:
        if self._channel is None:
            self._channel = self._setup.open(grpc.aio.secure_channel, grpc.aio.insecure_channel)
        method = self._methods.get(ask.where)
        if method is None:
            method = self._methods[ask.where] = self._channel.unary_unary(ask.where)
        try:
            return Reply(await method(ask.body or b"", timeout=seconds, metadata=self._setup.metadata))
        except grpc.RpcError as error:
            raise self._setup.failed(error) from error

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
