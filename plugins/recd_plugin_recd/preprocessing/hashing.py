"""Hashes of ids by torch operations, on any device and in scripts.

The definitions are the public ones of TorchArrow's ``functional.sigrid_hash``: Thomas Wang's 64-bit
mix of an id, CityHash's combination of two 64-bit numbers, and a remainder that is never negative.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigrid_hash(ids: Tensor, salt: int, buckets: int) -> Tensor:
    """Hash int64 ids into [0, buckets)."""
    return torch.remainder(combine(torch.full_like(ids, salt), ids), buckets)


def combine(hashes: Tensor, ids: Tensor) -> Tensor:
    """Another id into each 64-bit hash; order matters."""
    city = -7070675565921424023  # 0x9DDFEA08EB382D69 as a signed number
    first = (_mix(ids) ^ hashes) * city
    first = first ^ _shifted(first, 47)
    second = (hashes ^ first) * city
    return (second ^ _shifted(second, 47)) * city


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
