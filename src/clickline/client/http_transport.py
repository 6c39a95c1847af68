"""Sends requests over HTTP, blocking or async, and translates its errors."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import httpx

from clickline.client.attempts import AttemptFailed, PreparedRequest, RawResponse, ServerAddress
from clickline.client.error_messages import (
    no_tls,
    read_ca_file,
    timed_out,
    unreachable,
    untrusted_certificate,
)
from clickline.errors import ClicklineError, Refusal, RequestRefused

_KINDS: dict[int, Refusal] = {
    401: "unauthenticated",
    403: "unauthenticated",
    404: "not_found",
    408: "late",
    429: "overloaded",
    503: "unavailable",
    504: "late",
}


class _BaseTransport:
    """What both kinds of client share."""

    _client_type: Callable[..., Any]

    def __init__(
        self, address: ServerAddress, token: str | None, tls: bool | str | ssl.SSLContext, timeout: float
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._client = self._client_type(
            base_url=f"{'https' if tls else 'http'}://{address}",
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cadata=read_ca_file(tls)) if isinstance(tls, str) else tls,
        )

    def _request(self, prepared: PreparedRequest[Any], seconds: float) -> dict[str, Any]:
        # With the timeout, the server does not start work that would finish too late.
        timeout = {"x-request-timeout-ms": str(int(seconds * 1000))}
        return {
            "method": "GET" if prepared.body is None else "POST",
            "url": prepared.path,
            "content": prepared.body,
            "headers": {**prepared.headers, **timeout},
            "timeout": seconds,
        }

    def _response(self, response: httpx.Response, body: bytes) -> RawResponse:
        status = response.status_code
        if status < 300:
            return RawResponse(body, response.headers)
        kind = _KINDS.get(status, "invalid" if status < 500 else "internal")
        wait = response.headers.get("retry-after", "")
        raise AttemptFailed(
            RequestRefused(kind, _error_message(status, body)),
            retryable=kind in ("overloaded", "unavailable"),
            retry_after=float(wait) if wait.isdigit() else 0.0,
        )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn any transport error into `AttemptFailed`."""
        try:
            yield
        except httpx.ConnectTimeout as error:
            raise unreachable(
                self.address, f"no connection in {self.timeout:.3g} seconds", "serve.http_port"
            ) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise timed_out(self.address, self.timeout) from error
        except httpx.TransportError as error:
            raise self._to_failure(_root_cause(error)) from error

    def _to_failure(self, reason: str) -> AttemptFailed:
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return untrusted_certificate(self.address, reason)
        if "WRONG_VERSION_NUMBER" in reason:
            return no_tls(self.address)
        if "illegal" in reason:  # bytes arrived, but not an HTTP response
            return AttemptFailed(
                ClicklineError(
                    f"{self.address} does not use HTTP; it may be a gRPC port. Use the server's HTTP port "
                    "(serve.http_port, by default 8501), or the protocol grpc."
                )
            )
        return unreachable(self.address, reason, "serve.http_port")


def _root_cause(error: BaseException) -> str:
    """The system's message if there is one: the outer error may only say that all attempts failed."""
    reason, deeper = str(error) or type(error).__name__, error.__cause__ or error.__context__
    while deeper is not None:
        if isinstance(deeper, ssl.SSLError | socket.gaierror):  # these have their own error numbers
            return str(deeper.strerror or deeper)
        if isinstance(deeper, OSError) and deeper.errno:
            reason = os.strerror(deeper.errno)
        deeper = deeper.__cause__ or deeper.__context__
    return reason


def _error_message(status: int, body: bytes) -> str:
    """The error message in a response that refuses a request."""
    try:
        document = json.loads(body)
        return str(document.get("error") or document["err_msg"])
    except (ValueError, AttributeError, LookupError):
        return f"HTTP {status}: {body[:200].decode('utf-8', 'replace').strip()}"


class HttpTransport(_BaseTransport):
    """Blocking HTTP connections; safe to use from several threads."""

    _client_type = httpx.Client

    def call(self, prepared: PreparedRequest[Any], seconds: float) -> RawResponse:
        deadline = monotonic() + seconds
        pieces = []
        with (
            self._translate_errors(),
            self._client.stream(**self._request(prepared, seconds)) as response,
        ):
            for piece in response.iter_bytes():
                pieces.append(piece)
                if monotonic() > deadline:  # httpx only limits the wait for each piece
                    raise TimeoutError
        return self._response(response, b"".join(pieces))

    def close(self) -> None:
        self._client.close()


class AsyncHttpTransport(_BaseTransport):
    """Asyncio HTTP connections."""

    _client_type = httpx.AsyncClient

    async def call(self, prepared: PreparedRequest[Any], seconds: float) -> RawResponse:
        with self._translate_errors():
            async with asyncio.timeout(seconds):
                response = await self._client.request(**self._request(prepared, seconds))
        return self._response(response, response.content)

    async def close(self) -> None:
        await self._client.aclose()
