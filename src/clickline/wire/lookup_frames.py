"""The frames that predictors and lookup servers exchange, little-endian.

    header   bytes that follow u32 │ kind u8 │ status u8 │ parts u16 │ request u64
    hello    magic, protocol number, token
             ──▶ JSON: the shard of this server, and the versions it has loaded
    lookup   version u64 │ number of keys of each part, u64 │ keys u64
             ──▶ version u64 │ rows, part after part │ whether each row was found, one byte per key
    status   empty
             ──▶ JSON, as after a hello

An answer has the kind and the request number of its request. Its status is OK, NOT_LOADED (the version is not loaded;
the body lists those that are, u64 …) or REFUSED (the body is a message). The reader sets the maximum size of the next
frame; a larger or malformed one raises `ProtocolError`, after which the connection cannot be used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

HELLO, LOOKUP, STATUS = 1, 2, 3
OK, NOT_LOADED, REFUSED = 0, 1, 2

HEADER = struct.Struct("<IBBHQ")
MAX_HELLO = 4096
MAX_MESSAGE = 64 * 1024  # of an answer without rows
MAX_PARTS = 256
MAX_KEYS = 1 << 22  # in one request
LOOKUP_ROWS_AT = HEADER.size + 8  # where the rows of an answer begin: a multiple of 8

_MAGIC = b"CLKLOOK"
_PROTOCOL = 1
_MIN_BUFFER = 64 * 1024
_MAX_IDLE_BUFFER = 4 * 1024**2


class ProtocolError(ValueError):
    """The received bytes are not a valid frame."""


class FrameHeader(NamedTuple):
    """The header of a frame; its body is in the receive buffer."""

    size: int  # of the body
    kind: int
    status: int
    parts: int
    request: int


class Receiver(Protocol):
    """The part of a socket that a receive buffer uses."""

    def recv_into(self, buffer: memoryview, /) -> int: ...


class ReceiveBuffer:
    """A reused buffer that frames are received into, one at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # maximum size of the next body
        self.bytes = np.empty(_MIN_BUFFER, dtype=np.uint8)
        self._view = self.bytes.data
        self._received = 0
        self._frame_end = 0

    def receive(self, socket: Receiver) -> int:
        """Receive once from the socket; 0: the other side has closed the connection."""
        count = socket.recv_into(self._view[self._received :])
        self._received += count
        return count

    def frame(self) -> FrameHeader | None:
        """The frame at the front, once it is complete. It stays until `done`."""
        if self._received < HEADER.size:
            return None
        frame = FrameHeader(*HEADER.unpack_from(self._view))
        if frame.size > self.limit:
            raise ProtocolError(f"a frame of {frame.size:,} bytes; allowed: {self.limit:,}")
        frame_end = HEADER.size + frame.size
        if self._received < frame_end:
            if frame_end > self.bytes.size:
                self._resize(1 << (frame_end - 1).bit_length())
            return None
        self._frame_end = frame_end
        return frame

    def body(self) -> memoryview:
        """The body of the frame that `frame` returned last."""
        return self._view[HEADER.size : self._frame_end]

    def release(self) -> None:
        """Drop the first frame."""
        rest = self._received - self._frame_end
        if rest:
            self.bytes[:rest] = self.bytes[self._frame_end : self._received].copy()
        self._received, self._frame_end = rest, 0
        if self.bytes.size > _MAX_IDLE_BUFFER and rest <= _MIN_BUFFER:
            self._resize(_MIN_BUFFER)

    @property
    def empty(self) -> bool:
        return not self._received

    def _resize(self, size: int) -> None:
        bytes_ = np.empty(size, dtype=np.uint8)
        bytes_[: self._received] = self.bytes[: self._received]
        self.bytes = bytes_
        self._view = bytes_.data


# ── hello, status, messages ────────────────────────────────────────────────────────────────────


def hello(token: str | None) -> bytes:
    """The first frame of a connection."""
    body = _MAGIC + bytes([_PROTOCOL]) + (token or "").encode()
    return HEADER.pack(len(body), HELLO, OK, 0, 0) + body


