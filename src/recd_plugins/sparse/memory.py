"""What compiled code needs to work on memory by address; for use inside numba functions only."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Which caches keep a line that is needed only once: of AMD's Zen the first alone (0), which leaves
# the larger ones to others. Intel's first cache has lost such a line again before it is read, and
# comparing takes twice the time: there all keep it (3).
_KEEP = 0 if binding.get_host_cpu_name().startswith("znver") else 3


def _pointer_to(item: Any) -> Any:
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
        signature = types.CPointer(item)(types.int64)  # type: ignore[no-untyped-call]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, codegen

    return intrinsic(pointer)


def _copy_bytes(typing_context: Any, target: Any, source: Any, size: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        pointer = ir.IntType(8).as_pointer()
        write, read = (builder.inttoptr(address, pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, write, read, args[2], 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _prefetch(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        flag = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag]),
            "llvm.prefetch.p0",
        )
        read, keep, data = (ir.Constant(flag, number) for number in (0, _KEEP, 1))
        builder.call(function, [builder.inttoptr(args[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _line_differs(typing_context: Any, left: Any, right: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        vector = ir.VectorType(ir.IntType(64), 8)
        left, right = (builder.inttoptr(address, vector.as_pointer()) for address in args)
        differ = builder.icmp_unsigned(
            "!=", builder.load(left, align=4), builder.load(right, align=4)
        )
        return builder.zext(builder.bitcast(differ, ir.IntType(8)), ir.IntType(64))

    return types.uint64(types.int64, types.int64), codegen


def _differing_words(typing_context: Any, left: Any, right: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        lanes, words = 16, ir.IntType(32)
        vector = ir.VectorType(words, lanes)
        mask = ir.Constant(ir.IntType(64), 0)
        left, right = (builder.inttoptr(address, vector.as_pointer()) for address in args)
        for part in range(64 // lanes):
            index = [ir.Constant(words, part)]
            differ = builder.icmp_unsigned(
                "!=",
                builder.load(builder.gep(left, index), align=4),
                builder.load(builder.gep(right, index), align=4),
            )
            bits = builder.zext(builder.bitcast(differ, ir.IntType(lanes)), mask.type)
            mask = builder.or_(mask, builder.shl(bits, ir.Constant(mask.type, part * lanes)))
        return mask

    return types.uint64(types.int64, types.int64), codegen


def _count_trailing_zeros(typing_context: Any, number: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


def _address_of(typing_context: Any, pointer: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(pointer), codegen


#: int32_at(address)[i] is the i-th 32-bit integer from an address on.
int32_at: Any = _pointer_to(types.int32)
#: The same with 64-bit integers.
int64_at: Any = _pointer_to(types.int64)
#: The same with 32-bit floats.
float32_at: Any = _pointer_to(types.float32)
#: The address that a pointer was made of.
address_of: Any = intrinsic(_address_of)
#: differing_words(left, right): bit i is set where the i-th of 64 words from two addresses differ.
differing_words: Any = intrinsic(_differing_words)
#: line_differs(left, right): 0 where the 64 bytes from two addresses are equal.
line_differs: Any = intrinsic(_line_differs)
#: count_trailing_zeros(n) of a number that is not 0.
count_trailing_zeros: Any = intrinsic(_count_trailing_zeros)
#: copy_bytes(target, source, size) between two addresses.
copy_bytes: Any = intrinsic(_copy_bytes)
#: prefetch(address) starts to fetch a cache line that is needed only once; the address need not be
#: valid.
prefetch: Any = intrinsic(_prefetch)
