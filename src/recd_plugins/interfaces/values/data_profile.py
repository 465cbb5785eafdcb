"""What a planner knows of the data: lengths of features, and how far they are deduplicated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log

import numpy as np

from recd_plugins.interfaces.values.rows import Table


@dataclass(frozen=True)
class DistinctIds:
    """Distinct ids of a table in batches of several sizes.

    Between and beyond them they grow with a power of the batch size, as words of a text do (Heaps'
    law).

    Attributes:
        batch_sizes: rows, ascending.
        ids: of all features of the table in such a batch, the mean.
    """

    batch_sizes: tuple[int, ...]
    ids: tuple[float, ...]

    def of(self, batch_size: int) -> float:
        """Distinct ids of a batch of so many rows."""
        known = [pair for pair in zip(self.batch_sizes, self.ids, strict=True) if pair[1]]
        if not known:
            return 0.0
        (size, ids), (next_size, next_ids) = next(
            (pair for pair in pairwise(known) if batch_size <= pair[1][0]), (known[-2:] * 2)[:2]
        )
        if size == next_size:  # one batch is all that is known
            return ids * batch_size / size
        exponent = min(1.0, log(next_ids / ids) / log(next_size / size))
        return float(next_ids * (batch_size / next_size) ** exponent)


@dataclass(frozen=True)
class DistinctGradients:
    """How many of the gradients of a sequence table's rows differ, of those that one rank gets.

    Attributes:
        owners: ranks that the rows are split over, ascending.
        kept: shares of the gradients that are sent, those of rows that are read least; ascending.
        coalesced: of ``kept`` and ``owners``, the share that differs where each id has one gradient
            in a batch.
        plain: likewise where each has one wherever it is stored.
    """

    owners: tuple[int, ...]
    kept: tuple[float, ...]
    coalesced: tuple[tuple[float, ...], ...]
    plain: tuple[tuple[float, ...], ...]

    def share(self, kept: float, owners: int, *, coalesced: bool) -> float:
        """Between those that were counted in proportion, of owners to their logarithm."""
        of_kept = [
            np.interp(np.log(owners), np.log(self.owners), shares)
            for shares in (self.coalesced if coalesced else self.plain)
        ]
        return float(np.interp(kept, self.kept, of_kept))


@dataclass(frozen=True)
class FeatureProfile:
    """One feature, as the model gets it.

    Of B adjacent rows the first is stored; each of the others is not with a certain probability. So
    a batch of one row has nothing to share, and one of many rows has S samples of most sessions.

    Attributes:
        length: mean ids of a row.
        deduplicated: whether the converter takes it apart into unique rows.
        repeated_rows: the probability that a row is not stored, since an equal one is.
        repeated_ids: the same of an id, with its row.
        shared_ids: the same of an id of a sequence feature, alone or with its row: more than
            ``repeated_ids`` where the converter stores the feature partially.
    """

    length: float = 1.0
    deduplicated: bool = False
    repeated_rows: float = 0.0
    repeated_ids: float = 0.0
    shared_ids: float = 0.0

    def rows(self, batch_size: int) -> float:
        """Unique rows of a batch."""
        return batch_size - (batch_size - 1) * self.repeated_rows

    def ids(self, batch_size: int, *, pooled: bool) -> float:
        """Ids that travel and are looked up, of a feature that is pooled in bags or a sequence."""
        repeated = self.repeated_ids if pooled else self.shared_ids
        return self.length * (batch_size - (batch_size - 1) * repeated)

    def dedupe_factor(self, batch_size: int, *, pooled: bool) -> float:
        """Ids of a batch over ``ids``; 1 where there are none."""
        ids = self.ids(batch_size, pooled=pooled)
        return self.length * batch_size / ids if ids else 1.0

    def plain(self) -> FeatureProfile:
        """The same feature, not deduplicated."""
        return FeatureProfile(self.length)


@dataclass(frozen=True)
class DataProfile:
    """The features of a table.

    Attributes:
        features: by name.
        source: where the figures come from, in words.
        samples_per_session: S of the whole table, None where only its first rows were seen.
        distinct: of tables whose ids are coalesced, by table name.
        read: rows of tables that a batch reads, each once, by table name: coalesced or not.
        gradients: of tables whose equal gradients are sent once, by name.
    """

    features: Mapping[str, FeatureProfile]
    source: str = "the caller"
    samples_per_session: float | None = None
    distinct: Mapping[str, DistinctIds] = field(default_factory=dict)
    read: Mapping[str, DistinctIds] = field(default_factory=dict)
    gradients: Mapping[str, DistinctGradients] = field(default_factory=dict)

    def of(self, feature: str) -> FeatureProfile:
        """One feature; one id a row, as TorchRec assumes, where it is none of the data's."""
        return self.features.get(feature, FeatureProfile())

    def ids(self, table: Table, batch_size: int) -> float:
        """Ids of a rank's batch that a table is asked for; distinct ones if it is coalesced."""
        if (distinct := self.distinct.get(table.name)) is not None:
            return distinct.of(batch_size)
        return sum(self.of(f).ids(batch_size, pooled=table.pooled) for f in table.features)

    def rows(self, table: Table, batch_size: int) -> float:
        """Rows of a rank's batch, of all features of a table: lengths that are sent, and vectors
        that a pooled table returns. Of a coalesced table each id is one, and a sequence's has none.
        """
        if (distinct := self.distinct.get(table.name)) is not None:
            return distinct.of(batch_size) if table.pooled else 0.0
        return sum(self.of(f).rows(batch_size) for f in table.features)

    def plain(self) -> DataProfile:
        """The same data, neither deduplicated nor coalesced, nor are equal gradients sent once."""
        features = {name: feature.plain() for name, feature in self.features.items()}
        return replace(self, features=features, distinct={}, gradients={})
