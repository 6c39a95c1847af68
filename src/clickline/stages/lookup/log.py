"""What a lookup server has to say: one line of JSON an event, on stderr."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

__all__ = ["Log"]

_LINES_A_SECOND = 10
_LONGEST = 2000  # characters of one value


class Log:
    """Writes events. Of the same one at most so many a second; the next line tells how many were left out."""

    def __init__(self, shard: int) -> None:
        self._process = f"lookup, shard {shard}"
        self._lock = threading.Lock()
        self._second = 0
        self._said: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def say(self, event: str, level: str = "info", **fields: Any) -> None:
        with self._lock:
            second = int(time.monotonic())
            if second != self._second:
                self._second, self._said = second, {}
            self._said[event] = self._said.get(event, 0) + 1
            if self._said[event] > _LINES_A_SECOND:
                self._left_out[event] = self._left_out.get(event, 0) + 1
                return
            suppressed = self._left_out.pop(event, 0)
        if suppressed:
            fields["suppressed"] = suppressed
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": level, "process": self._process, "event": event, **fields}
        cut = {
            key: value[:_LONGEST] + "…" if isinstance(value, str) and len(value) > _LONGEST else value
            for key, value in line.items()
        }
        with suppress(OSError):  # nobody reads our stderr any more: go on answering
            os.write(2, json.dumps(cut, ensure_ascii=False, default=str).encode(errors="replace") + b"\n")
