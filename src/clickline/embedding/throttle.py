"""Work that gives way: a thread that keeps to a share of one core."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST = 0.001  # seconds of work between two rests; shorter ones would be spent on waking up


class Pace:
    """Call `rest` often: it sleeps so long that the thread's work stays at `share` of a core's time.

    Work is measured in processor time, so waiting for a disk or for a busy machine is no work. There are no
    rests after `hurry`, nor while `urgent` says so.
    """

    def __init__(self, share: float, urgent: Callable[[], bool]) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of {share} of a core: above 0 and up to 1 is allowed")
        self._rest_for_work = 1.0 / share - 1.0
        self._urgent = urgent
        self._hurried = threading.Event()
        self._rested_at: float | None = None

    def hurry(self) -> None:
        """Rest no more; also ends a rest that is going on."""
        self._hurried.set()

    def rest(self) -> None:
        now = time.thread_time()
        if self._rested_at is None:
            self._rested_at = now
        worked = now - self._rested_at
        if worked < _BURST:
            return
        if not self._urgent():
            self._hurried.wait(worked * self._rest_for_work)
        self._rested_at = time.thread_time()
