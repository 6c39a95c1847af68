"""Requests over HTTP, waiting or not; what goes wrong, in plain words."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import httpx

from clickline.client.error_messages import late, no_tls, read_authority, unreachable, untrusted
from clickline.client.request import Address, Ask, Failed, Reply
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


class _Setup:
    """What both kinds of client are made with."""

    def __init__(
        self, address: Address, token: str | None, tls: bool | str | ssl.SSLContext, timeout: float
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.options: dict[str, Any] = {
            "base_url": f"{'https' if tls else 'http'}://{address}",
            "headers": {} if token is None else {"authorization": f"Bearer {token}"},
            "verify": ssl.create_default_context(cadata=read_authority(tls)) if isinstance(tls, str) else tls,
        }

    def request(self, ask: Ask[Any], seconds: float) -> dict[str, Any]:
        told = {
            "x-request-timeout-ms": str(int(seconds * 1000))
        }  # the server starts no work that comes too late
        return {
            "method": "GET" if ask.body is None else "POST",
            "url": ask.where,
            "content": ask.body,
            "headers": {**ask.headers, **told},
            "timeout": seconds,
        }

    def reply(self, response: httpx.Response, body: bytes) -> Reply:
        status = response.status_code
        if status < 300:
            return Reply(body, response.headers)
        kind = _KINDS.get(status, "invalid" if status < 500 else "internal")
        wait = response.headers.get("retry-after", "")
        raise Failed(
            RequestRefused(kind, _words(status, body)),
            again=kind in ("overloaded", "unavailable"),
            wait=float(wait) if wait.isdigit() else 0.0,
        )

    @contextmanager
    def troubles(self) -> Iterator[None]:
        """Whatever happens on the wire, as `Failed`."""
        try:
            yield
        except httpx.ConnectTimeout as error:
            raise unreachable(
                self.address, f"no connection in {self.timeout:.3g} seconds", "serve.http_port"
            ) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise late(self.address, self.timeout) from error
        except httpx.TransportError as error:
            raise self._failed(_reason(error)) from error

    def _failed(self, words: str) -> Failed:
        if "CERTIFICATE_VERIFY_FAILED" in words:
            return untrusted(self.address, words)
        if "WRONG_VERSION_NUMBER" in words:
            return no_tls(self.address)
        if "illegal" in words:  # bytes came, but not those of an HTTP answer
            return Failed(
                ClicklineError(
                    f"{self.address} does not speak HTTP; it may be a gRPC port. Use the server's HTTP port "
                    "(serve.http_port, by default 8501), or the protocol grpc."
                )
            )
        return unreachable(self.address, words, "serve.http_port")


def _reason(error: BaseException) -> str:
    """The system's words where there are any: what stands on top of them may only say that all tries failed."""
    words, deeper = str(error) or type(error).__name__, error.__cause__ or error.__context__
    while deeper is not None:
        if isinstance(deeper, ssl.SSLError | socket.gaierror):  # these have numbers of their own
            return str(deeper.strerror or deeper)
        if isinstance(deeper, OSError) and deeper.errno:
            words = os.strerror(deeper.errno)
        deeper = deeper.__cause__ or deeper.__context__
    return words


def _words(status: int, body: bytes) -> str:
    """What a server says of a request that it refuses."""
    try:
        document = json.loads(body)
        return str(document.get("error") or document["err_msg"])
    except (ValueError, AttributeError, LookupError):
        return f"HTTP {status}: {body[:200].decode('utf-8', 'replace').strip()}"


class Http:
    """Connections that callers wait for; safe to use from several threads."""

    def __init__(
        self, address: Address, token: str | None, tls: bool | str | ssl.SSLContext, timeout: float
    ) -> None:
        self._setup = _Setup(address, token, tls, timeout)
        self._client = httpx.Client(**self._setup.options)

    def call(self, ask: Ask[Any], seconds: float) -> Reply:
        deadline = monotonic() + seconds
        pieces = []
        with self._setup.troubles(), self._client.stream(**self._setup.request(ask, seconds)) as response:
            for piece in response.iter_bytes():
                pieces.append(piece)
                if monotonic() > deadline:  # httpx only bounds the wait for each piece
                    raise TimeoutError
        return self._setup.reply(response, b"".join(pieces))

    def close(self) -> None:
        self._client.close()


class AsyncHttp:
    """Connections in an event loop."""

    def __init__(
        self, address: Address, token: str | None, tls: bool | str | ssl.SSLContext, timeout: float
    ) -> None:
        self._setup = _Setup(address, token, tls, timeout)
        self._client = httpx.AsyncClient(**self._setup.options)

    async def call(self, ask: Ask[Any], seconds: float) -> Reply:
        with self._setup.troubles():
            async with asyncio.timeout(seconds):
                response = await self._client.request(**self._setup.request(ask, seconds))
        return self._setup.reply(response, response.content)

    async def close(self) -> None:
        await self._client.aclose()
