"""What is known of the trace of one table: its ids, and the distribution of stack distances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.draws import stream_of
from recd_plugin_dlrm.trace import kernels
from recd_plugins.api import DataError

#: Sizes of caches that hit rates are compared at, as shares of the distinct ids.
SHARES = np.arange(1, 51) / 100


@dataclass(frozen=True, eq=False)
class TableTrace:
    """The profile of one table's trace: DLRM paper, Algorithm 1.

    Attributes:
        feature: whose ids these are; its table is ``t_<feature>``.
        ids: int64 ``[m]``, distinct, in the order of first use.
        distances: int64 ``[k]``: LRU stack distances that occur, rising. The first is 0, of ids
            that are new.
        counts: int64 ``[k]``: how many accesses have each.
        rows: of data that had these ids.
    """

    feature: str
    ids: NDArray[np.int64]
    distances: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: int

    @property
    def table(self) -> str:
        """The name that the built-in models give the table."""
        return f"t_{self.feature}"

    @property
    def accesses(self) -> int:
        return int(self.counts.sum())

    @property
    def new_share(self) -> float:
        """The share of accesses that are the first of their id: the paper's p0."""
        return float(self.counts[0] / self.accesses)

    @property
    def median_distance(self) -> int | None:
        """The median of accesses that are not the first of their id; None where there are none."""
        sums = np.cumsum(self.counts[1:])
        if not len(sums):
            return None
        return int(self.distances[1:][np.searchsorted(sums, (int(sums[-1]) + 1) // 2)])

    def weights(self, min_new: float = 0.0) -> NDArray[np.float64]:
        """The distribution of distances with a share of new ids of at least ``min_new``.

        p0 is raised to it, and the others are lowered in proportion so that the sum stays 1: the
        paper does so for synthetic traces that are too short to see all ids otherwise.

        Args:
            min_new: at least 0 and below 1.

        Returns:
            float64 ``[k]``.
        """
        weights = self.counts / self.accesses
        raised = max(weights[0], min_new)
        if len(weights) > 1:
            weights[1:] *= (1 - raised) / (1 - weights[0])
            weights[0] = raised
        return weights

    def cache_sizes(self) -> NDArray[np.int64]:
        """Rows of caches of ``SHARES`` of the ids, at least one."""
        return np.maximum(1, np.round(SHARES * len(self.ids))).astype(np.int64)

    def hit_rates(
        self,
        sizes: NDArray[np.int64],
        counts: NDArray[np.int64] | NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Hit rates of LRU caches, which hit where the distance is 1 to their size.

        Args:
            sizes: int64 ``[s]``, rows.
            counts: ``[k]``, of another trace with the same distances; this one's without it.
        """
        counts = self.counts if counts is None else counts
        hits = np.concatenate(([0.0], np.cumsum(counts[1:])))
        return hits[np.searchsorted(self.distances[1:], sizes, side="right")] / counts.sum()


def total_variation(
    first: NDArray[np.int64] | NDArray[np.float64], second: NDArray[np.int64] | NDArray[np.float64]
) -> float:
    """Half the sum of absolute differences of two distributions over the same values, ``[k]``."""
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


# Positions of a new stack; a power of two, as always.
_LEAST = 1 << 12
_MOST_IDS = 1 << 29


class LruStack:
    """Codes of ids by how recently they were accessed, as ``kernels`` use it.

    Positions that were used are freed when all are used up, so that a stack of m ids has 2m to 4m
    positions of 8 bytes each, and for a moment twice that, however long a trace is.

    Attributes:
        tree, at, last: int32; see ``kernels``.
        state: int64 ``[4]``: positions used and ids in the stack, and two more for the generator.
    """

    def __init__(self) -> None:
        self.tree = np.zeros(_LEAST + 1, np.int32)
        self.at = np.full(_LEAST + 1, -1, np.int32)
        self.last = np.zeros(0, np.int32)
        self.state = np.zeros(4, np.int64)

    def make_room(self) -> None:
        """Free positions where all are used up."""
        used, live = int(self.state[0]), int(self.state[1])
        if used < len(self.at) - 1:
            return
        if live > _MOST_IDS:
            raise MemoryError(f"an LRU stack holds at most {_MOST_IDS:,} ids")
        size = max(_LEAST, 1 << (2 * live - 1).bit_length())
        tree, at = np.zeros(size + 1, np.int32), np.full(size + 1, -1, np.int32)
        self.state[0] = kernels.compact(self.at, used, self.last, tree, at)
        self.tree, self.at = tree, at

    def know(self, num_ids: int) -> None:
        """Have a place in ``last`` for so many ids."""
        if num_ids > len(self.last):
            self.last = grown(self.last, num_ids)


def grown(array: np.ndarray, size: int) -> np.ndarray:
    """The same values with room for ``size`` at least, zeros behind them."""
    larger = np.zeros(max(size, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


class TraceGenerator:
    """Draws a trace piece by piece, in O(log m + log k) an access.

    At each access the distance is drawn from those within the ids that are out, with their shares
    of the profile; 0 puts out the next id, and is no choice any more when all are out. Access i is
    the same however the trace is cut into pieces. Holds about 50 bytes a distinct id.

    Args:
        profile: of the trace to imitate.
        seed: of the draws.
        min_new: p0 is raised to this at least; see ``TableTrace.weights``.

    Attributes:
        new_share: the p0 that it draws with.
        counts: int64 ``[k]``: accesses so far, by the distances of the profile.
    """

    def __init__(self, profile: TableTrace, seed: int = 0, min_new: float = 0.0) -> None:
        self.profile = profile
        self.counts = np.zeros(len(profile.counts), np.int64)
        self._seed = seed
        weights = profile.weights(min_new)
        self.new_share = float(weights[0])
        self._cumulative = np.cumsum(weights)
        self._stack = LruStack()
        self._stack.know(len(profile.ids))

    @property
    def accesses(self) -> int:
        """Drawn so far."""
        return int(self._stack.state[3])

    @property
    def num_ids(self) -> int:
        """Distinct ids that are out."""
        return int(self._stack.state[1])

    def draw(self, accesses: int) -> NDArray[np.int64]:
        """The ids of the next accesses, int64 ``[accesses]``.

        Raises:
            DataError: the profile's trace never had an id twice, and all ids are out.
        """
        profile, stack = self.profile, self._stack
        if len(profile.distances) == 1 and self.accesses + accesses > len(profile.ids):
            raise DataError(
                f"table {profile.table}: in the trace that was profiled no id came twice, so a "
                f"synthetic one has at most its {len(profile.ids):,} accesses"
            )
        codes = np.empty(accesses, np.int32)
        done = 0
        while done < accesses:
            stack.make_room()
            done += kernels.generate(
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

    def pieces(self, accesses: int, size: int) -> Iterator[NDArray[np.int64]]:
        """The next accesses in pieces of ``size``, the last one shorter."""
        for first in range(0, accesses, size):
            yield self.draw(min(size, accesses - first))


def replay(ids: NDArray[np.int64], distances: NDArray[np.int64]) -> NDArray[np.int64]:
    """The trace that has these distances: that of which ``StackDistances`` found them.

    Args:
        ids: int64 ``[m]`` in the order of first use.
        distances: int64 ``[n]``.

    Raises:
        DataError: a distance is deeper than the ids that are out by then, or too many are 0.
    """
    stack = LruStack()
    stack.know(len(ids))
    codes = np.empty(len(distances), np.int32)
    num_new = np.cumsum(distances == 0)
    too_deep = (distances < 0) | (distances > num_new) | (num_new > len(ids))
    if too_deep.any():
        access = int(too_deep.argmax())
        raise DataError(
            f"access {access} (from 0) has distance {distances[access]}, which is none of an LRU "
            f"stack of {num_new[access]} ids; the trace has {len(ids)}"
        )
    done = 0
    while done < len(codes):
        stack.make_room()
        done += kernels.replay(codes[done:], distances[done:], stack.tree, stack.at, stack.state)
    return ids[codes]


#: Hit rates are to differ by half a point at most, so that noise has room within one.
WITHIN = 0.005
# Values of p0 between its own and 1 that are looked at, more and more of them.
_TRIED = 64


class ExpectedTrace:
    """What synthetic traces of ``accesses`` accesses have in the mean.

    Args:
        profile: that they are drawn from.
        accesses: of each.
    """

    def __init__(self, profile: TableTrace, accesses: int) -> None:
        self._profile = profile
        self._accesses = accesses
        num_ids = len(profile.ids)
        sums = np.concatenate(([0.0], np.cumsum(profile.counts[1:]) / profile.accesses))
        stages = np.arange(num_ids)
        within = sums[np.searchsorted(profile.distances[1:], stages, side="right")]
        # Of stages 0 to s - 1: the sum of P.
        self._sums_of_within = np.concatenate(([0.0], np.cumsum(within)))

    def counts(self, min_new: float) -> NDArray[np.float64]:
        """Accesses by distance where p0 is raised to ``min_new``, float64 ``[k]``."""
        profile = self._profile
        weights = profile.weights(min_new)
        num_ids = len(profile.ids)
        old_rest, rest = 1 - profile.new_share, 1 - weights[0]
        lowered = rest / old_rest if old_rest else 1.0
        ends = np.arange(num_ids + 1) + self._sums_of_within * (lowered / weights[0])
        stages = float(np.interp(self._accesses, ends, np.arange(num_ids + 1)))
        per_stage = weights / weights[0]
        expected = per_stage * np.maximum(0.0, stages - profile.distances)
        expected[0] = stages
        left = self._accesses - float(ends[-1])
        if left > 0 and len(weights) > 1:
            expected[1:] += left * weights[1:] / weights[1:].sum()
        return expected

    def worst_difference(self, min_new: float) -> float:
        """The largest difference of hit rates at ``TableTrace.cache_sizes``."""
        return worst_difference(self._profile, self.counts(min_new))


def worst_difference(profile: TableTrace, counts: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """The largest difference of hit rates of a profile and of a trace with ``counts``, in shares.

    Over LRU caches of 1 % to 50 % of the ids.
    """
    sizes = profile.cache_sizes()
    return float(np.abs(profile.hit_rates(sizes) - profile.hit_rates(sizes, counts)).max())


def least_new(profile: TableTrace, accesses: int, within: float = WITHIN) -> float:
    """The least p0 whose hit rates are expected ``within`` the original's, else the best one.

    About the least: 64 are tried. With more than its own p0 a trace has its ids earlier.
    """
    expected = ExpectedTrace(profile, accesses)
    own = profile.new_share
    tried = [own]
    if own < 1:
        # Even steps of the odds from the trace's own to a million to one.
        odds = np.geomspace(own / (1 - own), 1e6, _TRIED)
        tried += [float(each / (1 + each)) for each in odds[1:] if each > odds[0]]
    differences = []
    for share in tried:
        differences.append(expected.worst_difference(share))
        if differences[-1] <= within:
            return share
    return tried[int(np.argmin(differences))]


def generator_of(
    profile: TableTrace, accesses: int, seed: int, min_new: float | None
) -> TraceGenerator:
    """A generator of ``accesses`` accesses of one of several tables, each with draws of its own.

    Args:
        min_new: see ``TraceGenerator``; None takes ``least_new``.
    """
    share = least_new(profile, accesses) if min_new is None else min_new
    return TraceGenerator(profile, stream_of(seed, "trace", profile.feature), share)
