"""What follow mode is doing, as it is reported; errors of a store or a disk are reported there and retried."""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from datetime import UTC, datetime
from typing import Any, TypeVar

from clickline.errors import StorageError
from clickline.progress import Progress

MIN_DELAY = 1.0
_MAX_DELAY = 60.0

T = TypeVar("T")


class FollowStatus:
    """The facts of the stage `follow`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._facts: dict[str, Any] = {"state": "starting"}
        self.trained_hours: Sized | None = None
        self.source_answered = False  # whether the source has ever answered

    def report(self, **facts: Any) -> None:
        before = dict(self._facts)
        self._facts |= facts
        if self.trained_hours is not None:
            self._facts["hours_learned"] = len(self.trained_hours)
        if self._facts != before:
            self._progress.stage("follow", "running", self._facts)

    def retry(self, what: str, action: Callable[[], T]) -> T:
        """Retry errors of a disk or a store with growing delays. A source that has never answered is an error at once:
        most likely its name is wrong."""
        delay = MIN_DELAY
        while True:
            try:
                result = action()
            except (StorageError, OSError) as error:
                if not self.source_answered:
                    raise
                self.report_failure(what, error)
            else:
                if self._facts.get("trouble") is not None:
                    self._progress.log(f"{what}: works again")
                    self.report(trouble=None)
                return result
            time.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY)

    def report_failure(self, what: str, error: Exception) -> None:
        message = str(error)
        if isinstance(error, OSError):
            message = f"{error.filename or 'the machine'}: {error.strerror or error}"
        before = self._facts.get("trouble")
        if before is None or before["words"] != message:
            self._progress.log(f"{what}: {message} Retrying until it works.")
            self.report(trouble={"what": what, "words": message, "since": utc(time.time())})


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
