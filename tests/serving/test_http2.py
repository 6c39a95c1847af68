"""HTTP/2 on real sockets: real gRPC clients, and clients that do not keep to the protocol."""

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
from http2_peer import ECHO, MESSAGE, MOST, PREFACE, Server, frame, literal, spoken
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()
    assert running.troubles == []


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as opened:
        yield opened


def test_messages_of_every_size_come_back(channel):
    call = channel.unary_unary("/test/Echo")
    for size in (0, 1, 5, 16_383, 16_384, 16_385, 65_535, 200_000, MOST):
        body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert call(body, timeout=20) == body


def test_call_with_too_much_metadata_ends_alone(server, channel):
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


def test_an_answer_larger_than_every_window_arrives_whole(channel):
    assert channel.unary_unary("/test/Big")(b"0123456789", timeout=60) == b"0123456789" * 500_000


def test_many_calls_on_one_connection_are_told_apart(channel):
    call = channel.unary_unary("/test/Echo")
    bodies = [b"%d" % number * (1 + number % 4000) for number in range(500)]
    futures = [call.future(body, timeout=60, metadata=[("n", str(n))]) for n, body in enumerate(bodies)]
    assert [one.result() for one in futures] == bodies


def test_deadlines_and_refusals_are_understood(channel):
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
                channel.unary_unary("/test/Echo")(b"\0" * (3 * MOST), timeout=10)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_that_is_too_large_is_refused_and_the_connection_lives(channel):
    call = channel.unary_unary("/test/Echo")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"x" * (3 * MOST), timeout=20)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "serve.max_body" in caught.value.details()
    assert call(b"y", timeout=20) == b"y"


def test_streams_of_messages_are_answered_one_by_one(channel):
    call = channel.stream_stream("/test/Each")
    sent = [b"a", b"", b"c" * 100_000, b"d"]
    assert list(call(iter(sent), timeout=20)) == sent
    assert list(call(iter([]), timeout=20)) == []


def test_a_call_that_is_given_up_is_told(server, channel):
    future = channel.unary_unary("/test/Wait").future(b"x", timeout=60)
    deadline = time.monotonic() + 20
    while not any(stream.path == "/test/Wait" for stream in server.echo.waiting):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    future.cancel()
    while "/test/Wait" not in server.echo.gone_calls:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_leaving_answers_what_is_under_way():
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
                    connection.leave()
                server.echo.waiting[0].reply(b"answered")

            server.on_loop(leave)
            assert future.result() == b"answered"
            while server.connections:
                assert time.monotonic() < deadline
                time.sleep(0.005)
    finally:
        server.close()
    assert server.troubles == []


# ── without a client library ───────────────────────────────────────────────────────────────────


def test_frames_may_come_byte_by_byte_padded_and_continued(server):
    headers = frame(1, 8 | 32, 1, b"\3" + b"\0\0\0\0\x10" + ECHO[:10] + b"\0\0\0") + frame(9, 4, 1, ECHO[10:])
    data = frame(0, 8 | 1, 1, b"\4" + MESSAGE + b"\0\0\0\0")
    whole = PREFACE + frame(4, 0, 0) + headers + data
    assert MESSAGE in spoken(server, *(whole[n : n + 1] for n in range(len(whole))), until=MESSAGE)


def test_a_client_with_a_small_window_gets_no_more_than_it_takes(server):
    small = frame(4, 0, 0, struct.pack(">HL", 4, 3))
    asked = frame(1, 4, 1, ECHO) + frame(0, 1, 1, MESSAGE)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(PREFACE + small + asked)
        heard = b""
        while MESSAGE[:3] not in heard.split(b"application/grpc")[-1]:
            heard += connection.recv(65536)
        assert b"grpc-status" not in heard
        connection.sendall(frame(8, 0, 1, struct.pack(">L", 100)))
        while b"grpc-status" not in heard:
            heard += connection.recv(65536)
    assert frame(0, 0, 1, MESSAGE[:3]) in heard and frame(0, 0, 1, MESSAGE[3:]) in heard


