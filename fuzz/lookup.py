"""Frames between predictors and lookup servers, on both sides."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from functools import cache

import numpy as np
from table_model import random_content, write_content

from clickline.embedding.serving import PartShape, ServingTable
from clickline.scoring.lookup_connection import LookupConnection
from clickline.serving.lookup.lookup_server import _Connection
from clickline.serving.lookup.lookup_versions import ShardVersion, ShardVersions
from clickline.wire.lookup_frames import (
    HEADER,
    LOOKUP,
    MAX_MESSAGE,
    OK,
    STATUS,
    ProtocolError,
    ReceiveBuffer,
    answer_bytes,
    hello,
    lookup_keys_at,
    read_json,
    read_message,
    read_versions,
    status_request,
    write_lookup_header,
)
from fuzz.target import Choices, Target, scratch

_PARTS = [PartShape(3, True), PartShape(1, False)]
_SIZE = answer_bytes([2, 1], [16, 8])


class _Socket:
    """Delivers its bytes in pieces, then closes; discards what is sent."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self._size = size
        self.sent = 0

    def recv_into(self, buffer: memoryview, /) -> int:
        count = min(self._size, len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def sendall(self, data: bytes) -> None:
        self.sent += len(data)

    def setsockopt(self, *_: object) -> None:
        pass

    settimeout = setsockopt


@cache
def _versions() -> ShardVersions:
    folder = write_content(scratch() / "lookup", _PARTS, random_content(np.random.default_rng(2), _PARTS, 50))
    versions = ShardVersions(0)
    versions.open = {1: ShardVersion(1, ServingTable.open([folder]))}
    return versions


def _lookup(data: bytes) -> None:
    """A server reads a connection."""
    choices = Choices(data)
    size, token = choices.one_of([1 << 20, 1, 7]), choices.one_of([None, b"t"])
    greeting = hello("t") if choices.number(8) else b""
    socket = _Socket(greeting + choices.rest(), size)
    connection = _Connection(socket, "peer", _versions(), token, None)  # type: ignore[arg-type]
    try:
        connection.serve(_versions().describe)
    except (ProtocolError, OSError) as ended:
        assert str(ended)
    assert connection._buffer.bytes.size <= 1 << 26 and connection._out.size <= 1 << 20


def _answer(data: bytes) -> None:
    """A predictor reads answers."""
    choices = Choices(data)
    connection = LookupConnection.__new__(LookupConnection)
    connection.buffer = ReceiveBuffer(MAX_MESSAGE)
    connection.late_answers = 0
    connection._pending = deque([(7, _SIZE), (8, _SIZE)])
    connection._socket = _Socket(choices.rest(), choices.one_of([1 << 20, 1]))  # type: ignore[assignment]
    try:
        while (frame := connection.receive(8)) is not None:
            body = connection.buffer.body()
            if frame.status == OK:
                assert frame.size == _SIZE
            else:
                read_message(body)
                read_versions(body)
                read_json(body)
            del body
            connection.buffer.release()
    except (ProtocolError, OSError) as ended:
        assert str(ended)
    assert connection.buffer.bytes.size <= 1 << 17


def _lookup_frame(counts: list[int], keys: int, version: int = 1) -> bytes:
    frame = np.zeros(lookup_keys_at(len(counts)) + 8 * keys, dtype=np.uint8)
    write_lookup_header(frame, 0, 7, version, counts)
    return frame.tobytes()


def _lookup_seeds() -> Sequence[bytes]:
    frames = [
        _lookup_frame([2, 1], 3) + status_request(9),
        _lookup_frame([2, 1], 3, version=9) + _lookup_frame([0, 0], 0),
        _lookup_frame([2], 2),
        HEADER.pack(32, LOOKUP, 0, 2, 1) + struct.pack("<4Q", 1, 2**63, 2**63, 5),
        HEADER.pack(2**32 - 1, LOOKUP, 0, 2, 1),
        HEADER.pack(8, STATUS, 0, 0, 1) + bytes(8) + HEADER.pack(0, 9, 0, 0, 0),
    ]
    return [bytes([size, 0, 0, 0, 1, 0]) + frame for frame in frames for size in range(3)]


def _answer_seeds() -> Sequence[bytes]:
    good = HEADER.pack(_SIZE, LOOKUP, OK, 2, 7) + bytes(_SIZE)
    second = HEADER.pack(16, LOOKUP, 1, 2, 8) + bytes(16)
    refused = HEADER.pack(2, LOOKUP, 2, 0, 8) + b"{}"
    return [
        bytes([n, 0]) + frames
        for n in range(2)
        for frames in (good + second, good + refused, good * 2, good[:20])
    ]


TARGETS = {"lookup": Target(_lookup, _lookup_seeds), "lookup-answer": Target(_answer, _answer_seeds)}
