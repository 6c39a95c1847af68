"""Raw memory for kernels: addresses of arrays, and large zeroed allocations.

Rows and index entries are in many allocations that never move. Kernels access them by address, so that one
call can serve every shard. Tuples of addresses are also fast in inner loops: taking an array out of a tuple
costs an atomic reference count each time.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.kernel_intrinsics import Int as Int

_HUGE_PAGE = 1 << 21


def address(array: NDArray[Any]) -> int:
    """The address of an array's first byte. The caller must keep the array alive."""
    return int(array.ctypes.data)


def allocate(size: int) -> NDArray[np.uint8]:
    """Zeroed bytes, in huge pages if large: random rows of a big table would miss the TLB otherwise."""
    if size < _HUGE_PAGE:
        return np.zeros(size, dtype=np.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages are never huge
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel built without them: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    """A copy with room for `size` elements."""
    wider = np.zeros(size, dtype=array.dtype)
    wider[: array.size] = array
    return wider
