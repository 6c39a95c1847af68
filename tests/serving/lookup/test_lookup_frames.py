"""How lookup servers and predictors handle malformed frames."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from fleet import (
    InProcessServer,
    certificate_in,
    eventually,
    in_process_server,
    opened,
    publish,
    random_blocks,
    registry_in,
)
from hypothesis import example, given
from hypothesis import strategies as st

from clickline.scoring.lookup_connection import LookupConnection, resolve
from clickline.serving.lookup import lookup_server as server_module
from clickline.wire import lookup_frames
from clickline.wire.lookup_frames import (
    HEADER,
    HELLO,
    LOOKUP,
    NOT_LOADED,
    OK,
    STATUS,
    FrameHeader,
    ProtocolError,
    ReceiveBuffer,
    answer_bytes,
    hello,
    lookup_keys_at,
    read_hello,
    read_lookup,
    read_versions,
    write_lookup_header,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[InProcessServer]:
    registry = registry_in(tmp_path_factory.mktemp("garbage"))
    number = publish(registry, random_blocks(1), shards=1)
    with in_process_server(0, {number: opened(registry, number)}) as here:
        yield here


def connected(server: InProcessServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def handshaken(server: InProcessServer) -> socket.socket:
    connection = connected(server)
    connection.sendall(hello(None))
    size = HEADER.unpack(exactly(connection, HEADER.size))[0]
    exactly(connection, size)
    return connection


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, "the connection ended"
        data += piece
    return data


def answers_until_end(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection; times out if it does not."""
    data = b""
    with connection:
        connection.shutdown(socket.SHUT_WR)
        while True:
            try:
                piece = connection.recv(1 << 16)
            except ConnectionResetError:
                return data
            if not piece:
                return data
            data += piece


def lookup(keys: list[int], version: int = 1, request: int = 7, counts: list[int] | None = None) -> bytes:
    counts = [len(keys), 0] if counts is None else counts
    frame = np.zeros(lookup_keys_at(len(counts)) + 8 * len(keys), dtype=np.uint8)
    write_lookup_header(frame, 0, request, version, counts)
    frame[lookup_keys_at(len(counts)) :] = np.array(keys, dtype=np.uint64).view(np.uint8)
    return frame.tobytes()


def still_answers(server: InProcessServer) -> None:
    with handshaken(server) as connection:
        connection.sendall(lookup([1, 2, 3]))
        head = FrameHeader(*HEADER.unpack(exactly(connection, HEADER.size)))
        assert head == FrameHeader(answer_bytes([3, 0], [40, 24]), LOOKUP, OK, 2, 7)
        exactly(connection, head.size)


