"""CPU and memory use of a process."""

from __future__ import annotations

import mmap
import time

import numpy as np

from clickline.training.tracking import resource_usage


def work(cpu_seconds: float) -> None:
    end = time.process_time() + cpu_seconds
    while time.process_time() < end:
        pass


def test_cpu_is_counted_since_the_last_call() -> None:
    resource_usage()
    before_wall, before_cpu = time.monotonic(), time.process_time()
    work(0.2)
    reported = resource_usage()["system/cpu_cores"]
    share = (time.process_time() - before_cpu) / (time.monotonic() - before_wall)
    assert abs(reported - share) < 0.2 * share + 0.01
    time.sleep(0.2)  # idle
    assert resource_usage()["system/cpu_cores"] < reported / 2


def test_memory_grows_with_allocations() -> None:
    before = resource_usage()["system/memory_mib"]
    held = np.frombuffer(mmap.mmap(-1, 64 * 2**20), np.uint8)  # new memory, not freed by an earlier test
    held[:] = 1
    assert resource_usage()["system/memory_mib"] - before > 50
    assert held[-1] == 1
