"""Random draws by what they are for: any draw can be made alone, in any process, with one outcome.

A draw is a hash of its stream and a counter (splitmix64). Numba notices no change of this file in
kernels of others.
"""

from __future__ import annotations

import hashlib

import numba as nb
import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TO_UNIT = 1.0 / (1 << 53)


def stream_of(*purpose: str | int) -> int:
    """The stream of one purpose, such as a seed and a feature, in 63 bits."""
    digest = hashlib.sha256(repr(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@nb.njit(inline="always")
def mix(value: np.uint64) -> np.uint64:
    """The splitmix64 finalizer."""
    value = nb.uint64(value) + GOLDEN
    value = (value ^ (value >> nb.uint64(30))) * nb.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> nb.uint64(27))) * nb.uint64(0x94D049BB133111EB)
    return value ^ (value >> nb.uint64(31))


@nb.njit(inline="always")
def substream(stream: int, counter: int) -> np.uint64:
    """A stream of its own for one row."""
    return mix(nb.uint64(stream) + nb.uint64(counter) * GOLDEN)


@nb.njit(inline="always")
def draw(stream: np.uint64, counter: int) -> float:
    """A uniform number in [0, 1)."""
    return np.float64(mix(stream + nb.uint64(counter) * GOLDEN) >> nb.uint64(11)) * _TO_UNIT
