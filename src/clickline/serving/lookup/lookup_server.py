"""The lookup server: one thread per connection, reused buffers, and a table search that releases the GIL.

A request costs one call to receive, one kernel per part, and one call to send. The rows of a large request are sent
piece by piece, so that a connection needs no more memory than one piece.
"""

from __future__ import annotations

import hmac
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from clickline.serving.json_log import JsonLog
from clickline.serving.lookup.lookup_versions import ShardVersion, ShardVersions
from clickline.wire.lookup_frames import (
    HELLO,
    LOOKUP,
    LOOKUP_ROWS_AT,
    MAX_HELLO,
    MAX_KEYS,
    MAX_PARTS,
    STATUS,
    FrameHeader,
    LookupFrame,
    ProtocolError,
    ReceiveBuffer,
    answer_bytes,
    read_hello,
    read_lookup,
    refusal,
    request_bytes,
    status_reply,
    version_not_loaded,
    write_answer_header,
)

_HELLO_SECONDS = 5.0
_IDLE_SECONDS = 300.0
_SEND_SECONDS = 30.0  # for a client that does not read its answer
_MAX_CONNECTIONS = 1024
_BACKLOG = 128


class LookupServer:
    """Answers lookups from the open versions."""

    def __init__(
        self,
        versions: ShardVersions,
        listening: socket.socket,
        log: JsonLog,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`listening`: a bound socket, closed when the server stops."""
        self.draining = False
        self.protocol_errors = 0  # connections closed because of one
        self.rejected = 0  # connections above the limit
        self._versions = versions
        self._listening = listening
        self._log = log
        self._token = None if token is None else token.encode()
        self._tls = tls
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, _Connection] = {}
        self._ended: Counter[str] = Counter()  # of connections that have ended

    def start(self) -> None:
        self._listening.listen(_BACKLOG)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def stop(self, seconds: float) -> None:
        """Accept no more connections, answer what has arrived, and return within `seconds`."""
        self.draining = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            running = list(self._connections.items())
        for _, connection in running:
            connection.end_reading()
        deadline = time.monotonic() + seconds
        for thread, _ in running:
            thread.join(max(0.0, deadline - time.monotonic()))

    def counts(self) -> Counter[str]:
        """The numbers of requests, keys and found keys, and of requests for versions that are not loaded."""
        with self._lock:
            running = [connection.counts for connection in self._connections.values()]
            return sum(running, self._ended)

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
                self._log.throttled("a connection was not accepted", "warning", message=str(error))
                time.sleep(0.1)  # out of file descriptors: other connections must close first
                continue
            if len(self._connections) >= _MAX_CONNECTIONS:
                self.rejected += 1
                self._log.throttled("too many connections", "warning", allowed=_MAX_CONNECTIONS)
                accepted.close()
                continue
            connection = _Connection(accepted, f"{peer[0]}:{peer[1]}", self._versions, self._token, self._tls)
            thread = threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True)
            with self._lock:
                self._connections[thread] = connection
            try:
                thread.start()
            except RuntimeError as error:  # the system is out of threads: reject this connection
                with self._lock:
                    del self._connections[thread]
                connection.close()
                self.rejected += 1
                self._log.throttled("a connection was not accepted", "error", message=str(error))
                continue
            if self.draining:  # `stop` may have missed it
                connection.end_reading()

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.serve(self._describe)
        except ProtocolError as error:
            self.protocol_errors += 1
            self._log.throttled("a connection was ended", "warning", peer=connection.peer, reason=str(error))
        except OSError as error:
            # The peer disconnected, was silent for too long, or does not speak TLS.
            if isinstance(error, ssl.SSLError):
                self.protocol_errors += 1
                self._log.throttled(
                    "a connection was ended", "warning", peer=connection.peer, reason=str(error)
                )
        except Exception as error:  # noqa: BLE001 - a bug closes only the connection that meets it
            self._log.throttled("a request failed", "error", peer=connection.peer, message=repr(error))
        finally:
            connection.close()
            with self._lock:
                del self._connections[threading.current_thread()]
                self._ended += connection.counts

    def _describe(self) -> dict[str, object]:
        return {**self._versions.describe(), "draining": self.draining}


class _Connection:
    """The connection of one predictor, served by one thread."""

    def __init__(
        self,
        accepted: socket.socket,
        peer: str,
        versions: ShardVersions,
        token: bytes | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.peer = peer
        self.counts: Counter[str] = Counter()
        self._socket = accepted
        self._versions = versions
        self._token = token
        self._tls = tls
        self._buffer = ReceiveBuffer(MAX_HELLO)
        self._out = np.empty(LOOKUP_ROWS_AT, dtype=np.uint8)
        self._found_N = np.empty(0, dtype=np.bool_)

    def serve(self, describe: Callable[[], dict[str, object]]) -> None:
        """Answer requests until the peer closes the connection."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._set_timeouts(_HELLO_SECONDS)
        if self._tls is not None:
            self._socket = self._tls.wrap_socket(self._socket, server_side=True)
        if not self._handshake(describe):
            return
        self._buffer.limit = request_bytes(MAX_PARTS, MAX_KEYS)
        self._set_timeouts(_IDLE_SECONDS)
        while (frame := self._receive_frame()) is not None:
            if frame.kind == LOOKUP:
                self._look_up(frame)
            elif frame.kind == STATUS:
                self._socket.sendall(status_reply(frame, describe()))
            else:
                raise ProtocolError(f"a frame of kind {frame.kind}")
            self._buffer.release()

    def end_reading(self) -> None:
        """Stop reading: what has arrived is answered, then the connection is closed."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RD)  # SSLSocket.shutdown would also stop writing

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _set_timeouts(self, seconds: float) -> None:
        """Set how long to wait for the next bytes."""
        if self._tls is not None:
            self._socket.settimeout(seconds)
            return
        # In the kernel: Python's own timeout calls `poll` before each operation.
        for option, limit in ((socket.SO_RCVTIMEO, seconds), (socket.SO_SNDTIMEO, _SEND_SECONDS)):
            time_limit = struct.pack("ll", int(limit), int(limit % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, time_limit)

    def _receive_frame(self, deadline: float = float("inf")) -> FrameHeader | None:
        """Return the next frame; None when the peer has closed. Bytes that trickle in do not extend `deadline`."""
        while (frame := self._buffer.frame()) is None:
            if time.monotonic() > deadline:
                raise ProtocolError("no hello before the deadline")
            if not self._buffer.receive(self._socket):
                if not self._buffer.empty:
                    raise ProtocolError("the connection ended in the middle of a frame")
                return None
        return frame

    def _handshake(self, describe: Callable[[], dict[str, object]]) -> bool:
        frame = self._receive_frame(time.monotonic() + _HELLO_SECONDS)
        if frame is None:
            return False
        given = read_hello(frame, self._buffer.body())
        self._buffer.release()
        if self._token is not None and not hmac.compare_digest(given, self._token):
            answer = FrameHeader(0, HELLO, 0, 0, frame.request)
            self._socket.sendall(
                refusal(answer, "the token is missing or wrong: both sides need the same serve.token_file")
            )
            raise ProtocolError("a hello with a missing or wrong token")
        self._socket.sendall(status_reply(frame, describe()))
        return True

    def _look_up(self, frame: FrameHeader) -> None:
        lookup = read_lookup(frame, self._buffer)
        version = self._versions.open.get(lookup.version)
        if version is None:
            self.counts["not_loaded"] += 1
            self._socket.sendall(version_not_loaded(frame, sorted(self._versions.open)))
            return
        version.last_used = time.monotonic()
        if len(lookup.counts) != len(version.widths):
            raise ProtocolError(
                f"a lookup of {len(lookup.counts)} parts; version {version.number} has {len(version.widths)}"
            )
        self.counts["requests"] += 1
        self.counts["keys"] += lookup.keys_N.size
        self._send_rows(frame, lookup, version)

    def _send_rows(self, frame: FrameHeader, lookup: LookupFrame, version: ShardVersion) -> None:
        keys = lookup.keys_N.size
        size = answer_bytes(lookup.counts, version.widths)
        if self._out.size < version.piece:
            self._out = np.empty(version.piece, dtype=np.uint8)
        if self._found_N.size < keys:
            self._found_N = np.empty(keys, dtype=np.bool_)
        out, found_N = self._out, self._found_N[:keys]
        write_answer_header(out, frame, lookup.version, size)
        at, first = LOOKUP_ROWS_AT, 0
        for part, (count, width) in enumerate(zip(lookup.counts, version.widths, strict=True)):
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
                self.counts["found"] += version.tables.find(
                    part, lookup.keys_N[first:stop], rows_NW, found_N[first:stop]
                )
                at, first = end, stop
        if at + keys <= out.size:
            out[at : at + keys] = found_N
            self._socket.sendall(out[: at + keys].data)
        else:
            self._socket.sendall(out[:at].data)
            self._socket.sendall(found_N.data)
