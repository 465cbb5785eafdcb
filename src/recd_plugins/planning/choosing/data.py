"""The data of a model, as trials of choices ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from recd_plugins.access.profile import AccessProfile
from recd_plugins.interfaces import Table, TrainingData
from recd_plugins.planning.profile import measure_profile
from recd_plugins.planning.setting import RegistryData, coalesced_tables, off_meta
from recd_plugins.registry import RunConfig
from recd_plugins.values.data_profile import DataProfile, DistinctIds


class DataOfChoices(TrainingData):
    """Data whose profile suits tables that a chooser may have coalesced.

    Args:
        data: of the model, whatever is coalesced.
        tables: that are chosen for.
        profile: its own, with these tables coalesced.
        sample: accesses are counted in so many rows at most, and what else is known of the profile
            alone. The rows that are read most often are read still more often in few rows of data
            than in many, so that what counts on them looks better than it is; None: in as many as
            are asked for.
    """

    def __init__(
        self,
        data: TrainingData,
        tables: Sequence[Table],
        profile: DataProfile,
        sample: int | None = None,
    ) -> None:
        self._data = data
        self._tables = tables
        self._profile = profile
        self._sample = sample

    def profile(self) -> DataProfile:
        """See ``TrainingData.profile``."""
        return self._profile

    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        """See ``TrainingData.access``; data is read once for all tables that are alike in kind."""
        if self._sample is not None:
            rows = min(self._sample, rows or self._sample)
        found = self._data.access(self._alike(tables), rows, deduplicated=deduplicated)
        return AccessProfile({t.name: found.tables[t.name] for t in tables}, found.source)

    def distinct(self, tables: Sequence[Table]) -> Mapping[str, DistinctIds]:
        """See ``TrainingData.distinct``; likewise."""
        known = self._profile.distinct
        found = known if self._sample is not None else self._data.distinct(self._alike(tables))
        return {table.name: found[table.name] for table in tables if table.name in found}

    def _alike(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        kinds = {table.pooled for table in tables}
        together = tuple(table for table in self._tables if table.pooled in kinds)
        return together if set(tables) <= set(together) else tuple(tables)


def profile_of_choices(
    registry: RunConfig,
    tables: Sequence[Table],
    ours: Sequence[Table],
    data: TrainingData,
    rows: Mapping[str, int],
) -> DataProfile:
    """Of a model's data, with what coalescing any of ``tables`` would send.

    Args:
        registry: the data's.
        tables: that are chosen for.
        ours: all tables of the model.
        data: of the model.
        rows: of the table of each feature.
    """
    own = isinstance(data, RegistryData)
    coalesced = [*tables, *(coalesced_tables(registry, ours) if own else ())]
    with off_meta():
        measured = measure_profile(registry, num_embeddings=rows, coalesced=coalesced, others=ours)
    if own:
        return measured
    known = data.profile()
    return replace(
        known,
        distinct={**known.distinct, **measured.distinct},
        read={**known.read, **measured.read},
        spread={**known.spread, **measured.spread},
        gradients={**known.gradients, **measured.gradients},
    )
