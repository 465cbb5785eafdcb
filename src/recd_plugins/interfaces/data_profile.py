"""Properties of data for planning: lengths of features, duplication and distinct ids.

``TableStatistics`` implements the data characterization of the RecD paper (section 3). It holds
sums over rows, so the statistics of several files add up to those of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from math import log
from typing import Any, Self

from recd_plugins.interfaces.rows import Table


@dataclass(frozen=True)
class DistinctIds:
    """Mean number of distinct ids of a table in a batch, for several batch sizes.

    Attributes:
        batch_sizes: numbers of rows per batch, ascending.
        ids: mean number of distinct ids of all features of the table, one per batch size.
    """

    batch_sizes: tuple[int, ...]
    ids: tuple[float, ...]

    def of(self, batch_size: int) -> float:
        """Return the distinct ids for ``batch_size``, interpolated by Heaps' power law."""
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
        repeated_rows: probability that a row after the first repeats a stored row.
        repeated_ids: probability that an id is not stored because its row repeats a stored row.
        shared_ids: probability that an id of a sequence feature is not stored; above
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
        """Return the expected number of ids that a batch sends and looks up."""
        repeated = self.repeated_ids if pooled else self.shared_ids
        return self.length * (batch_size - (batch_size - 1) * repeated)

    def dedupe_factor(self, batch_size: int, *, pooled: bool) -> float:
        """Return the ratio of all ids of a batch to its stored ids."""
        ids = self.ids(batch_size, pooled=pooled)
        return self.length * batch_size / ids if ids else 1.0

    def plain(self) -> FeatureProfile:
        """Return the profile of the feature without deduplication."""
        return FeatureProfile(self.length)


@dataclass(frozen=True)
class DataProfile:
    """Profiles of a dataset's features.

    Attributes:
        features: maps the feature name to its profile.
        source: origin of the numbers, for messages.
        distinct: maps the name of a coalesced table to its distinct ids.
        read: maps the table name to the distinct rows that a batch reads.
    """

    features: Mapping[str, FeatureProfile]
    source: str = "the caller"
    distinct: Mapping[str, DistinctIds] = field(default_factory=dict)
    read: Mapping[str, DistinctIds] = field(default_factory=dict)

    def of(self, feature: str) -> FeatureProfile:
        """Return a feature's profile. Unknown features get a profile with one id per row."""
        return self.features.get(feature, FeatureProfile())

    def ids(self, table: Table, batch_size: int) -> float:
        """Return the number of ids that a rank's batch looks up in a table.

        A coalesced table counts only distinct ids.
        """
        if (distinct := self.distinct.get(table.name)) is not None:
            return distinct.of(batch_size)
        return sum(self.of(f).ids(batch_size, pooled=table.pooled) for f in table.features)

    def rows(self, table: Table, batch_size: int) -> float:
        """Return the number of lengths sent for a rank's batch.

        A pooled table returns one vector per length. In a coalesced pooled table, each id counts
        as a row. A coalesced sequence table sends no lengths.
        """
        if (distinct := self.distinct.get(table.name)) is not None:
            return distinct.of(batch_size) if table.pooled else 0.0
        return sum(self.of(f).rows(batch_size) for f in table.features)

    def plain(self) -> DataProfile:
        """Return the profile without deduplication of rows and ids."""
        features = {name: feature.plain() for name, feature in self.features.items()}
        return replace(self, features=features, distinct={})


#: Largest shift between two lists that still counts as a partial duplicate.
MAX_SHIFT = 8
_VERSION = 1


def least_ids_saved(*, sequence: bool) -> float:
    """Return how many ids per row deduplication must save to be faster on one rank.

    Args:
        sequence: whether the feature has a pooling entry. Pooling runs once per unique row.
    """
    return 2.0 if sequence else 6.0


def dedupe_factor(samples_per_session: float, stays: float) -> float:
    """Return the ratio of ids before and after deduplication: DedupeFactor (RecD, section 4.3).

    Args:
        samples_per_session: S, mean rows of a session in the batch.
        stays: d, the probability that the next row of a session has the same list.
    """
    return _ratio(samples_per_session, samples_per_session - (samples_per_session - 1) * stays)


@dataclass(frozen=True)
class FeatureStatistics:
    """Sums over a feature's rows. Each row is compared with the previous row of its session.

    Attributes:
        rows: number of rows.
        sessions: runs of neighbouring rows of one session.
        ids: number of ids in all rows.
        unchanged_rows: number of rows that equal the previous row.
        unchanged_ids: number of ids in unchanged rows.
        shifted_ids: ``unchanged_ids`` plus the ids that rows share with the previous row after a
            shift by up to ``MAX_SHIFT``.
        shared_ids: number of ids that occur anywhere in the previous row.
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
        """S, the mean number of rows per session."""
        return _ratio(self.rows, self.sessions)

    @property
    def stays(self) -> float:
        """d, the probability that the next row of a session is equal."""
        return _share(self.unchanged_rows, self.rows - self.sessions)

    @property
    def length(self) -> float:
        """l, the mean number of ids per row."""
        return _share(self.ids, self.rows)

    @property
    def exact_duplication(self) -> float:
        """Share of the ids whose row equals the previous row."""
        return _share(self.unchanged_ids, self.ids)

    @property
    def partial_duplication(self) -> float:
        """Share of the ids that also occur in the previous row (RecD, figure 4, partial)."""
        return _share(self.shared_ids, self.ids)

    @property
    def dedupe_factor(self) -> float:
        """Ratio of ids to stored ids with exact deduplication."""
        return _ratio(self.ids, self.ids - self.unchanged_ids)

    @property
    def partial_dedupe_factor(self) -> float:
        """Ratio of ids to stored ids with partial deduplication (RecD, section 7)."""
        return _ratio(self.ids, self.ids - self.shifted_ids)


@dataclass(frozen=True)
class TableStatistics:
    """Statistics of a table's rows, in stored order.

    Attributes:
        rows: number of rows.
        sessions: runs of neighbouring rows of one session.
        features: maps the feature name to its sums.
    """

    rows: int
    sessions: int
    features: Mapping[str, FeatureStatistics]

    @property
    def samples_per_session(self) -> float:
        """S, the mean number of rows per session; 1 without rows."""
        return _ratio(self.rows, self.sessions)

    @property
    def total(self) -> FeatureStatistics:
        """Sum of the statistics of all features."""
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
        """Parse the result of ``to_json``. Raises ValueError for other values."""
        if not isinstance(value, dict) or value.get("version") != _VERSION:
            raise ValueError(f"the table statistics do not have version {_VERSION}")
        try:
            rows, sessions = int(value["rows"]), int(value["sessions"])
            known = {field.name for field in fields(FeatureStatistics)} - {"rows", "sessions"}
            features = {
                name: FeatureStatistics(rows, sessions, **{key: int(counts[key]) for key in known})
                for name, counts in value["features"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the table statistics are incomplete: {error!r}") from error
        return cls(rows, sessions, features)


def _ratio(whole: float, part: float) -> float:
    if part > 0:
        return whole / part
    return float("inf") if whole > 0 else 1.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
