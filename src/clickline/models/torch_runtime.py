"""Process settings that let PyTorch's threads and our own share the cores.

Without them a training step takes a sixth longer, measured on 2 cores (docs/benchmarks.md).
"""

from __future__ import annotations

import ctypes
import os
import sys

# After each task OpenMP's threads spin for milliseconds, on cores that the tables' threads need. OpenMP reads this
# when PyTorch is loaded; a value set by the user is kept.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's settings in <malloc.h>


def retain_freed_memory() -> None:
    """Make glibc keep the memory that a step frees for the next one, which needs as much: returning it to the system
    and getting it again costs thousands of page faults per step."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, 1 << 30)
            mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def should_find_ahead(threads: int) -> bool:
    """Whether to look up the next batch while the network runs: on two cores it would only slow down both."""
    return threads > 2
