"""HTTP/2 as gRPC uses it, on the event loop: frames in, messages out; answers in, frames out.

gRPC's own Python server takes about 0.35 ms of processor time for a small call: threads hand it to each other and
take the interpreter in turns. Here a call is read, answered and written in one turn of the loop, which takes a quarter
of that. So this is what a server of unary calls needs and no more: no push, no priorities, no compression of what we
send. Header blocks are decoded by `hpack`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any, Protocol
from urllib.parse import quote

from hpack import HPACKError

from clickline.serving.hpack_decoder import HeaderDecoder, TooMuchWork

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = 0, 1, 3, 4, 5
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_ENABLE_PUSH, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST = 2, 3, 4, 5, 6
_NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _STREAM_CLOSED = 0, 1, 3, 5
_FRAME_SIZE_ERROR, _REFUSED_STREAM, _CANCEL, _COMPRESSION_ERROR, _ENHANCE_YOUR_CALM = 6, 7, 8, 9, 11

_FRAME = struct.Struct(">BHBBL")  # the length's high byte and the rest, type, flags, stream
_LARGEST_FRAME = 1 << 20
_LARGEST_WINDOW = (1 << 31) - 1
_USUAL_WINDOW = 65535
_WINDOW_STEP = 1 << 20  # bytes taken in before the connection's window is opened again
_MOST_CONNECTIONS = 16384  # of one process
_MOST_STREAMS = 1024  # under way on one connection
_MOST_HEADERS = 1 << 16  # bytes of a call's headers; a call with more is refused
_LARGEST_BLOCK = 1 << 20  # bytes of headers that are read at all, for the sake of the other calls
_MOST_CONTINUATIONS = 1024  # frames of one block
_MOST_RESETS = 10_000  # calls that a client may give up, beside one for each answer that it waited for
_MOST_HELD = 4  # of the largest message, in calls of one connection that are not whole yet
_MOST_UNSENT = 1 << 24  # bytes of answers that a client does not take yet
_KNOWN_BLOCKS = 256  # header blocks that are remembered
_KNOWN_BYTES = 256  # of one of them
_FAREWELL = b"goodbye!"  # a ping whose answer says: the client has heard that we leave

_TOO_MUCH_METADATA = f"The call has more than {_MOST_HEADERS} bytes of metadata. Send less."
_ANSWER = b"\x88\x0f\x10\x10application/grpc"  # :status 200, content-type
_DONE = b"\x00\x0bgrpc-status\x010"
_COMPRESSED = {"gzip": 31, "deflate": 15}  # bits of the window, as zlib wants them


class Service(Protocol):
    """Who answers calls."""

    def opened(self, stream: Stream) -> None:
        """A call has begun: its headers are here. May refuse it, or ask for messages one by one."""

    def message(self, stream: Stream, message: bytes) -> None:
        """The message of a unary call, once it is whole; of a streaming one each of them."""

    def ended(self, stream: Stream) -> None:
        """No more messages of a streaming call will come."""

    def gone(self, stream: Stream) -> None:
        """Nobody waits for this call's answer any more."""

    @property
    def most_bytes(self) -> int:
        """Of one message."""

    @property
    def arriving(self) -> Arriving:
        """What all connections share."""


class Arriving:
    """Requests that are not whole yet, over all connections of a process: how many bytes they hold."""

    __slots__ = ("bytes", "most")

    def __init__(self, most: int) -> None:
        self.bytes = 0
        self.most = most


