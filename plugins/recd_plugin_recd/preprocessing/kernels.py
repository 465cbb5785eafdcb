"""Numba kernels for CPU tensors, used by the modules in ``modules``."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

u32, u64 = np.uint32, np.uint64
_CITY = 0x9DDFEA08EB382D69
_LOW_63 = (1 << 63) - 1
_BLOCK = 1024
_NARROW = 1 << 31


def hash_ids(values: Tensor, salt: int, buckets: int) -> Tensor:
    """Hash int64 ids on the CPU to the range [0, buckets). ``buckets`` is at most 2**48."""
    ids = values.contiguous().numpy()
    hashed = np.empty_like(ids)
    (_hash_narrow if buckets <= _NARROW else _hash)(ids, salt, buckets, hashed)
    return torch.from_numpy(hashed)


def first_of_rows(values: Tensor, offsets: Tensor, new_offsets: Tensor) -> Tensor:
    """Return the first values of each row. ``new_offsets`` are the offsets of the result."""
    taken = values.new_empty(int(new_offsets[-1]))
    rows = values.contiguous().numpy(), offsets.contiguous().numpy()
    _take(*rows, new_offsets.numpy(), taken.numpy())
    return taken


def hash_windows(values: Tensor, offsets: Tensor, new_offsets: Tensor, n: int, salt: int) -> Tensor:
    """Return a 63-bit hash of each ``n`` consecutive ids in a row. Order matters."""
    hashes = values.new_empty(int(new_offsets[-1]))
    rows = values.contiguous().numpy(), offsets.contiguous().numpy()
    _hash_windows(*rows, new_offsets.numpy(), n, salt, hashes.numpy())
    return hashes


def count_below(values: Tensor, borders: Tensor) -> Tensor:
    """Return the number of ``borders`` below each value, in the dtype of the values."""
    numbers = values.contiguous().numpy()
    counts = np.empty_like(numbers)
    _count_below(numbers, borders.numpy(), counts)
    return torch.from_numpy(counts)


@numba.njit(inline="always")
def _combine(upper: Any, identifier: Any) -> Any:
    key = u64(identifier)
    key = ~key + (key << u64(21))
    key ^= key >> u64(24)
    key = key + (key << u64(3)) + (key << u64(8))
    key ^= key >> u64(14)
    key = key + (key << u64(2)) + (key << u64(4))
    key ^= key >> u64(28)
    key += key << u64(31)
    city = u64(_CITY)
    first = (key ^ upper) * city
    first ^= first >> u64(47)
    second = (first ^ upper) * city
    second ^= second >> u64(47)
    return second * city


@numba.njit(cache=True, nogil=True)
def _hash_narrow(ids: Any, salt: Any, buckets: Any, out: Any) -> None:
    """Faster variant of ``_hash`` for AVX2. ``buckets`` is at most 2**31."""
    upper = u64(salt)
    modulus, inverse = float(buckets), 1.0 / buckets
    for index in range(len(ids)):
        hashed = _combine(upper, ids[index])
        # 48 bits, and then what is left of them and 16 more: floats hold both without rounding.
        # Quotients are off by less than one, so that what is left is in [-buckets, 2 * buckets).
        rest = float(np.int32(np.int64(hashed) >> 32)) * 65536.0
        rest += float(np.int32((hashed >> u64(16)) & u64(0xFFFF)))
        rest -= np.floor(rest * inverse) * modulus
        rest = rest * 65536.0 + float(np.int32(hashed & u64(0xFFFF)))
        rest -= np.floor(rest * inverse) * modulus
        rest = rest + modulus if rest < 0 else rest
        rest = rest - modulus if rest >= modulus else rest
        out[index] = np.int64(np.int32(rest))


@numba.njit(cache=True, nogil=True)
def _hash(ids: Any, salt: Any, buckets: Any, out: Any) -> None:
    upper = u64(salt)
    inverse = 1.0 / buckets
    for index in range(len(ids)):
        # Floor modulo without a division, which SIMD lacks. The quotient as a float is off by a
        # relative 2**-52, so what is left of 64 bits is under 2**12 + 2 * buckets; a second round
        # is off by one at most.
        rest = np.int64(_combine(upper, ids[index]))
        rest -= np.int64(np.floor(rest * inverse)) * buckets
        rest -= np.int64(np.floor(rest * inverse)) * buckets
        if rest < 0:
            rest += buckets
        if rest >= buckets:
            rest -= buckets
        out[index] = rest


@numba.njit(cache=True, nogil=True)
def _take(values: Any, offsets: Any, new_offsets: Any, out: Any) -> None:
    for row in range(len(new_offsets) - 1):
        shift = np.int64(offsets[row]) - np.int64(new_offsets[row])
        for at in range(new_offsets[row], new_offsets[row + 1]):
            out[at] = values[at + shift]


@numba.njit(cache=True, nogil=True)
def _hash_windows(values: Any, offsets: Any, new_offsets: Any, n: Any, salt: Any, out: Any) -> None:
    for row in range(len(new_offsets) - 1):
        shift = np.int64(offsets[row]) - np.int64(new_offsets[row])
        for at in range(new_offsets[row], new_offsets[row + 1]):
            key = u64(salt)
            for index in range(at + shift, at + shift + n):
                key = _combine(key, values[index])
            out[at] = np.int64(key & u64(_LOW_63))


@numba.njit(cache=True, nogil=True)
def _count_below(values: Any, borders: Any, out: Any) -> None:
    """Binary search for blocks of values, so that each step uses SIMD and has no branches."""
    counts = np.empty(_BLOCK, u32)
    for start in range(0, len(values), _BLOCK):
        block, counted = values[start : start + _BLOCK], out[start : start + _BLOCK]
        counts[:] = 0
        left = len(borders)
        while left > 0:
            half = u32(left - left // 2)
            for at in range(len(block)):
                below = not (block[at] <= borders[counts[at] + half - u32(1)])
                counts[at] += half if below else u32(0)
            left //= 2
        for at in range(len(block)):
            counted[at] = counts[at]
