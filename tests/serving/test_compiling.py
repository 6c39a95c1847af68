"""Whoever waits because kernels are compiled is told so; whoever does not is not."""

from __future__ import annotations

import threading
import time

from numba import njit

from clickline.serving.compile_notice import patience


def test_a_long_compilation_is_told_once() -> None:
    said: list[str] = []
    enough = threading.Event()

    def say() -> None:
        said.append("compiling")
        enough.set()

    with patience(say, 0.01):
        for number in (1, 2):
            assert njit(lambda value, number=number: value + number)(1) == 1 + number
        assert enough.wait(20)
    assert said == ["compiling"]


def test_kernels_that_are_ready_are_nothing_to_tell() -> None:
    said: list[str] = []
    ready = njit(lambda value: value * 3)
    ready(1)
    with patience(lambda: said.append("compiling"), 0.001):
        assert ready(2) == 6
        time.sleep(0.05)
    assert said == []


def test_a_short_compilation_is_nothing_to_tell() -> None:
    said: list[str] = []
    with patience(lambda: said.append("compiling"), 600.0):
        assert njit(lambda value: value - 4)(5) == 1
    assert said == []
    deadline = time.monotonic() + 20
    while [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
