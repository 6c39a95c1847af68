"""Intrinsics that read 16-bit and 8-bit weights in kernels.

They use integer arithmetic instead of the processor's half floats, which not every processor has; LLVM vectorizes
it as well.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(32)
_SINGLE = ir.FloatType()


def _element(builder: Any, bits: int, args: Any) -> Any:
    base = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
    return builder.load(builder.gep(base, [args[1]]))


def _fp16() -> Any:
    """An intrinsic `fp16_at(address, j)`: the j-th half float at an address, as float32. Finite values only."""

    def load(typing_context: Any, address: Any, j: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def number(value: int) -> Any:
                return ir.Constant(_WORD, value)

            bits = builder.zext(_element(builder, 16, args), _WORD)
            magnitude = builder.shl(builder.and_(bits, number(0x7FFF)), number(13))
            normal = builder.add(magnitude, number((127 - 15) << 23))
            # A subnormal half: as a fraction above a power of two that is then subtracted.
            shifted = builder.bitcast(builder.add(magnitude, number((127 - 14) << 23)), _SINGLE)
            base = builder.bitcast(number((127 - 14) << 23), _SINGLE)
            subnormal = builder.bitcast(builder.fsub(shifted, base), _WORD)
            is_normal = builder.icmp_unsigned(">=", magnitude, number(1 << 23))
            sign = builder.shl(builder.and_(bits, number(0x8000)), number(16))
            return builder.bitcast(builder.or_(builder.select(is_normal, normal, subnormal), sign), _SINGLE)

        return types.float32(types.int64, types.int64), build

    return intrinsic(load)


def _int8() -> Any:
    """An intrinsic `int8_at(address, j)`: the j-th signed byte at an address, as float32."""

    def load(typing_context: Any, address: Any, j: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.sitofp(_element(builder, 8, args), _SINGLE)

        return types.float32(types.int64, types.int64), build

    return intrinsic(load)


fp16_at = _fp16()
int8_at = _int8()
