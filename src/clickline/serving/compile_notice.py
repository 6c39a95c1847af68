"""Explains a slow first start: kernels are compiled once per machine and read from the cache afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

_SECONDS = 2.0


@contextmanager
def notify_if_compiling(notify: Callable[[], None], seconds: float = _SECONDS) -> Iterator[None]:
    """Call `notify` once, from another thread, if the block is still running `seconds` after its first kernel
    compilation began. Kernels that come from the cache do not count."""
    timer = threading.Timer(seconds, notify)
    timer.daemon = True
    listener = _FirstCompilation(timer)
    with event.install_listener("numba:compile", listener):
        try:
            yield
        finally:
            timer.cancel()


class _FirstCompilation(event.Listener):
    def __init__(self, timer: threading.Timer) -> None:
        self._timer = timer
        self._started = False

    def on_start(self, event: event.Event) -> None:
        if not self._started:
            self._started = True
            self._timer.start()

    def on_end(self, event: event.Event) -> None:
        pass
