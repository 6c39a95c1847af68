"""A process in a container over the websocket of `pods/exec`.

The first byte of every message is its channel: 0 stdin, 1 stdout, 2 stderr, 3 exit status. The `WSClient` of the
`kubernetes` package reads as long as messages are available, whatever their size, before it returns any: a large file
that arrives quickly would be held in memory, and copied again for each message.
"""

from __future__ import annotations

import json
import select
import ssl
from typing import Any

from clickline.errors import ClusterError

_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3
_IDLE_SECONDS = 300.0
_MAX_STDERR = 8192


class ExecProcess:
    """The process of `Kube.exec`. It is read from and written to like a binary file."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._stdout = bytearray()
        self._stderr = b""
        self._status: dict[str, Any] | None = None
        self._open = True
        socket.settimeout(_IDLE_SECONDS)

    def write(self, data: bytes) -> None:
        """Write to its stdin. Raises ClusterError with its stderr if it has ended."""
        from websocket import ABNF, WebSocketException

        while self._open and self._has_message():
            self._read_message()
        try:
            if self._open:
                self._socket.send(bytes([_STDIN]) + data, opcode=ABNF.OPCODE_BINARY)
        except (OSError, WebSocketException):
            self._drain()
        if not self._open:
            self.check()
            raise ClusterError("the process in the pod ended before everything was sent")

    def read(self, size: int) -> bytes:
        """Read from its stdout; empty at the end."""
        while self._open and not self._stdout:
            self._read_message()
        data = bytes(self._stdout[:size])
        del self._stdout[:size]
        return data

    def readline(self, size: int) -> bytes:
        while self._open and b"\n" not in self._stdout and len(self._stdout) < size:
            self._read_message()
        return self.read(min(size, self._stdout.find(b"\n") + 1 or size))

    def check(self) -> None:
        """Wait until it ends; raises ClusterError with its stderr if it failed."""
        self._drain()
        message = self._stderr.decode(errors="replace").strip()
        if self._status is None:
            raise ClusterError(
                f"the connection to the pod was closed{f': {message}' if message else ''}. Try again."
            )
        if self._status.get("status") != "Success":
            raise ClusterError(message or str(self._status.get("message") or "it failed without a message"))

    def close(self) -> None:
        self._socket.shutdown()  # the library's `close` leaves the socket open if the other side has closed

    def _drain(self) -> None:
        while self._open:
            self._read_message()

    def _has_message(self) -> bool:
        """Whether a message can be read without blocking; TLS may have buffered data already."""
        inner = self._socket.sock
        if isinstance(inner, ssl.SSLSocket) and inner.pending():
            return True
        return bool(select.select([inner], [], [], 0)[0])

    def _read_message(self) -> None:
        """Read one message."""
        from websocket import ABNF, WebSocketException

        try:
            code, frame = self._socket.recv_data_frame(True)
        except (OSError, WebSocketException):
            self._open = False  # `check` knows whether the process had ended
            return
        if code == ABNF.OPCODE_CLOSE:
            self._open = False
        elif code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
            channel, data = frame.data[0], frame.data[1:]
            if channel == _STDOUT:
                self._stdout += data
            elif channel == _STDERR:
                self._stderr = (self._stderr + data)[-_MAX_STDERR:]
            elif channel == _STATUS and data:
                self._status = json.loads(data)
