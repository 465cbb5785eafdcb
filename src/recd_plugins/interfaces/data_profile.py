"""Statistics of training data for sharding planners, such as lengths and duplication.

``TableStatistics`` implements the data characterization of the RecD paper (section 3). The fields
are sums over rows, so statistics of several files can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import log
from typing import Any, Self

from recd_plugins.interfaces.rows import Table


@dataclass(frozen=True)
class DistinctIds:
    """Mean number of distinct ids that a batch looks up in a table, for several batch sizes.

    Attributes:
        batch_sizes: numbers of rows per batch, ascending.
        ids: mean number of distinct ids for each batch size, over all features of the table.
    """

    batch_sizes: tuple[int, ...]
    ids: tuple[float, ...]

    def of(self, batch_size: int) -> float:
        """Return the distinct ids for ``batch_size``, interpolated with Heaps' power law."""
        known = [pair for pair in zip(self.batch_sizes, self.ids, strict=True) if pair[1]]
        if not known:
            return 0.0
        (size, ids), (next_size, next_ids) = next(
            (pair for pair in pairwise(known) if batch_size <= pair[1][0]), (known[-2:] * 2)[:2]
        )
        if size == next_size:  # only one batch size is known
            return ids * batch_size / size
        exponent = min(1.0, log(next_ids / ids) / log(next_size / size))
        return float(next_ids * (batch_size / next_size) ** exponent)


@dataclass(frozen=True)
class FeatureProfile:
    """Lengths and duplication of a feature in training batches.

    Attributes:
        length: mean number of ids per row.
        deduplicated: whether the converter deduplicates the feature.
        repeated_rows: probability that a row of a batch is a duplicate of an earlier row.
        repeated_ids: fraction of ids that exact deduplication of rows removes from a batch.
        shared_ids: fraction of ids of a sequence feature that deduplication removes. Above
            ``repeated_ids`` with partial deduplication.
    """

    length: float = 1.0
    deduplicated: bool = False
    repeated_rows: float = 0.0
    repeated_ids: float = 0.0
    shared_ids: float = 0.0

    def rows(self, batch_size: int) -> float:
        """Return the expected number of unique rows in a batch."""
        return batch_size - (batch_size - 1) * self.repeated_rows

    def ids(self, batch_size: int, *, pooled: bool) -> float:
        """Return the ids per batch, without ``repeated_ids`` if ``pooled``, else ``shared_ids``."""
        repeated = self.repeated_ids if pooled else self.shared_ids
        return self.length * (batch_size - (batch_size - 1) * repeated)

    def dedupe_factor(self, batch_size: int, *, pooled: bool) -> float:
        """Return the expected number of ids in a batch before, divided by after, deduplication."""
        ids = self.ids(batch_size, pooled=pooled)
        return self.length * batch_size / ids if ids else 1.0

    def plain(self) -> FeatureProfile:
        """Return the profile that the feature would have without deduplication."""
        return FeatureProfile(self.length)


@dataclass(frozen=True)
class DataProfile:
    """Lengths and duplication of all features of a dataset.

    Attributes:
        features: maps the feature name to its profile.
        source: description of the measured data, for messages.
        distinct: distinct ids per batch of coalesced tables, which send each distinct id once.
            Keyed by table name.
        read: distinct rows that a batch reads from a table, keyed by table name.
    """

    features: Mapping[str, FeatureProfile]
    source: str = "the caller"
    distinct: Mapping[str, DistinctIds] = field(default_factory=dict)
    read: Mapping[str, DistinctIds] = field(default_factory=dict)

    def of(self, feature: str) -> FeatureProfile:
        """Return the profile of a feature; for an unknown feature, one id per row."""
        return self.features.get(feature, FeatureProfile())

    def ids(self, table: Table, batch_size: int) -> float:
        """Return the number of ids that a rank's batch looks up in a table.

        For a coalesced table, which sends each distinct id once, return the number of distinct ids.
        """
        if (distinct := self.distinct.get(table.name)) is not None:
            return distinct.of(batch_size)
        return sum(self.of(f).ids(batch_size, pooled=table.pooled) for f in table.features)

    def rows(self, table: Table, batch_size: int) -> float:
        """Return the number of lengths that a rank sends for the KeyedJaggedTensor of a table.

        This is also the number of vectors that a pooled table returns. A coalesced table sends each
        distinct id once: one length per distinct id if it is pooled, else no lengths.
        """
        if (distinct := self.distinct.get(table.name)) is not None:
            return distinct.of(batch_size) if table.pooled else 0.0
        return sum(self.of(f).rows(batch_size) for f in table.features)

    def plain(self) -> DataProfile:
        """Return the profile that the data would have without deduplication."""
        features = {name: feature.plain() for name, feature in self.features.items()}
        return replace(self, features=features, distinct={})


#: Largest shift between two lists that still counts as a partial duplicate.
MAX_SHIFT = 8
_VERSION = 1


