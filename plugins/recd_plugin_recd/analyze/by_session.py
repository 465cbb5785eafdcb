"""What a table would be like by session, from a sample of its sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from recd_plugin_recd.analyze.batch_meter import BatchMeter
from recd_plugin_recd.analyze.co_changes import CoChanges
from recd_plugin_recd.analyze.session_sample import SessionSample
from recd_plugin_recd.analyze.table_analysis import DedupGroupReport
from recd_plugins.api import SessionKeys
from recd_plugins.api.columns import StatisticsAccumulator
from recd_plugins.api.tables import FeatureStatistics, TableStatistics

#: Figures whose sampling error is told.
_FIGURES: dict[str, Callable[[FeatureStatistics], float]] = {
    "exact": lambda total: total.exact_duplication,
    "partial": lambda total: total.partial_duplication,
    "factor_by_session": lambda total: total.dedupe_factor,
    "partial_factor": lambda total: total.partial_dedupe_factor,
}
#: Of the DedupeFactor that a feature has alone, what it keeps in a group at least.
_MIN_KEPT = 0.9


class BySession:
    """Measures the sample, by session and time, in batches of ``batch_size``."""

    def __init__(
        self, sample: SessionSample, keys: SessionKeys, features: Sequence[str], batch_size: int
    ) -> None:
        self._sample = sample
        self._batch_size = batch_size
        self._co_changes = CoChanges(features)
        self._parts: list[TableStatistics] = []
        meter = BatchMeter([(name,) for name in features], batch_size)
        for hashes, batch in sample.by_session():
            accumulator = StatisticsAccumulator(batch.schema, keys, features)
            changed = accumulator.add(batch)
            changed[:, 1:] &= hashes[1:] == hashes[:-1]
            self._co_changes.add(changed)
            self._parts.append(accumulator.result())
            meter.add(batch, hashes)
        self.batches = meter.result()

    @cached_property
    def statistics(self) -> TableStatistics:
        """The statistics of the whole sample."""
        return TableStatistics.merge(self._parts)

    def groups(self, among: Sequence[str]) -> tuple[DedupGroupReport, ...]:
        """Features of ``among`` that change together, and what deduplicating them so gives.

        Features that repeat in rows of other sessions too, each with its own, are better alone: a
        group that loses by being one is not made.
        """
        groups = self._co_changes.groups(among)
        meter = BatchMeter(groups, self._batch_size)
        for hashes, batch in self._sample.by_session():
            meter.add(batch, hashes)
        factors, alone = meter.result().dedupe_factors, self.batches.dedupe_factors
        found = []
        for group in groups:
            if factors[group] >= _MIN_KEPT * min(alone[(name,)] for name in group):
                found.append(DedupGroupReport(group, factors[group]))
            else:
                found += [DedupGroupReport((name,), alone[(name,)]) for name in group]
        return tuple(found)

    def errors(self) -> dict[str, float]:
        """Standard errors of figures over all features, from how the sample's parts differ."""
        if len(self._parts) < 2:
            return {}
        left_out = np.sqrt((1 - self._sample.rate) / len(self._parts))
        spreads = {
            name: np.std([figure(part.total) for part in self._parts], ddof=1)
            for name, figure in _FIGURES.items()
        }
        return {name: float(spread * left_out) for name, spread in spreads.items()}
