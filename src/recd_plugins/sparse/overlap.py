"""Numba functions that read and write memory through addresses."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Locality of prefetched lines: first-level cache only (0) on AMD's Zen, all caches (3) on Intel,
# whose first cache loses such lines too early.
_KEEP = 0 if binding.get_host_cpu_name().startswith("znver") else 3


def _pointer_to(item: Any) -> Any:
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
        signature = types.CPointer(item)(types.int64)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, codegen

    return intrinsic(pointer)


def _copy_bytes(typing_context: Any, target: Any, source: Any, size: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        pointer = ir.IntType(8).as_pointer()
        write, read = (builder.inttoptr(address, pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, write, read, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _prefetch(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        flag = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
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


def _pointer_address(typing_context: Any, pointer: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(pointer), codegen


#: int32_at(address)[i] is the i-th 32-bit integer starting at an address.
int32_at: Any = _pointer_to(types.int32)
#: int64_at(address)[i] is the i-th 64-bit integer starting at an address.
int64_at: Any = _pointer_to(types.int64)
#: pointer_address(pointer) is its address.
pointer_address: Any = intrinsic(_pointer_address)
#: differing_words(left, right): bit i is set if the i-th of 64 words at two addresses differ.
differing_words: Any = intrinsic(_differing_words)
#: line_differs(left, right): 0 if the 64 bytes at two addresses are equal.
line_differs: Any = intrinsic(_line_differs)
#: count_trailing_zeros(n) of a number that is not 0.
count_trailing_zeros: Any = intrinsic(_count_trailing_zeros)
#: copy_bytes(target, source, size) between two addresses.
copy_bytes: Any = intrinsic(_copy_bytes)
#: prefetch(address) fetches a cache line for one use; the address need not be valid.
prefetch: Any = intrinsic(_prefetch)


u64 = np.uint64
#: Words compared at once, and bytes of a cache line.
_BLOCK, _LINE = 64, 64
#: Prefetch distance in bytes. Hardware prefetching ends with a sweep, at the first row that
#: differs.
_AHEAD = 8192
#: Rows per round: changed rows are processed while they are in the cache.
CHUNK = 32


@numba.njit(inline="always")
def offset_at(address: Any, wide: Any, row: Any) -> Any:
    """Return the offset of a row. ``wide`` selects 64-bit offsets instead of 32-bit."""
    if wide:
        return u64(int64_at(address)[row])
    return u64(int32_at(address)[row])


@numba.njit(inline="always")
def first_difference(words: Any, start: Any, back: Any, end: Any) -> Any:
    """Return the first i in [start, end) with words[i] != words[i - back], or ``end``."""
    address = pointer_address(words)
    at = start
    while at + u64(_BLOCK) <= end:
        left = address + np.int64(at << u64(2))
        for line in range(0, _BLOCK * 4, _LINE):
            prefetch(left + np.int64(_AHEAD + line))
        difference = differing_words(left, left - np.int64(back << u64(2)))
        if difference != u64(0):
            return at + count_trailing_zeros(difference)
        at += u64(_BLOCK)
    if at < end and end >= u64(_BLOCK) and end - back >= u64(_BLOCK):
        # The last block overlaps the previous words.
        first = end - u64(_BLOCK)
        left = address + np.int64(first << u64(2))
        difference = differing_words(left, left - np.int64(back << u64(2)))
        difference = (difference >> (at - first)) << (at - first)
        return end if difference == u64(0) else first + count_trailing_zeros(difference)
    while at < end and words[at] == words[at - back]:
        at += u64(1)
    return at


@numba.njit(inline="always")
def values_equal(words: Any, shift: Any, left: Any, right: Any) -> Any:
    """Return whether the values at indices ``left`` and ``right`` are equal."""
    if shift:
        left, right = left << u64(1), right << u64(1)
        return words[left] == words[right] and words[left + u64(1)] == words[right + u64(1)]
    return words[left] == words[right]


@numba.njit(inline="always")
def next_change(
    words: Any, shift: Any, offsets: Any, wide: Any, row: Any, stop: Any, num_rows: Any
) -> Any:
    """Return the first row, starting at ``row`` > 0, that differs from the previous row, and stop.

    Adjacent rows of equal length are compared in one sweep. The row is ``num_rows`` if no row
    differs. Pass 0 as ``stop`` at first, then the returned ``stop``, with the next row.
    """
    while row < num_rows:
        start = offset_at(offsets, wide, row)
        length = start - offset_at(offsets, wide, row - u64(1))
        if stop <= row:
            stop, end = row, start
            while stop < num_rows:
                next_end = offset_at(offsets, wide, stop + u64(1))
                if next_end - end != length:
                    break
                stop, end = stop + u64(1), next_end
            if stop == row:
                break
        else:
            end = offset_at(offsets, wide, stop)
        if length == u64(1):
            # Rows with a single id change often: a sweep would stop at each.
            value = start
            while value < end and values_equal(words, shift, value, value - u64(1)):
                value += u64(1)
            row += value - start
            if value < end:
                break
        else:
            first, last, stride = start << u64(shift), end << u64(shift), length << u64(shift)
            at = first_difference(words, first, stride, last)
            if at < last:
                row += (at - first) // stride
                break
            row = stop
    return row, stop


@numba.njit(inline="always")
def overlap(
    words: Any,
    shift: Any,
    previous: Any,
    previous_length: Any,
    current: Any,
    length: Any,
    max_shift: Any,
) -> Any:
    """Return the smallest k <= max_shift such that the current row begins with previous[k:].

    Returns -1 if there is no such k. The rows are equal if k is 0 and the lengths are equal. An
    empty row overlaps only with an empty row.
    """
    if length == u64(0) or previous_length == u64(0):
        return np.int64(0) if length == previous_length else np.int64(-1)
    found = np.int64(-1)
    for moved in range(min(u64(max_shift) + u64(1), previous_length)):
        first = previous + u64(moved)
        shared = previous_length - u64(moved)
        if shared <= length and values_equal(words, shift, first, current):
            start, end = current << u64(shift), (current + shared) << u64(shift)
            if first_difference(words, start, (current - first) << u64(shift), end) == end:
                found = np.int64(moved)
                break
    return found


@numba.njit(inline="always")
def bytes_differ(left: Any, back: Any, size: Any) -> Any:
    """Return whether ``size`` bytes (a multiple of 4) at ``left`` and at ``left - back`` differ."""
    difference = u64(0)
    if size >= _LINE:
        last = left + size - _LINE
        while left < last:
            prefetch(left + _AHEAD)
            difference |= line_differs(left, left - back)
            left += _LINE
        # The last line overlaps the one before.
        prefetch(last + _AHEAD)
        difference |= line_differs(last, last - back)
    else:
        words, others = int32_at(left), int32_at(left - back)
        for index in range(size >> 2):
            difference |= u64(words[index] ^ others[index])
    return difference != u64(0)


@numba.njit(inline="always")
def find_changes(
    values: Any, item: Any, offsets: Any, wide: Any, first: Any, end: Any, changed: Any, rows: Any
) -> Any:
    """Find the rows from ``first`` up to ``end`` that differ from the previous row.

    Row 0 counts as different. Sets the rows in ``changed``, uint8 ``[B]``, writes the row numbers
    to ``rows``, and returns how many rows differ. ``item`` is log2 of the size of a value in bytes.
    """
    count = 0
    start = np.int64(offset_at(offsets, wide, first)) << item
    back = np.int64(-1)
    if first > 0:
        back = start - (np.int64(offset_at(offsets, wide, first - 1)) << item)
    for row in range(first, end):
        stop = np.int64(offset_at(offsets, wide, row + 1)) << item
        size = stop - start
        differs = True
        if size == back:
            differs = bytes_differ(values + start, back, size)
        changed[row] = differs
        rows[count] = row
        count += differs
        start, back = stop, size
    return count
