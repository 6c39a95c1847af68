"""Frames of brpc's protocol baidu_std.

    "PRPC" | size of the rest, 4 bytes | size of the meta, 4 bytes | RpcMeta | message | attachment

Sizes are big-endian. The correlation id of a call is repeated in its answer.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from google.protobuf.message import DecodeError

from clickline.errors import RequestRefused
from clickline.wire.messages import RpcMeta
from clickline.wire.protobuf_writer import bytes_field, encode_varint

MAGIC = b"PRPC"
HEADER_BYTES = 12
MAX_META = 1 << 16

ENOSERVICE, ENOMETHOD, EREQUEST, ERPCAUTH, ERPCTIMEDOUT = 1001, 1002, 1003, 1004, 1008
EINTERNAL, ELOGOFF, ELIMIT = 2001, 2002, 2004
"""brpc's error codes."""

_NONE, _SNAPPY, _GZIP, _ZLIB = range(4)
_SUCCESS = b"\x12\x02\x08\x00"  # response { error_code: 0 }


class NotBrpc(Exception):
    """The bytes are not a frame of baidu_std."""


def read_header(data: bytes | bytearray, at: int = 0) -> tuple[int, int]:
    """The sizes of a frame's rest and of its meta."""
    magic, size, meta_size = struct.unpack_from(">4sLL", data, at)
    if magic != MAGIC:
        raise NotBrpc("a frame does not begin with PRPC")
    if meta_size > min(size, MAX_META):
        raise NotBrpc(f"a frame of {size} bytes claims {meta_size} bytes of meta; allowed: {MAX_META}")
    return size, meta_size


def read_meta(data: bytes) -> Any:
    """Parse an RpcMeta that describes a request."""
    try:
        meta = RpcMeta.FromString(data)
    except DecodeError:
        raise NotBrpc("the meta of a frame is not an RpcMeta") from None
    if not meta.HasField("request"):
        raise NotBrpc("the meta of a frame has no request")
    return meta


def message_of(meta: Any, rest: bytes, limit: int) -> bytes:
    """The message of a frame, without the attachment and decompressed. Refuses what cannot be read."""
    for field in ("chunk_info", "stream_settings"):
        if meta.HasField(field):
            raise RequestRefused(
                "invalid", f"The call has {field}. This server answers only single messages."
            )
    if not 0 <= meta.attachment_size <= len(rest):
        raise RequestRefused(
            "invalid",
            f"attachment_size is {meta.attachment_size} in a call with {len(rest)} bytes after its meta.",
        )
    message = rest[: len(rest) - meta.attachment_size] if meta.attachment_size else rest
    kind = meta.compress_type
    if kind == _NONE:
        if len(message) > limit:
            raise _too_large(limit)
        return message
    if kind not in (_SNAPPY, _GZIP, _ZLIB):
        raise RequestRefused(
            "invalid", f"compress_type is {kind}; allowed: 0 (none), 1 (snappy), 2 (gzip) and 3 (zlib)."
        )
    return _unsnapped(message, limit) if kind == _SNAPPY else _inflated(message, limit)


def _inflated(message: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(47)  # gzip or zlib, detected by its header
    try:
        plain = stream.decompress(message, limit + 1)
    except zlib.error as error:
        raise RequestRefused("invalid", f"The message cannot be decompressed: {error}.") from None
    if len(plain) > limit:
        raise _too_large(limit)
    if not stream.eof or stream.unused_data:
        raise RequestRefused("invalid", "The compressed message is truncated or followed by other data.")
    return plain


def _unsnapped(message: bytes, limit: int) -> bytes:
    from pyarrow import Codec  # takes a moment: only for clients that compress in this way

    size = shift = 0
    for byte in message[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > limit:
        raise _too_large(limit)
    try:
        plain: bytes = Codec("snappy").decompress(message, size, asbytes=True)
    except OSError as error:
        raise RequestRefused("invalid", f"The message cannot be decompressed: {error}.") from None
    return plain


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(
        "invalid",
        f"The message, decompressed, has more than {limit} bytes (serve.max_body). Send fewer rows at once.",
    )


def answer_frame(correlation_id: int, message: bytes) -> bytes:
    """The frame of an answer."""
    return _frame(_SUCCESS + _correlation(correlation_id), message)


def error_frame(correlation_id: int, code: int, text: str) -> bytes:
    """The frame of an error."""
    encoded = text.encode("utf-8", "backslashreplace")
    error = b"\x08" + encode_varint(code) + bytes_field(2, encoded)
    return _frame(bytes_field(2, error) + _correlation(correlation_id), b"")


def _correlation(correlation_id: int) -> bytes:
    return b"\x20" + encode_varint(correlation_id % 2**64)


def _frame(meta: bytes, message: bytes) -> bytes:
    return struct.pack(">4sLL", MAGIC, len(meta) + len(message), len(meta)) + meta + message
