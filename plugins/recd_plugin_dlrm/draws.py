"""Counter-based random numbers, so that any process can reproduce any row independently.

A random number is a hash of its stream and a counter (splitmix64). After a change of
this file, clear Numba's cache: kernels in other files are not compiled again.
"""

from __future__ import annotations

import hashlib
import math

import numba as nb
import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TO_UNIT = 1.0 / (1 << 53)


def stream_of(*purpose: str | int) -> int:
    """Hash values such as a seed and a feature name to the 63-bit key of a random stream."""
    digest = hashlib.sha256(repr(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@nb.njit(inline="always")
def mix(value: np.uint64) -> np.uint64:
    """Hash a 64-bit value with the splitmix64 finalizer."""
    value = nb.uint64(value) + GOLDEN
    value = (value ^ (value >> nb.uint64(30))) * nb.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> nb.uint64(27))) * nb.uint64(0x94D049BB133111EB)
    return value ^ (value >> nb.uint64(31))


@nb.njit(inline="always")
def substream(stream: int, counter: int) -> np.uint64:
    """Return the key of the random stream of one row, where ``counter`` is the row number."""
    return mix(nb.uint64(stream) + nb.uint64(counter) * GOLDEN)


@nb.njit(inline="always")
def draw(stream: np.uint64, counter: int) -> float:
    """Return the ``counter``-th uniform random number in [0, 1) of a stream."""
    return np.float64(mix(stream + nb.uint64(counter) * GOLDEN) >> nb.uint64(11)) * _TO_UNIT


Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@nb.njit(cache=True, nogil=True)
def uniforms(stream: int, first_row: int, num_rows: int) -> NDArray[np.float64]:
    """Return one uniform random number in [0, 1) per row, float64 ``[num_rows]``."""
    out = np.empty(num_rows, np.float64)
    for i in range(num_rows):
        out[i] = draw(substream(stream, first_row + i), 0)
    return out


@nb.njit(cache=True, nogil=True)
def normals(stream: int, first_row: int, num_rows: int) -> NDArray[np.float64]:
    """Return one standard normal random number per row (Box-Muller), float64 ``[num_rows]``."""
    out = np.empty(num_rows, np.float64)
    for i in range(num_rows):
        of_row = substream(stream, first_row + i)
        radius = math.sqrt(-2.0 * math.log(1.0 - draw(of_row, 0)))
        out[i] = radius * math.cos(2.0 * math.pi * draw(of_row, 1))
    return out


@nb.njit(cache=True, nogil=True)
def list_offsets(stream: int, first_row: int, num_rows: int, most: int, fixed: bool) -> Int32s:
    """Return int32 offsets of lists of ``most`` ids if ``fixed``, else of 1 to ``most`` ids."""
    offsets = np.zeros(num_rows + 1, np.int32)
    for i in range(num_rows):
        length = most
        if not fixed:
            length = 1 + int(draw(substream(stream, first_row + i), 0) * most)
        offsets[i + 1] = offsets[i] + length
    return offsets


@nb.njit(cache=True, nogil=True)
def uniform_ids(stream: int, first_row: int, offsets: Int32s, num_ids: int) -> Int64s:
    """Return random ids from 0 to ``num_ids - 1`` for the lists, int64 ``[offsets[-1]]``."""
    out = np.empty(offsets[-1], np.int64)
    for i in range(len(offsets) - 1):
        of_row = substream(stream, first_row + i)
        for j in range(offsets[i], offsets[i + 1]):
            out[j] = np.int64(draw(of_row, j - offsets[i]) * num_ids)
    return out


@nb.njit(cache=True, nogil=True)
def _integral(x: float, exponent: float) -> float:
    """Return an antiderivative of ``x^-exponent``."""
    if exponent == 1.0:
        return math.log(x)
    return math.expm1((1.0 - exponent) * math.log(x)) / (1.0 - exponent)


@nb.njit(cache=True, nogil=True)
def _inverse_integral(y: float, exponent: float) -> float:
    if exponent == 1.0:
        return math.exp(y)
    return math.exp(math.log1p(y * (1.0 - exponent)) / (1.0 - exponent))


@nb.njit(cache=True, nogil=True)
def zipf_ids(stream: int, first_row: int, offsets: Int32s, num_ids: int, exponent: float) -> Int64s:
    """Return Zipf-distributed random ids for the lists, int64 ``[offsets[-1]]``.

    The probability of id k - 1 is proportional to ``k^-exponent``. Uses rejection-inversion
    (Hörmann and Derflinger, 1996), which is exact and needs no table of probabilities.
    """
    out = np.empty(offsets[-1], np.int64)
    top = _integral(1.5, exponent) - 1.0
    bottom = _integral(num_ids + 0.5, exponent)
    sure = 2.0 - _inverse_integral(_integral(2.5, exponent) - 2.0**-exponent, exponent)
    for i in range(len(offsets) - 1):
        of_row = substream(stream, first_row + i)
        for j in range(offsets[i], offsets[i + 1]):
            counter = j - offsets[i]
            while True:
                point = bottom + draw(of_row, counter) * (top - bottom)
                x = _inverse_integral(point, exponent)
                rank = math.floor(x + 0.5)
                if rank < 1:
                    rank = 1
                if rank > num_ids:
                    rank = num_ids
                if rank - x <= sure or point >= _integral(rank + 0.5, exponent) - rank**-exponent:
                    break
                # Retry with a counter that no other id of the row uses.
                counter += 1 << 32
            out[j] = rank - 1
    return out


@nb.njit(cache=True, nogil=True)
def add_effects(stream: int, offsets: Int32s, ids: Int64s, out: NDArray[np.float64]) -> None:
    """Add the effect of each row's ids on its label, with variance 1, to ``out[num_rows]``."""
    salt = mix(nb.uint64(stream))
    for i in range(len(out)):
        length = offsets[i + 1] - offsets[i]
        total = 0.0
        for j in range(offsets[i], offsets[i + 1]):
            total += 2.0 * draw(mix(nb.uint64(ids[j]) ^ salt), 0) - 1.0
        if length:
            out[i] += total * math.sqrt(3.0 / length)
