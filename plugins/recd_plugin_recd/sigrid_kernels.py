"""sigrid_hash: salt and id, mixed by Thomas Wang's function, combined, then floor modulo.

The definition is the public one of TorchArrow's ``functional.sigrid_hash``: the 64-bit mix of the
id, CityHash's combination of two 64-bit numbers with the salt first, and the remainder, never
negative, of the result as a signed integer.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

u64 = np.uint64
_CITY = 0x9DDFEA08EB382D69


def hash_on_cpu(values: Tensor, salt: int, buckets: int) -> Tensor:
    """Hash int64 ids in CPU memory into [0, buckets), buckets <= 2**48."""
    ids = values.contiguous().numpy()
    hashed = np.empty_like(ids)
    _hash(ids, salt, buckets, hashed)
    return torch.from_numpy(hashed)


def hash_by_torch(values: Tensor, salt: int, buckets: int) -> Tensor:
    """The same by torch operations on any device."""
    city = _CITY - (1 << 64)
    low = _mix(values)
    first = (low ^ salt) * city
    first = first ^ _shifted(first, 47)
    second = (first ^ salt) * city
    return torch.remainder((second ^ _shifted(second, 47)) * city, buckets)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's fills with the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _mix(ids: Tensor) -> Tensor:
    ids = ~ids + (ids << 21)
    ids = ids ^ _shifted(ids, 24)
    ids = ids + (ids << 3) + (ids << 8)
    ids = ids ^ _shifted(ids, 14)
    ids = ids + (ids << 2) + (ids << 4)
    ids = ids ^ _shifted(ids, 28)
    return ids + (ids << 31)


@numba.njit(cache=True, nogil=True)
def _hash(ids: Any, salt: Any, buckets: Any, out: Any) -> None:
    upper, city = u64(salt), u64(_CITY)
    inverse = 1.0 / buckets
    for index in range(len(ids)):
        key = u64(ids[index])
        key = ~key + (key << u64(21))
        key ^= key >> u64(24)
        key = key + (key << u64(3)) + (key << u64(8))
        key ^= key >> u64(14)
        key = key + (key << u64(2)) + (key << u64(4))
        key ^= key >> u64(28)
        key += key << u64(31)
        first = (key ^ upper) * city
        first ^= first >> u64(47)
        second = (first ^ upper) * city
        second ^= second >> u64(47)
        # Floor modulo without a division, which SIMD lacks. The quotient as a float is off by a
        # relative 2**-52, so what is left of 64 bits is under 2**12 + 2 * buckets; a second round
        # is off by one at most.
        rest = np.int64(second * city)
        rest -= np.int64(np.floor(rest * inverse)) * buckets
        rest -= np.int64(np.floor(rest * inverse)) * buckets
        if rest < 0:
            rest += buckets
        if rest >= buckets:
            rest -= buckets
        out[index] = rest
