"""Bijective hash of 63-bit ids, and the hash of strings to such ids."""

from __future__ import annotations

from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ids = TypeVar("Ids", int, NDArray[np.int64], Tensor)

_U64 = np.uint64
_MODULUS = 2**63
_MASK = _MODULUS - 1
_FACTOR = 0xD6E8FEB86659FD93 & _MASK
_INVERSE_FACTOR = pow(_FACTOR, -1, _MODULUS)


def mix(ids: Ids) -> Ids:
    """Map 63-bit ids to uniformly spread 63-bit numbers, one to one.

    Args:
        ids: numbers from 0 to 2^63 - 1: a Python int, a NumPy array or a tensor, of dtype int64.

    Returns:
        Mixed ids of the same type, equal to the bit on every device.
    """
    ids = ids ^ (ids >> 32)
    ids = (ids * _FACTOR) & _MASK
    ids = ids ^ (ids >> 32)
    ids = (ids * _FACTOR) & _MASK
    return ids ^ (ids >> 32)


def unmix(mixed: Ids) -> Ids:
    """Return the ids of mixed ids: the inverse of ``mix``."""
    ids = mixed ^ (mixed >> 32)
    ids = (ids * _INVERSE_FACTOR) & _MASK
    ids = ids ^ (ids >> 32)
    ids = (ids * _INVERSE_FACTOR) & _MASK
    return ids ^ (ids >> 32)


@numba.njit(inline="always")
def mix_one(number: Any) -> Any:
    """Return ``mix`` of one int64 as uint64, for numba functions."""
    # Unsigned, because numba assumes that signed products do not overflow.
    mixed = _U64(number) ^ (_U64(number) >> _U64(32))
    mixed = (mixed * _U64(_FACTOR)) & _U64(_MASK)
    mixed = mixed ^ (mixed >> _U64(32))
    mixed = (mixed * _U64(_FACTOR)) & _U64(_MASK)
    return mixed ^ (mixed >> _U64(32))


def bucket_width(num_buckets: int) -> int:
    """Return the width of a bucket's range of mixed ids. The last bucket's may be wider."""
    return min(_MODULUS // num_buckets, _MASK)


def bucket_of(mixed: NDArray[np.int64], num_buckets: int) -> NDArray[np.int64]:
    """Return the bucket of each mixed id, from 0 to ``num_buckets - 1``, int64 ``[n]``."""
    return np.minimum(mixed // bucket_width(num_buckets), num_buckets - 1)
