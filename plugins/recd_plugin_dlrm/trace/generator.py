"""Algorithms 1 and 2 of the DLRM paper: LRU stack distances of a trace, and synthetic traces.

The LRU stack is an array with a Fenwick tree, with O(log n) time per access. Each access stores the
code of its id at the next position; a later access to the id resets that position to -1. The tree
counts occupied positions. The id at stack distance d is at the d-th occupied position from the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numba as nb
import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.draws import draw, mix, stream_of
from recd_plugins.api import DataError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


@nb.njit(cache=True, nogil=True)
def code_ids(
    ids: Int64s, keys: Int64s, codes: Int32s, unique: Int64s, num: int, out: Int32s
) -> int:
    """Map ids to consecutive codes with a hash table, and return the number of distinct ids."""
    mask = nb.uint64(len(keys) - 1)
    for i in range(len(ids)):
        key = ids[i]
        place = mix(nb.uint64(key)) & mask
        while codes[place] >= 0 and keys[place] != key:
            place = (place + nb.uint64(1)) & mask
        if codes[place] < 0:
            keys[place] = key
            codes[place] = num
            unique[num] = key
            num += 1
        out[i] = codes[place]
    return num


@nb.njit(cache=True, nogil=True)
def insert_ids(unique: Int64s, num: int, keys: Int64s, codes: Int32s) -> None:
    """Insert the first ``num`` ids of ``unique`` into an empty hash table."""
    mask = nb.uint64(len(keys) - 1)
    for code in range(num):
        place = mix(nb.uint64(unique[code])) & mask
        while codes[place] >= 0:
            place = (place + nb.uint64(1)) & mask
        keys[place] = unique[code]
        codes[place] = code


@nb.njit(cache=True, nogil=True)
def compact(at: Int32s, used: int, last: Int32s, new_tree: Int32s, new_at: Int32s) -> int:
    """Copy an LRU stack to new arrays without gaps. Return the number of used positions."""
    live = 0
    for position in range(1, used + 1):
        code = at[position]
        if code >= 0:
            live += 1
            new_at[live] = code
            last[code] = live
    for position in range(1, len(new_tree)):
        new_tree[position] += position <= live
        parent = position + (position & -position)
        if parent < len(new_tree):
            new_tree[parent] += new_tree[position]
    return live


@nb.njit(cache=True, nogil=True)
def _add(tree: Int32s, position: int, change: int) -> None:
    while position < len(tree):
        tree[position] += change
        position += position & -position


@nb.njit(cache=True, nogil=True)
def _sum_to(tree: Int32s, position: int) -> int:
    total = 0
    while position > 0:
        total += tree[position]
        position -= position & -position
    return total


@nb.njit(cache=True, nogil=True)
def _find(tree: Int32s, rank: int) -> int:
    """Return the position of the ``rank``-th occupied slot, counted from 1."""
    position, step = 0, len(tree) - 1
    while step:
        ahead = position + step
        if ahead < len(tree) and tree[ahead] < rank:
            position = ahead
            rank -= tree[ahead]
        step >>= 1
    return position + 1


@nb.njit(cache=True, nogil=True)
def stack_distances(
    codes: Int32s,
    out: Int64s,
    counts: Int64s,
    tree: Int32s,
    at: Int32s,
    last: Int32s,
    state: Int64s,
) -> int:
    """Run Algorithm 1 until no position is free. Return the number of distances in ``out``."""
    used, live = state[0], state[1]
    done = 0
    while done < len(codes) and used < len(at) - 1:
        code = codes[done]
        before = last[code]
        distance = 0
        if before == used and before > 0:
            distance = 1
        else:
            if before > 0:
                distance = live - _sum_to(tree, before - 1)
                _add(tree, before, -1)
                at[before] = -1
            else:
                live += 1
            used += 1
            at[used] = code
            last[code] = used
            _add(tree, used, 1)
        out[done] = distance
        counts[distance] += 1
        done += 1
    state[0], state[1] = used, live
    return done


@nb.njit(cache=True, nogil=True)
def _access(distance: int, tree: Int32s, at: Int32s, used: int, live: int) -> tuple[int, int, int]:
    """Access the id at a stack distance. Return its code, the used positions and the stack size."""
    if distance == 1:
        return at[used], used, live
    if distance == 0:
        code = live
        live += 1
    else:
        position = _find(tree, live - distance + 1)
        code = at[position]
        _add(tree, position, -1)
        at[position] = -1
    used += 1
    at[used] = code
    _add(tree, used, 1)
    return code, used, live


@nb.njit(cache=True, nogil=True)
def generate(
    out: Int32s,
    num_ids: int,
    distances: Int64s,
    cumulative: Float64s,
    counts: Int64s,
    seed: int,
    tree: Int32s,
    at: Int32s,
    state: Int64s,
) -> int:
    """Run Algorithm 2 until no position is free. Return the number of id codes in ``out``."""
    used, live, reach, drawn = state[0], state[1], state[2], state[3]
    stream = mix(nb.uint64(seed))
    done = 0
    while done < len(out) and used < len(at) - 1:
        while reach < len(distances) and distances[reach] <= live:
            reach += 1
        low = 1 if live == num_ids else 0
        base = cumulative[0] if low else 0.0
        point = base + draw(stream, drawn) * (cumulative[reach - 1] - base)
        high = reach - 1
        while low < high:
            middle = (low + high) >> 1
            if cumulative[middle] > point:
                high = middle
            else:
                low = middle + 1
        counts[low] += 1
        out[done], used, live = _access(distances[low], tree, at, used, live)
        done += 1
        drawn += 1
    state[0], state[1], state[2], state[3] = used, live, reach, drawn
    return done


#: Cache sizes at which hit rates are compared, as shares of the distinct ids.
SHARES = np.arange(1, 51) / 100


@dataclass(frozen=True, eq=False)
class TableTrace:
    """Profile of the id trace of one table (DLRM paper, Algorithm 1).

    Attributes:
        feature: the sparse feature; its table is ``t_<feature>``.
        ids: int64 ``[m]``, distinct ids in the order of first use.
        distances: int64 ``[k]``, the LRU stack distances that occur, in ascending order from 0.
        counts: int64 ``[k]``, number of accesses with each distance.
        rows: number of rows of the data.
    """

    feature: str
    ids: NDArray[np.int64]
    distances: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: int

    @property
    def table(self) -> str:
        return f"t_{self.feature}"

    @property
    def accesses(self) -> int:
        return int(self.counts.sum())

    @property
    def new_share(self) -> float:
        """Return p0 of the paper: the fraction of accesses to ids that did not occur before."""
        return float(self.counts[0] / self.accesses)

    @property
    def median_distance(self) -> int | None:
        """Return the median stack distance of repeated accesses, or None if no id repeats."""
        sums = np.cumsum(self.counts[1:])
        if not len(sums):
            return None
        return int(self.distances[1:][np.searchsorted(sums, (int(sums[-1]) + 1) // 2)])

    def weights(self, min_new: float = 0.0) -> NDArray[np.float64]:
        """Return the probability of each distance, ``[k]``; distance 0 has at least ``min_new``."""
        weights = self.counts / self.accesses
        raised = max(weights[0], min_new)
        if len(weights) > 1:
            weights[1:] *= (1 - raised) / (1 - weights[0])
            weights[0] = raised
        return weights

    def cache_sizes(self) -> NDArray[np.int64]:
        """Return cache sizes in rows, one for each fraction of the distinct ids in ``SHARES``."""
        return np.maximum(1, np.round(SHARES * len(self.ids))).astype(np.int64)

    def hit_rates(
        self,
        sizes: NDArray[np.int64],
        counts: NDArray[np.int64] | NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Return the hit rates of LRU caches with ``sizes`` rows, float64 ``[len(sizes)]``.

        ``counts`` are the numbers of accesses with each distance; None means ``self.counts``.
        """
        counts = self.counts if counts is None else counts
        hits = np.concatenate(([0.0], np.cumsum(counts[1:])))
        return hits[np.searchsorted(self.distances[1:], sizes, side="right")] / counts.sum()