class Stream:
    """One call."""

    __slots__ = (
        "answered",
        "begun",
        "body",
        "connection",
        "deadline",
        "ended",
        "headers",
        "id",
        "messages",
        "path",
        "refused",
        "streaming",
        "waits",
        "window",
    )

    def __init__(self, connection: Connection, id: int, headers: Mapping[str, str]) -> None:
        self.connection = connection
        self.id = id
        self.headers = headers
        self.path = headers.get(":path", "")
        self.deadline = _deadline(headers.get("grpc-timeout"))
        self.body: bytes | bytearray = b""
        self.streaming = False  # messages are wanted one by one
        self.messages = 0  # so many have come, of a streaming call
        self.refused = False  # what still comes is thrown away
        self.ended = False  # all of the request is here
        self.waits = 0.0  # since when part of an answer waits for the client's window; 0: it does not
        self.window = 0  # bytes that the client takes of the answer, beside what it takes of every one
        self.answered = False  # the answer's headers are sent
        self.begun = monotonic()

    def reply(self, message: bytes) -> None:
        """Answer a unary call."""
        self.connection.send(self, b"\0" + len(message).to_bytes(4, "big") + message, last=True)

    def send(self, message: bytes) -> None:
        """One of several messages."""
        self.connection.send(self, b"\0" + len(message).to_bytes(4, "big") + message, last=False)

    def finish(self) -> None:
        """The end of several messages."""
        self.connection.send(self, b"", last=True)

    def refuse(self, status: int, message: str) -> None:
        """End the call without an answer."""
        self.refused = True
        self.connection.refuse(self, status, message)


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, service: Service, connections: set[Connection]) -> None:
        self._service = service
        self._connections = connections
        self._decoder = HeaderDecoder(_MOST_HEADERS)
        self._blocks: dict[bytes, dict[str, str]] = {}
        self._streams: dict[int, Stream] = {}
        # Answers that do not fit the client's window yet: data, and what ends them.
        self._waiting: dict[Stream, deque[tuple[memoryview, bytes]]] = {}
        self._unsent = 0  # bytes of them
        self._left = bytearray()  # the beginning of a frame
        self._wanted = 0  # bytes until more can be made of it
        self._begun = False
        self._over_and_out = False  # whatever still comes is not read
        self._headers: tuple[int, int, bytearray] | None = (
            None  # a block that goes on: stream, flags, its bytes
        )
        self._continuations = 0  # frames that it came in, beside the first
        self._last_stream = 0
        self._window = _USUAL_WINDOW  # bytes that the client takes on this connection
        self._first_window = _USUAL_WINDOW  # and on each new stream
        self._frame_size = 16384  # that it takes
        self._taken = 0  # bytes since its window was opened last
        self._credit = _MOST_RESETS
        self._held = 0  # bytes of calls that are not whole yet
        self.leaving = False
        self._left_for_good = False  # no new calls are taken
        self._since = monotonic()  # something was begun that is not ended yet
        self._stuck_since = 0.0  # the client takes nothing from its socket; 0: it does
        self._transport: Any = None

    @property
    def busy(self) -> bool:
        """Whether an answer is on its way out."""
        return bool(self._waiting) or self._transport.get_write_buffer_size() > 0

    @property
    def half_said(self) -> bool:
        """Whether the client has begun a greeting, a frame or a block of headers and not ended it."""
        return not self._begun or bool(self._left) or self._headers is not None

    @property
    def stuck(self) -> bool:
        """Whether the client lets its answers lie."""
        return self._stuck_since > 0

    # ── the transport ──────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if len(self._connections) >= _MOST_CONNECTIONS:
            transport.abort()
            return
        self._connections.add(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        most = min(_LARGEST_WINDOW, 2 * self._service.most_bytes + _USUAL_WINDOW)
        settings = b"".join(
            struct.pack(">HL", key, value)
            for key, value in (
                (_MAX_CONCURRENT_STREAMS, _MOST_STREAMS),
                (_INITIAL_WINDOW_SIZE, most),
                (_MAX_FRAME_SIZE, _LARGEST_FRAME),
                (_MAX_HEADER_LIST, _MOST_HEADERS),
            )
        )
        opened = (_LARGEST_WINDOW - _USUAL_WINDOW).to_bytes(4, "big")
        transport.write(_frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, opened))

    def pause_writing(self) -> None:
        """The client does not read its answers: it is not asked for more questions."""
        self._stuck_since = monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stuck_since = 0.0
        self._transport.resume_reading()

    def sweep(self, seconds: float) -> None:
        """Give up what a client has begun so long ago and not ended: a frame, a call, or to take an answer."""
        before = monotonic() - seconds
        unfinished = self.half_said or self._over_and_out
        if (unfinished and self._since <= before) or 0 < self._stuck_since <= before:
            self._transport.abort()
            return
        for stream in list(self._streams.values()):
            if 0 < stream.waits <= before:
                self._reset(stream, _CANCEL)
            elif not stream.ended and stream.begun <= before:
                stream.refuse(4, f"The request did not arrive within {seconds:.0f} seconds.")

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._over_and_out = True
        streams, self._streams = self._streams, {}
        self._waiting.clear()
        for stream in streams.values():
            self._let_go(stream)
            self._service.gone(stream)

    def data_received(self, data: bytes) -> None:
        if self._over_and_out:
            return
        if self._left:
            self._left += data
            if len(self._left) < self._wanted:
                return
            data = bytes(self._left)
            self._left.clear()
        at, size, length = 0, len(data), 0
        if not self._begun:
            if size < len(PREFACE):
                if not PREFACE.startswith(data):
                    self._transport.abort()  # not HTTP/2
                self._left += data
                self._wanted = len(PREFACE)
                return
            if not data.startswith(PREFACE):
                self._transport.abort()
                return
            self._begun = True
            at = len(PREFACE)
        try:
            while size - at >= 9:
                high, low, kind, flags, id = _FRAME.unpack_from(data, at)
                length = high << 16 | low
                if length > _LARGEST_FRAME:
                    raise _Fault(_FRAME_SIZE_ERROR, f"a frame of {length} bytes")
                if size - at - 9 < length:
                    break
                self._frame(kind, flags, id & 0x7FFFFFFF, data[at + 9 : at + 9 + length])
                at += 9 + length
        except _Fault as fault:
            self._fail(fault)
            return
        if at < size:
            self._wanted = 9 + length if size - at >= 9 else 9
            self._left += data[at:]
            if self._headers is None:
                self._since = monotonic()
        if self._taken >= _WINDOW_STEP:
            self._transport.write(_frame(_WINDOW_UPDATE, 0, 0, self._taken.to_bytes(4, "big")))
            self._taken = 0

    # ── frames ─────────────────────────────────────────────────────────────────────────────────

    def _frame(self, kind: int, flags: int, id: int, payload: bytes) -> None:
        if self._headers is not None and kind != _CONTINUATION:
            raise _Fault(_PROTOCOL_ERROR, "a header block was interrupted")
        if kind == _DATA:
            self._data(flags, id, payload)
        elif kind == _HEADERS:
            if flags & _PADDED:
                payload = _unpadded(payload)
            if flags & _PRIORITY:
                if len(payload) < 5:
                    raise _Fault(_FRAME_SIZE_ERROR, "half of a priority")
                payload = payload[5:]
            if flags & _END_HEADERS:
                self._open(id, flags, payload)
            else:
                self._headers, self._continuations = (id, flags, bytearray(payload)), 0
                self._since = monotonic()
        elif kind == _CONTINUATION:
            if self._headers is None or self._headers[0] != id:
                raise _Fault(_PROTOCOL_ERROR, "a continuation of nothing")
            block = self._headers[2]
            block += payload
            self._continuations += 1
            too_many = len(block) > _LARGEST_BLOCK or self._continuations > _MOST_CONTINUATIONS
            if too_many or not (payload or flags & _END_HEADERS):
                raise _Fault(_ENHANCE_YOUR_CALM, "a header block is too large, or goes on with nothing")
            if flags & _END_HEADERS:
                begun, self._headers = self._headers, None
                self._open(id, begun[1], bytes(block))
        elif kind == _RST_STREAM:
            self._given_up(id, payload)
        elif kind == _SETTINGS:
            self._settings(flags, id, payload)
        elif kind == _PING:
            self._ping(flags, id, payload)
        elif kind == _WINDOW_UPDATE:
            self._open_window(id, payload)
        elif kind == _PUSH_PROMISE:
            raise _Fault(_PROTOCOL_ERROR, "clients push nothing")
        # Others mean nothing to us: GOAWAY comes from clients that are about to leave anyway.

    def _given_up(self, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _Fault(_FRAME_SIZE_ERROR, "a reset has 4 bytes")
        if not 0 < id <= self._last_stream:
            raise _Fault(_PROTOCOL_ERROR, "a call was given up that never began")
        self._credit -= 1
        if self._credit < 0:
            raise _Fault(_ENHANCE_YOUR_CALM, "too many calls were given up")
        stream = self._streams.get(id)
        if stream is not None:
            self._drop(stream)

    def _ping(self, flags: int, id: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise _Fault(_FRAME_SIZE_ERROR, "a ping has 8 bytes")
        if id:
            raise _Fault(_PROTOCOL_ERROR, "a ping belongs to no call")
        if not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif self.leaving and payload == _FAREWELL:
            self._leave_for_good()

    def _open(self, id: int, flags: int, block: bytes) -> None:
        """Headers: a call begins, or a client says goodbye to one."""
        headers = self._decoded(block)
        stream = self._streams.get(id)
        if stream is not None:  # trailers of a request: gRPC has none, HTTP/2 does
            if stream.ended:
                raise _Fault(_STREAM_CLOSED, "headers after the end of a call")
            if not flags & _END_STREAM:
                raise _Fault(_PROTOCOL_ERROR, "headers in the middle of a call")
            if headers is None:
                stream.refuse(8, _TOO_MUCH_METADATA)
            else:
                self._end(stream)
            return
        if id <= self._last_stream or id % 2 == 0:
            raise _Fault(_PROTOCOL_ERROR, f"a call with number {id} after {self._last_stream}")
        self._last_stream = id
        if self._left_for_good or len(self._streams) >= _MOST_STREAMS:
            self._transport.write(_frame(_RST_STREAM, 0, id, _REFUSED_STREAM.to_bytes(4, "big")))
            return
        stream = Stream(self, id, headers or {})
        self._streams[id] = stream
        if headers is None:
            stream.refuse(8, _TOO_MUCH_METADATA)
            return
        self._service.opened(stream)
        if flags & _END_STREAM and id in self._streams:
            self._end(stream)

    def _decoded(self, block: bytes) -> dict[str, str] | None:
        """What a block of headers says; None: more than allowed. Most are made of numbers of a table alone, and come
        again and again."""
        if block and min(block) > 0x80 and max(block) < 0xFF:
            known = self._blocks.get(block)
            if known is not None:
                return known
            headers = self._decode(block)
            if headers is not None and len(self._blocks) < _KNOWN_BLOCKS and len(block) <= _KNOWN_BYTES:
                self._blocks[block] = headers
            return headers
        self._blocks.clear()  # this one may change the table
        return self._decode(block)

    def _decode(self, block: bytes) -> dict[str, str] | None:
        try:
            found = self._decoder.decode(block)
            return None if found is None else {_text(name): _text(value) for name, value in found}
        except TooMuchWork as error:
            raise _Fault(_ENHANCE_YOUR_CALM, str(error)) from error
        except (HPACKError, ValueError) as error:
            raise _Fault(_COMPRESSION_ERROR, f"headers cannot be read: {error}") from error

    def _data(self, flags: int, id: int, payload: bytes) -> None:
        self._taken += len(payload)
        stream = self._streams.get(id)
        if stream is None:
            if not 0 < id <= self._last_stream:
                raise _Fault(_PROTOCOL_ERROR, "data of a call that never began")
            return  # of one that was answered already
        if stream.ended:
            raise _Fault(_STREAM_CLOSED, "data after the end of a call")
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _END_STREAM and not (stream.body or stream.streaming or stream.refused):
            stream.ended = True
            self._whole(stream, payload)  # mostly
            return
        if not stream.refused:
            if not stream.body:
                stream.body = payload
            elif isinstance(stream.body, bytearray):
                stream.body += payload
            else:
                stream.body = bytearray(stream.body + payload)
            self._hold(len(payload))
            if stream.streaming:
                self._messages(stream)
            self._bound(stream)
        if flags & _END_STREAM and id in self._streams:
            self._end(stream)

    def _bound(self, stream: Stream) -> None:
        """Refuse a call that would make us hold too much."""
        most = self._service.most_bytes
        if len(stream.body) > 5 + 2 * most:
            stream.refuse(3, f"The request is larger than {most} bytes (serve.max_body).")
        elif self._held > _MOST_HELD * most:
            stream.refuse(8, "Too many large requests are half sent on this connection. Send them in turn.")
        elif self._service.arriving.bytes > self._service.arriving.most:
            stream.refuse(8, "Too many large requests are half sent to this server. Try again later.")

    def _end(self, stream: Stream) -> None:
        """All of a call is here."""
        stream.ended = True
        if stream.refused:
            return
        if stream.streaming:
            self._service.ended(stream)
            return
        body = bytes(stream.body)
        self._let_go(stream)
        self._whole(stream, body)

    def _whole(self, stream: Stream, body: bytes) -> None:
        """The message of a unary call, as it was sent."""
        if len(body) < 5 or int.from_bytes(body[1:5], "big") != len(body) - 5:
            stream.refuse(13, "The call holds no message, or not exactly one.")
            return
        message = self._plain(stream, body[0], body[5:])
        if message is not None:
            self._service.message(stream, message)

    def _messages(self, stream: Stream) -> None:
        """Whole messages of a streaming call."""
        first = int.from_bytes(stream.body[1:5], "big")
        if first <= self._service.most_bytes and len(stream.body) < 5 + first:
            return  # not yet one
        body, at = bytes(stream.body), 0
        self._let_go(stream)
        while len(body) - at >= 5 and not stream.refused:
            length = int.from_bytes(body[at + 1 : at + 5], "big")
            if length > self._service.most_bytes:
                stream.refuse(8, f"A message of {length} bytes; {self._service.most_bytes} are allowed.")
            if len(body) - at < 5 + length:
                break
            flag, message = body[at], body[at + 5 : at + 5 + length]
            at += 5 + length
            stream.messages += 1
            plain = self._plain(stream, flag, message)
            if plain is not None:
                self._service.message(stream, plain)
        if not stream.refused:
            stream.body = body[at:]
            self._hold(len(stream.body))

    def _plain(self, stream: Stream, flag: int, message: bytes) -> bytes | None:
        """A message without its compression; None where it cannot be read, and the call was refused."""
        if not flag:
            return message
        name = stream.headers.get("grpc-encoding", "identity")
        bits = _COMPRESSED.get(name)
        if bits is None:
            stream.refuse(12, f"Messages compressed by {name[:20]} are not read; gzip and deflate are.")
            return None
        unpacker = zlib.decompressobj(bits)
        try:
            plain = unpacker.decompress(message, self._service.most_bytes + 1)
        except zlib.error:
            stream.refuse(13, "The compressed message is damaged.")
            return None
        if len(plain) > self._service.most_bytes:
            stream.refuse(3, f"The request is larger than {self._service.most_bytes} bytes (serve.max_body).")
            return None
        if not unpacker.eof:
            stream.refuse(13, "The compressed message is damaged: its end is missing.")
            return None
        return plain

    # ── windows ────────────────────────────────────────────────────────────────────────────────

    def _settings(self, flags: int, id: int, payload: bytes) -> None:
        if id:
            raise _Fault(_PROTOCOL_ERROR, "settings belong to no call")
        if flags & _ACK:
            if payload:
                raise _Fault(_FRAME_SIZE_ERROR, "an acknowledgement of settings says nothing")
            return
        if len(payload) % 6:
            raise _Fault(_FRAME_SIZE_ERROR, "settings have 6 bytes each")
        for key, value in struct.iter_unpack(">HL", payload):
            if key == _INITIAL_WINDOW_SIZE:
                if value > _LARGEST_WINDOW:
                    raise _Fault(_FLOW_CONTROL_ERROR, "a window is too large")
                self._first_window = value
            elif key == _MAX_FRAME_SIZE:
                if not 16384 <= value < 1 << 24:
                    raise _Fault(_PROTOCOL_ERROR, "frames of that size are not allowed")
                self._frame_size = value
            elif key == _ENABLE_PUSH and value > 1:
                raise _Fault(_PROTOCOL_ERROR, "push is allowed or not")
        self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        self._flush()

    def _open_window(self, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _Fault(_FRAME_SIZE_ERROR, "an update of a window has 4 bytes")
        more = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if id == 0:
            self._window += more
            if not more or self._window > _LARGEST_WINDOW:
                raise _Fault(_FLOW_CONTROL_ERROR, "the connection's window")
            self._flush()
        elif (stream := self._streams.get(id)) is not None:
            stream.window += more
            if not more:
                self._reset(stream, _PROTOCOL_ERROR)
            elif self._first_window + stream.window > _LARGEST_WINDOW:
                self._reset(stream, _FLOW_CONTROL_ERROR)
            elif stream.waits:
                self._pour(stream)
        elif id > self._last_stream:
            raise _Fault(_PROTOCOL_ERROR, "a window of a call that never began")

    # ── answers ────────────────────────────────────────────────────────────────────────────────

    def send(self, stream: Stream, data: bytes, *, last: bool) -> None:
        """Part of an answer, or all of it in one write."""
        if self._streams.get(stream.id) is not stream:
            return  # nobody waits for it
        size = len(data)
        fits = (
            size <= self._frame_size and size <= self._first_window + stream.window and size <= self._window
        )
        if not fits and self._unsent and self._unsent + size > _MOST_UNSENT:
            stream.refuse(8, "The answers before this one were not taken yet. Read them first.")
            return
        head = b"" if stream.answered else _frame(_HEADERS, _END_HEADERS, stream.id, _ANSWER)
        stream.answered = True
        tail = _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream.id, _DONE) if last else b""
        if fits and not stream.waits:
            stream.window -= size
            self._window -= size
            self._transport.write(head + (_frame(_DATA, 0, stream.id, data) if size else b"") + tail)
            if last:
                self._over(stream)
            return
        self._transport.write(head)
        if not stream.waits:
            stream.waits = monotonic()
        self._waiting.setdefault(stream, deque()).append((memoryview(data), tail))
        self._unsent += size
        self._pour(stream)

    def _flush(self) -> None:
        """Send as much of what waits as the client takes."""
        for stream in list(self._waiting):
            if self._window <= 0:
                return
            self._pour(stream)

    def _pour(self, stream: Stream) -> None:
        """The same, of one call."""
        pieces = self._waiting[stream]
        while pieces:
            data, tail = pieces[0]
            while data:
                size = min(len(data), self._frame_size, self._first_window + stream.window, self._window)
                if size <= 0:
                    pieces[0] = (data, tail)
                    return
                self._transport.write(_frame(_DATA, 0, stream.id, bytes(data[:size])))
                data = data[size:]
                stream.window -= size
                self._window -= size
                self._unsent -= size
            pieces.popleft()
            if tail:
                self._transport.write(tail)
                self._over(stream)
                return
        del self._waiting[stream]
        stream.waits = 0.0

    def refuse(self, stream: Stream, status: int, message: str) -> None:
        """Trailers alone."""
        if self._streams.get(stream.id) is not stream:
            return
        words = quote(message, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()[:4096]
        block = _literal(b"grpc-status", str(status).encode()) + _literal(b"grpc-message", words)
        if not stream.answered:
            block = _ANSWER + block
        self._transport.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream.id, block))
        self._over(stream)

    def _over(self, stream: Stream) -> None:
        """Its answer is out."""
        if self._credit < _MOST_RESETS:
            self._credit += 1
        self._forget(stream)

    def _reset(self, stream: Stream, code: int) -> None:
        """End a call without a word."""
        self._transport.write(_frame(_RST_STREAM, 0, stream.id, code.to_bytes(4, "big")))
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        self._forget(stream)
        self._service.gone(stream)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.id]
        if stream.body:
            self._let_go(stream)
        if stream.waits:
            self._unsent -= sum(len(data) for data, _ in self._waiting.pop(stream))
        if self._left_for_good and not self._streams:
            self._transport.close()

    def _hold(self, size: int) -> None:
        self._held += size
        self._service.arriving.bytes += size

    def _let_go(self, stream: Stream) -> None:
        """Of what has come of a call so far."""
        self._hold(-len(stream.body))
        stream.body = b""

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def leave(self) -> None:
        """Say that we leave. Calls that are on their way are still taken, until the client has heard it."""
        if self.leaving:
            return
        self.leaving = True
        if not self._begun:
            self._transport.close()
            return
        gone = struct.pack(">LL", _LARGEST_WINDOW, _NO_ERROR)
        self._transport.write(_frame(_GOAWAY, 0, 0, gone) + _frame(_PING, 0, 0, _FAREWELL))

    def hurry(self) -> None:
        """It was time enough: wait only for answers, no more for questions."""
        self._leave_for_good()
        for stream in list(self._streams.values()):
            if not stream.ended:
                stream.refuse(14, "The server is stopping, and the request was not whole. Ask another one.")

    def _leave_for_good(self) -> None:
        """Take no more calls; close when those under way are answered."""
        if self._left_for_good:
            return
        self._left_for_good = True
        self._transport.write(_frame(_GOAWAY, 0, 0, struct.pack(">LL", self._last_stream, _NO_ERROR)))
        if not self._streams:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _fail(self, fault: _Fault) -> None:
        self._over_and_out, self._since = True, monotonic()
        words = str(fault).encode()
        self._transport.write(
            _frame(_GOAWAY, 0, 0, struct.pack(">LL", self._last_stream, fault.code) + words)
        )
        self._transport.close()


class _Fault(Exception):
    """The client does not speak HTTP/2 as it should: the connection ends."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


def _frame(kind: int, flags: int, id: int, payload: bytes) -> bytes:
    length = len(payload)
    return _FRAME.pack(length >> 16, length & 0xFFFF, kind, flags, id) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that no table knows."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(value: int) -> bytes:
    """An integer with a prefix of 7 bits."""
    if value < 127:
        return bytes([value])
    octets = bytearray([127])
    value -= 127
    while value >= 128:
        octets.append(value & 127 | 128)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _Fault(_PROTOCOL_ERROR, "more padding than there is")
    return payload[1 : len(payload) - payload[0]]


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def _deadline(timeout: str | None) -> float | None:
    """When a call must be answered, in the time of `time.monotonic`."""
    if not timeout or timeout[-1] not in _UNITS or len(timeout) > 9:
        return None
    if not (timeout.isascii() and timeout[:-1].isdigit()):
        return None
    return monotonic() + int(timeout[:-1]) * _UNITS[timeout[-1]]
