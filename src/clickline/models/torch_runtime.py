"""What PyTorch's and our own threads need of the process to get on with each other.

Measured on 2 cores (docs/benchmarks.md): without this a training step takes a sixth longer.
"""

from __future__ import annotations

import ctypes
import os
import sys

# After each piece of work OpenMP's threads spin for milliseconds in wait of the next, on the cores that the tables'
# threads want now. It reads this when PyTorch is loaded; what the user has set stays.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's settings in <malloc.h>


def keep_memory() -> None:
    """Let glibc keep the memory that a step frees for the next one, which needs as much: giving it back and taking
    it again costs thousands of page faults a step."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, 1 << 30)
            mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def finds_ahead(threads: int) -> bool:
    """Whether looking up the next batch beside the network's work pays: on two cores both only wait for each other."""
    return threads > 2
