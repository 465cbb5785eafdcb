"""Algorithm 2: synthetic traces with the stack distances of a profile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.trace import kernels
from recd_plugin_dlrm.trace.lru_stack import LruStack
from recd_plugin_dlrm.trace.table_trace import TableTrace
from recd_plugins.api import DataError


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
