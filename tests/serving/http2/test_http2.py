"""HTTP/2 on real sockets: real gRPC clients, and clients that violate the protocol."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import socket
import struct
import time
from collections.abc import Iterator

import grpc
import pytest
from http2_peer import ECHO, MAX_MESSAGE, MESSAGE, Server, exchange, frame, literal
from hypothesis import given, settings
from hypothesis import strategies as st

from clickline.serving.http2.frames import PREFACE
from servers.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()
    assert running.errors == []


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as opened:
        yield opened


def test_messages_of_every_size_come_back(channel):
    call = channel.unary_unary("/test/Echo")
    for size in (0, 1, 5, 16_383, 16_384, 16_385, 65_535, 200_000, MAX_MESSAGE):
        body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert call(body, timeout=20) == body


def test_call_with_too_much_metadata_fails_alone(server, channel):
    call = channel.unary_unary("/test/Echo")
    waiting = channel.unary_unary("/test/Wait").future(b"slow", timeout=60)
    eventually(lambda: len(server.echo.waiting) == 1)
    for size in (70_000, 900_000):
        with pytest.raises(grpc.RpcError) as caught:
            call(b"hi", metadata=[("x-large", "v" * size)], timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "65536 bytes of metadata" in caught.value.details()
        assert call(b"hi", metadata=[("x-small", "v" * 1000)], timeout=20) == b"hi"
    server.on_loop(lambda: server.echo.waiting.pop().reply(b"in the end"))
    assert waiting.result() == b"in the end"


def test_answer_larger_than_the_windows_arrives_complete(channel):
    assert channel.unary_unary("/test/Big")(b"0123456789", timeout=60) == b"0123456789" * 500_000


def test_many_calls_on_one_connection_get_their_own_answers(channel):
    call = channel.unary_unary("/test/Echo")
    bodies = [b"%d" % number * (1 + number % 4000) for number in range(500)]
    futures = [call.future(body, timeout=60, metadata=[("n", str(n))]) for n, body in enumerate(bodies)]
    assert [one.result() for one in futures] == bodies


def test_deadlines_and_error_statuses_are_understood(channel):
    left = float(channel.unary_unary("/test/Deadline")(b"", timeout=5))
    assert 3 < left <= 5.1
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test/Nowhere")(b"", timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "not here: 50 % ü"


def test_compressed_messages_are_read(server):
    address = f"127.0.0.1:{server.port}"
    for way in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        with grpc.insecure_channel(address, compression=way) as channel:
            assert channel.unary_unary("/test/Echo")(b"abc" * 1000, timeout=10) == b"abc" * 1000
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/test/Echo")(b"\0" * (3 * MAX_MESSAGE), timeout=10)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_too_large_message_is_refused_and_the_connection_survives(channel):
    call = channel.unary_unary("/test/Echo")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"x" * (3 * MAX_MESSAGE), timeout=20)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "serve.max_body" in caught.value.details()
    assert call(b"y", timeout=20) == b"y"


def test_streamed_messages_are_answered_one_by_one(channel):
    call = channel.stream_stream("/test/Each")
    sent = [b"a", b"", b"c" * 100_000, b"d"]
    assert list(call(iter(sent), timeout=20)) == sent
    assert list(call(iter([]), timeout=20)) == []


def test_cancelled_call_is_reported_to_the_handler(server, channel):
    future = channel.unary_unary("/test/Wait").future(b"x", timeout=60)
    deadline = time.monotonic() + 20
    while not any(stream.path == "/test/Wait" for stream in server.echo.waiting):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    future.cancel()
    while "/test/Wait" not in server.echo.cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_drain_answers_open_calls():
    server = Server()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            assert channel.unary_unary("/test/Echo")(b"x", timeout=20) == b"x"
            future = channel.unary_unary("/test/Wait").future(b"late", timeout=20)
            deadline = time.monotonic() + 20
            while not server.echo.waiting:
                assert time.monotonic() < deadline
                time.sleep(0.005)

            def leave() -> None:
                for connection in list(server.connections):
                    connection.start_drain()
                server.echo.waiting[0].reply(b"answered")

            server.on_loop(leave)
            assert future.result() == b"answered"
            while server.connections:
                assert time.monotonic() < deadline
                time.sleep(0.005)
    finally:
        server.close()
    assert server.errors == []


# ── without a client library ───────────────────────────────────────────────────────────────────


def test_frames_may_arrive_byte_by_byte_padded_and_continued(server):
    headers = frame(1, 8 | 32, 1, b"\3" + b"\0\0\0\0\x10" + ECHO[:10] + b"\0\0\0") + frame(9, 4, 1, ECHO[10:])
    data = frame(0, 8 | 1, 1, b"\4" + MESSAGE + b"\0\0\0\0")
    whole = PREFACE + frame(4, 0, 0) + headers + data
    assert MESSAGE in exchange(server, *(whole[n : n + 1] for n in range(len(whole))), until=MESSAGE)


def test_client_gets_no_more_than_its_window(server):
    small = frame(4, 0, 0, struct.pack(">HL", 4, 3))
    asked = frame(1, 4, 1, ECHO) + frame(0, 1, 1, MESSAGE)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(PREFACE + small + asked)
        received = b""
        while MESSAGE[:3] not in received.split(b"application/grpc")[-1]:
            received += connection.recv(65536)
        assert b"grpc-status" not in received
        connection.sendall(frame(8, 0, 1, struct.pack(">L", 100)))
        while b"grpc-status" not in received:
            received += connection.recv(65536)
    assert frame(0, 0, 1, MESSAGE[:3]) in received and frame(0, 0, 1, MESSAGE[3:]) in received


@pytest.mark.parametrize(
    "wrong",
    [
        frame(9, 4, 1, ECHO),  # a CONTINUATION without HEADERS
        frame(1, 0, 1, ECHO) + frame(0, 1, 1, MESSAGE),  # an interrupted header block
        frame(1, 4, 2, ECHO),  # an even stream id
        frame(0, 1, 7, MESSAGE),  # never opened
        frame(1, 4 | 8, 1, b"\xff" + ECHO),  # padding longer than the payload
        frame(4, 0, 0, b"12345"),
        frame(6, 0, 0, b"1"),
        frame(8, 0, 0, struct.pack(">L", 0)),
        frame(1, 4, 1, b"\xff\xff\xff\xff\xff\xff"),  # an invalid index
        struct.pack(">BHBBL", 255, 0, 0, 0, 1),  # larger than the maximum frame
        frame(1, 0, 1, ECHO) + frame(9, 0, 1, b"\0" * 40_000) * 27,  # an endless header block
    ],
)
def test_protocol_violation_ends_only_that_connection(server, channel, wrong):
    received = exchange(server, PREFACE + frame(4, 0, 0), wrong, until=b"never sent")
    assert struct.pack(">B", 7) in received  # GOAWAY
    assert channel.unary_unary("/test/Echo")(b"x", timeout=20) == b"x"


def test_server_stops_reading_from_a_client_that_never_reads(server):
    """Otherwise its answers would accumulate."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(PREFACE + frame(4, 0, 0, struct.pack(">HL", 4, 2**31 - 1)))
        connection.sendall(frame(8, 0, 0, struct.pack(">L", 2**31 - 1 - 65535)))
        body = b"\0" + struct.pack(">L", 60_000) + b"x" * 60_000
        connection.settimeout(1.0)
        sent = []

        def flood() -> None:
            for number in range(1, 4001, 2):
                connection.sendall(frame(1, 4, number, ECHO) + frame(0, 1, number, body))
                sent.append(len(body))

        with pytest.raises(TimeoutError):  # finally nothing more is accepted
            flood()
        assert sum(sent) < 60_000_000


