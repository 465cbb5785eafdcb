"""Results of the FlexShard paper (arXiv 2301.02959, tables 5 and 6), with access distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import (
    PAPER_FLAT,
    ClusterShape,
    CostOptions,
    RowCosts,
    TableDemand,
)

#: 4 nodes of 8 A100, 4096 samples a rank.
CLUSTER = ClusterShape(nodes=4, ranks_per_node=8, batch_size=4096, collectives=PAPER_FLAT)
#: M = 6 and c = 1, float32. Memory limits the number of flex rows.
OPTIONS = CostOptions(minimise="bytes")
EMBEDDING_DIM = 256


@dataclass(frozen=True)
class PaperModel:
    """A model of table 5: the number of rows in each tier and their shares of accesses.

    The ``..._seconds`` fields are the summed times of the measured collectives (table 6).
    """

    name: str
    num_embeddings: int
    two_tier_rows: int
    two_tier_covered: float
    hot_rows: int
    hot_covered: float
    flex_rows: int
    flex_covered: float
    two_tier_seconds: float
    three_tier_seconds: float

    @property
    def length(self) -> float:
        """Ids per sample, estimated so that the two-tier plan needs no extra memory."""
        costs = RowCosts.of(CLUSTER, OPTIONS)
        return _least_accesses(costs.row_wise_static) * self.two_tier_rows / self.two_tier_covered

    def fitted(self, dedupe_factor: float = 1.0) -> TableDemand:
        """Return a table whose power-law accesses match the three coverages of table 5."""
        knots = [self.hot_rows, self.two_tier_rows, self.hot_rows + self.flex_rows]
        covered = [self.hot_covered, self.two_tier_covered, self.hot_covered + self.flex_covered]
        known = _least_accesses(RowCosts.of(CLUSTER, OPTIONS).flex_static)
        laws = _power_laws(
            [*knots, self.num_embeddings], np.diff([0.0, *covered, 1.0]) * self.length, known
        )
        edges = _edges(self.num_embeddings, knots)
        rows = np.diff(edges)
        return TableDemand(
            self.name,
            self.num_embeddings,
            EMBEDDING_DIM,
            # Accesses never increase, except for rounding errors.
            np.minimum.accumulate(np.diff(_accesses(laws, edges)) / rows),
            repeats=rows,
            dedupe_factor=dedupe_factor,
        )


def _least_accesses(static: float) -> float:
    """Return the accesses per sample above which a hot row needs less memory than ``static``."""
    costs = RowCosts.of(CLUSTER, OPTIONS)
    return (costs.hot_static - static) / costs.saved / CLUSTER.batch_size


def _edges(num_rows: int, among: Sequence[int] = ()) -> NDArray[np.int64]:
    """Return bin edges: bins of one row for the first 2,000 rows, then bins of growing width."""
    wide = np.geomspace(2000, num_rows, int(np.log(num_rows / 2000) / np.log(1.002)))
    return np.unique(np.concatenate([np.arange(2000), np.rint(wide), among])).astype(np.int64)


class PowerLaw(NamedTuple):
    """Power law: row ``x >= start`` is accessed ``first * (x / start) ** -exponent`` times."""

    start: float
    first: float
    exponent: float

    def accesses(self, stops: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the total accesses to all rows from ``start`` up to each of ``stops``."""
        power = 1 - self.exponent
        return self.first * self.start / power * ((stops / self.start) ** power - 1)

    def at(self, row: float) -> float:
        return self.first * (row / self.start) ** -self.exponent


def _power_laws(
    stops: Sequence[int], accesses: NDArray[np.float64], first: float
) -> list[PowerLaw]:
    """Fit a power law to each row range that ends at one of ``stops``.

    ``accesses`` are the accesses per sample in each range, and ``first`` those of the last row of
    the first range. The rows before the first law are accessed once per sample.
    """

    def head(exponent: float) -> PowerLaw:
        return PowerLaw(stops[0] * first ** (1 / exponent), 1.0, exponent)

    def head_lacks(exponent: float) -> float:
        law = head(exponent)
        return float(accesses[0] - law.start - law.accesses(np.array(stops[:1]))[0])

    laws = [head(_root(head_lacks, 0.01, 5.0))]
    for start, stop, wanted in zip(stops, stops[1:], accesses[1:], strict=False):
        from_here = partial(PowerLaw, float(start), laws[-1].at(start))
        surplus = partial(_surplus, from_here, np.array([float(stop)]), wanted)
        laws.append(from_here(_root(surplus, 0.01, 50.0)))
    return laws


def _surplus(
    law: Callable[[float], PowerLaw], stop: NDArray[np.float64], wanted: float, exponent: float
) -> float:
    return float(law(exponent).accesses(stop)[0]) - wanted


def _accesses(laws: Sequence[PowerLaw], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the accesses of a sample to the first ``rows`` rows of the table."""
    total = np.minimum(rows, laws[0].start)
    stops = [law.start for law in laws[1:]] + [np.inf]
    for law, stop in zip(laws, stops, strict=True):
        total += law.accesses(np.clip(rows, law.start, min(stop, float(rows[-1]))))
    return total


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Find the root of a decreasing function between ``low`` and ``high`` by bisection."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


MODELS = {
    values[0]: PaperModel(*values)
    for values in (
        ("RM-1", 30_000_000, 346_144, 0.525, 100_064, 0.368, 1_184_544, 0.306, 0.152, 0.146),
        ("RM-2", 30_000_000, 507_072, 0.770, 128_736, 0.639, 2_397_216, 0.217, 0.086, 0.100),
        ("RM-3", 10_000_000, 115_296, 0.349, 36_704, 0.227, 318_560, 0.259, 0.105, 0.105),
        ("RM-4", 10_000_000, 184_864, 0.570, 55_040, 0.390, 592_992, 0.360, 0.077, 0.075),
    )
}
