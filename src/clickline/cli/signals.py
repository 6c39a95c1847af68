"""Ctrl-C and SIGTERM: the command has a moment to clean up, then the process ends, busy kernels or not."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from clickline.cli.exit_codes import ExitCode

GRACE_SECONDS = 1.5
MESSAGE = "interrupted; run the same command again to go on"

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_leaving = threading.Lock()


def listen() -> None:
    """From now on the first signal raises KeyboardInterrupt in the main thread, a second ends at once."""
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    # Python runs a handler only between two steps of the main thread, which may be deep in a kernel. The
    # byte is written at once, and a thread of its own can read it meanwhile.
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(signals,), name="interrupts", daemon=True).start()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and `&` in a script mean it
            signal.signal(number, _interrupt)


def take_stop() -> Callable[[float], bool]:
    """From now on SIGTERM only answers this: wait for so many seconds at most, and say whether it has come.

    A pipe, not an Event: a handler that sets the Event for which its own thread waits can block for ever.
    """
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _nothing_more)

    def stopped(seconds: float) -> bool:
        return bool(select.select([signals], [], [], seconds)[0])  # never read: once come, it stays so

    return stopped


def leave() -> NoReturn:
    """Ends the process with exit code 130, without waiting for its threads."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # the other thread is about to end us both
    with suppress(OSError, ValueError):
        show_cursor = "\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{show_cursor}{MESSAGE}\n".encode())
    os._exit(ExitCode.INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for one in _SIGNALS:
        signal.signal(one, _nothing_more)
    raise KeyboardInterrupt


def _nothing_more(number: int, frame: FrameType | None) -> None:
    """A second signal is `_watch`'s; raising again would tear the clean-up that the first one began."""


def _watch(signals: int) -> None:
    _wait_for_signal(signals, None)
    _wait_for_signal(signals, GRACE_SECONDS)
    _end_children()
    leave()


def _end_children() -> None:
    """What the main thread did not come to: it is busy still, or a library caught its KeyboardInterrupt. Ray's agents
    would live on without us. What a command leaves running on purpose has a process group of its own."""
    from clickline.pipeline.processes import descendants

    for child in list(descendants(os.getpid())):
        with suppress(ProcessLookupError):
            if os.getpgid(child.pid) == os.getpgrp():
                child.send(signal.SIGKILL)


def _wait_for_signal(signals: int, seconds: float | None) -> None:
    while select.select([signals], [], [], seconds)[0]:
        if os.read(signals, 1)[0] in _SIGNALS:
            return
