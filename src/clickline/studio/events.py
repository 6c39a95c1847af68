"""Server-sent events: one look a second at a home, shared by all who listen; none when nobody does."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

from clickline.errors import ClicklineError
from clickline.studio.home_view import View

_SECONDS = 1.0
_QUIET_SECONDS = 10.0  # without news a comment tells that the connection lives
_LOOKED_SECONDS = 10.0  # that the server is sampled on after somebody has asked once
_WAITING = 100  # events that a slow listener may leave unread


class Watch:
    """Looks at one home and tells what changed."""

    def __init__(self, view: View, encode: Callable[[Any], bytes]) -> None:
        self._view = view
        self._encode = encode
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._told: dict[str, object] = {}  # by name of event: what it was made from
        self._last: dict[str, bytes] = {}  # for a listener who comes later

    async def stream(self) -> AsyncIterator[bytes]:
        """Events as they go over the wire, until the listener leaves or the studio ends."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        for known in self._last.values() if self._listeners else ():
            queue.put_nowait(known)
        self._listeners.add(queue)
        self._begin()
        try:
            yield b": hello\n\n"
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), _QUIET_SECONDS)
                except TimeoutError:
                    yield b":\n\n"
                    continue
                if event is None:
                    return
                yield event
        finally:
            self._listeners.discard(queue)

    async def sampled(self) -> dict[str, Any]:
        """How the server is doing; it is sampled for some seconds more."""
        serving = self._view.serving
        self._until = time.monotonic() + _LOOKED_SECONDS
        await serving.sample(1.5 * _SECONDS)
        self._begin()
        return serving.document()

    @property
    def looks(self) -> bool:
        """Whether it costs anything now."""
        return self._task is not None

    def close(self) -> None:
        """End all streams."""
        self._until = 0.0
        for queue in self._listeners:
            self._drop(queue)
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        if self._task is None:
            self._told.clear()
            self._last.clear()
            self._task = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        try:
            while self._listeners or time.monotonic() < self._until:
                began = time.monotonic()
                try:
                    await self._look()
                except (ClicklineError, OSError):
                    pass  # it is slow or away: the next look may see it
                except Exception:  # noqa: BLE001 - whoever listens waits for the next look
                    traceback.print_exc()
                await asyncio.sleep(max(0.1, _SECONDS - (time.monotonic() - began)))
        finally:
            self._task = None

    async def _look(self) -> None:
        view = self._view
        point = await view.serving.sample(_SECONDS / 2)
        if point is not None:
            self._tell("serving", point, point["at"])
        if not self._listeners:
            return
        found = await view.status()
        self._tell("status", found, {key: value for key, value in found.items() if key != "now"})
        for name, stamp in (await view.stamps()).items():
            self._tell(name, {"changed": True}, stamp)

    def _tell(self, name: str, document: Any, of: object) -> None:
        if name in self._told and self._told[name] == of:
            return
        first = name not in self._told
        self._told[name] = of
        if first and name in ("runs", "data", "versions"):  # whoever comes fetches them anyway
            return
        event = b"event: " + name.encode() + b"\ndata: " + self._encode(document) + b"\n\n"
        if name in ("status", "serving"):
            self._last[name] = event
        for queue in list(self._listeners):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._drop(queue)  # it comes again, and gets everything anew

    def _drop(self, queue: asyncio.Queue[bytes | None]) -> None:
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
