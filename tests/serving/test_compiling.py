"""A long compilation of kernels is reported; a short one, or none, is not."""

from __future__ import annotations

import threading
import time

from numba import njit

from clickline.serving.compile_notice import notify_if_compiling


def test_long_compilation_is_reported_once() -> None:
    reports: list[str] = []
    reported = threading.Event()

    def notify() -> None:
        reports.append("compiling")
        reported.set()

    with notify_if_compiling(notify, 0.01):
        for number in (1, 2):
            assert njit(lambda value, number=number: value + number)(1) == 1 + number
        assert reported.wait(20)
    assert reports == ["compiling"]


def test_cached_kernels_are_not_reported() -> None:
    reports: list[str] = []
    ready = njit(lambda value: value * 3)
    ready(1)
    with notify_if_compiling(lambda: reports.append("compiling"), 0.001):
        assert ready(2) == 6
        time.sleep(0.05)
    assert reports == []


def test_short_compilation_is_not_reported() -> None:
    reports: list[str] = []
    with notify_if_compiling(lambda: reports.append("compiling"), 600.0):
        assert njit(lambda value: value - 4)(5) == 1
    assert reports == []
    deadline = time.monotonic() + 20
    while [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
