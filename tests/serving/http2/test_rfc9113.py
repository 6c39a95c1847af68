"""What RFC 9113 requires of a server, section by section, against a real socket. `h2spec` checks the same."""

from __future__ import annotations

import struct

import pytest
from http2_peer import (
    CONTINUATION,
    DATA,
    ECHO,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MESSAGE,
    PING,
    PRIORITY,
    PUSH,
    RST,
    SETTINGS,
    WINDOW,
    Peer,
    Server,
    ask,
    exchange,
    frame,
    literal,
    path,
)

PROTOCOL, FLOW_CONTROL, CLOSED, FRAME_SIZE, REFUSED, COMPRESSION = 1, 3, 5, 6, 7, 9
PADDED = 8
WAIT = path("Wait")  # a call that is not answered


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HL", key, value))


def window(stream: int, size: int) -> bytes:
    return frame(WINDOW, 0, stream, struct.pack(">L", size))


OPEN = frame(HEADERS, END_HEADERS, 1, WAIT)  # stream 1 is open
HALF_CLOSED = ask(1, WAIT)  # the client has ended stream 1

CONNECTION_ERRORS = [  # section, what is wrong, frames, code of GOAWAY
    ("4.2", "a frame above SETTINGS_MAX_FRAME_SIZE", struct.pack(">BHBBL", 16, 1, DATA, 0, 1), FRAME_SIZE),
    (
        "4.3",
        "a header block that cannot be decoded",
        frame(HEADERS, END_HEADERS, 1, b"\xff" * 8),
        COMPRESSION,
    ),
    ("4.3", "a header block interrupted by DATA", frame(HEADERS, 0, 1, ECHO) + frame(DATA, 0, 1), PROTOCOL),
    ("4.3", "a header block interrupted by HEADERS", frame(HEADERS, 0, 1, ECHO) + ask(3), PROTOCOL),
    ("5.1", "idle: DATA", frame(DATA, 0, 1, MESSAGE), PROTOCOL),
    ("5.1", "idle: RST_STREAM", frame(RST, 0, 1, bytes(4)), PROTOCOL),
    ("5.1", "idle: WINDOW_UPDATE", window(1, 5), PROTOCOL),
    ("5.1", "idle: CONTINUATION", frame(CONTINUATION, END_HEADERS, 1, ECHO), PROTOCOL),
    ("5.1", "half-closed: DATA", HALF_CLOSED + frame(DATA, 0, 1, MESSAGE), CLOSED),
    ("5.1", "half-closed: HEADERS", HALF_CLOSED + frame(HEADERS, END_HEADERS | END_STREAM, 1, ECHO), CLOSED),
    ("5.1.1", "an even stream number", ask(2), PROTOCOL),
    ("5.1.1", "a stream number that decreases", ask(5, WAIT) + ask(3), PROTOCOL),
    ("5.5", "an unknown frame in a header block", frame(HEADERS, 0, 1, ECHO) + frame(22, 0, 0), PROTOCOL),
    ("6.1", "DATA on stream 0", frame(DATA, 0, 0, MESSAGE), PROTOCOL),
    ("6.1", "padding as long as the payload", OPEN + frame(DATA, PADDED, 1, b"\x05xxxx"), PROTOCOL),
    ("6.1", "a padded frame without a length", OPEN + frame(DATA, PADDED, 1), PROTOCOL),
    ("6.2", "HEADERS on stream 0", frame(HEADERS, END_HEADERS, 0, ECHO), PROTOCOL),
    (
        "6.2",
        "HEADERS with too much padding",
        frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + ECHO),
        PROTOCOL,
    ),
    ("6.2", "HEADERS with half a priority", frame(HEADERS, END_HEADERS | 32, 1, b"\0\0"), FRAME_SIZE),
    ("6.3", "PRIORITY on stream 0", frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    ("6.3", "PRIORITY of 4 bytes", OPEN + frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE),
    ("6.4", "RST_STREAM on stream 0", frame(RST, 0, 0, bytes(4)), PROTOCOL),
    ("6.4", "RST_STREAM of 3 bytes", OPEN + frame(RST, 0, 1, bytes(3)), FRAME_SIZE),
    ("6.5", "an acknowledgement with settings", frame(SETTINGS, 1, 0, struct.pack(">HL", 4, 5)), FRAME_SIZE),
    ("6.5", "SETTINGS on a stream", frame(SETTINGS, 0, 1), PROTOCOL),
    ("6.5", "half a setting", frame(SETTINGS, 0, 0, b"\0\4\0"), FRAME_SIZE),
    ("6.5.2", "SETTINGS_ENABLE_PUSH of 2", setting(2, 2), PROTOCOL),
    ("6.5.2", "SETTINGS_INITIAL_WINDOW_SIZE of 2^31", setting(4, 1 << 31), FLOW_CONTROL),
    ("6.5.2", "SETTINGS_MAX_FRAME_SIZE below 2^14", setting(5, 16383), PROTOCOL),
    ("6.5.2", "SETTINGS_MAX_FRAME_SIZE of 2^24", setting(5, 1 << 24), PROTOCOL),
    ("6.6", "PUSH_PROMISE of a client", OPEN + frame(PUSH, 4, 1, struct.pack(">L", 2) + ECHO), PROTOCOL),
    ("6.7", "PING on a stream", frame(PING, 0, 1, bytes(8)), PROTOCOL),
    ("6.7", "PING of 6 bytes", frame(PING, 0, 0, bytes(6)), FRAME_SIZE),
    ("6.8", "GOAWAY on a stream", frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    ("6.9", "WINDOW_UPDATE of 3 bytes", frame(WINDOW, 0, 0, bytes(3)), FRAME_SIZE),
    ("6.9", "WINDOW_UPDATE of 0 for the connection", window(0, 0), PROTOCOL),
    ("6.9.1", "a window of the connection beyond 2^31-1", window(0, (1 << 31) - 1), FLOW_CONTROL),
    ("6.10", "CONTINUATION after END_HEADERS", OPEN + frame(CONTINUATION, END_HEADERS, 1, b""), PROTOCOL),
    (
        "6.10",
        "CONTINUATION of another stream",
        frame(HEADERS, 0, 1, ECHO) + frame(CONTINUATION, 4, 3),
        PROTOCOL,
    ),
    ("8.1", "a second HEADERS without END_STREAM", OPEN + frame(HEADERS, END_HEADERS, 1, ECHO), PROTOCOL),
]
STREAM_ERRORS = [  # section, what is wrong, frames on stream 1, code of RST_STREAM
    ("6.9", "WINDOW_UPDATE of 0", OPEN + window(1, 0), PROTOCOL),
    ("6.9.1", "a window beyond 2^31-1", OPEN + window(1, (1 << 31) - 1), FLOW_CONTROL),
]
ALLOWED = [  # section, what is allowed, frames before a call on stream 5
    ("4.1", "reserved bit and unknown flags", frame(PING, 0xF0, 1 << 31, bytes(8))),
    ("4.3", "a header block in three frames", frame(HEADERS, 0, 1, ECHO[:3]) + frame(CONTINUATION, 0, 1, ECHO[3:9])
     + frame(CONTINUATION, END_HEADERS, 1, ECHO[9:]) + frame(DATA, END_STREAM, 1, MESSAGE)),
    ("5.1", "WINDOW_UPDATE and RST_STREAM after the answer", ask(1) + window(1, 5) + frame(RST, 0, 1, bytes(4))),
    ("5.1", "PRIORITY of an idle stream", frame(PRIORITY, 0, 9, bytes(5))),
    ("5.1.1", "stream numbers that are left out", ask(3)),
    ("5.5", "an unknown frame", frame(22, 0xFF, 0, b"anything") + frame(22, 0, 7)),
    ("6.1", "a padded message", frame(HEADERS, END_HEADERS, 1, ECHO)
     + frame(DATA, END_STREAM | PADDED, 1, b"\x03" + MESSAGE + bytes(3))),
    ("6.1", "empty DATA frames", frame(HEADERS, END_HEADERS, 1, ECHO) + frame(DATA, 0, 1) * 5
     + frame(DATA, END_STREAM, 1, MESSAGE)),
    ("6.2", "HEADERS with padding and priority", frame(HEADERS, 4 | PADDED | 32, 1, b"\2" + bytes(5) + ECHO + b"\0\0")
     + frame(DATA, END_STREAM, 1, MESSAGE)),
    ("6.5.2", "an unknown setting", setting(0x99, 7)),
    ("6.7", "an acknowledgement of a PING that was not sent", frame(PING, 1, 0, bytes(8))),
    ("8.1", "trailers of a request", frame(HEADERS, END_HEADERS, 1, ECHO) + frame(DATA, 0, 1, MESSAGE)
     + frame(HEADERS, END_HEADERS | END_STREAM, 1, literal(b"x", b"y"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("frames", "code"),
    [pytest.param(frames, code, id=f"{section} {what}") for section, what, frames, code in CONNECTION_ERRORS],
)
def test_connection_error(server: Server, frames: bytes, code: int) -> None:
    with Peer(server) as peer:
        peer.send(frames)
        assert peer.goaway()[0] == code


@pytest.mark.parametrize(
    ("frames", "code"),
    [pytest.param(frames, code, id=f"{section} {what}") for section, what, frames, code in STREAM_ERRORS],
)
def test_stream_error_ends_only_its_call(server: Server, frames: bytes, code: int) -> None:
    with Peer(server) as peer:
        peer.send(frames)
        assert peer.reset(1) == code
        peer.send(ask(3))
        assert b"grpc-status\x010" in peer.trailers(3)


@pytest.mark.parametrize(
    "frames", [pytest.param(frames, id=f"{section} {what}") for section, what, frames in ALLOWED]
)
def test_allowed_frames_do_not_disturb_calls(server: Server, frames: bytes) -> None:
    opened = any(frames[at : at + 9] == frame(HEADERS, END_HEADERS, 1, ECHO)[:9] for at in range(len(frames)))
    with Peer(server) as peer:
        peer.send(frames + ask(5))
        if opened:
            assert b"grpc-status\x010" in peer.trailers(1)
        assert b"grpc-status\x010" in peer.trailers(5)


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX", b"\0" * 30]
)
def test_3_4_connection_without_the_preface_is_closed(server: Server, start: bytes) -> None:
    try:
        received = exchange(server, start, until=b"never")
    except ConnectionResetError:
        return
    assert frame(SETTINGS, 0, 0)[3:4] == received[3:4] and b"grpc-status" not in received


def test_5_1_2_calls_above_the_limit_are_refused(server: Server) -> None:
    with Peer(server) as peer:
        peer.send(b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, WAIT) for n in range(1025)))
        assert peer.reset(2049) == REFUSED


def test_6_5_3_settings_are_acknowledged(server: Server) -> None:
    with Peer(server) as peer:
        peer.receive_until(lambda: (SETTINGS, 1, 0, b"") in peer.received)


def test_6_7_ping_is_answered_with_its_payload(server: Server) -> None:
    with Peer(server) as peer:
        peer.send(frame(PING, 0, 0, b"12345678"))
        peer.receive_until(lambda: (PING, 1, 0, b"12345678") in peer.received)
        assert (PING, 1, 0, b"12345678") in peer.received


def test_6_9_2_initial_window_applies_to_open_calls_and_may_become_negative(server: Server) -> None:
    with Peer(server, struct.pack(">HL", 4, 3)) as peer:
        peer.send(ask(1))  # its answer has 7 bytes
        peer.ping()
        peer.send(setting(4, 0))  # 3 bytes were sent: the window is -3
        peer.ping()
        peer.send(window(1, 3))
        peer.ping()
        assert [one[3] for one in peer.received if one[0] == DATA] == [MESSAGE[:3]]
        peer.send(window(1, 4))
        peer.trailers(1)
        assert b"".join(one[3] for one in peer.received if one[0] == DATA) == MESSAGE
