"""What is known of the trace of one table: its ids, and the distribution of stack distances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
