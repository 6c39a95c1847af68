"""The log of a serving process, which also takes refused requests, internal errors and the log records of libraries."""

from __future__ import annotations

import logging
import time
import traceback
from typing import Any

from clickline.serving.json_log import JsonLog

_MAX_CHARACTERS = 2000  # of a traceback


class ServerLog(JsonLog, logging.Handler):
    """A JsonLog that is also a `logging` handler, for the records of libraries."""

    def __init__(self, process: str, *write: Any) -> None:
        JsonLog.__init__(self, process, *write)
        logging.Handler.__init__(self, logging.WARNING)
        self._traceback_at: dict[str, float] = {}

    def refused(self, protocol: str, kind: str, message: str) -> None:
        """Log a refused request."""
        self.throttled("refused", "warning", protocol=protocol, kind=kind, message=message)

    def unexpected(self, error: BaseException, reference: str, protocol: str) -> None:
        """Log a bug; each kind with its traceback at most once a minute."""
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        where = f"{frame[0].filename}:{frame[0].lineno}" if frame else "?"
        kind = f"{type(error).__name__} at {where}"
        fields: dict[str, Any] = {"id": reference, "protocol": protocol, "kind": kind, "message": str(error)}
        now = time.monotonic()
        if now - self._traceback_at.get(kind, float("-inf")) >= 60:
            self._traceback_at[kind] = now
            fields["traceback"] = "".join(traceback.format_exception(error))[-_MAX_CHARACTERS:]
            self.event("internal error", "error", **fields)
        else:
            self.throttled("internal error", "error", **fields)

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record of a library."""
        fields = {"logger": record.name, "message": record.getMessage().strip()}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))[-_MAX_CHARACTERS:]
        self.throttled("library", record.levelname.lower(), **fields)
