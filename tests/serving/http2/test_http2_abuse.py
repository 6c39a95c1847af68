"""Malicious or broken HTTP/2 clients: the cost of each is bounded, and other clients are not affected."""

from __future__ import annotations

import contextlib
import gzip
import socket
import struct
import time

import grpc
import pytest
from hpack import Encoder
from http2_peer import (
    CALM,
    CONTINUATION,
    DATA,
    ECHO,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_MESSAGE,
    MESSAGE,
    PING,
    RST,
    SETTINGS,
    WINDOW,
    Echo,
    Peer,
    Server,
    ask,
    frame,
    literal,
    path,
)

from clickline.serving.http2 import connection as http2
from clickline.serving.http2.connection import Http2Connection
from clickline.serving.http2.frames import PREFACE
from servers.waiting import eventually


def waiting_calls(server: Server, count: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while len(server.echo.waiting) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


class TestProtocol:
    def test_invalid_stream_window_ends_only_that_call(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.send(ask(1, path("Wait")) + ask(3, path("Wait")))
            peer.send(frame(WINDOW, 0, 1, struct.pack(">L", 2**31 - 1)) + frame(WINDOW, 0, 3, b"\0\0\0\0"))
            assert (peer.reset(1), peer.reset(3)) == (3, 1)
            peer.send(ask(5))
            assert b"grpc-status\x010" in peer.trailers(5)
        assert server.echo.cancelled[:2] == ["/test/Wait"] * 2

    def test_malformed_timeout_is_ignored(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.send(ask(1, path("Deadline") + literal(b"grpc-timeout", b"\xb2S")))
            peer.trailers(1)
            assert b"-1.000" in b"".join(payload for kind, _, _, payload in peer.received if kind == DATA)

    def test_truncated_compressed_message_is_refused(self, server: Server) -> None:
        packed = gzip.compress(bytes(range(256)) * 20)[:-12]
        body = b"\1" + struct.pack(">L", len(packed)) + packed
        with Peer(server) as peer:
            peer.send(ask(1, ECHO + literal(b"grpc-encoding", b"gzip"), body))
            assert b"damaged" in peer.trailers(1)

    def test_nothing_is_sent_after_a_call_was_refused(self, server: Server) -> None:
        large = b"\0" + struct.pack(">L", 70_000) + b"x" * 70_000
        too_large = b"\0" + struct.pack(">L", 2 * MAX_MESSAGE) + b"x"
        with Peer(server, struct.pack(">HL", 4, 1 << 20)) as peer:
            peer.send(frame(HEADERS, END_HEADERS, 1, path("Each")))
            for at in range(0, len(large), 16384):
                peer.send(frame(DATA, 0, 1, large[at : at + 16384]))
            peer.send(frame(DATA, 0, 1, too_large))
            assert b"grpc-status\x018" in peer.trailers(1)
            peer.send(frame(WINDOW, 0, 0, struct.pack(">L", 100_000)))  # the queued answer would fit now
            peer.ping()
            last = max(n for n, one in enumerate(peer.received) if one[2] == 1)
            assert peer.received[last][:2] == (HEADERS, END_HEADERS | END_STREAM)

    def test_header_size_limit_is_announced(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.receive_until(lambda: any(one[0] == SETTINGS and one[3] for one in peer.received))
            settings = dict(
                struct.iter_unpack(">HL", next(one[3] for one in peer.received if one[0] == SETTINGS))
            )
        assert settings[6] == 1 << 16


def long_literal(name: bytes, value: bytes, first: int = 0) -> bytes:
    """Like `literal`, of any length; with `first` 0x40 it goes into the table."""
    length = len(value) - 127
    assert length >= 0
    octets = bytearray([127])
    while length >= 128:
        octets.append(length & 127 | 128)
        length >>= 7
    octets.append(length)
    return bytes([first, len(name)]) + name + bytes(octets) + value


def block_frames(stream: int, block: bytes, size: int = 16384) -> bytes:
    """A header block in frames, as clients split it."""
    pieces = [block[at : at + size] for at in range(0, len(block), size)]
    frames = [frame(HEADERS, 0, stream, pieces[0])]
    frames += [frame(CONTINUATION, 0, stream, piece) for piece in pieces[1:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream, pieces[-1])])


KNOWN = b"\x40" + b"\x05:path" + b"\x0a/test/Echo"  # goes into the table at index 62
BOMB = b"\x83\x86" + long_literal(b"a", b"v" * 4000, 0x40) + b"\xbe" * 200  # index 62 again: 800 KB from 4 KB


class TestTooMuchMetadata:
    @pytest.mark.parametrize(
        "large",
        [
            long_literal(b"x-large", b"v" * 70_000),
            long_literal(b"x-large", b"v" * 900_000),
            b"".join(long_literal(b"x-%d" % n, b"v" * 1000) for n in range(100)),
            long_literal(b"x-one", b"v" * 70_000) + KNOWN,  # the table changes after the limit
            BOMB,
            b"".join(long_literal(b"x-%d" % n, b"v" * 1000, 0x40) for n in range(200)),
            Encoder().encode([(b"x-%d" % n, b"v%d" % n * 250) for n in range(200)], huffman=True),
            b"".join(b"\x40\x06x-%04d\x01v" % n for n in range(3000)),
            b"\xbe" * 5000,
            b"\x83" * 500_000 + b"\xff\x00" * 200_000,  # the second: index 127, as in a full table
            long_literal(b"a", b"v" * 16_000, 0x40) * 60,
        ],
        ids=[
            "one",
            "huge",
            "many",
            "then-table",
            "bomb",
            "table",
            "table-huffman",
            "table-tiny",
            "references",
            "many-references",
            "table-huge",
        ],
    )
    def test_only_that_call_ends_and_the_header_table_stays_correct(
        self, server: Server, large: bytes
    ) -> None:
        with Peer(server) as peer:
            peer.send(frame(HEADERS, END_HEADERS, 1, path("Wait")) + frame(DATA, END_STREAM, 1, MESSAGE))
            waiting_calls(server, 1)
            peer.send(block_frames(3, b"\x83\x86" + KNOWN + large) + frame(DATA, END_STREAM, 3, MESSAGE))
            ended = peer.trailers(3)
            assert b"grpc-status\x018" in ended and b"65536 bytes of metadata" in ended
            for n in (5, 9):  # the newest entry of the table, whatever was sent before
                peer.send(ask(n, b"\x83\x86" + KNOWN) + ask(n + 2, b"\x83\x86\xbe"))
                assert b"grpc-status\x010" in peer.trailers(n + 2)
            server.on_loop(lambda: server.echo.waiting[0].reply(b"still here"))
            assert b"grpc-status\x010" in peer.trailers(1)
            assert not peer.closed

    @pytest.mark.parametrize(("entries", "size"), [(200, 1000), (3000, 1)])
    def test_real_client_keeps_using_the_connection(self, server: Server, entries: int, size: int) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_metadata_size", 1 << 22),
            ("grpc.absolute_max_metadata_size", 1 << 22),
        ]
        few = [("x-known", "again"), ("x-other-bin", b"\0\1")]
        large = [(f"x-{n}", f"{n}-".ljust(size, "v")) for n in range(entries)]
        with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
            call = channel.unary_unary("/test/Echo")
            assert call(b"first", timeout=20, metadata=few) == b"first"
            (connection,) = server.connections
            for n in range(3):
                with pytest.raises(grpc.RpcError) as refused:
                    call(b"large", timeout=20, metadata=[*few, *large])
                assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "65536" in refused.value.details()
                assert call(b"%d" % n, timeout=20, metadata=few) == b"%d" % n
            assert server.connections == {connection}

    def test_too_large_trailers_end_only_their_call(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.send(frame(HEADERS, END_HEADERS, 1, ECHO) + frame(DATA, 0, 1, MESSAGE))
            large = long_literal(b"x-large", b"v" * 70_000)
            peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, large))
            assert b"grpc-status\x018" in peer.trailers(1)
            peer.send(ask(3))
            assert b"grpc-status\x010" in peer.trailers(3)

    @pytest.mark.parametrize(
        "flood",
        [
            frame(HEADERS, 0, 1, b"\x83") + frame(CONTINUATION, 0, 1, b"\x86") * 5000,
            frame(HEADERS, 0, 1, b"\x83") + frame(CONTINUATION, 0, 1, b"\0" * 16384) * 80,
            block_frames(1, b"\x20" * 200_000),
            block_frames(1, b"\x00\0\0" * 200_000),
            block_frames(1, b"\x41\0" * 200_000),
            block_frames(1, Encoder().encode([(b"a", b"0" * 8000)], huffman=True) * 100),
        ],
        ids=["frames", "bytes", "resizes", "fields", "table", "huffman"],
    )
    def test_header_floods_end_the_connection_quickly(self, server: Server, flood: bytes) -> None:
        with Peer(server) as peer:
            began = time.process_time()
            with contextlib.suppress(ConnectionError):
                peer.send(flood)
            assert peer.goaway()[0] == CALM
            assert time.process_time() - began < 2  # about 100 ms


class TestFloods:
    def test_rapid_resets_end_the_connection(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rapid reset with complete requests, so that each costs work for an answer that is not awaited."""
        monkeypatch.setattr(http2, "_MAX_RESETS", 100)
        with Peer(server) as peer:
            peer.send(
                b"".join(
                    ask(n, path("Wait")) + frame(RST, 0, n, struct.pack(">L", 8)) for n in range(1, 1001, 2)
                )
            )
            assert peer.goaway()[0] == CALM
        assert len(server.echo.waiting) <= 102

    def test_client_that_waits_for_answers_may_cancel_others_without_limit(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http2, "_MAX_RESETS", 10)
        with Peer(server) as peer:
            for n in range(1, 201, 4):
                peer.send(ask(n) + ask(n + 2, path("Wait")) + frame(RST, 0, n + 2, struct.pack(">L", 8)))
                peer.trailers(n)
            peer.ping()
            assert not peer.closed

    def test_many_small_messages_in_one_frame_are_fast(self, server: Server) -> None:
        """Once each message copied the remaining bytes: 1 MiB of them took five seconds."""
        with Peer(server, struct.pack(">HL", 4, 2**31 - 1)) as peer:
            peer.send(frame(WINDOW, 0, 0, struct.pack(">L", 2**30)))
            began = time.monotonic()
            many = b"\0\0\0\0\0" * 200_000
            peer.send(frame(HEADERS, END_HEADERS, 1, path("Count")) + frame(DATA, END_STREAM, 1, many))
            peer.trailers(1)
            assert time.monotonic() - began < 2.5
        assert server.echo.counted == 200_000

    def test_cost_of_settings_does_not_depend_on_open_calls(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.send(b"".join(ask(n, path("Wait")) for n in range(1, 2001, 2)))
            waiting_calls(server, 1000)
            began = time.monotonic()
            peer.send(frame(SETTINGS, 0, 0, struct.pack(">HLHL", 4, 1, 4, 2) * 80_000))
            peer.ping()
            assert time.monotonic() - began < 3  # with one pass over 1000 calls each: half a minute

    def test_frame_in_tiny_pieces_is_not_copied_for_each(self) -> None:
        connection = Http2Connection(Echo(), set())
        with socket.socket() as end:
            connection.connection_made(_NullTransport(end))
        whole = PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 0, b"x" * 1_000_000)[:-1]
        began = time.process_time()
        for at in range(0, len(whole), 10):
            connection.data_received(whole[at : at + 10])
        assert time.process_time() - began < 1.0

    def test_unread_answers_are_queued_up_to_a_limit(self, server: Server) -> None:
        """Its window is closed, so answers are queued: up to a limit, and for a limited time."""
        with Peer(server, struct.pack(">HL", 4, 0)) as peer:
            for n in range(1, 21, 2):
                peer.send(ask(n, path("Big"), b"\0\0\0\0\x0a0123456789"))  # 5 MB each
            peer.ping()
            refused = [one for one in peer.received if one[0] == HEADERS and one[1] & END_STREAM]
            assert 5 <= len(refused) <= 8
            assert all(b"grpc-status\x018" in one[3] for one in refused)
            (connection,) = server.connections
            for seconds in (1000.0, 0.0):
                server.on_loop(lambda seconds=seconds: connection.check_timeouts(seconds))  # type: ignore[misc]
                peer.ping()
                resets = [one for one in peer.received if one[0] == RST]
                assert len(resets) == (0 if seconds else 10 - len(refused))
            assert not connection.busy

    def test_incomplete_streaming_messages_are_buffered_up_to_a_limit(self, server: Server) -> None:
        half = b"\0" + struct.pack(">L", MAX_MESSAGE) + b"x" * (MAX_MESSAGE - 1000)
        with Peer(server) as peer:
            for n in range(1, 21, 2):
                peer.send(frame(HEADERS, END_HEADERS, n, path("Each")))
                for at in range(0, len(half), 16384):
                    peer.send(frame(DATA, 0, n, half[at : at + 16384]))
            peer.ping()
            assert sum(b"half sent" in one[3] for one in peer.received if one[0] == HEADERS) >= 5

    def test_connections_are_limited(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http2, "_MAX_CONNECTIONS", 2)
        with Peer(server) as one, Peer(server) as other:
            for peer in (one, other):
                peer.ping()
            third = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            with third, contextlib.suppress(ConnectionResetError):
                assert third.recv(1) == b""
            one.ping()

    def test_buffered_bytes_of_all_connections_are_limited(self, server: Server) -> None:
        half = b"\0" + struct.pack(">L", MAX_MESSAGE) + b"x" * (MAX_MESSAGE - 1000)
        said = b"".join(frame(DATA, 0, 1, half[at : at + 16384]) for at in range(0, len(half), 16384))
        peers = [Peer(server) for _ in range(20)]
        try:
            for peer in peers:
                peer.send(frame(HEADERS, END_HEADERS, 1, ECHO) + said)
                peer.ping()
            refused = [
                any(one[0] == HEADERS and b"half sent" in one[3] for one in peer.received) for peer in peers
            ]
            assert refused == [False] * 16 + [True] * 4
        finally:
            for peer in peers:
                peer.__exit__()
        eventually(lambda: not server.connections)
        assert server.echo.buffered.bytes == 0


class TestTimeouts:
    @pytest.mark.parametrize(
        "half",
        [
            frame(DATA, 0, 1, MESSAGE)[:-1],
            frame(HEADERS, 0, 1, ECHO),  # an incomplete block
        ],
    )
    def test_connection_with_incomplete_frame_times_out(self, server: Server, half: bytes) -> None:
        with Peer(server) as peer:
            peer.ping()
            (connection,) = server.connections
            peer.send(half)
            eventually(lambda: connection.incomplete)
            server.on_loop(lambda: connection.check_timeouts(1000.0))
            server.on_loop(lambda: connection.check_timeouts(0.0))
            peer.receive_until(lambda: peer.closed)
            assert peer.closed

    def test_call_with_only_headers_times_out(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.send(frame(HEADERS, END_HEADERS, 1, ECHO) + ask(3, path("Wait")))
            peer.ping()
            (connection,) = server.connections
            server.on_loop(lambda: connection.check_timeouts(0.0))
            assert b"did not arrive" in peer.trailers(1)
            peer.ping()
            assert not [one for one in peer.received if one[2] == 3]  # the other call is still being answered

    def test_client_that_does_not_read_times_out(self, server: Server) -> None:
        with Peer(server, struct.pack(">HL", 4, 2**31 - 1)) as peer:
            peer.send(frame(WINDOW, 0, 0, struct.pack(">L", 2**30)))
            eventually(lambda: bool(server.connections))
            (connection,) = server.connections
            for n in range(1, 11, 2):
                peer.send(ask(n, path("Big"), b"\0\0\0\0\x0a0123456789"))
            eventually(lambda: connection.blocked)
            server.on_loop(lambda: connection.check_timeouts(1000.0))
            assert connection in server.connections
            server.on_loop(lambda: connection.check_timeouts(0.0))
            eventually(lambda: not server.connections)


class TestDrain:
    def test_call_in_flight_during_drain_is_answered(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.send(ask(1))
            peer.trailers(1)
            (connection,) = server.connections
            server.on_loop(connection.start_drain)
            eventually(lambda: connection.draining)
            peer.send(ask(3))  # before it has read the GOAWAY
            assert b"grpc-status\x010" in peer.trailers(3)
            peer.receive_until(lambda: any(one[:2] == (PING, 0) for one in peer.received))
            first = next(one[3] for one in peer.received if one[0] == GOAWAY)
            assert first == struct.pack(">LL", 2**31 - 1, 0)
            mark = next(one[3] for one in peer.received if one[:2] == (PING, 0))
            peer.send(frame(PING, 1, 0, mark))
            peer.receive_until(lambda: peer.closed)
            assert [one[3] for one in peer.received if one[0] == GOAWAY][-1] == struct.pack(">LL", 3, 0)

    def test_drain_refuses_incomplete_calls_and_completes_answers(self, server: Server) -> None:
        with Peer(server, struct.pack(">HL", 4, 10)) as peer:
            peer.send(frame(HEADERS, END_HEADERS, 1, ECHO) + frame(DATA, 0, 1, MESSAGE[:3]))
            peer.send(ask(3, path("Big"), b"\0\0\0\0\x0a0123456789"))
            peer.ping()
            (connection,) = server.connections
            server.on_loop(connection.start_drain)
            server.on_loop(connection.finish_drain)
            assert b"stopping" in peer.trailers(1)
            peer.send(
                frame(WINDOW, 0, 3, struct.pack(">L", 2**30)) + frame(WINDOW, 0, 0, struct.pack(">L", 2**30))
            )
            peer.trailers(3)
            answer = b"".join(one[3] for one in peer.received if one[0] == DATA and one[2] == 3)
            assert len(answer) == 5_000_005
            peer.receive_until(lambda: peer.closed)

    def test_busy_real_client_does_not_notice_drains(self, server: Server) -> None:
        """Its connection is drained 50 times. gRPC itself retries calls that it had assigned to that connection and not
        sent yet."""
        with grpc.insecure_channel(
            f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = channel.unary_unary("/test/Echo")
            for n in range(1500):
                if n % 30 == 0:
                    server.on_loop(lambda: [one.start_drain() for one in list(server.connections)])
                assert call(b"%d" % n, timeout=20, wait_for_ready=True) == b"%d" % n


class _NullTransport:
    """A transport that discards everything."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def write(self, data: bytes) -> None:
        pass

    def get_extra_info(self, name: str) -> socket.socket:
        return self._end
