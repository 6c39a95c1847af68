"""Server-sent events: one check of a home per second, shared by all listeners; none without listeners."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

from clickline.errors import ClicklineError
from clickline.studio.home_view import HomeView

_SECONDS = 1.0
_KEEPALIVE_SECONDS = 10.0  # without events, a comment is sent after this time
_SAMPLING_SECONDS = 10.0  # how long the server is sampled after one request for its metrics
_MAX_UNREAD = 100  # events that a slow listener may leave unread


class EventBroadcaster:
    """Checks one home once a second and sends its changes to all listeners."""

    def __init__(self, view: HomeView, encode: Callable[[Any], bytes]) -> None:
        self._view = view
        self._encode = encode
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._sent_from: dict[str, object] = {}  # event name to the value it was sent for
        self._last: dict[str, bytes] = {}  # event name to the last event, for later listeners

    async def stream(self) -> AsyncIterator[bytes]:
        """Encoded events, until the listener disconnects or the studio stops."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_UNREAD)
        for known in self._last.values() if self._listeners else ():
            queue.put_nowait(known)
        self._listeners.add(queue)
        self._start()
        try:
            yield b": hello\n\n"
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), _KEEPALIVE_SECONDS)
                except TimeoutError:
                    yield b":\n\n"
                    continue
                if event is None:
                    return
                yield event
        finally:
            self._listeners.discard(queue)

    async def serving(self) -> dict[str, Any]:
        """The metrics of the server, which is then sampled for some more seconds."""
        serving = self._view.serving
        self._until = time.monotonic() + _SAMPLING_SECONDS
        await serving.sample(1.5 * _SECONDS)
        self._start()
        return serving.document()

    @property
    def is_polling(self) -> bool:
        """Whether the home is being checked."""
        return self._task is not None

    def close(self) -> None:
        """End all streams."""
        self._until = 0.0
        for queue in self._listeners:
            self._drop(queue)
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        if self._task is None:
            self._sent_from.clear()
            self._last.clear()
            self._task = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        try:
            while self._listeners or time.monotonic() < self._until:
                began = time.monotonic()
                try:
                    await self._check()
                except (ClicklineError, OSError):
                    pass  # slow or unreachable: the next check may succeed
                except Exception:  # noqa: BLE001 - listeners wait for the next check
                    traceback.print_exc()
                await asyncio.sleep(max(0.1, _SECONDS - (time.monotonic() - began)))
        finally:
            self._task = None

    async def _check(self) -> None:
        view = self._view
        point = await view.serving.sample(_SECONDS / 2)
        if point is not None:
            self._send("serving", point, point["at"])
        if not self._listeners:
            return
        status = await view.status()
        self._send("status", status, {key: value for key, value in status.items() if key != "now"})
        for name, stamp in (await view.stamps()).items():
            self._send(name, {"changed": True}, stamp)

    def _send(self, name: str, document: Any, value: object) -> None:
        if name in self._sent_from and self._sent_from[name] == value:
            return
        first = name not in self._sent_from
        self._sent_from[name] = value
        if first and name in ("runs", "data", "versions"):  # a new listener fetches them anyway
            return
        event = b"event: " + name.encode() + b"\ndata: " + self._encode(document) + b"\n\n"
        if name in ("status", "serving"):
            self._last[name] = event
        for queue in list(self._listeners):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._drop(queue)  # the listener reconnects and gets everything again

    def _drop(self, queue: asyncio.Queue[bytes | None]) -> None:
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