def test_incomplete_calls_time_out(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(PREFACE + frame(4, 0, 0) + frame(1, 4, 1, ECHO) + frame(0, 0, 1, MESSAGE[:4]))
        deadline, received = time.monotonic() + 20, b""
        while b"did not arrive" not in received:
            server.on_loop(lambda: [one.check_timeouts(0.0) for one in list(server.connections)])
            assert time.monotonic() < deadline
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                received += connection.recv(65536)


def test_incomplete_calls_are_buffered_up_to_a_limit(server):
    many = b"".join(
        frame(1, 4, number, ECHO) + frame(0, 0, number, b"\0\0\x10\0\0" + b"x" * (MAX_MESSAGE - 5))
        for number in range(1, 13, 2)
    )
    assert b"half sent" in exchange(server, PREFACE + frame(4, 0, 0), many, until=b"half sent")


def test_http1_and_silent_clients_do_no_harm(server, channel):
    assert exchange(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", until=b"never sent")[:3] in (
        b"",
        b"\0\0\x18",
    )
    socket.create_connection(("127.0.0.1", server.port), timeout=20).close()
    assert channel.unary_unary("/test/Echo")(b"x", timeout=20) == b"x"


def test_damaged_compressed_message_is_refused(server):
    packed = gzip.compress(b"hello")[:-6] + b"??????"
    body = b"\1" + struct.pack(">L", len(packed)) + packed
    block = ECHO + literal(b"grpc-encoding", b"gzip")
    received = exchange(
        server, PREFACE + frame(4, 0, 0), frame(1, 4, 1, block) + frame(0, 1, 1, body), until=b"grpc-message"
    )
    assert b"damaged" in received


@settings(max_examples=150)
@given(st.lists(st.one_of(
    st.binary(max_size=40),
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=60)),
    st.just(frame(1, 4, 1, ECHO)), st.just(frame(0, 1, 1, MESSAGE)), st.just(frame(3, 0, 1, b"\0\0\0\x08")),
), max_size=8))  # fmt: skip
def test_server_survives_any_bytes(server, parts):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(PREFACE + b"".join(parts))
        connection.shutdown(socket.SHUT_WR)
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass
    assert server.errors == []


def test_server_still_answers_after_the_other_tests(server, channel):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        call = channel.unary_unary("/test/Echo")
        assert list(threads.map(lambda n: call(b"%d" % n, timeout=20), range(50))) == [
            b"%d" % n for n in range(50)
        ]
