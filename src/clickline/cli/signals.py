"""Ctrl-C and SIGTERM: the command gets a moment to clean up, then the process exits even if a kernel is busy."""

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
MESSAGE = "interrupted; run the same command again to resume"

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_leaving = threading.Lock()


def listen() -> None:
    """From now on the first signal raises KeyboardInterrupt in the main thread; a second one exits at once."""
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    # Python runs a handler only between two bytecodes of the main thread, which may be inside a kernel. The
    # wakeup byte is written at once, and another thread can read it meanwhile.
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(signals,), name="interrupts", daemon=True).start()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and `&` in a script ignore it on purpose
            signal.signal(number, _interrupt)


def take_stop() -> Callable[[float], bool]:
    """From now on SIGTERM only makes the returned function, which waits up to the given seconds for it, return True.

    A pipe, not an Event: a handler that sets the Event its own thread waits for can block forever.
    """
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _ignore)

    def stopped(seconds: float) -> bool:
        return bool(select.select([signals], [], [], seconds)[0])  # never read, so it stays True

    return stopped


def leave() -> NoReturn:
    """Exit with code 130 without waiting for other threads."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # the other thread is about to end the process
    with suppress(OSError, ValueError):
        show_cursor = "\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{show_cursor}{MESSAGE}\n".encode())
    os._exit(ExitCode.INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for one in _SIGNALS:
        signal.signal(one, _ignore)
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    """`_watch` handles a second signal; raising again would interrupt the clean-up that the first one began."""


def _watch(signals: int) -> None:
    _wait_for_signal(signals, None)
    _wait_for_signal(signals, GRACE_SECONDS)
    _kill_children()
    leave()


def _kill_children() -> None:
    """Kill the children that the main thread did not stop because it is busy or a library caught KeyboardInterrupt;
    Ray's agents would outlive us. Processes that a command leaves running on purpose have their own process group."""
    from clickline.processes import descendants

    for child in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            if os.getpgid(child.pid) == os.getpgrp():
                child.send_signal(signal.SIGKILL)


def _wait_for_signal(signals: int, seconds: float | None) -> None:
    while select.select([signals], [], [], seconds)[0]:
        if os.read(signals, 1)[0] in _SIGNALS:
            return
