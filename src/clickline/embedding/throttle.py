"""A throttle that keeps a background thread at a share of one core."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST = 0.001  # seconds of work between pauses; with less, waking up would dominate


class Throttle:
    """Call `pause` often: it sleeps long enough to keep the thread's work at `share` of a core's time.

    Work is measured in CPU time, so waiting for the disk or for a busy machine does not count. There are no pauses
    after `disable`, nor while `urgent()` is true.
    """

    def __init__(self, share: float, urgent: Callable[[], bool]) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of {share} of a core: it must be above 0 and at most 1")
        self._pause_per_work = 1.0 / share - 1.0
        self._urgent = urgent
        self._disabled = threading.Event()
        self._paused_at: float | None = None

    def disable(self) -> None:
        """Stop pausing; also ends a pause in progress."""
        self._disabled.set()

    def pause(self) -> None:
        now = time.thread_time()
        if self._paused_at is None:
            self._paused_at = now
        worked = now - self._paused_at
        if worked < _BURST:
            return
        if not self._urgent():
            self._disabled.wait(worked * self._pause_per_work)
        self._paused_at = time.thread_time()
