"""Frames between predictors and lookup servers, little-endian.

    header   bytes that follow u32 │ kind u8 │ status u8 │ parts u16 │ request u64
    hello    magic, protocol number, token
             ──▶ JSON: which shard this is, and which versions are here
    lookup   version u64 │ how many keys, of each part, u64 │ keys u64
             ──▶ version u64 │ rows, part after part │ whether a row was found, a byte a key
    status   nothing
             ──▶ JSON, as after a hello

An answer has the kind and the request's number of what it answers. Its status is OK, NOT_HERE (the version is not:
the numbers of those that are, u64 …) or REFUSED (why, in words). Whoever reads says beforehand how long a frame may be;
a longer one, or one of another shape, is `Garbled`: its connection cannot be used any more.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

HELLO, LOOKUP, STATUS = 1, 2, 3
OK, NOT_HERE, REFUSED = 0, 1, 2

HEADER = struct.Struct("<IBBHQ")
MAX_HELLO = 4096
MAX_WORDS = 64 * 1024  # of an answer that holds no rows
MAX_PARTS = 256
MAX_KEYS = 1 << 22  # in one request
LOOKUP_ROWS_AT = HEADER.size + 8  # in an answer: a multiple of 8

_MAGIC = b"CLKLOOK"
_PROTOCOL = 1
_FIRST_ROOM = 64 * 1024
_KEPT_ROOM = 4 * 1024**2


class Garbled(ValueError):
    """What came is not a frame that was agreed on."""


class Frame(NamedTuple):
    """The head of a frame; its body stands in the inbox."""

    size: int  # of the body
    kind: int
    status: int
    parts: int
    request: int


class Receiver(Protocol):
    """What a socket is asked for."""

    def recv_into(self, buffer: memoryview, /) -> int: ...


class Inbox:
    """Memory that frames are received into, one at a time, again and again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes that the next body may have
        self.bytes = np.empty(_FIRST_ROOM, dtype=np.uint8)
        self._view = self.bytes.data
        self._have = 0
        self._taken = 0

    def receive(self, socket: Receiver) -> int:
        """Take what one call brings; 0: the other side has ended the connection."""
        count = socket.recv_into(self._view[self._have :])
        self._have += count
        return count

    def frame(self) -> Frame | None:
        """The frame at the front, once it is here as a whole. It stays until `done`."""
        if self._have < HEADER.size:
            return None
        frame = Frame(*HEADER.unpack_from(self._view))
        if frame.size > self.limit:
            raise Garbled(f"a frame of {frame.size:,} bytes; {self.limit:,} are allowed")
        whole = HEADER.size + frame.size
        if self._have < whole:
            if whole > self.bytes.size:
                self._make_room(1 << (whole - 1).bit_length())
            return None
        self._taken = whole
        return frame

    def body(self) -> memoryview:
        """Of the frame that was given out last."""
        return self._view[HEADER.size : self._taken]

    def done(self) -> None:
        """The frame is not needed any more."""
        rest = self._have - self._taken
        if rest:
            self.bytes[:rest] = self.bytes[self._taken : self._have].copy()
        self._have, self._taken = rest, 0
        if self.bytes.size > _KEPT_ROOM and rest <= _FIRST_ROOM:
            self._make_room(_FIRST_ROOM)

    @property
    def empty(self) -> bool:
        return not self._have

    def _make_room(self, size: int) -> None:
        bytes_ = np.empty(size, dtype=np.uint8)
        bytes_[: self._have] = self.bytes[: self._have]
        self.bytes = bytes_
        self._view = bytes_.data


# ── hello, status and words ────────────────────────────────────────────────────────────────────


def hello(token: str | None) -> bytes:
    """The first frame of a connection."""
    body = _MAGIC + bytes([_PROTOCOL]) + (token or "").encode()
    return HEADER.pack(len(body), HELLO, OK, 0, 0) + body


def read_hello(frame: Frame, body: memoryview) -> bytes:
    """The token that a hello carries."""
    if frame.kind != HELLO or bytes(body[: len(_MAGIC)]) != _MAGIC or frame.size <= len(_MAGIC):
        raise Garbled("the connection does not begin with a hello of ours")
    protocol = body[len(_MAGIC)]
    if protocol != _PROTOCOL:
        raise Garbled(f"the other side speaks protocol {protocol}, this release {_PROTOCOL}")
    return bytes(body[len(_MAGIC) + 1 :])