@given(st.binary(max_size=400))
@example(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
@example(HEADER.pack(0xFFFFFFFF, HELLO, 0, 0, 0))
@example(HEADER.pack(8, HELLO, 0, 0, 0) + b"CLKLOOK\x02")
def test_garbage_instead_of_a_hello_ends_the_connection(server, data):
    connection = connected(server)
    connection.sendall(data)
    assert answers_until_end(connection) == b""
    assert server.server.connections < 50
    still_answers(server)


@given(st.binary(max_size=400))
@example(HEADER.pack(0xFFFFFFFF, LOOKUP, 0, 1, 0))
@example(HEADER.pack(0, 9, 0, 0, 0))
@example(HEADER.pack(0, LOOKUP, 0, 0, 0))
def test_garbage_after_the_hello_does_no_harm(server, data):
    connection = handshaken(server)
    connection.sendall(data)
    answers_until_end(connection)
    still_answers(server)


@given(
    counts=st.lists(st.integers(0, 2**64 - 1), max_size=6),
    keys=st.integers(0, 20),
    parts=st.integers(0, 65535),
    cut=st.integers(0, 40),
)
@example(counts=[2**61, 0], keys=0, parts=2, cut=0)  # the size of the keys overflows
@example(counts=[2**64 - 1, 1], keys=0, parts=2, cut=0)
@example(counts=[3], keys=3, parts=1, cut=0)  # the version has two parts
def test_lookups_with_inconsistent_counts_are_refused(server, counts, keys, parts, cut):
    body = struct.pack(f"<{1 + len(counts)}Q", 1, *counts) + bytes(8 * keys)
    body = body[: max(0, len(body) - cut)]
    connection = handshaken(server)
    connection.sendall(HEADER.pack(len(body), LOOKUP, 0, parts, 1) + body)
    answer = answers_until_end(connection)
    if answer:
        numbers = struct.unpack(f"<{len(body) // 8}Q", body)  # keys are zeros, which may be read as counts
        assert parts == 2 and sum(numbers[1:3]) == len(numbers) - 3
    still_answers(server)


def test_pipelined_requests_are_answered_in_order(server):
    ids = opened_ids(server)
    with handshaken(server) as connection:
        connection.sendall(b"".join(lookup(ids[:n], request=n) for n in range(40)))
        for n in range(40):
            head = FrameHeader(*HEADER.unpack(exactly(connection, HEADER.size)))
            assert (head.request, head.status) == (n, OK)
            body = exactly(connection, head.size)
            assert body[8 + 40 * n :] == b"\x01" * n  # all found


def opened_ids(server: InProcessServer) -> list[int]:
    tables = server.versions.open[1].tables
    return [int(id) for id in tables.levels[0][0].rows(0)["id"][:40]]


def test_lookup_in_an_unknown_version_returns_the_open_ones(server):
    with handshaken(server) as connection:
        connection.sendall(lookup([1], version=99))
        head = FrameHeader(*HEADER.unpack(exactly(connection, HEADER.size)))
        assert head.status == NOT_LOADED
        assert read_versions(memoryview(exactly(connection, head.size))) == (1,)


def test_reason_for_closing_a_connection_is_logged(server, capfd):
    with in_process_server(
        0, {1: server.versions.open[1].tables}
    ) as fresh:  # a new server, whose log is not throttled
        connection = handshaken(fresh)
        connection.sendall(HEADER.pack(2**31, LOOKUP, 0, 1, 1))
        answers_until_end(connection)
    error = capfd.readouterr().err
    assert "a connection was ended" in error and "a frame of 2,147,483,648 bytes" in error


@pytest.mark.parametrize("tls", [False, True])
def test_silent_client_times_out(server, tls, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "_HELLO_SECONDS", 0.2)
    context = None
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate_in(tmp_path))
    with (
        in_process_server(0, {1: server.versions.open[1].tables}, tls=context) as fresh,
        connected(fresh) as silent,
    ):
        assert silent.recv(1) == b""  # the server has closed it


def test_trickling_hello_times_out(server, monkeypatch):
    monkeypatch.setattr(server_module, "_HELLO_SECONDS", 0.3)
    with in_process_server(0, {1: server.versions.open[1].tables}) as fresh, connected(fresh) as slow:
        began, ended = time.monotonic(), False
        slow.settimeout(0.05)
        while not ended:
            assert time.monotonic() - began < 10
            with suppress(TimeoutError):
                try:
                    slow.sendall(
                        HEADER.pack(1000, HELLO, 0, 0, 0)[:1] if time.monotonic() - began < 5 else b""
                    )
                    ended = slow.recv(1) == b""
                except (ConnectionResetError, BrokenPipeError):
                    ended = True
        assert time.monotonic() - began < 4


