"""A process in a container, over the websocket of `pods/exec`: its input, output and end.

Every message begins with the number of a channel: 0 its input, 1 its output, 2 its errors, 3 how it ended.
"""

from __future__ import annotations

import json
import select
import ssl
from typing import Any

from clickline.errors import ClusterError

_IN, _OUT, _ERRORS, _END = 0, 1, 2, 3
_IDLE_SECONDS = 300.0
_MAX_STDERR = 8192


class ExecProcess:
    """What `Kube.execute` gives. Reads and writes as a binary file does."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._out = bytearray()
        self._errors = b""
        self._status: dict[str, Any] | None = None
        self._open = True
        socket.settimeout(_IDLE_SECONDS)

    def write(self, data: bytes) -> None:
        """To its input. Raises ClusterError with its own words when it has ended meanwhile."""
        from websocket import ABNF, WebSocketException

        while self._open and self._waiting():
            self._take()
        try:
            if self._open:
                self._socket.send(bytes([_IN]) + data, opcode=ABNF.OPCODE_BINARY)
        except (OSError, WebSocketException):
            self._drain()
        if not self._open:
            self.check()
            raise ClusterError("the process in the pod ended before all was sent")

    def read(self, size: int) -> bytes:
        """Of its output; nothing at its end."""
        while self._open and not self._out:
            self._take()
        data = bytes(self._out[:size])
        del self._out[:size]
        return data

    def readline(self, size: int) -> bytes:
        while self._open and b"\n" not in self._out and len(self._out) < size:
            self._take()
        return self.read(min(size, self._out.find(b"\n") + 1 or size))

    def check(self) -> None:
        """Wait for its end; raises ClusterError with what it said if it did not end well."""
        self._drain()
        words = self._errors.decode(errors="replace").strip()
        if self._status is None:
            raise ClusterError(
                f"the connection to the pod was cut{f': {words}' if words else ''}. Try again."
            )
        if self._status.get("status") != "Success":
            raise ClusterError(words or str(self._status.get("message") or "it failed without a word"))

    def close(self) -> None:
        self._socket.shutdown()  # `close` of the library leaves a socket open whose other side has said goodbye

    def _drain(self) -> None:
        while self._open:
            self._take()

    def _waiting(self) -> bool:
        """Whether something can be read at once; TLS may hold what the socket has given already."""
        inner = self._socket.sock
        if isinstance(inner, ssl.SSLSocket) and inner.pending():
            return True
        return bool(select.select([inner], [], [], 0)[0])

    def _take(self) -> None:
        """One message."""
        from websocket import ABNF, WebSocketException

        try:
            code, frame = self._socket.recv_data_frame(True)
        except (OSError, WebSocketException):
            self._open = False  # `check` knows whether it had ended before
            return
        if code == ABNF.OPCODE_CLOSE:
            self._open = False
        elif code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
            channel, data = frame.data[0], frame.data[1:]
            if channel == _OUT:
                self._out += data
            elif channel == _ERRORS:
                self._errors = (self._errors + data)[-_MAX_STDERR:]
            elif channel == _END and data:
                self._status = json.loads(data)
