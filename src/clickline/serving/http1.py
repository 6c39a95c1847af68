"""uvicorn's HTTP/1.1 with additional limits: on the size of headers, and on the time that a request takes to arrive and
an answer to be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from clickline.errors import Refusal
from clickline.serving.protocols.http_common import error_response

_MAX_CONNECTIONS = 16384  # of one process
_MAX_HEADER_BYTES = 1 << 16  # bytes of a request before its body, plus one read

OnRefused = Callable[[Refusal, str], None]
"""Called for requests that were refused before they were complete."""


class _Trailers(list[tuple[bytes, bytes]]):
    """Discards headers after the body: a client could send them without end."""

    def append(self, header: tuple[bytes, bytes]) -> None:
        pass


_TRAILERS = _Trailers()


class Http1Protocol(HttpToolsProtocol):
    """The connection of one client."""

    def __init__(self, on_refused: OnRefused, **uvicorn_options: Any) -> None:
        super().__init__(**uvicorn_options)
        self._on_refused = on_refused
        self._requests = 0  # begun on this connection
        self._in_headers = False
        self._header_bytes = 0  # received of incomplete headers
        self._request_since = monotonic()  # when the incomplete request began; 0: there is none
        self._blocked_since = 0.0  # since when the client does not read its socket; 0: it does
        self._draining = False

    def check_timeouts(self, seconds: float) -> None:
        """Close the connection if a request is incomplete, or an answer unread, for longer than `seconds`."""
        before = monotonic() - seconds
        if 0 < self._blocked_since <= before:
            self.transport.abort()
        elif 0 < self._request_since <= before:
            self._refuse("late", f"The request did not arrive within {seconds:.0f} seconds.")

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops. A request in flight is still answered, with `connection: close`:
        closing at once would lose what the client is sending. `finish_drain` closes idle connections."""
        self._draining = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def finish_drain(self) -> None:
        """Refuse incomplete requests, and close idle connections."""
        if self._request_since:
            self._refuse(
                "unavailable", "The server is stopping, and the request was incomplete. Try another server."
            )
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _refuse(self, kind: Refusal, message: str) -> None:
        before = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (self._in_headers and before):
            return  # an earlier answer is still being sent: try again at the next check
        answered = not self._in_headers and self.cycle is not None and self.cycle.response_started
        if self._requests and not answered:
            reply = error_response(kind, message)
            headers = (
                *reply.headers,
                (b"content-length", b"%d" % len(reply.body)),
                (b"connection", b"close"),
            )
            head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[reply.status] + head + b"\r\n" + reply.body)
            self._on_refused(kind, message)
        self.transport.close()

    # ── what uvicorn and its parser call ───────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self._requests if self._in_headers else 0
        self._feed(data)
        if self._in_headers and self._requests == before:
            self._header_bytes += len(data)
            if self._header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse("invalid", f"The headers are larger than {_MAX_HEADER_BYTES} bytes.")

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("This server is not a proxy.")
            else:
                self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Continue in HTTP/1, as a server may: Java's client offers HTTP/2 in its first request. The parser treats what
        follows as the other protocol, so a new parser gets the same request without the upgrade header."""
        head = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        version = self.parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._feed(line + head + b"\r\n" + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._requests += 1
        self._in_headers, self._header_bytes, self._request_since = True, 0, monotonic()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_feed` handles it next
        super().on_headers_complete()
        if self._draining:
            self.cycle.keep_alive = False
        self._in_headers = False
        self.headers = _TRAILERS

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._request_since = 0.0

    def pause_writing(self) -> None:
        self._blocked_since = monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._blocked_since = 0.0
        super().resume_writing()
