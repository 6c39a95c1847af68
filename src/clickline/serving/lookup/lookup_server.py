"""Answers lookups: one thread for each connection, buffers that are used again, the search without the GIL.

A request costs one call to receive, one kernel for each part, one call to send. Rows of a large request are sent piece
by piece, so that a connection needs no more memory than one piece.
"""

from __future__ import annotations

import hmac
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from clickline.serving.json_log import Log
from clickline.serving.lookup.lookup_versions import OpenVersion, OpenVersions
from clickline.wire.frames import (
    HELLO,
    LOOKUP,
    LOOKUP_ROWS_AT,
    MAX_HELLO,
    MAX_KEYS,
    MAX_PARTS,
    STATUS,
    Frame,
    Garbled,
    Inbox,
    Lookup,
    answer_bytes,
    not_here,
    read_hello,
    read_lookup,
    refused,
    request_bytes,
    told,
    write_answer_head,
)

_HELLO_SECONDS = 5.0
_IDLE_SECONDS = 300.0
_SEND_SECONDS = 30.0  # for a client that does not take its answer
_MOST_CONNECTIONS = 1024
_BACKLOG = 128


class Counts:
    """What a server has done; each connection has its own until it ends."""

    __slots__ = ("found", "keys", "not_here", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.keys = 0
        self.found = 0
        self.not_here = 0

    def add(self, other: Counts) -> None:
        for name in Counts.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LookupServer:
    """Listens, and answers from the versions that are open."""

    def __init__(
        self,
        versions: OpenVersions,
        listening: socket.socket,
        log: Log,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`listening`: a socket that is bound; it is closed when the server stops."""
        self.draining = False
        self.garbled = 0  # connections that were ended for what they sent
        self.turned_away = 0
        self._versions = versions
        self._listening = listening
        self._log = log
        self._token = None if token is None else token.encode()
        self._tls = tls
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, _Connection] = {}
        self._ended = Counts()

    def start(self) -> None:
        self._listening.listen(_BACKLOG)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def stop(self, seconds: float) -> None:
        """Take no more connections, answer what has arrived, then end; after so many seconds at once."""
        self.draining = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            running = list(self._connections.items())
        for _, connection in running:
            connection.end_reading()
        until = time.monotonic() + seconds
        for thread, _ in running:
            thread.join(max(0.0, until - time.monotonic()))

    def counts(self) -> Counts:
        total = Counts()
        with self._lock:
            total.add(self._ended)
            for connection in self._connections.values():
                total.add(connection.counts)
        return total

    @property
    def connections(self) -> int:
        return len(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                accepted, peer = self._listening.accept()
            except OSError as error:
                if self.draining:
                    return
                self._log.sparingly("a connection was not accepted", "warning", message=str(error))
                time.sleep(0.1)  # out of file descriptors: others must end first
                continue
            if len(self._connections) >= _MOST_CONNECTIONS:
                self.turned_away += 1
                self._log.sparingly("too many connections", "warning", allowed=_MOST_CONNECTIONS)
                accepted.close()
                continue
            connection = _Connection(accepted, f"{peer[0]}:{peer[1]}", self._versions, self._token, self._tls)
            thread = threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True)
            with self._lock:
                self._connections[thread] = connection
            try:
                thread.start()
            except (
                RuntimeError
            ) as error:  # the system gives no more threads: this one goes, others may come later
                with self._lock:
                    del self._connections[thread]
                connection.close()
                self.turned_away += 1
                self._log.sparingly("a connection was not accepted", "error", message=str(error))
                continue
            if self.draining:  # `stop` may have missed it
                connection.end_reading()

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.converse(self._describe)
        except Garbled as error:
            self.garbled += 1
            self._log.sparingly("a connection was ended", "warning", peer=connection.peer, reason=str(error))
        except OSError as error:
            # The other side is gone, silent for too long, or speaks no TLS.
            if isinstance(error, ssl.SSLError):
                self.garbled += 1
                self._log.sparingly(
                    "a connection was ended", "warning", peer=connection.peer, reason=str(error)
                )
        except Exception as error:  # noqa: BLE001 - a bug that one request meets ends one connection
            self._log.sparingly("a request failed", "error", peer=connection.peer, message=repr(error))
        finally:
            connection.close()
            with self._lock:
                del self._connections[threading.current_thread()]
                self._ended.add(connection.counts)

    def _describe(self) -> dict[str, object]:
        return {**self._versions.describe(), "draining": self.draining}


class _Connection:
    """One predictor's connection, in a thread of its own."""

    def __init__(
        self,
        accepted: socket.socket,
        peer: str,
        versions: OpenVersions,
        token: bytes | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.peer = peer
        self.counts = Counts()
        self._socket = accepted
        self._versions = versions
        self._token = token
        self._tls = tls
        self._inbox = Inbox(MAX_HELLO)
        self._out = np.empty(LOOKUP_ROWS_AT, dtype=np.uint8)
        self._found_N = np.empty(0, dtype=np.bool_)

    def converse(self, describe: Callable[[], dict[str, object]]) -> None:
        """Answer until the other side ends."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._wait_for(_HELLO_SECONDS)
        if self._tls is not None:
            self._socket = self._tls.wrap_socket(self._socket, server_side=True)
        if not self._greet(describe):
            return
        self._inbox.limit = request_bytes(MAX_PARTS, MAX_KEYS)
        self._wait_for(_IDLE_SECONDS)
        while (frame := self._next()) is not None:
            if frame.kind == LOOKUP:
                self._look_up(frame)
            elif frame.kind == STATUS:
                self._socket.sendall(told(frame, describe()))
            else:
                raise Garbled(f"a frame of kind {frame.kind}")
            self._inbox.done()

    def end_reading(self) -> None:
        """What has arrived is answered; then the connection ends."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RD)  # that of SSLSocket would also stop writing

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _wait_for(self, seconds: float) -> None:
        """How long to wait for the next bytes."""
        if self._tls is not None:
            self._socket.settimeout(seconds)
            return
        # By the kernel: Python's own time limit asks `poll` before each call.
        for option, limit in ((socket.SO_RCVTIMEO, seconds), (socket.SO_SNDTIMEO, _SEND_SECONDS)):
            time_limit = struct.pack("ll", int(limit), int(limit % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, time_limit)

    def _next(self, until: float = float("inf")) -> Frame | None:
        """The next frame; None when the other side has ended. Bytes that come one by one do not stretch `until`."""
        while (frame := self._inbox.frame()) is None:
            if time.monotonic() > until:
                raise Garbled("no hello in time")
            if not self._inbox.receive(self._socket):
                if not self._inbox.empty:
                    raise Garbled("the connection ended in the middle of a frame")
                return None
        return frame

    def _greet(self, describe: Callable[[], dict[str, object]]) -> bool:
        frame = self._next(time.monotonic() + _HELLO_SECONDS)
        if frame is None:
            return False
        given = read_hello(frame, self._inbox.body())
        self._inbox.done()
        if self._token is not None and not hmac.compare_digest(given, self._token):
            answer = Frame(0, HELLO, 0, 0, frame.request)
            self._socket.sendall(
                refused(answer, "the token is missing or wrong: both sides need the same serve.token_file")
            )
            raise Garbled("a hello without the right token")
        self._socket.sendall(told(frame, describe()))
        return True

    def _look_up(self, frame: Frame) -> None:
        asked = read_lookup(frame, self._inbox)
        opened = self._versions.open.get(asked.version)
        if opened is None:
            self.counts.not_here += 1
            self._socket.sendall(not_here(frame, sorted(self._versions.open)))
            return
        opened.asked = time.monotonic()
        if len(asked.counts) != len(opened.widths):
            raise Garbled(
                f"a lookup of {len(asked.counts)} parts; version {opened.number} has {len(opened.widths)}"
            )
        self.counts.requests += 1
        self.counts.keys += asked.keys_N.size
        self._send_rows(frame, asked, opened)

    def _send_rows(self, frame: Frame, asked: Lookup, opened: OpenVersion) -> None:
        keys = asked.keys_N.size
        size = answer_bytes(asked.counts, opened.widths)
        if self._out.size < opened.piece:
            self._out = np.empty(opened.piece, dtype=np.uint8)
        if self._found_N.size < keys:
            self._found_N = np.empty(keys, dtype=np.bool_)
        out, found_N = self._out, self._found_N[:keys]
        write_answer_head(out, frame, asked.version, size)
        at, first = LOOKUP_ROWS_AT, 0
        for part, (count, width) in enumerate(zip(asked.counts, opened.widths, strict=True)):
            last = first + count
            while first < last:
                room = (out.size - at) // width
                if room == 0:
                    self._socket.sendall(out[:at].data)
                    at = 0
                    continue
                stop = min(last, first + room)
                end = at + (stop - first) * width
                rows_NW = out[at:end].reshape(stop - first, width)
                self.counts.found += opened.tables.find(
                    part, asked.keys_N[first:stop], rows_NW, found_N[first:stop]
                )
                at, first = end, stop
        if at + keys <= out.size:
            out[at : at + keys] = found_N
            self._socket.sendall(out[: at + keys].data)
        else:
            self._socket.sendall(out[:at].data)
            self._socket.sendall(found_N.data)
