"""The connection of one client: its calls, from their first frame to their end."""

from __future__ import annotations

import asyncio
import socket
import struct
from time import monotonic
from typing import Any

from clickline.serving.http2.flow_control import DEFAULT_WINDOW, MAX_WINDOW, SendWindows
from clickline.serving.http2.frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    MAX_FRAME,
    NO_ERROR,
    PADDED,
    PING,
    PRIORITY_FRAME,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    FrameReader,
    Http2Error,
    NotHttp2,
    frame,
    unpadded,
)
from clickline.serving.http2.grpc_messages import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallRefused,
    decompressed,
    error_trailers,
    message_end,
    unary_message,
)
from clickline.serving.http2.header_blocks import MAX_HEADERS, HeaderBlocks
from clickline.serving.http2.stream import CallHandler, Stream

_ENABLE_PUSH, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST = 2, 3, 4, 5, 6
_WINDOW_STEP = 1 << 20  # bytes received before the connection's window is extended
_MAX_CONNECTIONS = 16384  # of one process
_MAX_STREAMS = 1024  # open on one connection
_MAX_RESETS = 10_000  # calls that a client may cancel, plus one for each answer that it waited for
_MAX_BUFFERED = 4  # times the largest message: buffered in incomplete calls of one connection
_DRAIN_PING = b"goodbye!"  # a ping whose acknowledgement shows that the client has read our GOAWAY
_METADATA_TOO_LARGE = f"The call has more than {MAX_HEADERS} bytes of metadata. Send less."


