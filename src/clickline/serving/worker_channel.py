"""How the supervisor and a worker talk: lines of JSON over a pair of sockets.

The end of one process is the end of the stream for the other, however it died.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

_LONGEST_LINE = 64 * 1024**2


class Channel:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_LONGEST_LINE))

    def send(self, **message: Any) -> None:
        """Does not wait; what a dead process cannot read any more is lost."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other side is gone."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while (message := await self.receive()) is not None:
            yield message

    async def flush(self) -> None:
        with suppress(ConnectionError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
