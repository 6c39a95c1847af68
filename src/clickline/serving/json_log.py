"""What a server has to say: one line of JSON an event, on stderr."""

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

_LINES_A_SECOND = 10
_LONGEST = 2000  # characters of one value


def _to_stderr(line: bytes) -> None:
    os.write(2, line)  # one call, so that the lines of several processes never mix


class Log:
    """Writes events. Any thread may."""

    def __init__(self, process: str, write: Callable[[bytes], None] = _to_stderr) -> None:
        self._process = process
        self._write = write
        self._turn = threading.Lock()
        self._second = -1
        self._said: Counter[str] = Counter()  # in this second, by event
        self._left_out: Counter[str] = Counter()

    def say(self, event: str, level: str = "info", **fields: Any) -> None:
        """One line."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": level, "process": self._process, "event": event, **fields}
        cut = {
            key: value[:_LONGEST] + "…" if isinstance(value, str) and len(value) > _LONGEST else value
            for key, value in line.items()
        }
        text = json.dumps(cut, ensure_ascii=False, default=str)
        if not text.isprintable():  # what a client sent begins no line and moves nobody's cursor
            text = "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)
        with suppress(OSError):  # nobody reads our stderr any more: go on answering
            self._write(text.encode() + b"\n")

    def sparingly(self, event: str, level: str = "info", **fields: Any) -> None:
        """The same for what clients can bring about as often as they like: at most so many lines a second of one
        event, and the next one tells how many were left out."""
        with self._turn:
            second = int(time.monotonic())
            if second != self._second:
                self._second = second
                self._said.clear()
            self._said[event] += 1
            if self._said[event] > _LINES_A_SECOND:
                self._left_out[event] += 1
                return
            suppressed = self._left_out.pop(event, 0)
        if suppressed:
            fields["suppressed"] = suppressed
        self.say(event, level, **fields)
