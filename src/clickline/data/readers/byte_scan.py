"""Searches for single bytes in a buffer, 64 at a time: the basis of all text readers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numpy.typing import NDArray

from clickline.numba_cache import njit

NEWLINE = np.uint8(10)

_intrinsic: Any = extending.intrinsic  # its type stubs count the typing context as an argument of the caller
_WORD = ir.IntType(64)
_LANES = ir.VectorType(ir.IntType(8), 64)


@_intrinsic
def _load_and_match(typing_context: Any, data: Any, at: Any, byte: Any) -> Any:
    """One vector comparison of data[at:at + 64] with `byte`, as a 64-bit mask; the caller checks bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, position, wanted = arguments
        base = context.make_array(signature.args[0])(context, builder, array).data
        lanes = builder.bitcast(builder.gep(base, [position]), _LANES.as_pointer())
        text = builder.load(lanes)
        text.align = 1
        one = builder.insert_element(
            ir.Constant(_LANES, ir.Undefined), wanted, ir.Constant(ir.IntType(32), 0)
        )
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
        every = builder.shuffle_vector(one, ir.Constant(_LANES, ir.Undefined), zeros)
        return builder.bitcast(builder.icmp_unsigned("==", text, every), _WORD)

    return types.uint64(data, types.intp, types.uint8), generate


@_intrinsic
def first_one(typing_context: Any, word: Any) -> Any:
    """The position of the lowest 1 bit of a nonzero u64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@_intrinsic
def count_ones(typing_context: Any, word: Any) -> Any:
    """The number of 1 bits in a u64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@njit(cache=True, nogil=True, inline="always")
def match_64(data: NDArray[np.uint8], at: int, byte: np.uint8) -> np.uint64:
    """A mask whose bit i is set if data[at + i] is `byte`; bits past the end of the buffer are 0."""
    if at + 64 <= data.size:
        return _load_and_match(data, at, byte)  # type: ignore[no-any-return]
    mask = np.uint64(0)
    for i in range(data.size - at):
        if data[at + i] == byte:
            mask |= np.uint64(1) << np.uint64(i)
    return mask


@njit(cache=True, nogil=True)
def count_byte(data: NDArray[np.uint8], byte: np.uint8) -> int:
    """The number of occurrences of `byte`."""
    total = 0
    for at in range(0, data.size, 64):
        total += count_ones(match_64(data, at, byte))
    return total


@njit(cache=True, nogil=True)
def find_byte(data: NDArray[np.uint8], byte: np.uint8, start: int) -> int:
    """The position of the first `byte` at or after `start`; the length of the buffer if there is none."""
    for at in range(start, data.size, 64):
        mask = match_64(data, at, byte)
        if mask:
            return at + first_one(mask)  # type: ignore[no-any-return]
    return data.size


@njit(cache=True, nogil=True)
def last_byte(data: NDArray[np.uint8], byte: np.uint8) -> int:
    """The position of the last `byte`; -1 if there is none."""
    for at in range(data.size - 1, -1, -1):
        if data[at] == byte:
            return at
    return -1
