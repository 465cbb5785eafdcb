"""Numba kernel of ``recd.sigrid_hash``, for CPU tensors."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

u64 = np.uint64
_CITY = 0x9DDFEA08EB382D69
_NARROW = 1 << 31


def hash_ids(values: Tensor, salt: int, buckets: int) -> Tensor:
    """Hash int64 ids into [0, buckets), buckets <= 2**48."""
    ids = values.contiguous().numpy()
    hashed = np.empty_like(ids)
    (_hash_narrow if buckets <= _NARROW else _hash)(ids, salt, buckets, hashed)
    return torch.from_numpy(hashed)


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
    """Variant of ``_hash`` for AVX2, twice as fast; ``buckets`` <= 2**31."""
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