def least_ids_saved(*, sequence: bool) -> float:
    """Return how many ids per row deduplication must remove to be faster on a single rank.

    Args:
        sequence: whether the feature has a pooling entry. Pooling runs once per unique row.
    """
    return 2.0 if sequence else 6.0


def dedupe_factor(samples_per_session: float, stays: float) -> float:
    """Return the number of ids before, divided by after, deduplication (RecD, section 4.3).

    Args:
        samples_per_session: S, the mean number of rows of a session in a batch.
        stays: d, the probability that the next row of a session has the same list of ids.
    """
    return _ratio(samples_per_session, samples_per_session - (samples_per_session - 1) * stays)


@dataclass(frozen=True)
class FeatureStatistics:
    """Duplication counts of a feature. Each row is compared with its session's previous row.

    Attributes:
        rows: number of rows.
        sessions: number of blocks of adjacent rows with the same session.
        ids: number of ids in all rows.
        unchanged_rows: number of rows that are equal to the previous row.
        unchanged_ids: number of ids in unchanged rows.
        shifted_ids: ``unchanged_ids``, plus the ids in common with the previous row after a shift
            by up to ``MAX_SHIFT`` positions.
        shared_ids: number of ids that the previous row also contains, at any position.
    """

    rows: int = 0
    sessions: int = 0
    ids: int = 0
    unchanged_rows: int = 0
    unchanged_ids: int = 0
    shifted_ids: int = 0
    shared_ids: int = 0

    def __add__(self, other: FeatureStatistics) -> FeatureStatistics:
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return FeatureStatistics(*(mine + theirs for mine, theirs in pairs))

    @property
    def samples_per_session(self) -> float:
        """Mean number of rows per session (S in the RecD paper)."""
        return _ratio(self.rows, self.sessions)

    @property
    def stays(self) -> float:
        """Probability that a session's next row is equal (d in the RecD paper)."""
        return _share(self.unchanged_rows, self.rows - self.sessions)

    @property
    def length(self) -> float:
        """Mean number of ids per row (l in the RecD paper)."""
        return _share(self.ids, self.rows)

    @property
    def exact_duplication(self) -> float:
        """Fraction of ids in rows that are equal to the previous row."""
        return _share(self.unchanged_ids, self.ids)

    @property
    def partial_duplication(self) -> float:
        """Fraction of ids that the previous row also contains (RecD, figure 4, partial)."""
        return _share(self.shared_ids, self.ids)

    @property
    def dedupe_factor(self) -> float:
        """Number of ids before, divided by after, exact deduplication."""
        return _ratio(self.ids, self.ids - self.unchanged_ids)

    @property
    def partial_dedupe_factor(self) -> float:
        """Number of ids before, divided by after, partial deduplication (RecD, section 7)."""
        return _ratio(self.ids, self.ids - self.shifted_ids)


@dataclass(frozen=True)
class TableStatistics:
    """Duplication statistics of all features of a table.

    Attributes:
        rows: number of rows.
        sessions: number of blocks of adjacent rows with the same session.
        features: maps the feature name to its statistics.
    """

    rows: int
    sessions: int
    features: Mapping[str, FeatureStatistics]

    @property
    def samples_per_session(self) -> float:
        """Mean number of rows per session (S in the RecD paper); 1 without rows."""
        return _ratio(self.rows, self.sessions)

    @property
    def total(self) -> FeatureStatistics:
        """Return the sum of the statistics of all features."""
        return sum(self.features.values(), FeatureStatistics())

    @staticmethod
    def merge(parts: Iterable[TableStatistics]) -> TableStatistics:
        """Sum the statistics of several files or tables with the same features."""
        first, *others = parts
        rows, sessions, features = first.rows, first.sessions, dict(first.features)
        for each in others:
            rows, sessions = rows + each.rows, sessions + each.sessions
            features = {name: sums + each.features[name] for name, sums in features.items()}
        return TableStatistics(rows, sessions, features)

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values that ``from_json`` accepts."""
        own = ("rows", "sessions")
        features = {
            name: {key: count for key, count in asdict(feature).items() if key not in own}
            for name, feature in self.features.items()
        }
        counts = {"rows": self.rows, "sessions": self.sessions}
        return {"version": _VERSION, **counts, "features": features}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the result of ``to_json``. Raises ValueError for another version."""
        if not isinstance(value, dict) or value.get("version") != _VERSION:
            raise ValueError(f"the table statistics do not have version {_VERSION}")
        rows, sessions = value["rows"], value["sessions"]
        features = {
            name: FeatureStatistics(rows, sessions, **counts)
            for name, counts in value["features"].items()
        }
        return cls(rows, sessions, features)


def _ratio(whole: float, part: float) -> float:
    if part > 0:
        return whole / part
    return float("inf") if whole > 0 else 1.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
