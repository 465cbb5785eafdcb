"""Data that plugins are asked about in their contracts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recd_plugins.access.profile import AccessProfile
from recd_plugins.access.table_access import TableAccess
from recd_plugins.interfaces import Table, TrainingData
from recd_plugins.values.data_profile import DataProfile


class SkewedData(TrainingData):
    """Data that reads an eighth of the rows of each table much more often than the others."""

    def profile(self) -> DataProfile:
        """The profile of features with one id a row."""
        return DataProfile({})

    def access(
        self,
        tables: Sequence[Table],
        rows: int | None,  # noqa: ARG002
        *,
        deduplicated: bool = True,  # noqa: ARG002
    ) -> AccessProfile:
        """Counts of a thousand rows of data."""
        return AccessProfile({table.name: self._access(table) for table in tables}, "a test")

    def _access(self, table: Table) -> TableAccess:
        ids = np.arange(table.num_embeddings)
        accesses = np.where(ids < table.num_embeddings // 8, 400.0, 1.0)
        return TableAccess.from_counts(
            table.name,
            table.features,
            table.num_embeddings,
            samples=1000,
            rows=ids,
            accesses=accesses,
        )
