"""gRPC over HTTP/2: messages behind their 5-byte prefix, compression, timeouts, and the headers of a response."""

from __future__ import annotations

import zlib
from time import monotonic
from urllib.parse import quote

from clickline.serving.http2.header_blocks import literal

RESPONSE_HEADERS = b"\x88\x0f\x10\x10application/grpc"  # :status 200, content-type
OK_TRAILERS = b"\x00\x0bgrpc-status\x010"

_WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's wbits
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class CallRefused(Exception):
    """A call ends with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def prefixed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def unary_message(body: bytes, encoding: str, limit: int) -> bytes:
    """The message of a unary call."""
    if len(body) < 5 or int.from_bytes(body[1:5], "big") != len(body) - 5:
        raise CallRefused(13, "The call must hold exactly one message.")
    return decompressed(body[0], body[5:], encoding, limit)


def message_end(body: bytes | bytearray, at: int, limit: int) -> int | None:
    """Where the message at `at` of a streaming call ends; None: it is incomplete."""
    if len(body) - at < 5:
        return None
    length = int.from_bytes(body[at + 1 : at + 5], "big")
    if length > limit:
        raise CallRefused(8, f"A message has {length} bytes; {limit} are allowed.")
    end = at + 5 + length
    return None if end > len(body) else end


def decompressed(flag: int, message: bytes, encoding: str, limit: int) -> bytes:
    if not flag:
        return message
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise CallRefused(12, f"grpc-encoding {encoding[:20]} is not supported; gzip and deflate are.")
    unpacker = zlib.decompressobj(bits)
    try:
        plain = unpacker.decompress(message, limit + 1)
    except zlib.error:
        raise CallRefused(13, "The compressed message is damaged.") from None
    if len(plain) > limit:
        raise CallRefused(3, f"The request is larger than {limit} bytes (serve.max_body).")
    if not unpacker.eof:
        raise CallRefused(13, "The compressed message is damaged: its end is missing.")
    return plain


def error_trailers(status: int, message: str) -> bytes:
    """The header block that ends a call with an error."""
    quoted = quote(message, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()[:4096]
    return literal(b"grpc-status", str(status).encode()) + literal(b"grpc-message", quoted)


def deadline_of(timeout: str | None) -> float | None:
    """The deadline of a call, as a time of `time.monotonic`."""
    if not timeout or timeout[-1] not in _UNITS or len(timeout) > 9:
        return None
    if not (timeout.isascii() and timeout[:-1].isdigit()):
        return None
    return monotonic() + int(timeout[:-1]) * _UNITS[timeout[-1]]
