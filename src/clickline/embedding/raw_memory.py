"""Raw memory for kernels: typed pointers at an address, prefetching, and large zeroed allocations.

Rows and index entries are in many allocations that never move. Kernels access them by address, so that one
call can serve every shard. Tuples of addresses are also fast in inner loops: taking an array out of a tuple
costs an atomic reference count each time. Nothing here checks bounds: that is the caller's job.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Int = Any
"""An integer inside a kernel: Numba sees no difference between int and np.int64, a type checker does."""

_HUGE_PAGE = 1 << 21


def _pointer_at(element: Any) -> Any:
    """An intrinsic `at(address)`: a pointer that is indexed like an array of `element`."""

    def at(typing_context: Any, address: Any) -> Any:
        result = types.CPointer(element)  # type: ignore[no-untyped-call]

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.int64), build

    return intrinsic(at)


def _prefetch() -> Any:
    """An intrinsic `prefetch(address)`: request a cache line that is needed soon; never faults."""

    def fetch(typing_context: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            insert: Any = cgutils.get_or_insert_function
            function = insert(builder.module, kind, "llvm.prefetch.p0")
            read, keep, data = (ir.Constant(word, value) for value in (0, 3, 1))
            builder.call(function, [builder.inttoptr(args[0], byte), read, keep, data])
            return context.get_dummy_value()

        return types.void(types.int64), build

    return intrinsic(fetch)


f32_at = _pointer_at(types.float32)
f64_at = _pointer_at(types.float64)
i32_at = _pointer_at(types.int32)
i64_at = _pointer_at(types.int64)
u8_at = _pointer_at(types.uint8)
u16_at = _pointer_at(types.uint16)
u32_at = _pointer_at(types.uint32)
u64_at = _pointer_at(types.uint64)
prefetch = _prefetch()


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