class Http2Connection(asyncio.Protocol):
    """The connection of one client."""

    def __init__(self, handler: CallHandler, connections: set[Http2Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._frames = FrameReader()
        self._blocks = HeaderBlocks()
        self._windows = SendWindows()
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._received = 0  # bytes since the last window update
        self._buffered = 0  # bytes of incomplete requests
        self._reset_credit = _MAX_RESETS
        self.draining = False
        self._refuses_calls = False  # new calls are refused
        self._closed_since = 0.0  # since when input is ignored; 0: it is not
        self._blocked_since = 0.0  # since when the client does not read its socket; 0: it does
        self._transport: Any = None

    @property
    def busy(self) -> bool:
        """Whether an answer is still being sent."""
        return bool(self._windows.waiting) or self._transport.get_write_buffer_size() > 0

    @property
    def incomplete(self) -> bool:
        """Whether the client has begun a preface, frame or header block and not completed it."""
        return self._frames.incomplete or self._blocks.incomplete_since > 0

    @property
    def blocked(self) -> bool:
        """Whether the client does not read its answers."""
        return self._blocked_since > 0

    # ── the transport ──────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        self._transport = self._windows.transport = transport
        if len(self._connections) >= _MAX_CONNECTIONS:
            transport.abort()
            return
        self._connections.add(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        limit = min(MAX_WINDOW, 2 * self._handler.max_message_bytes + DEFAULT_WINDOW)
        settings = b"".join(
            struct.pack(">HL", key, value)
            for key, value in (
                (_MAX_CONCURRENT_STREAMS, _MAX_STREAMS),
                (_INITIAL_WINDOW_SIZE, limit),
                (_MAX_FRAME_SIZE, MAX_FRAME),
                (_MAX_HEADER_LIST, MAX_HEADERS),
            )
        )
        opened = (MAX_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big")
        transport.write(frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, opened))

    def pause_writing(self) -> None:
        """The client does not read its answers, so stop reading its requests."""
        self._blocked_since = monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._blocked_since = 0.0
        self._transport.resume_reading()

    def check_timeouts(self, seconds: float) -> None:
        """End what a client has not completed within `seconds`: a frame, a request, or reading an answer."""
        before = monotonic() - seconds
        waits = [self._blocked_since, self._closed_since, self._blocks.incomplete_since]
        if self._frames.incomplete:
            waits.append(self._frames.incomplete_since)
        if any(0 < since <= before for since in waits):
            self._transport.abort()
            return
        for stream in list(self._streams.values()):
            if 0 < stream.blocked_since <= before:
                self._reset_stream(stream, CANCEL)
            elif not stream.ended and stream.started <= before:
                stream.refuse(4, f"The request did not arrive within {seconds:.0f} seconds.")

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._closed_since = monotonic()
        streams, self._streams = self._streams, {}
        self._windows.clear()
        for stream in streams.values():
            self._release_body(stream)
            self._handler.on_cancel(stream)

    def data_received(self, data: bytes) -> None:
        if self._closed_since:
            return
        try:
            for kind, flags, id, payload in self._frames.feed(data):
                self._handle_frame(kind, flags, id, payload)
        except NotHttp2:
            self._transport.abort()
            return
        except Http2Error as error:
            self._close_with_error(error)
            return
        if self._received >= _WINDOW_STEP:
            self._transport.write(frame(WINDOW_UPDATE, 0, 0, self._received.to_bytes(4, "big")))
            self._received = 0

    # ── frames ─────────────────────────────────────────────────────────────────────────────────

    def _handle_frame(self, kind: int, flags: int, id: int, payload: bytes) -> None:
        if self._blocks.incomplete_since and kind != CONTINUATION:
            raise Http2Error(PROTOCOL_ERROR, "a header block was interrupted")
        if kind == DATA:
            self._data(flags, id, payload)
        elif kind == HEADERS:
            block = self._blocks.begin(id, flags, payload)
            if block is not None:
                self._headers_complete(id, flags, block)
        elif kind == CONTINUATION:
            complete = self._blocks.proceed(id, flags, payload)
            if complete is not None:
                self._headers_complete(id, *complete)
        elif kind == RST_STREAM:
            self._reset_by_client(id, payload)
        elif kind == SETTINGS:
            self._settings(flags, id, payload)
        elif kind == PING:
            self._ping(flags, id, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(id, payload)
        elif kind == PUSH_PROMISE:
            raise Http2Error(PROTOCOL_ERROR, "clients must not push")
        elif kind == PRIORITY_FRAME:  # checked, and otherwise ignored
            if not id:
                raise Http2Error(PROTOCOL_ERROR, "PRIORITY of no stream")
            if len(payload) != 5:
                raise Http2Error(FRAME_SIZE_ERROR, "PRIORITY must have 5 bytes")
        elif kind == GOAWAY and id:
            raise Http2Error(PROTOCOL_ERROR, "GOAWAY on a stream")
        # Other frames are ignored: a client that sends GOAWAY is about to close the connection anyway.

    def _headers_complete(self, id: int, flags: int, block: bytes) -> None:
        """A header block is complete: it opens a call, or ends a request with trailers."""
        headers = self._blocks.decode(block)
        stream = self._streams.get(id)
        if stream is not None:  # request trailers: HTTP/2 allows them, gRPC sends none
            if stream.ended:
                raise Http2Error(STREAM_CLOSED, "HEADERS after END_STREAM")
            if not flags & END_STREAM:
                raise Http2Error(PROTOCOL_ERROR, "HEADERS in the middle of a call")
            if headers is None:
                stream.refuse(8, _METADATA_TOO_LARGE)
            else:
                self._end(stream)
            return
        if id <= self._last_stream or id % 2 == 0:
            raise Http2Error(PROTOCOL_ERROR, f"stream {id} after stream {self._last_stream}")
        self._last_stream = id
        if self._refuses_calls or len(self._streams) >= _MAX_STREAMS:
            self._transport.write(frame(RST_STREAM, 0, id, REFUSED_STREAM.to_bytes(4, "big")))
            return
        stream = Stream(self, id, headers or {})
        self._streams[id] = stream
        if headers is None:
            stream.refuse(8, _METADATA_TOO_LARGE)
            return
        self._handler.on_open(stream)
        if flags & END_STREAM and id in self._streams:
            self._end(stream)

    def _reset_by_client(self, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "RST_STREAM must have 4 bytes")
        if not 0 < id <= self._last_stream:
            raise Http2Error(PROTOCOL_ERROR, "RST_STREAM of a call that was never opened")
        self._reset_credit -= 1
        if self._reset_credit < 0:
            raise Http2Error(ENHANCE_YOUR_CALM, "too many calls were cancelled")
        stream = self._streams.get(id)
        if stream is not None:
            self._drop(stream)

    def _settings(self, flags: int, id: int, payload: bytes) -> None:
        if id:
            raise Http2Error(PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if payload:
                raise Http2Error(FRAME_SIZE_ERROR, "a SETTINGS acknowledgement with a payload")
            return
        if len(payload) % 6:
            raise Http2Error(FRAME_SIZE_ERROR, "each setting must have 6 bytes")
        for key, value in struct.iter_unpack(">HL", payload):
            if key == _INITIAL_WINDOW_SIZE:
                self._windows.set_initial(value)
            elif key == _MAX_FRAME_SIZE:
                if not 16384 <= value < 1 << 24:
                    raise Http2Error(PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
                self._windows.frame_size = value
            elif key == _ENABLE_PUSH and value > 1:
                raise Http2Error(PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH must be 0 or 1")
        self._transport.write(frame(SETTINGS, ACK, 0, b""))
        self._flush()

    def _ping(self, flags: int, id: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise Http2Error(FRAME_SIZE_ERROR, "PING must have 8 bytes")
        if id:
            raise Http2Error(PROTOCOL_ERROR, "PING on a stream")
        if not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif self.draining and payload == _DRAIN_PING:
            self._refuse_new_calls()

    def _window_update(self, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "WINDOW_UPDATE must have 4 bytes")
        size = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if id == 0:
            self._windows.extend(size)
            self._flush()
        elif (stream := self._streams.get(id)) is not None:
            within = self._windows.extend_stream(stream, size)
            if not size:
                self._reset_stream(stream, PROTOCOL_ERROR)
            elif not within:
                self._reset_stream(stream, FLOW_CONTROL_ERROR)
            elif stream.blocked_since and self._windows.send_queued(stream):
                self._finished(stream)
        elif id > self._last_stream:
            raise Http2Error(PROTOCOL_ERROR, "WINDOW_UPDATE of a call that was never opened")

    # ── requests ───────────────────────────────────────────────────────────────────────────────

    def _data(self, flags: int, id: int, payload: bytes) -> None:
        self._received += len(payload)
        stream = self._streams.get(id)
        if stream is None:
            if not 0 < id <= self._last_stream:
                raise Http2Error(PROTOCOL_ERROR, "DATA of a call that was never opened")
            return  # of a call that is already answered
        if stream.ended:
            raise Http2Error(STREAM_CLOSED, "DATA after END_STREAM")
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & END_STREAM and not (stream.body or stream.streaming or stream.refused):
            stream.ended = True
            self._deliver_unary(stream, payload)  # the common case
            return
        if not stream.refused:
            if not stream.body:
                stream.body = payload
            elif isinstance(stream.body, bytearray):
                stream.body += payload
            else:
                stream.body = bytearray(stream.body + payload)
            self._count_buffered(len(payload))
            if stream.streaming:
                self._deliver_messages(stream)
            self._check_buffered(stream)
        if flags & END_STREAM and id in self._streams:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        """The client has sent all of a call."""
        stream.ended = True
        if stream.refused:
            return
        if stream.streaming:
            self._handler.on_end(stream)
            return
        body = bytes(stream.body)
        self._release_body(stream)
        self._deliver_unary(stream, body)

    def _deliver_unary(self, stream: Stream, body: bytes) -> None:
        encoding = stream.headers.get("grpc-encoding", "identity")
        try:
            message = unary_message(body, encoding, self._handler.max_message_bytes)
        except CallRefused as refused:
            stream.refuse(refused.status, str(refused))
            return
        self._handler.on_message(stream, message)

    def _deliver_messages(self, stream: Stream) -> None:
        """Deliver the complete messages of a streaming call."""
        limit, at = self._handler.max_message_bytes, 0
        encoding = stream.headers.get("grpc-encoding", "identity")
        try:
            if message_end(stream.body, 0, limit) is None:
                return  # none is complete yet
            body = bytes(stream.body)
            self._release_body(stream)
            while not stream.refused and (end := message_end(body, at, limit)) is not None:
                stream.messages += 1
                message = decompressed(body[at], body[at + 5 : end], encoding, limit)
                at = end
                self._handler.on_message(stream, message)
        except CallRefused as refused:
            stream.refuse(refused.status, str(refused))
        if not stream.refused:
            stream.body = body[at:]
            self._count_buffered(len(stream.body))

    def _check_buffered(self, stream: Stream) -> None:
        """Refuse a call if too many bytes of incomplete requests are buffered."""
        limit = self._handler.max_message_bytes
        if len(stream.body) > 5 + 2 * limit:
            stream.refuse(3, f"The request is larger than {limit} bytes (serve.max_body).")
        elif self._buffered > _MAX_BUFFERED * limit:
            stream.refuse(8, "Too many large requests are half sent on this connection. Send them in turn.")
        elif self._handler.buffered.bytes > self._handler.buffered.limit:
            stream.refuse(8, "Too many large requests are half sent to this server. Try again later.")

    def _count_buffered(self, size: int) -> None:
        self._buffered += size
        self._handler.buffered.bytes += size

    def _release_body(self, stream: Stream) -> None:
        """Discard what has been buffered of a request."""
        self._count_buffered(-len(stream.body))
        stream.body = b""

    # ── answers ────────────────────────────────────────────────────────────────────────────────

    def send(self, stream: Stream, data: bytes, *, last: bool) -> None:
        """Send part of an answer, or all of it in one write."""
        if self._streams.get(stream.id) is not stream:
            return  # the client no longer waits for it
        if self._windows.full(len(data)) and not self._windows.fits(stream, len(data)):
            stream.refuse(8, "Earlier answers on this connection were not read yet. Read them first.")
            return
        head = b"" if stream.answered else frame(HEADERS, END_HEADERS, stream.id, RESPONSE_HEADERS)
        stream.answered = True
        tail = frame(HEADERS, END_HEADERS | END_STREAM, stream.id, OK_TRAILERS) if last else b""
        if self._windows.send(stream, head, data, tail):
            self._finished(stream)

    def _flush(self) -> None:
        """Send as much of the queued answers as the client's windows allow."""
        for stream in self._windows.waiting:
            if self._windows.closed:
                return
            if self._windows.send_queued(stream):
                self._finished(stream)

    def refuse(self, stream: Stream, status: int, message: str) -> None:
        """End a call with an error status, in trailers only."""
        if self._streams.get(stream.id) is not stream:
            return
        block = error_trailers(status, message)
        if not stream.answered:
            block = RESPONSE_HEADERS + block
        self._transport.write(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, block))
        self._finished(stream)

    def _finished(self, stream: Stream) -> None:
        """The answer to a call has been sent."""
        if self._reset_credit < _MAX_RESETS:
            self._reset_credit += 1
        self._remove(stream)

    def _reset_stream(self, stream: Stream, code: int) -> None:
        """Reset a call without a status."""
        self._transport.write(frame(RST_STREAM, 0, stream.id, code.to_bytes(4, "big")))
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        self._remove(stream)
        self._handler.on_cancel(stream)

    def _remove(self, stream: Stream) -> None:
        del self._streams[stream.id]
        if stream.body:
            self._release_body(stream)
        self._windows.forget(stream)
        if self._refuses_calls and not self._streams:
            self._transport.close()

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def start_drain(self) -> None:
        """Announce the shutdown. Calls in flight are still accepted until the client has read the announcement."""
        if self.draining:
            return
        self.draining = True
        if not self._frames.preface_received:
            self._transport.close()
            return
        gone = struct.pack(">LL", MAX_WINDOW, NO_ERROR)
        self._transport.write(frame(GOAWAY, 0, 0, gone) + frame(PING, 0, 0, _DRAIN_PING))

    def finish_drain(self) -> None:
        """Refuse incomplete requests; from now on only answers are waited for."""
        self._refuse_new_calls()
        for stream in list(self._streams.values()):
            if not stream.ended:
                stream.refuse(
                    14, "The server is stopping, and the request was incomplete. Try another server."
                )

    def _refuse_new_calls(self) -> None:
        """Accept no more calls; close when the open ones are answered."""
        if self._refuses_calls:
            return
        self._refuses_calls = True
        self._transport.write(frame(GOAWAY, 0, 0, struct.pack(">LL", self._last_stream, NO_ERROR)))
        if not self._streams:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _close_with_error(self, error: Http2Error) -> None:
        self._closed_since = monotonic()
        message = str(error).encode()
        gone = struct.pack(">LL", self._last_stream, error.code) + message
        self._transport.write(frame(GOAWAY, 0, 0, gone))
        self._transport.close()
