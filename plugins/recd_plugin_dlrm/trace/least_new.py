"""How far p0 has to be raised for a synthetic trace to have the hit rates of its original.

While fewer ids are out than the stack is deep, no distance beyond them can be drawn, and the others
are drawn more often. With the weights p of Algorithm 2 the step from s to s + 1 ids takes
``(p0 + P(s)) / p0`` accesses in the mean, P(s) being the sum of p from 1 to s, and has ``p_d / p0``
accesses of each distance d within s: a small p0 makes this phase long. How long, and what the whole
trace then has of each distance, is known without drawing it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.draws import stream_of
from recd_plugin_dlrm.trace.generator import TraceGenerator
from recd_plugin_dlrm.trace.table_trace import TableTrace

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
