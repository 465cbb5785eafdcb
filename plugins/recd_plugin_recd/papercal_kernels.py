"""The inner loops of the PAPERCAL generator.

Every random draw is a hash of what it is for (seed, session, position, feature), so that any row
can be made by itself, in any order, with the same outcome.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TO_UNIT = 1.0 / (1 << 53)
# An update that replaces a whole list moves its version on by more than any list is long.
REPLACED = 1024


@nb.njit(inline="always")
def mix(value: np.uint64) -> np.uint64:
    """The splitmix64 finalizer."""
    value = nb.uint64(value) + _GOLDEN
    value = (value ^ (value >> nb.uint64(30))) * nb.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> nb.uint64(27))) * nb.uint64(0x94D049BB133111EB)
    return value ^ (value >> nb.uint64(31))


@nb.njit(inline="always")
def draw(stream: np.uint64, counter: int) -> float:
    """A uniform number in [0, 1)."""
    return np.float64(mix(stream + nb.uint64(counter) * _GOLDEN) >> nb.uint64(11)) * _TO_UNIT


@nb.njit(cache=True)
def session_keys(seed: int, first: int, count: int) -> Int64s:
    """63-bit session ids, int64 ``[count]``."""
    stream = mix(nb.uint64(seed))
    keys = np.empty(count, np.int64)
    for i in range(count):
        keys[i] = nb.int64(mix(stream ^ nb.uint64(first + i)) >> nb.uint64(1))
    return keys


@nb.njit(cache=True)
def session_lengths(keys: Int64s, mean: float, sigma: float, longest: int) -> Int64s:
    """Lognormal rows a session, between 1 and ``longest``, int64 ``[num_sessions]``."""
    lengths = np.empty(len(keys), np.int64)
    mu = math.log(mean) - sigma * sigma / 2
    for i in range(len(keys)):
        stream = mix(nb.uint64(keys[i]) ^ nb.uint64(1))
        radius = math.sqrt(-2.0 * math.log(1.0 - draw(stream, 0)))
        normal = radius * math.cos(2.0 * math.pi * draw(stream, 1))
        lengths[i] = min(longest, max(1, round(math.exp(mu + sigma * normal))))
    return lengths


@nb.njit(cache=True)
def row_times(keys: Int64s, lengths: Int64s, starts: Int64s, duration: int) -> Int64s:
    """Times of every session's rows, ascending in the session, int64 ``[lengths.sum()]``."""
    times = np.empty(lengths.sum(), np.int64)
    row = 0
    for i in range(len(keys)):
        stream = mix(nb.uint64(keys[i]) ^ nb.uint64(2))
        for position in range(lengths[i]):
            times[row + position] = starts[i] + np.int64(draw(stream, position) * duration)
        times[row : row + lengths[i]].sort()
        row += lengths[i]
    return times


@nb.njit(cache=True)
def list_versions(
    keys: Int64s, positions: Int64s, keep: NDArray[np.float64], replace: float
) -> NDArray[np.int64]:
    """How far each clock has moved on at each row of its session, int64 ``[clocks, rows]``.

    A clock stands still with probability ``keep[clock]``, jumps by REPLACED with probability
    ``replace`` and else moves by one.
    """
    versions = np.empty((len(keep), len(keys)), np.int64)
    for clock in range(len(keep)):
        salt = mix(nb.uint64(clock + 1000))
        for row in range(len(keys)):
            version, first = 0, 1
            if row and keys[row] == keys[row - 1] and positions[row] > positions[row - 1]:
                version, first = versions[clock, row - 1], positions[row - 1] + 1
            stream = mix(nb.uint64(keys[row]) ^ salt)
            for position in range(first, positions[row] + 1):
                if draw(stream, 2 * position) >= keep[clock]:
                    version += REPLACED if draw(stream, 2 * position + 1) < replace else 1
            versions[clock, row] = version
    return versions


@nb.njit(cache=True)
def list_offsets(keys: Int64s, clock: int, mean_length: int) -> NDArray[np.int32]:
    """Offsets of a feature's lists, whose length is that of the session, int32 ``[rows + 1]``.

    Lengths are uniform over 0.5-1.5 times the mean, and at least 1.
    """
    offsets = np.zeros(len(keys) + 1, np.int32)
    salt = mix(nb.uint64(clock + 2000))
    for row in range(len(keys)):
        length = 1
        if mean_length > 1:
            length = max(1, round(mean_length * (0.5 + draw(nb.uint64(keys[row]) ^ salt, 0))))
        offsets[row + 1] = offsets[row] + length
    return offsets


@nb.njit(cache=True)
def list_values(
    keys: Int64s, versions: Int64s, offsets: NDArray[np.int32], feature: int, num_ids: int
) -> Int64s:
    """A feature's ids, int64 ``[offsets[-1]]``: at version v a window that starts at v.

    Ids are Zipf(1) over ``num_ids`` ranks, hashed to 63 bits.
    """
    values = np.empty(offsets[-1], np.int64)
    salt = mix(nb.uint64(feature + 3000))
    log_num_ids = math.log(num_ids)
    for row in range(len(keys)):
        start, length = offsets[row], offsets[row + 1] - offsets[row]
        made = 0
        if row and keys[row] == keys[row - 1]:
            step = versions[row] - versions[row - 1]
            for j in range(step, length):
                values[start + made] = values[offsets[row - 1] + j]
                made += 1
        stream = mix(nb.uint64(keys[row]) ^ salt)
        for j in range(made, length):
            rank = np.uint64(math.exp(log_num_ids * draw(stream, versions[row] + j)))
            values[start + j] = nb.int64(mix(rank ^ salt) >> nb.uint64(1))
    return values


@nb.njit(cache=True)
def uniforms(keys: Int64s, positions: Int64s, purpose: int) -> NDArray[np.float64]:
    """One uniform number in [0, 1) a row, float64 ``[rows]``."""
    out = np.empty(len(keys), np.float64)
    salt = mix(nb.uint64(purpose + 4000))
    for row in range(len(keys)):
        out[row] = draw(mix(nb.uint64(keys[row]) ^ salt), positions[row])
    return out


@nb.njit(cache=True)
def mean_effects(values: Int64s, offsets: NDArray[np.int32]) -> NDArray[np.float64]:
    """The mean over each row's ids of a hidden effect in [-1, 1), float64 ``[rows]``."""
    out = np.zeros(len(offsets) - 1, np.float64)
    for row in range(len(out)):
        for j in range(offsets[row], offsets[row + 1]):
            out[row] += 2.0 * draw(nb.uint64(values[j]), 7) - 1.0
        out[row] /= max(1, offsets[row + 1] - offsets[row])
    return out
