"""HTTP/1.1 as uvicorn speaks it, with bounds that it does not have: on the size of headers, on the time that a request
takes to arrive and an answer to be taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from clickline.errors import Refusal
from clickline.serving.protocols.http_common import refusal

_MOST_CONNECTIONS = 16384  # of one process
_MOST_HEAD = 1 << 16  # bytes of a request before its body, beside what came at once

Tell = Callable[[Refusal, str], None]
"""Is told of requests that were refused before they were whole."""


class _Trailers(list[tuple[bytes, bytes]]):
    """Headers after the body: without an end, if a client likes, so they are not kept."""

    def append(self, header: tuple[bytes, bytes]) -> None:
        pass


_TRAILERS = _Trailers()


class Http1(HttpToolsProtocol):
    """One client."""

    def __init__(self, tell: Tell, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._tell = tell
        self._requests = 0  # that have begun
        self._in_head = False
        self._head = 0  # bytes of a head that goes on
        self._since = monotonic()  # when the client began what it has not ended; 0: it owes nothing
        self._stuck_since = 0.0  # it takes nothing from its socket; 0: it does
        self._leaving = False

    def sweep(self, seconds: float) -> None:
        """End a client that has let wait for so long: for a request, or with its answer."""
        before = monotonic() - seconds
        if 0 < self._stuck_since <= before:
            self.transport.abort()
        elif 0 < self._since <= before:
            self._refuse("late", f"The request did not arrive within {seconds:.0f} seconds.")

    def shutdown(self) -> None:
        """The server stops. A request that is on its way is still taken, and its answer says that it was the last:
        closing at once would lose what the client sends in the same moment. `hurry` ends who sends none."""
        self._leaving = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def hurry(self) -> None:
        """The server stops, and has waited enough for requests that are not whole, or have not come."""
        if self._since:
            self._refuse(
                "unavailable", "The server is stopping, and the request was not whole. Ask another one."
            )
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _refuse(self, kind: Refusal, words: str) -> None:
        before = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (self._in_head and before):
            return  # the answer to a request before this one is on its way: next time
        answered = not self._in_head and self.cycle is not None and self.cycle.response_started
        if self._requests and not answered:
            reply = refusal(kind, words)
            headers = (
                *reply.headers,
                (b"content-length", b"%d" % len(reply.body)),
                (b"connection", b"close"),
            )
            head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[reply.status] + head + b"\r\n" + reply.body)
            self._tell(kind, words)
        self.transport.close()

    # ── what uvicorn and its parser call ───────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self._requests if self._in_head else 0
        self._feed(data)
        if self._in_head and self._requests == before:
            self._head += len(data)
            if self._head > _MOST_HEAD and not self.transport.is_closing():
                self._refuse("invalid", f"The headers are larger than {_MOST_HEAD} bytes.")

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("This is no proxy.")
            else:
                self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def _stay(self, rest: bytes) -> None:
        """Go on in HTTP/1, as a server may: Java's client asks for HTTP/2 in its first request. The parser takes what
        follows for the other protocol, so a new one is told the same request without that wish."""
        head = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        version = self.parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._feed(line + head + b"\r\n" + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._requests += 1
        self._in_head, self._head, self._since = True, 0, monotonic()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_feed` is told next
        super().on_headers_complete()
        if self._leaving:
            self.cycle.keep_alive = False
        self._in_head = False
        self.headers = _TRAILERS

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._since = 0.0

    def pause_writing(self) -> None:
        self._stuck_since = monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = 0.0
        super().resume_writing()