def test_server_keeps_accepting_after_running_out_of_threads(server, monkeypatch):
    with in_process_server(0, {1: server.versions.open[1].tables}) as fresh:
        begin, failures = threading.Thread.start, []

        def start(thread: threading.Thread) -> None:
            if thread.name == "connection" and len(failures) < 2:
                failures.append(thread)
                raise RuntimeError("can't start new thread")
            begin(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        for _ in range(2):
            assert answers_until_end(connected(fresh)) == b""
        still_answers(fresh)
        assert fresh.server.rejected == 2


def test_connections_above_the_limit_are_rejected(server, monkeypatch):
    eventually(lambda: not server.server.connections)  # those of other tests are closing
    monkeypatch.setattr(server_module, "_MAX_CONNECTIONS", 1)
    with handshaken(server):
        assert answers_until_end(connected(server)) == b""
        assert server.server.rejected >= 1


# ── predictor side ─────────────────────────────────────────────────────────────────────────────


def answering(answer: bytes) -> tuple[socket.socket, str]:
    """A server that answers the hello, and then anything with the same bytes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(lookup_frames.status_reply(FrameHeader(0, HELLO, 0, 0, 0), {"shard": 0}))
            connection.recv(1 << 16)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return listening, f"127.0.0.1:{listening.getsockname()[1]}"


def receive_until_error(connection: LookupConnection) -> None:
    for _ in range(1000):
        assert connection.receive(7) is None
        select.select([connection], [], [], 10)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        HEADER.pack(2**31, LOOKUP, OK, 1, 7),
        HEADER.pack(48, LOOKUP, OK, 1, 7) + bytes(48),  # of another size
        HEADER.pack(49, LOOKUP, OK, 1, 8) + bytes(49),  # of another request
        HEADER.pack(49, STATUS, OK, 1, 7) + bytes(49),
        HEADER.pack(49, LOOKUP, OK, 1, 7) + bytes(20),  # truncated
    ],
)
def test_malformed_answer_ends_the_connection(answer):
    listening, address = answering(answer)
    with listening:
        connection = LookupConnection(
            resolve("127.0.0.1", int(address.rpartition(":")[2])), "127.0.0.1", None, None, 10
        )
        try:
            frame = lookup([1], counts=[1])
            connection.send(7, memoryview(frame), answer_bytes([1], [40]))
            with pytest.raises((ProtocolError, ConnectionResetError)):
                receive_until_error(connection)
        finally:
            connection.close()


# ── receive buffer ─────────────────────────────────────────────────────────────────────────────


class Pieces:
    """A socket that delivers its bytes in pieces of these sizes, then one at a time."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data = data
        self._sizes = sizes

    def recv_into(self, buffer: memoryview, /) -> int:
        size = min(self._sizes.pop(0) if self._sizes else 1, len(buffer), len(self._data))
        assert len(buffer)
        buffer[:size] = self._data[:size]
        self._data = self._data[size:]
        return size


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=30), max_size=5), st.lists(st.integers(1, 500)))
def test_frames_are_reassembled_from_any_pieces(requests, sizes):
    buffer = ReceiveBuffer(1 << 20)
    data = b"".join(lookup(keys, request=n) for n, keys in enumerate(requests))
    pieces = Pieces(data, sizes)
    for n, keys in enumerate(requests):
        while (frame := buffer.frame()) is None:
            assert buffer.receive(pieces)
        assert frame.request == n
        found = read_lookup(frame, buffer)
        assert (found.version, found.counts, found.keys_N.tolist()) == (1, (len(keys), 0), keys)
        buffer.release()
    assert buffer.empty


def test_buffer_grows_for_a_large_frame_and_shrinks_again():
    keys = list(range(1_000_000))
    buffer = ReceiveBuffer(1 << 24)
    pieces = Pieces(lookup(keys), [1 << 20] * 100)
    while (frame := buffer.frame()) is None:
        assert buffer.receive(pieces)
    assert read_lookup(frame, buffer).keys_N[-1] == keys[-1]
    buffer.release()
    assert buffer.bytes.size < 1 << 20


def test_a_hello_carries_the_token():
    frame = hello("a secret")
    buffer = ReceiveBuffer(4096)
    buffer.receive(Pieces(frame, [len(frame)]))
    found = buffer.frame()
    assert found is not None
    assert read_hello(found, buffer.body()) == b"a secret"
