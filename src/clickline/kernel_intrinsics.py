"""LLVM operations that Numba does not offer, for kernels: pointers at an address, unaligned loads, bits of floats.

Nothing here checks bounds: that is the caller's job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

Int = Any
"""An integer inside a kernel: Numba sees no difference between int and np.int64, a type checker does."""

_WORD = ir.IntType(32)
_SINGLE = ir.FloatType()


def _of_value(result: Any, argument: Any, emit: Callable[[Any, Any, Any], Any]) -> Any:
    """An intrinsic of one value: `emit(context, builder, value)` generates its code."""

    def operation(typing_context: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(context, builder, args[0])

        return result(argument), build

    return intrinsic(operation)


def _of_element(emit: Callable[[Any, Any], Any], bits: int) -> Any:
    """An intrinsic `at(address, j)`: the j-th of the integers at an address, converted by `emit(builder, integer)`."""

    def operation(typing_context: Any, address: Any, j: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            return emit(builder, builder.load(builder.gep(base, [args[1]])))

        return types.float32(types.int64, types.int64), build

    return intrinsic(operation)


def _load(kind: Any, result: Any) -> Any:
    """An intrinsic `load(data, index)`: a little-endian value from any byte position of an array."""

    def load(typing_context: Any, data: Any, index: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.gep(array.data, [args[1]])
            return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)

        return result(data, types.int64), build

    return intrinsic(load)


def _bits(source: Any, result: Any, kind: Any) -> Any:
    """An intrinsic `cast(value)`: the same bits under another type."""
    return _of_value(result, source, lambda context, builder, value: builder.bitcast(value, kind))


def _pointer_at(element: Any) -> Any:
    """An intrinsic `at(address)`: a pointer that is indexed like an array of `element`."""
    pointer = types.CPointer(element)  # type: ignore[no-untyped-call]

    def emit(context: Any, builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, context.get_value_type(pointer))

    return _of_value(pointer, types.int64, emit)


def _emit_prefetch(context: Any, builder: Any, address: Any) -> Any:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
    insert: Any = cgutils.get_or_insert_function
    function = insert(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(_WORD, value) for value in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, byte), read, keep, data])
    return context.get_dummy_value()


def _half_as_float(builder: Any, half: Any) -> Any:
    """A half float as float32, finite values only. In integer arithmetic: not every processor has half floats, and LLVM
    vectorizes this as well."""

    def number(value: int) -> Any:
        return ir.Constant(_WORD, value)

    bits = builder.zext(half, _WORD)
    magnitude = builder.shl(builder.and_(bits, number(0x7FFF)), number(13))
    normal = builder.add(magnitude, number((127 - 15) << 23))
    # A subnormal half: as a fraction above a power of two that is then subtracted.
    shifted = builder.bitcast(builder.add(magnitude, number((127 - 14) << 23)), _SINGLE)
    base = builder.bitcast(number((127 - 14) << 23), _SINGLE)
    subnormal = builder.bitcast(builder.fsub(shifted, base), _WORD)
    is_normal = builder.icmp_unsigned(">=", magnitude, number(1 << 23))
    sign = builder.shl(builder.and_(bits, number(0x8000)), number(16))
    return builder.bitcast(builder.or_(builder.select(is_normal, normal, subnormal), sign), _SINGLE)


f32_at = _pointer_at(types.float32)
f64_at = _pointer_at(types.float64)
i32_at = _pointer_at(types.int32)
i64_at = _pointer_at(types.int64)
u8_at = _pointer_at(types.uint8)
u16_at = _pointer_at(types.uint16)
u32_at = _pointer_at(types.uint32)
u64_at = _pointer_at(types.uint64)

fp16_at = _of_element(_half_as_float, 16)
int8_at = _of_element(lambda builder, integer: builder.sitofp(integer, _SINGLE), 8)

load_u8 = _load(ir.IntType(8), types.uint8)
load_u16 = _load(ir.IntType(16), types.uint16)
load_u32 = _load(ir.IntType(32), types.uint32)
load_u64 = _load(ir.IntType(64), types.uint64)
load_f32 = _load(_SINGLE, types.float32)
load_f64 = _load(ir.DoubleType(), types.float64)

f32_from_bits = _bits(types.uint32, types.float32, _SINGLE)
f64_from_bits = _bits(types.int64, types.float64, ir.DoubleType())
bits_of_f64 = _bits(types.float64, types.int64, ir.IntType(64))

prefetch = _of_value(types.void, types.int64, _emit_prefetch)
"""`prefetch(address)`: request a cache line that is needed soon; never faults."""

leading_zeros = _of_value(
    types.int64,
    types.uint64,
    lambda context, builder, value: builder.ctlz(value, ir.Constant(ir.IntType(1), 1)),
)
"""`leading_zeros(value)`: the number of leading zero bits of a nonzero u64."""
