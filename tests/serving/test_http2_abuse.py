"""Clients that are out for harm, or broken: what one of them costs is bounded, and the others do not notice."""

from __future__ import annotations

import contextlib
import gzip
import socket
import struct
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from hpack import Encoder
from http2_peer import ECHO, MESSAGE, MOST, PREFACE, Echo, Server, frame, literal

from clickline.serving import http2
from clickline.serving.http2 import Connection
from servers.waiting import eventually

DATA, HEADERS, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
STREAM_CLOSED, CALM = 5, 11


def path(method: str) -> bytes:
    return b"\x83\x86" + literal(b":path", f"/test/{method}".encode())


class Peer:
    """A client that says what it likes."""

    def __init__(self, server: Server, settings: bytes = b"") -> None:
        self.heard: list[tuple[int, int, int, bytes]] = []  # kind, flags, stream, payload
        self.closed = False
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self._left = b""
        self.say(PREFACE + frame(SETTINGS, 0, 0, settings))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def say(self, data: bytes) -> None:
        self._socket.sendall(data)

    def hear(self, enough: Callable[[], bool], seconds: float = 20.0) -> None:
        """Take frames in until `enough`, or the server closes."""
        deadline = time.monotonic() + seconds
        while not enough() and not self.closed:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                piece = self._socket.recv(1 << 20)
            except ConnectionResetError:
                piece = b""
            self.closed = not piece
            self._left += piece
            while len(self._left) >= 9:
                high, low, kind, flags, stream = struct.unpack_from(">BHBBL", self._left)
                size = 9 + (high << 16 | low)
                if len(self._left) < size:
                    break
                self.heard.append((kind, flags, stream, self._left[9:size]))
                self._left = self._left[size:]

    def hear_ping(self) -> None:
        """All that was said before has been dealt with."""
        mark = struct.pack(">Q", len(self.heard))
        self.say(frame(PING, 0, 0, mark))
        self.hear(lambda: (PING, 1, 0, mark) in self.heard)

    def goodbye(self) -> tuple[int, bytes]:
        """Code and words of the server's GOAWAY."""
        self.hear(lambda: self.closed)
        payload = next(payload for kind, _, _, payload in self.heard if kind == GOAWAY)
        return int.from_bytes(payload[4:8], "big"), payload[8:]

    def trailers(self, stream: int) -> bytes:
        """How a call ended."""
        self.hear(lambda: any(one[:3] == (HEADERS, END_HEADERS | END_STREAM, stream) for one in self.heard))
        return next(one[3] for one in self.heard if one[:3] == (HEADERS, END_HEADERS | END_STREAM, stream))

    def reset(self, stream: int) -> int:
        """The code that a call was reset with."""
        self.hear(lambda: any(one[0] == RST and one[2] == stream for one in self.heard))
        return next(int.from_bytes(one[3], "big") for one in self.heard if one[0] == RST and one[2] == stream)


def ask(stream: int, headers: bytes = ECHO, message: bytes = MESSAGE) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, message)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()
    assert running.troubles == []