# Initial number of positions of a stack, a power of two.
_LEAST = 1 << 12
# Accesses between two checks for enough space for new ids.
_PIECE = 1 << 16


class LruStack:
    """State of an LRU stack of id codes, for the Numba kernels. m ids need 2m to 4m positions.

    Attributes:
        tree, at, last: int32, Fenwick tree, code at each position, and last position per code.
        state: int64 ``[4]``: used positions, stack size, and two values of the generator.
    """

    def __init__(self) -> None:
        self.tree = np.zeros(_LEAST + 1, np.int32)
        self.at = np.full(_LEAST + 1, -1, np.int32)
        self.last = np.zeros(0, np.int32)
        self.state = np.zeros(4, np.int64)

    def make_room(self) -> None:
        """Move the stack to larger arrays if all positions are used."""
        used, live = int(self.state[0]), int(self.state[1])
        if used < len(self.at) - 1:
            return
        size = max(_LEAST, 1 << (2 * live - 1).bit_length())
        tree, at = np.zeros(size + 1, np.int32), np.full(size + 1, -1, np.int32)
        self.state[0] = compact(self.at, used, self.last, tree, at)
        self.tree, self.at = tree, at


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    """Return a copy of the array with at least ``size`` values, padded with zeros."""
    if size <= len(array):
        return array
    larger = np.zeros(max(size, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


class StackDistances:
    """Computes LRU stack distances piece by piece, in O(log m) per access for m distinct ids."""

    def __init__(self) -> None:
        self.accesses = 0
        self._stack = LruStack()
        self._keys = np.zeros(2 * _PIECE, np.int64)
        self._codes = np.full(2 * _PIECE, -1, np.int32)
        self._unique = np.zeros(_PIECE, np.int64)
        self._num_ids = 0
        self._counts = np.zeros(_PIECE + 1, np.int64)

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the LRU stack distance of each id, int64 ``[n]``, or 0 for an id that is new."""
        out = np.empty(len(ids), np.int64)
        for first in range(0, len(ids), _PIECE):
            self._add(ids[first : first + _PIECE], out[first : first + _PIECE])
        self.accesses += len(ids)
        return out

    def trace(self, feature: str, rows: int | None = None) -> TableTrace:
        """Return the profile of all ids so far. ``rows`` defaults to the number of accesses."""
        distances = np.flatnonzero(self._counts)
        return TableTrace(
            feature=feature,
            ids=self._unique[: self._num_ids].copy(),
            distances=distances,
            counts=self._counts[distances],
            rows=self.accesses if rows is None else rows,
        )

    def _add(self, ids: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        most = self._num_ids + len(ids)
        if 2 * most > len(self._keys):
            size = 1 << (2 * most).bit_length()
            self._keys, self._codes = np.zeros(size, np.int64), np.full(size, -1, np.int32)
            insert_ids(self._unique, self._num_ids, self._keys, self._codes)
        self._unique = _grown(self._unique, most)
        codes = np.empty(len(ids), np.int32)
        self._num_ids = code_ids(ids, self._keys, self._codes, self._unique, self._num_ids, codes)
        self._counts = _grown(self._counts, self._num_ids + 1)
        stack, done = self._stack, 0
        stack.last = _grown(stack.last, self._num_ids)
        while done < len(codes):
            stack.make_room()
            done += stack_distances(
                codes[done:],
                out[done:],
                self._counts,
                stack.tree,
                stack.at,
                stack.last,
                stack.state,
            )


def profile_ids(ids: NDArray[np.int64], feature: str = "id") -> TableTrace:
    """Profile a complete trace of ids, int64 ``[n]``."""
    distances = StackDistances()
    distances.add(np.ascontiguousarray(ids, np.int64))
    return distances.trace(feature)


class TraceGenerator:
    """Generates a synthetic trace in pieces, in O(log m + log k) per access.

    Each access draws a stack distance from the profile, limited to the number of ids so far.
    Distance 0 yields a new id. The result does not depend on the size of the pieces.

    Attributes:
        new_share: the probability p0 of a new id, at least ``min_new``.
        counts: int64 ``[k]``, number of accesses so far with each distance of the profile.
    """

    def __init__(self, profile: TableTrace, seed: int = 0, min_new: float = 0.0) -> None:
        self.profile = profile
        self.counts = np.zeros(len(profile.counts), np.int64)
        self._seed = seed
        weights = profile.weights(min_new)
        self.new_share = float(weights[0])
        self._cumulative = np.cumsum(weights)
        self._stack = LruStack()
        self._stack.last = np.zeros(len(profile.ids), np.int32)

    @property
    def accesses(self) -> int:
        """Return the number of accesses so far."""
        return int(self._stack.state[3])

    @property
    def num_ids(self) -> int:
        """Return the number of distinct ids so far."""
        return int(self._stack.state[1])

    def draw(self, accesses: int) -> NDArray[np.int64]:
        """Generate the next ids of the trace, int64 ``[accesses]``."""
        profile, stack = self.profile, self._stack
        if len(profile.distances) == 1 and self.accesses + accesses > len(profile.ids):
            raise DataError(
                f"table {profile.table!r}: the original trace repeats no id, so a synthetic trace "
                f"can have at most {len(profile.ids):,} accesses. Reduce the number of accesses."
            )
        codes = np.empty(accesses, np.int32)
        done = 0
        while done < accesses:
            stack.make_room()
            done += generate(
                codes[done:],
                len(profile.ids),
                profile.distances,
                self._cumulative,
                self.counts,
                self._seed,
                stack.tree,
                stack.at,
                stack.state,
            )
        return profile.ids[codes]


#: Maximum difference of hit rates that ``least_new`` accepts.
WITHIN = 0.005
# Number of p0 values that ``least_new`` tries.
_TRIED = 64


def expected_counts(profile: TableTrace, accesses: int) -> Callable[[float], NDArray[np.float64]]:
    """Return a function from ``min_new`` to the expected accesses per distance, float64 ``[k]``."""
    num_ids = len(profile.ids)
    sums = np.concatenate(([0.0], np.cumsum(profile.counts[1:]) / profile.accesses))
    within = sums[np.searchsorted(profile.distances[1:], np.arange(num_ids), side="right")]
    # Sum of P over stages 0 to s - 1.
    sums_of_within = np.concatenate(([0.0], np.cumsum(within)))

    def counts(min_new: float) -> NDArray[np.float64]:
        weights = profile.weights(min_new)
        old_rest, rest = 1 - profile.new_share, 1 - weights[0]
        lowered = rest / old_rest if old_rest else 1.0
        ends = np.arange(num_ids + 1) + sums_of_within * (lowered / weights[0])
        stages = float(np.interp(accesses, ends, np.arange(num_ids + 1)))
        expected = weights / weights[0] * np.maximum(0.0, stages - profile.distances)
        expected[0] = stages
        left = accesses - float(ends[-1])
        if left > 0 and len(weights) > 1:
            expected[1:] += left * weights[1:] / weights[1:].sum()
        return expected

    return counts


def worst_difference(profile: TableTrace, counts: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Return the largest difference of LRU hit rates between ``profile`` and ``counts``.

    Compares caches of 1 % to 50 % of the ids. ``counts`` has the accesses with each distance.
    """
    sizes = profile.cache_sizes()
    return float(np.abs(profile.hit_rates(sizes) - profile.hit_rates(sizes, counts)).max())


def least_new(profile: TableTrace, accesses: int, within: float = WITHIN) -> float:
    """Return the lowest fraction of new ids (p0) that changes LRU hit rates by ``within`` or less.

    Returns the p0 with the smallest change of the profile's hit rates if all exceed ``within``.
    """
    expected = expected_counts(profile, accesses)
    own = profile.new_share
    tried = [own]
    if own < 1:
        # Even steps of the odds from the trace's own to a million to one.
        odds = np.geomspace(own / (1 - own), 1e6, _TRIED)
        tried += [float(each / (1 + each)) for each in odds[1:] if each > odds[0]]
    differences = []
    for share in tried:
        differences.append(worst_difference(profile, expected(share)))
        if differences[-1] <= within:
            return share
    return tried[int(np.argmin(differences))]


def generator_of(
    profile: TableTrace, accesses: int, seed: int, min_new: float | None
) -> TraceGenerator:
    """Return a trace generator for one table. If ``min_new`` is None, use ``least_new``."""
    share = least_new(profile, accesses) if min_new is None else min_new
    return TraceGenerator(profile, stream_of(seed, "trace", profile.feature), share)
