"""The log of a serving process: also of refused requests, of bugs that requests meet, and of what libraries say."""

from __future__ import annotations

import logging
import time
import traceback
from typing import Any

from clickline.serving.json_log import Log as Lines

_LONGEST = 2000  # characters of a traceback


class Log(Lines, logging.Handler):
    """Writes events; as a handler of `logging` it does the same for what libraries have to say."""

    def __init__(self, process: str, *write: Any) -> None:
        Lines.__init__(self, process, *write)
        logging.Handler.__init__(self, logging.WARNING)
        self._traced: dict[str, float] = {}

    def refused(self, protocol: str, kind: str, message: str) -> None:
        """A refused request."""
        self.sparingly("refused", "warning", protocol=protocol, kind=kind, message=message)

    def unexpected(self, error: BaseException, reference: str, protocol: str) -> None:
        """A bug that a request met; each kind with its traceback once a minute."""
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        where = f"{frame[0].filename}:{frame[0].lineno}" if frame else "?"
        kind = f"{type(error).__name__} at {where}"
        told: dict[str, Any] = {"id": reference, "protocol": protocol, "kind": kind, "message": str(error)}
        now = time.monotonic()
        if now - self._traced.get(kind, float("-inf")) >= 60:
            self._traced[kind] = now
            told["traceback"] = "".join(traceback.format_exception(error))[-_LONGEST:]
            self.say("internal error", "error", **told)
        else:
            self.sparingly("internal error", "error", **told)

    def emit(self, record: logging.LogRecord) -> None:
        """What a library logs."""
        told = {"logger": record.name, "message": record.getMessage().strip()}
        if record.exc_info and record.exc_info[1] is not None:
            told["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))[-_LONGEST:]
        self.sparingly("library", record.levelname.lower(), **told)