def waiting_calls(server: Server, count: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while len(server.echo.waiting) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


class TestProtocol:
    @pytest.mark.parametrize("again", [ask(1)[len(frame(1, 4, 1, ECHO)) :], frame(HEADERS, 5, 1, ECHO)])
    def test_a_call_that_has_ended_cannot_go_on(self, server: Server, again: bytes) -> None:
        with Peer(server) as peer:
            peer.say(ask(1, path("Wait")) + again)
            assert peer.goodbye()[0] == STREAM_CLOSED
        assert len(server.echo.waiting) == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            frame(DATA, 0, 0, MESSAGE),
            frame(RST, 0, 0, b"\0\0\0\x08"),
            frame(RST, 0, 9, b"\0\0\0\x08"),  # never began
            frame(RST, 0, 1, b"\0\0\x08"),
            frame(SETTINGS, 0, 1),
            frame(SETTINGS, 1, 0, struct.pack(">HL", 4, 5)),  # an acknowledgement that says something
            frame(SETTINGS, 0, 0, struct.pack(">HL", 2, 2)),
            frame(PING, 0, 1, b"12345678"),
            frame(WINDOW, 0, 9, struct.pack(">L", 5)),
            frame(PUSH, 4, 1, struct.pack(">L", 2) + ECHO),
            frame(HEADERS, 4 | 32, 3, b"\0\0"),  # half of a priority
            frame(HEADERS, 4, 1, ECHO),  # begins a second time, without an end
            frame(CONTINUATION, 0, 1, b""),
        ],
    )
    def test_what_is_against_the_protocol_ends_the_connection(self, server: Server, wrong: bytes) -> None:
        with Peer(server) as peer:
            peer.say(frame(HEADERS, END_HEADERS, 1, path("Wait")) + wrong)
            peer.goodbye()

    def test_a_stream_window_that_is_too_large_ends_that_call_alone(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.say(ask(1, path("Wait")) + ask(3, path("Wait")))
            peer.say(frame(WINDOW, 0, 1, struct.pack(">L", 2**31 - 1)) + frame(WINDOW, 0, 3, b"\0\0\0\0"))
            assert (peer.reset(1), peer.reset(3)) == (3, 1)
            peer.say(ask(5))
            assert b"grpc-status\x010" in peer.trailers(5)
        assert server.echo.gone_calls[:2] == ["/test/Wait"] * 2

    def test_a_timeout_that_is_no_number_is_no_deadline(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.say(ask(1, path("Deadline") + literal(b"grpc-timeout", b"\xb2S")))
            peer.trailers(1)
            assert b"-1.000" in b"".join(payload for kind, _, _, payload in peer.heard if kind == DATA)

    def test_a_compressed_message_that_is_cut_off_is_refused(self, server: Server) -> None:
        packed = gzip.compress(bytes(range(256)) * 20)[:-12]
        body = b"\1" + struct.pack(">L", len(packed)) + packed
        with Peer(server) as peer:
            peer.say(ask(1, ECHO + literal(b"grpc-encoding", b"gzip"), body))
            assert b"damaged" in peer.trailers(1)

    def test_nothing_follows_the_end_of_a_call_that_was_refused_in_the_middle(self, server: Server) -> None:
        large = b"\0" + struct.pack(">L", 70_000) + b"x" * 70_000
        too_large = b"\0" + struct.pack(">L", 2 * MOST) + b"x"
        with Peer(server, struct.pack(">HL", 4, 1 << 20)) as peer:
            peer.say(frame(HEADERS, END_HEADERS, 1, path("Each")))
            for at in range(0, len(large), 16384):
                peer.say(frame(DATA, 0, 1, large[at : at + 16384]))
            peer.say(frame(DATA, 0, 1, too_large))
            assert b"grpc-status\x018" in peer.trailers(1)
            peer.say(frame(WINDOW, 0, 0, struct.pack(">L", 100_000)))  # what waited would fit now
            peer.hear_ping()
            last = max(n for n, one in enumerate(peer.heard) if one[2] == 1)
            assert peer.heard[last][:2] == (HEADERS, END_HEADERS | END_STREAM)

    def test_the_size_of_headers_that_are_taken_is_told(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.hear(lambda: any(one[0] == SETTINGS and one[3] for one in peer.heard))
            settings = dict(
                struct.iter_unpack(">HL", next(one[3] for one in peer.heard if one[0] == SETTINGS))
            )
        assert settings[6] == 1 << 16


def long_literal(name: bytes, value: bytes, first: int = 0) -> bytes:
    """As `literal`, of any length; `first` 0x40: it goes into the table."""
    length = len(value) - 127
    assert length >= 0
    octets = bytearray([127])
    while length >= 128:
        octets.append(length & 127 | 128)
        length >>= 7
    octets.append(length)
    return bytes([first, len(name)]) + name + bytes(octets) + value


def block_frames(stream: int, block: bytes, size: int = 16384) -> bytes:
    """A header block in frames as clients cut it."""
    pieces = [block[at : at + size] for at in range(0, len(block), size)]
    frames = [frame(HEADERS, 0, stream, pieces[0])]
    frames += [frame(CONTINUATION, 0, stream, piece) for piece in pieces[1:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream, pieces[-1])])


KNOWN = b"\x40" + b"\x05:path" + b"\x0a/test/Echo"  # goes into the table, where 62 stands for it
BOMB = b"\x83\x86" + long_literal(b"a", b"v" * 4000, 0x40) + b"\xbe" * 200  # 62 again: 800 KB from 4 KB


class TestTooMuchMetadata:
    @pytest.mark.parametrize(
        "large",
        [
            long_literal(b"x-large", b"v" * 70_000),
            long_literal(b"x-large", b"v" * 900_000),
            b"".join(long_literal(b"x-%d" % n, b"v" * 1000) for n in range(100)),
            long_literal(b"x-one", b"v" * 70_000) + KNOWN,  # the table changes after it was too much
            BOMB,
            b"".join(long_literal(b"x-%d" % n, b"v" * 1000, 0x40) for n in range(200)),
            Encoder().encode([(b"x-%d" % n, b"v%d" % n * 250) for n in range(200)], huffman=True),
            b"".join(b"\x40\x06x-%04d\x01v" % n for n in range(3000)),
            b"\xbe" * 5000,
            b"\x83" * 500_000 + b"\xff\x00" * 200_000,  # the second: number 127, as of a full table
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
    def test_only_its_call_ends_and_the_table_stays_right(self, server: Server, large: bytes) -> None:
        with Peer(server) as peer:
            peer.say(frame(HEADERS, END_HEADERS, 1, path("Wait")) + frame(DATA, END_STREAM, 1, MESSAGE))
            waiting_calls(server, 1)
            peer.say(block_frames(3, b"\x83\x86" + KNOWN + large) + frame(DATA, END_STREAM, 3, MESSAGE))
            ended = peer.trailers(3)
            assert b"grpc-status\x018" in ended and b"65536 bytes of metadata" in ended
            for n in (5, 9):  # the newest entry of the table, whatever came before
                peer.say(ask(n, b"\x83\x86" + KNOWN) + ask(n + 2, b"\x83\x86\xbe"))
                assert b"grpc-status\x010" in peer.trailers(n + 2)
            server.on_loop(lambda: server.echo.waiting[0].reply(b"still here"))
            assert b"grpc-status\x010" in peer.trailers(1)
            assert not peer.closed

    @pytest.mark.parametrize(("entries", "size"), [(200, 1000), (3000, 1)])
    def test_real_client_goes_on_over_the_same_connection(
        self, server: Server, entries: int, size: int
    ) -> None:
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

    def test_trailers_that_are_too_large_end_only_their_call(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.say(frame(HEADERS, END_HEADERS, 1, ECHO) + frame(DATA, 0, 1, MESSAGE))
            large = long_literal(b"x-large", b"v" * 70_000)
            peer.say(frame(HEADERS, END_HEADERS | END_STREAM, 1, large))
            assert b"grpc-status\x018" in peer.trailers(1)
            peer.say(ask(3))
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
    def test_floods_of_headers_end_the_connection_soon(self, server: Server, flood: bytes) -> None:
        with Peer(server) as peer:
            began = time.process_time()
            with contextlib.suppress(ConnectionError):
                peer.say(flood)
            assert peer.goodbye()[0] == CALM
            assert time.process_time() - began < 2  # some 100 ms


class TestFloods:
    def test_calls_that_are_asked_and_given_up_at_once_end_the_connection(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rapid reset: whole requests, so that each costs work, and nobody waits for an answer."""
        monkeypatch.setattr(http2, "_MOST_RESETS", 100)
        with Peer(server) as peer:
            peer.say(
                b"".join(
                    ask(n, path("Wait")) + frame(RST, 0, n, struct.pack(">L", 8)) for n in range(1, 1001, 2)
                )
            )
            assert peer.goodbye()[0] == CALM
        assert len(server.echo.waiting) <= 102

    def test_whoever_waits_for_answers_may_give_up_others_for_ever(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http2, "_MOST_RESETS", 10)
        with Peer(server) as peer:
            for n in range(1, 201, 4):
                peer.say(ask(n) + ask(n + 2, path("Wait")) + frame(RST, 0, n + 2, struct.pack(">L", 8)))
                peer.trailers(n)
            peer.hear_ping()
            assert not peer.closed

    def test_many_small_messages_in_one_frame_take_little_time(self, server: Server) -> None:
        """Each was cut off the front of all that was left: 1 MiB of them took five seconds."""
        with Peer(server, struct.pack(">HL", 4, 2**31 - 1)) as peer:
            peer.say(frame(WINDOW, 0, 0, struct.pack(">L", 2**30)))
            began = time.monotonic()
            many = b"\0\0\0\0\0" * 200_000
            peer.say(frame(HEADERS, END_HEADERS, 1, path("Count")) + frame(DATA, END_STREAM, 1, many))
            peer.trailers(1)
            assert time.monotonic() - began < 2.5
        assert server.echo.counted == 200_000

    def test_settings_cost_the_same_however_many_calls_are_under_way(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.say(b"".join(ask(n, path("Wait")) for n in range(1, 2001, 2)))
            waiting_calls(server, 1000)
            began = time.monotonic()
            peer.say(frame(SETTINGS, 0, 0, struct.pack(">HLHL", 4, 1, 4, 2) * 80_000))
            peer.hear_ping()
            assert time.monotonic() - began < 3  # once each for 1000 calls: half a minute

    def test_a_frame_that_comes_in_crumbs_is_not_copied_for_each(self) -> None:
        connection = Connection(Echo(), set())
        with socket.socket() as end:
            connection.connection_made(_Nowhere(end))
        whole = PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 0, b"x" * 1_000_000)[:-1]
        began = time.process_time()
        for at in range(0, len(whole), 10):
            connection.data_received(whole[at : at + 10])
        assert time.process_time() - began < 1.0

    def test_answers_that_a_client_does_not_take_are_bounded(self, server: Server) -> None:
        """Its window is closed, so they wait here: no more than so much, and not for ever."""
        with Peer(server, struct.pack(">HL", 4, 0)) as peer:
            for n in range(1, 21, 2):
                peer.say(ask(n, path("Big"), b"\0\0\0\0\x0a0123456789"))  # 5 MB each
            peer.hear_ping()
            refused = [one for one in peer.heard if one[0] == HEADERS and one[1] & END_STREAM]
            assert 5 <= len(refused) <= 8
            assert all(b"grpc-status\x018" in one[3] for one in refused)
            (connection,) = server.connections
            for seconds in (1000.0, 0.0):
                server.on_loop(lambda seconds=seconds: connection.sweep(seconds))  # type: ignore[misc]
                peer.hear_ping()
                resets = [one for one in peer.heard if one[0] == RST]
                assert len(resets) == (0 if seconds else 10 - len(refused))
            assert not connection.busy

    def test_what_streams_have_half_sent_is_bounded_too(self, server: Server) -> None:
        half = b"\0" + struct.pack(">L", MOST) + b"x" * (MOST - 1000)
        with Peer(server) as peer:
            for n in range(1, 21, 2):
                peer.say(frame(HEADERS, END_HEADERS, n, path("Each")))
                for at in range(0, len(half), 16384):
                    peer.say(frame(DATA, 0, n, half[at : at + 16384]))
            peer.hear_ping()
            assert sum(b"half sent" in one[3] for one in peer.heard if one[0] == HEADERS) >= 5

    def test_connections_are_bounded(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http2, "_MOST_CONNECTIONS", 2)
        with Peer(server) as one, Peer(server) as other:
            for peer in (one, other):
                peer.hear_ping()
            third = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            with third, contextlib.suppress(ConnectionResetError):
                assert third.recv(1) == b""
            one.hear_ping()

    def test_all_connections_together_hold_a_bounded_amount(self, server: Server) -> None:
        half = b"\0" + struct.pack(">L", MOST) + b"x" * (MOST - 1000)
        said = b"".join(frame(DATA, 0, 1, half[at : at + 16384]) for at in range(0, len(half), 16384))
        peers = [Peer(server) for _ in range(20)]
        try:
            for peer in peers:
                peer.say(frame(HEADERS, END_HEADERS, 1, ECHO) + said)
                peer.hear_ping()
            refused = [
                any(one[0] == HEADERS and b"half sent" in one[3] for one in peer.heard) for peer in peers
            ]
            assert refused == [False] * 16 + [True] * 4
        finally:
            for peer in peers:
                peer.__exit__()
        eventually(lambda: not server.connections)
        assert server.echo.arriving.bytes == 0


class TestSilence:
    @pytest.mark.parametrize(
        "half",
        [
            frame(DATA, 0, 1, MESSAGE)[:-1],
            frame(HEADERS, 0, 1, ECHO),  # goes on, and never does
        ],
    )
    def test_a_connection_with_half_a_frame_is_ended(self, server: Server, half: bytes) -> None:
        with Peer(server) as peer:
            peer.hear_ping()
            (connection,) = server.connections
            peer.say(half)
            eventually(lambda: connection.half_said)
            server.on_loop(lambda: connection.sweep(1000.0))
            server.on_loop(lambda: connection.sweep(0.0))
            peer.hear(lambda: peer.closed)
            assert peer.closed

    def test_a_call_of_which_only_the_headers_come_is_ended(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.say(frame(HEADERS, END_HEADERS, 1, ECHO) + ask(3, path("Wait")))
            peer.hear_ping()
            (connection,) = server.connections
            server.on_loop(lambda: connection.sweep(0.0))
            assert b"did not arrive" in peer.trailers(1)
            peer.hear_ping()
            assert not [one for one in peer.heard if one[2] == 3]  # the other is being answered

    def test_a_client_that_takes_nothing_from_its_socket_is_ended(self, server: Server) -> None:
        with Peer(server, struct.pack(">HL", 4, 2**31 - 1)) as peer:
            peer.say(frame(WINDOW, 0, 0, struct.pack(">L", 2**30)))
            eventually(lambda: bool(server.connections))
            (connection,) = server.connections
            for n in range(1, 11, 2):
                peer.say(ask(n, path("Big"), b"\0\0\0\0\x0a0123456789"))
            eventually(lambda: connection.stuck)
            server.on_loop(lambda: connection.sweep(1000.0))
            assert connection in server.connections
            server.on_loop(lambda: connection.sweep(0.0))
            eventually(lambda: not server.connections)


class TestLeaving:
    def test_a_call_on_its_way_when_the_server_leaves_is_answered(self, server: Server) -> None:
        with Peer(server) as peer:
            peer.say(ask(1))
            peer.trailers(1)
            (connection,) = server.connections
            server.on_loop(connection.leave)
            eventually(lambda: connection.leaving)
            peer.say(ask(3))  # before it has read that the server leaves
            assert b"grpc-status\x010" in peer.trailers(3)
            peer.hear(lambda: any(one[:2] == (PING, 0) for one in peer.heard))
            first = next(one[3] for one in peer.heard if one[0] == GOAWAY)
            assert first == struct.pack(">LL", 2**31 - 1, 0)
            mark = next(one[3] for one in peer.heard if one[:2] == (PING, 0))
            peer.say(frame(PING, 1, 0, mark))
            peer.hear(lambda: peer.closed)
            assert [one[3] for one in peer.heard if one[0] == GOAWAY][-1] == struct.pack(">LL", 3, 0)

    def test_half_sent_calls_are_refused_and_answers_arrive_whole(self, server: Server) -> None:
        with Peer(server, struct.pack(">HL", 4, 10)) as peer:
            peer.say(frame(HEADERS, END_HEADERS, 1, ECHO) + frame(DATA, 0, 1, MESSAGE[:3]))
            peer.say(ask(3, path("Big"), b"\0\0\0\0\x0a0123456789"))
            peer.hear_ping()
            (connection,) = server.connections
            server.on_loop(connection.leave)
            server.on_loop(connection.hurry)
            assert b"stopping" in peer.trailers(1)
            peer.say(
                frame(WINDOW, 0, 3, struct.pack(">L", 2**30)) + frame(WINDOW, 0, 0, struct.pack(">L", 2**30))
            )
            peer.trailers(3)
            answer = b"".join(one[3] for one in peer.heard if one[0] == DATA and one[2] == 3)
            assert len(answer) == 5_000_005
            peer.hear(lambda: peer.closed)

    def test_a_real_client_in_full_swing_notices_nothing(self, server: Server) -> None:
        """Its connection is left 50 times. What gRPC has chosen a connection for and not sent yet when that one is
        left, it sends again by itself: no call of ours has begun."""
        with grpc.insecure_channel(
            f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = channel.unary_unary("/test/Echo")
            for n in range(1500):
                if n % 30 == 0:
                    server.on_loop(lambda: [one.leave() for one in list(server.connections)])
                assert call(b"%d" % n, timeout=20, wait_for_ready=True) == b"%d" % n


class _Nowhere:
    """A transport whose other end is nobody's."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def write(self, data: bytes) -> None:
        pass

    def get_extra_info(self, name: str) -> socket.socket:
        return self._end
