"""Logs of a serving process: one line of JSON an event, on stderr."""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

__all__ = ["Log", "Sparing"]

_LINES_A_SECOND = 10
_LONGEST = 2000  # characters of one value


def _to_stderr(line: bytes) -> None:
    os.write(2, line)  # one call, so that the lines of several processes never mix


class Sparing:
    """Lets so many through each second and counts the others."""

    def __init__(self, a_second: int = _LINES_A_SECOND) -> None:
        self._a_second = a_second
        self._second = -1
        self._said = 0
        self._suppressed = 0

    def allows(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._said = second, 0
        self._said += 1
        if self._said > self._a_second:
            self._suppressed += 1
            return False
        return True

    def suppressed(self) -> int:
        """How many were not let through since this was last asked."""
        count, self._suppressed = self._suppressed, 0
        return count


class Log(logging.Handler):
    """Writes events; as a handler of `logging` it does the same for what libraries have to say."""

    def __init__(self, process: str, write: Callable[[bytes], None] = _to_stderr) -> None:
        super().__init__(logging.WARNING)
        self._process = process
        self._write = write
        self._refused = Sparing()
        self._others = Sparing()
        self._traced: dict[str, float] = {}

    def say(self, event: str, level: str = "info", **fields: Any) -> None:
        """One line."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": level, "process": self._process, "event": event, **fields}
        cut = {
            key: value[:_LONGEST] + "…" if isinstance(value, str) and len(value) > _LONGEST else value
            for key, value in line.items()
        }
        with suppress(OSError):  # nobody reads our stderr any more: go on answering
            self._write(json.dumps(cut, ensure_ascii=False, default=str).encode(errors="replace") + b"\n")

    def refused(self, protocol: str, kind: str, message: str) -> None:
        """A refused request: at most so many lines a second, the next one tells how many were left out."""
        if self._refused.allows():
            suppressed = self._refused.suppressed()
            more = {"suppressed": suppressed} if suppressed else {}
            self.say("refused", "warning", protocol=protocol, kind=kind, message=message, **more)

    def unexpected(self, error: BaseException, reference: str, protocol: str) -> None:
        """A bug that a request met; each kind with its traceback once a minute."""
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        where = f"{frame[0].filename}:{frame[0].lineno}" if frame else "?"
        kind = f"{type(error).__name__} at {where}"
        now = time.monotonic()
        more: dict[str, Any] = {}
        if now - self._traced.get(kind, float("-inf")) >= 60:
            self._traced[kind] = now
            more["traceback"] = "".join(traceback.format_exception(error))[-_LONGEST:]
        elif not self._others.allows():
            return
        suppressed = self._others.suppressed()
        if suppressed:
            more["suppressed"] = suppressed
        self.say(
            "internal error", "error", id=reference, protocol=protocol, kind=kind, message=str(error), **more
        )

    def emit(self, record: logging.LogRecord) -> None:
        """What a library logs."""
        if self._others.allows():
            self.say("library", record.levelname.lower(), logger=record.name, message=record.getMessage())