def ask_status(request: int) -> bytes:
    return HEADER.pack(0, STATUS, OK, 0, request)


def told(frame: Frame, document: Mapping[str, Any]) -> bytes:
    """The answer to a hello or a status."""
    body = json.dumps(document).encode()
    return HEADER.pack(len(body), frame.kind, OK, 0, frame.request) + body


def read_json(body: memoryview) -> dict[str, Any]:
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Garbled(f"no JSON: {error}") from error
    if not isinstance(document, dict):
        raise Garbled("JSON that is not an object")
    return document


def refused(frame: Frame, words: str) -> bytes:
    """The answer to anything that is not done."""
    body = words.encode()[:MAX_WORDS]
    return HEADER.pack(len(body), frame.kind, REFUSED, 0, frame.request) + body


def read_words(body: memoryview) -> str:
    return bytes(body).decode(errors="replace")


# ── lookups ────────────────────────────────────────────────────────────────────────────────────


class Lookup(NamedTuple):
    """What a lookup asks for."""

    version: int
    counts: tuple[int, ...]  # keys of each part
    keys_N: NDArray[np.uint64]  # part after part; a view of the inbox


def request_bytes(parts: int, keys: int) -> int:
    """Size of the body of a lookup."""
    return 8 * (1 + parts + keys)


def answer_bytes(counts: Iterable[int], widths: Iterable[int]) -> int:
    """Size of the body of its answer; `widths`: bytes of a row of each part."""
    return 8 + sum(count * (width + 1) for count, width in zip(counts, widths, strict=True))


def lookup_keys_at(parts: int) -> int:
    """Where the keys of a lookup begin in its frame: a multiple of 8."""
    return HEADER.size + 8 + 8 * parts


def write_lookup_head(
    target: NDArray[np.uint8], at: int, request: int, version: int, counts: Sequence[int]
) -> None:
    """Write all but the keys of a lookup, whose frame begins at `at`."""
    parts = len(counts)
    HEADER.pack_into(target.data, at, request_bytes(parts, sum(counts)), LOOKUP, OK, parts, request)
    struct.pack_into(f"<{1 + parts}Q", target.data, at + HEADER.size, version, *counts)


def read_lookup(frame: Frame, inbox: Inbox) -> Lookup:
    """What is asked for, after a look at whether the numbers fit the frame."""
    parts, size = frame.parts, frame.size
    if parts > MAX_PARTS or size < request_bytes(parts, 0) or size % 8:
        raise Garbled(f"a lookup of {size} bytes for {parts} parts")
    version, *counts = struct.unpack_from(f"<{1 + parts}Q", inbox.bytes.data, HEADER.size)
    keys = sum(counts)
    if request_bytes(parts, keys) != size:
        raise Garbled(f"a lookup of {size} bytes that should hold {keys} keys of {parts} parts")
    if keys > MAX_KEYS:
        raise Garbled(f"a lookup of {keys:,} keys; {MAX_KEYS:,} are allowed")
    start = lookup_keys_at(parts)
    return Lookup(version, tuple(counts), inbox.bytes[start : start + 8 * keys].view(np.uint64))


def write_answer_head(target: NDArray[np.uint8], frame: Frame, version: int, size: int) -> None:
    """Write what stands before the rows of an answer; `size`: of its body."""
    HEADER.pack_into(target.data, 0, size, LOOKUP, OK, frame.parts, frame.request)
    struct.pack_into("<Q", target.data, HEADER.size, version)


def not_here(frame: Frame, versions: Sequence[int]) -> bytes:
    """The answer to a lookup in a version that is not here: those that are."""
    body = struct.pack(f"<{len(versions)}Q", *versions)
    return HEADER.pack(len(body), frame.kind, NOT_HERE, 0, frame.request) + body


def read_numbers(body: memoryview) -> tuple[int, ...]:
    if len(body) % 8:
        raise Garbled(f"{len(body)} bytes that should be numbers of versions")
    return struct.unpack(f"<{len(body) // 8}Q", body)
