"""Sends requests over a gRPC channel, blocking or async, and translates its errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc

from clickline.client.attempts import AttemptFailed, PreparedRequest, RawResponse, ServerAddress
from clickline.client.error_messages import (
    no_tls,
    read_ca_file,
    timed_out,
    unreachable,
    untrusted_certificate,
)
from clickline.errors import ClicklineError, Refusal, RequestRefused

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # each client has its own connection
    ("grpc.enable_retries", 0),  # the client retries itself
    ("grpc.initial_reconnect_backoff_ms", 20),  # by default a failed channel refuses calls for a second
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the minimum time to wait for a connection
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
# gRPC's own messages, when no server has answered.
_CONNECTION_ERRORS = re.compile(
    r"failed to connect|errors resolving|DNS resolution|ipv[46]:|Socket closed|Connection reset|Broken pipe"
    r"|recvmsg|sendmsg|GOAWAY|RST_STREAM|Stream removed|[Tt]ransport closed|Endpoint clos|keepalive"
)
_NOT_HTTP2 = re.compile(r"parsing HTTP/2|http1|SETTINGS frame", re.IGNORECASE)


class _BaseTransport:
    """What both kinds of channel share."""

    _channel: Any = None

    def __init__(self, address: ServerAddress, token: str | None, tls: bool | str, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self._metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        self._tls = bool(tls)
        self._roots = read_ca_file(tls).encode() if isinstance(tls, str) else None
        self._methods: dict[str, Any] = {}

    def _open(self, secure: Callable[..., Any], insecure: Callable[..., Any]) -> Any:
        if not self._tls:
            return insecure(str(self.address), _OPTIONS)
        return secure(str(self.address), grpc.ssl_channel_credentials(self._roots), _OPTIONS)

    def _send(self, request: PreparedRequest[Any], seconds: float) -> Any:
        """Start a call: the response's bytes, or an awaitable of them."""
        method = self._methods.get(request.path)
        if method is None:
            method = self._methods[request.path] = self._channel.unary_unary(request.path)
        return method(request.body or b"", timeout=seconds, metadata=self._metadata)

    def _to_failure(self, error: grpc.RpcError) -> AttemptFailed:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in details:
            return timed_out(self.address, self.timeout)
        if code is grpc.StatusCode.UNAVAILABLE and _CONNECTION_ERRORS.search(details):
            return self._unreachable(details)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return AttemptFailed(
                ClicklineError(
                    f"{self.address} does not support this request: {details} Is it a clickline server?"
                )
            )
        if "larger than max" in details:  # from gRPC itself, as RESOURCE_EXHAUSTED; a retry would not help
            return AttemptFailed(RequestRefused("invalid", f"{details} Send fewer rows at once."))
        kind = _KINDS.get(code, "internal")
        return AttemptFailed(RequestRefused(kind, details), retryable=kind in ("overloaded", "unavailable"))

    def _unreachable(self, details: str) -> AttemptFailed:
        if _NOT_HTTP2.search(details):
            return AttemptFailed(
                ClicklineError(
                    f"{self.address} does not use gRPC; it may be an HTTP port. Use the server's gRPC port "
                    "(serve.grpc_port, by default 8500), or the protocol http."
                )
            )
        if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
            return untrusted_certificate(self.address, details)
        if "WRONG_VERSION_NUMBER" in details:
            return no_tls(self.address)
        reason = details.rpartition("last error: ")[2].rpartition(f"{self.address}: ")[2]
        if "[" not in reason:  # the end of a list that was cut off
            reason = reason.rstrip("]. ")
        return unreachable(self.address, reason, "serve.grpc_port")


class GrpcTransport(_BaseTransport):
    """A blocking gRPC channel; safe to use from several threads."""

    def __init__(self, address: ServerAddress, token: str | None, tls: bool | str, timeout: float) -> None:
        super().__init__(address, token, tls, timeout)
        self._channel = self._open(grpc.secure_channel, grpc.insecure_channel)

    def call(self, request: PreparedRequest[Any], seconds: float) -> RawResponse:
        try:
            return RawResponse(self._send(request, seconds))
        except grpc.RpcError as error:
            raise self._to_failure(error) from error

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport(_BaseTransport):
    """An asyncio gRPC channel, opened by the first call."""

    async def call(self, request: PreparedRequest[Any], seconds: float) -> RawResponse:
        if self._channel is None:
            self._channel = self._open(grpc.aio.secure_channel, grpc.aio.insecure_channel)
        try:
            return RawResponse(await self._send(request, seconds))
        except grpc.RpcError as error:
            raise self._to_failure(error) from error

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
