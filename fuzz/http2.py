"""The HTTP/2 side of the gRPC port: any bytes, in any pieces, lead to frames or to a closed connection."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence

from hpack import Encoder

from clickline.serving.http2.connection import Http2Connection
from clickline.serving.http2.frames import PREFACE
from clickline.serving.http2.stream import BufferedBytes, Stream
from fuzz.target import Choices, Target

_MAX_MESSAGE = 4096


class _Transport:
    def __init__(self) -> None:
        self.ended = False
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def abort(self) -> None:
        self.ended = True

    close = abort

    def is_closing(self) -> bool:
        return self.ended

    def get_extra_info(self, name: str) -> _Transport:
        return self

    def setsockopt(self, *_: object) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class _EchoHandler:
    """Answers each call with its own message."""

    max_message_bytes = _MAX_MESSAGE

    def __init__(self) -> None:
        self.buffered = BufferedBytes(4 * _MAX_MESSAGE)

    def on_open(self, stream: Stream) -> None:
        stream.streaming = stream.path == "/stream"
        if stream.path == "/no":
            stream.refuse(5, "é" * 50 + stream.path)

    def on_message(self, stream: Stream, message: bytes) -> None:
        assert len(message) <= _MAX_MESSAGE
        if stream.streaming:
            stream.send(message)
        else:
            stream.reply(message)

    def on_end(self, stream: Stream) -> None:
        stream.finish()

    def on_cancel(self, stream: Stream) -> None:
        pass


def _http2(data: bytes) -> None:
    choices = Choices(data)
    size = choices.one_of([1 << 20, 1, 9, 100])
    with_preface = choices.number(8) > 0
    content = (PREFACE if with_preface else b"") + choices.rest()
    handler, transport = _EchoHandler(), _Transport()
    connection = Http2Connection(handler, set())
    connection.connection_made(transport)
    for at in range(0, len(content), size):
        if transport.ended:
            break
        connection.data_received(content[at : at + size])
        # Buffered input and queued output are bounded.
        assert handler.buffered.bytes <= 64 * _MAX_MESSAGE and transport.written < 1 << 26
    connection.check_timeouts(0.0)
    connection.connection_lost(None)
    assert handler.buffered.bytes == 0


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBL", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _seeds() -> Sequence[bytes]:
    encoder = Encoder()

    def call(number: int, path: str, body: bytes, **more: str) -> bytes:
        headers = {":method": "POST", ":path": path, "te": "trailers", "grpc-timeout": "1S", **more}
        block = encoder.encode(list(headers.items()))
        message = body[:1] + struct.pack(">L", len(body) - 1) + body[1:]
        return _frame(1, 4, number, block) + _frame(0, 1, number, message)

    zipped = {"grpc-encoding": "gzip"}
    settings = _frame(4, 0, 0, struct.pack(">HLHL", 4, 100, 5, 16384)) + _frame(4, 1, 0, b"")
    window = _frame(8, 0, 0, struct.pack(">L", 1000)) + _frame(8, 0, 1, struct.pack(">L", 5))
    calls = [
        settings + call(1, "/x", b"\0hello"),
        call(1, "/x", b"\1" + gzip.compress(b"hello" * 100), **zipped) + window,
        call(1, "/stream", b"\0hello") + call(3, "/no", b"\0x") + _frame(6, 0, 0, b"pingpong"),
        _frame(1, 0, 1, b"\x82") + _frame(9, 4, 1, b"\x84") + _frame(3, 0, 1, bytes(4)),
        _frame(1, 4 | 8 | 32, 1, b"\1" + bytes(5) + b"\x82\0") + _frame(7, 0, 0, bytes(8)),
        settings + call(1, "/x", b"\0" + b"y" * 3000) + call(3, "/x", b"\0" + b"z" * 3000) + window,
    ]
    return [bytes([size, 0, 1, 0]) + one for one in calls for size in range(4)]


TARGETS = {"http2": Target(_http2, _seeds)}
