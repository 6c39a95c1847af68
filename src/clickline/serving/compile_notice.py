"""Says why the first start takes long: kernels are compiled once for a machine, and then read from their cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

_SECONDS = 2.0


@contextmanager
def patience(say: Callable[[], None], seconds: float = _SECONDS) -> Iterator[None]:
    """Call `say` once, from another thread, if what is done meanwhile still goes on so long after the first kernel had
    to be compiled. Kernels that come from the cache do not count."""
    timer = threading.Timer(seconds, say)
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
        self._begun = False

    def on_start(self, event: event.Event) -> None:
        if not self._begun:
            self._begun = True
            self._timer.start()

    def on_end(self, event: event.Event) -> None:
        pass
