"""Which sessions stay when a table is downsampled: whole ones (RecD paper, section 7).

A session stays by its hash, xxhash64, which Spark computes too: a table thinned by either engine
has the same sessions, and so have tables of other days.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_recd.cluster.keys import plain_sessions

u64 = np.uint64
#: The seed of Spark's xxhash64, whose value for one column is the seed for the next.
_SEED = 42
#: Bits of a hash that are dropped: what is left is a whole number in float64.
DROPPED_BITS = 11
SCALE = float(1 << (64 - DROPPED_BITS))
_P1, _P2, _P3, _P4, _P5 = (
    u64(0x9E3779B185EBCA87),
    u64(0xC2B2AE3D27D4EB4F),
    u64(0x165667B19E3779F9),
    u64(0x85EBCA77C2B2AE63),
    u64(0x27D4EB2F165667C5),
)


def sessions_kept(sessions: Any, share: float, seed: int) -> NDArray[np.bool_]:
    """Whether the session of each row stays, bool ``[rows]``; ``sessions`` is an Arrow array."""
    return (hash_sessions(sessions, seed) >> u64(DROPPED_BITS)) < share * SCALE


def hash_sessions(sessions: Any, seed: int) -> NDArray[np.uint64]:
    """Return Spark's ``xxhash64(seed, session)``, with all numbers as 64-bit integers."""
    sessions = plain_sessions(sessions)
    if pt.is_integer(sessions.type):
        numbers = np.ascontiguousarray(sessions.to_numpy()).astype(np.int64, copy=False)
        data, offsets = numbers.view(np.uint8), np.arange(len(numbers) + 1) * 8
    else:
        packed = sessions.cast(pa.large_binary())
        _, ends, content = packed.buffers()
        offsets = np.frombuffer(ends, np.int64)[packed.offset : packed.offset + len(packed) + 1]
        data = np.frombuffer(content or b"", np.uint8)
    seeds = np.array([seed], np.int64).view(np.uint8)
    first = _xxhash64(seeds, np.array([0, 8]), u64(_SEED))[0]
    return _xxhash64(data, offsets, first)


@numba.njit(nogil=True, cache=True)
def _xxhash64(data: Any, offsets: Any, seed: Any) -> Any:
    """XXH64 of each ``data[offsets[i]:offsets[i + 1]]``, uint64."""
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for row in range(len(hashes)):
        at, end = offsets[row], offsets[row + 1]
        length = u64(end - at)
        if end - at >= 32:
            v1, v2, v3, v4 = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
            while at + 32 <= end:
                v1 = _round(v1, _word(data, at, 8))
                v2 = _round(v2, _word(data, at + 8, 8))
                v3 = _round(v3, _word(data, at + 16, 8))
                v4 = _round(v4, _word(data, at + 24, 8))
                at += 32
            mixed = _rotated(v1, 1) + _rotated(v2, 7) + _rotated(v3, 12) + _rotated(v4, 18)
            for lane in (v1, v2, v3, v4):
                mixed = (mixed ^ _round(u64(0), lane)) * _P1 + _P4
        else:
            mixed = seed + _P5
        mixed += length
        while at + 8 <= end:
            mixed = _rotated(mixed ^ _round(u64(0), _word(data, at, 8)), 27) * _P1 + _P4
            at += 8
        if at + 4 <= end:
            mixed = _rotated(mixed ^ (_word(data, at, 4) * _P1), 23) * _P2 + _P3
            at += 4
        while at < end:
            mixed = _rotated(mixed ^ (u64(data[at]) * _P5), 11) * _P1
            at += 1
        mixed = (mixed ^ (mixed >> u64(33))) * _P2
        mixed = (mixed ^ (mixed >> u64(29))) * _P3
        hashes[row] = mixed ^ (mixed >> u64(32))
    return hashes


@numba.njit(inline="always")
def _rotated(value: Any, bits: Any) -> Any:
    return (value << u64(bits)) | (value >> u64(64 - bits))


@numba.njit(inline="always")
def _round(lane: Any, word: Any) -> Any:
    return _rotated(lane + word * _P2, 31) * _P1


@numba.njit(inline="always")
def _word(data: Any, at: Any, size: Any) -> Any:
    """Little-endian bytes as a number."""
    word = u64(0)
    for index in range(size):
        word |= u64(data[at + index]) << u64(8 * index)
    return word
