"""What compiled code needs to work on memory by address; for use inside numba functions only."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


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
        read, keep, data = (ir.Constant(flag, number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


#: int32_at(address)[i] is the i-th 32-bit integer from an address on.
int32_at: Any = _pointer_to(types.int32)
#: The same with 64-bit integers.
int64_at: Any = _pointer_to(types.int64)
#: copy_bytes(target, source, size) between two addresses.
copy_bytes: Any = intrinsic(_copy_bytes)
#: prefetch(address) starts to fetch a cache line; the address need not be a valid one.
prefetch: Any = intrinsic(_prefetch)