@pytest.mark.parametrize(
    "wrong",
    [
        frame(9, 4, 1, ECHO),  # continues nothing
        frame(1, 0, 1, ECHO) + frame(0, 1, 1, MESSAGE),  # a block that is interrupted
        frame(1, 4, 2, ECHO),  # an even number
        frame(0, 1, 7, MESSAGE),  # never began
        frame(1, 4 | 8, 1, b"\xff" + ECHO),  # more padding than there is
        frame(4, 0, 0, b"12345"),
        frame(6, 0, 0, b"1"),
        frame(8, 0, 0, struct.pack(">L", 0)),
        frame(1, 4, 1, b"\xff\xff\xff\xff\xff\xff"),  # no header of any table
        struct.pack(">BHBBL", 255, 0, 0, 0, 1),  # larger than any frame may be
        frame(1, 0, 1, ECHO) + frame(9, 0, 1, b"\0" * 40_000) * 27,  # a block without an end
    ],
)
def test_what_is_against_the_protocol_ends_that_connection_alone(server, channel, wrong):
    heard = spoken(server, PREFACE + frame(4, 0, 0), wrong, until=b"never said")
    assert struct.pack(">B", 7) in heard  # GOAWAY
    assert channel.unary_unary("/test/Echo")(b"x", timeout=20) == b"x"


def test_a_client_that_never_reads_is_not_read_from_any_more(server):
    """Its answers would pile up otherwise."""
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

        with pytest.raises(TimeoutError):  # at last nothing more is taken
            flood()
        assert sum(sent) < 60_000_000


def test_calls_that_never_end_are_given_up(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(PREFACE + frame(4, 0, 0) + frame(1, 4, 1, ECHO) + frame(0, 0, 1, MESSAGE[:4]))
        deadline, heard = time.monotonic() + 20, b""
        while b"did not arrive" not in heard:
            server.on_loop(lambda: [one.sweep(0.0) for one in list(server.connections)])
            assert time.monotonic() < deadline
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                heard += connection.recv(65536)


def test_half_sent_calls_hold_a_bounded_amount_of_memory(server):
    many = b"".join(
        frame(1, 4, number, ECHO) + frame(0, 0, number, b"\0\0\x10\0\0" + b"x" * (MOST - 5))
        for number in range(1, 13, 2)
    )
    assert b"half sent" in spoken(server, PREFACE + frame(4, 0, 0), many, until=b"half sent")


def test_http1_and_silence_are_no_trouble(server, channel):
    assert spoken(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", until=b"never said")[:3] in (b"", b"\0\0\x18")
    socket.create_connection(("127.0.0.1", server.port), timeout=20).close()
    assert channel.unary_unary("/test/Echo")(b"x", timeout=20) == b"x"


def test_a_damaged_compressed_message_is_refused(server):
    packed = gzip.compress(b"hello")[:-6] + b"??????"
    body = b"\1" + struct.pack(">L", len(packed)) + packed
    block = ECHO + literal(b"grpc-encoding", b"gzip")
    heard = spoken(
        server, PREFACE + frame(4, 0, 0), frame(1, 4, 1, block) + frame(0, 1, 1, body), until=b"grpc-message"
    )
    assert b"damaged" in heard


@settings(max_examples=150)
@given(st.lists(st.one_of(
    st.binary(max_size=40),
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=60)),
    st.just(frame(1, 4, 1, ECHO)), st.just(frame(0, 1, 1, MESSAGE)), st.just(frame(3, 0, 1, b"\0\0\0\x08")),
), max_size=8))  # fmt: skip
def test_any_bytes_leave_the_server_answering(server, parts):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(PREFACE + b"".join(parts))
        connection.shutdown(socket.SHUT_WR)
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass
    assert server.troubles == []


def test_the_server_still_answers_after_all_that(server, channel):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        call = channel.unary_unary("/test/Echo")
        assert list(threads.map(lambda n: call(b"%d" % n, timeout=20), range(50))) == [
            b"%d" % n for n in range(50)
        ]