def read_hello(frame: FrameHeader, body: memoryview) -> bytes:
    """The token that a hello carries."""
    if frame.kind != HELLO or bytes(body[: len(_MAGIC)]) != _MAGIC or frame.size <= len(_MAGIC):
        raise ProtocolError("the connection does not begin with a valid hello")
    protocol = body[len(_MAGIC)]
    if protocol != _PROTOCOL:
        raise ProtocolError(f"the other side uses protocol {protocol}, this release {_PROTOCOL}")
    return bytes(body[len(_MAGIC) + 1 :])


def status_request(request: int) -> bytes:
    return HEADER.pack(0, STATUS, OK, 0, request)


def status_reply(frame: FrameHeader, document: Mapping[str, Any]) -> bytes:
    """The answer to a hello or a status."""
    body = json.dumps(document).encode()
    return HEADER.pack(len(body), frame.kind, OK, 0, frame.request) + body


def read_json(body: memoryview) -> dict[str, Any]:
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProtocolError("JSON that is not an object")
    return document


def refusal(frame: FrameHeader, message: str) -> bytes:
    """The answer to a request that is refused."""
    body = message.encode()[:MAX_MESSAGE]
    return HEADER.pack(len(body), frame.kind, REFUSED, 0, frame.request) + body


def read_message(body: memoryview) -> str:
    return bytes(body).decode(errors="replace")


# ── lookups ────────────────────────────────────────────────────────────────────────────────────


class LookupFrame(NamedTuple):
    """The contents of a lookup request."""

    version: int
    counts: tuple[int, ...]  # keys of each part
    keys_N: NDArray[np.uint64]  # part after part; a view of the receive buffer


def request_bytes(parts: int, keys: int) -> int:
    """The body size of a lookup."""
    return 8 * (1 + parts + keys)


def answer_bytes(counts: Iterable[int], widths: Iterable[int]) -> int:
    """The body size of its answer; `widths`: row bytes of each part."""
    return 8 + sum(count * (width + 1) for count, width in zip(counts, widths, strict=True))


def lookup_keys_at(parts: int) -> int:
    """The offset of the keys in the frame of a lookup: a multiple of 8."""
    return HEADER.size + 8 + 8 * parts


def write_lookup_header(
    target: NDArray[np.uint8], at: int, request: int, version: int, counts: Sequence[int]
) -> None:
    """Write everything but the keys of a lookup, whose frame begins at `at`."""
    parts = len(counts)
    HEADER.pack_into(target.data, at, request_bytes(parts, sum(counts)), LOOKUP, OK, parts, request)
    struct.pack_into(f"<{1 + parts}Q", target.data, at + HEADER.size, version, *counts)


def read_lookup(frame: FrameHeader, buffer: ReceiveBuffer) -> LookupFrame:
    """Parse a lookup, after checking its counts against the size of the frame."""
    parts, size = frame.parts, frame.size
    if parts > MAX_PARTS or size < request_bytes(parts, 0) or size % 8:
        raise ProtocolError(f"a lookup of {size} bytes for {parts} parts")
    version, *counts = struct.unpack_from(f"<{1 + parts}Q", buffer.bytes.data, HEADER.size)
    keys = sum(counts)
    if request_bytes(parts, keys) != size:
        raise ProtocolError(f"a lookup of {size} bytes for {keys} keys of {parts} parts")
    if keys > MAX_KEYS:
        raise ProtocolError(f"a lookup of {keys:,} keys; allowed: {MAX_KEYS:,}")
    start = lookup_keys_at(parts)
    return LookupFrame(version, tuple(counts), buffer.bytes[start : start + 8 * keys].view(np.uint64))


def write_answer_header(target: NDArray[np.uint8], frame: FrameHeader, version: int, size: int) -> None:
    """Write the part of an answer before its rows; `size`: of its body."""
    HEADER.pack_into(target.data, 0, size, LOOKUP, OK, frame.parts, frame.request)
    struct.pack_into("<Q", target.data, HEADER.size, version)


def version_not_loaded(frame: FrameHeader, versions: Sequence[int]) -> bytes:
    """The answer to a lookup in a version that is not loaded: the numbers of those that are."""
    body = struct.pack(f"<{len(versions)}Q", *versions)
    return HEADER.pack(len(body), frame.kind, NOT_LOADED, 0, frame.request) + body


def read_versions(body: memoryview) -> tuple[int, ...]:
    if len(body) % 8:
        raise ProtocolError(f"{len(body)} bytes are not a list of version numbers")
    return struct.unpack(f"<{len(body) // 8}Q", body)
