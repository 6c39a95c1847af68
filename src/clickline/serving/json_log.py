"""The log of a server: one JSON line per event, on stderr."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

_LINES_PER_SECOND = 10
_MAX_CHARACTERS = 2000  # of one value


def _to_stderr(line: bytes) -> None:
    os.write(2, line)  # one call, so that lines of several processes never mix


class JsonLog:
    """Writes events as JSON lines. Thread-safe."""

    def __init__(self, process: str, write: Callable[[bytes], None] = _to_stderr) -> None:
        self._process = process
        self._write = write
        self._lock = threading.Lock()
        self._second = -1
        self._written: Counter[str] = Counter()  # in this second, by event
        self._suppressed: Counter[str] = Counter()

    def event(self, event: str, level: str = "info", **fields: Any) -> None:
        """Write one line."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": level, "process": self._process, "event": event, **fields}
        shortened = {
            key: value[:_MAX_CHARACTERS] + "…"
            if isinstance(value, str) and len(value) > _MAX_CHARACTERS
            else value
            for key, value in line.items()
        }
        text = json.dumps(shortened, ensure_ascii=False, default=str)
        if (
            not text.isprintable()
        ):  # escape what a client sent, so that it cannot start a line or control a terminal
            text = "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)
        with suppress(OSError):  # stderr is closed: keep serving
            self._write(text.encode() + b"\n")

    def throttled(self, event: str, level: str = "info", **fields: Any) -> None:
        """Write one line, but at most 10 a second of the same event; the next line counts those suppressed. For
        events that clients can cause at will."""
        with self._lock:
            second = int(time.monotonic())
            if second != self._second:
                self._second = second
                self._written.clear()
            self._written[event] += 1
            if self._written[event] > _LINES_PER_SECOND:
                self._suppressed[event] += 1
                return
            suppressed = self._suppressed.pop(event, 0)
        if suppressed:
            fields["suppressed"] = suppressed
        self.event(event, level, **fields)
