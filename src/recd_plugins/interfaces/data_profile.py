"""Properties of data for planning: lengths of features, duplication and distinct ids.

``TableStatistics`` is the characterisation of the RecD paper (section 3): sums over rows and over
neighbouring rows of a session, so statistics of files add up to those of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from itertools import pairwise
from math import log
from typing import Any, Self

import numpy as np

from recd_plugins.interfaces.rows import Table


@dataclass(frozen=True)
class DistinctIds:
    """Distinct ids of a table in batches of several sizes.

    Other sizes are interpolated by a power of the batch size (Heaps' law).

    Attributes:
        batch_sizes: rows, ascending.
        ids: mean distinct ids of all features of the table in such a batch.
    """

    batch_sizes: tuple[int, ...]
    ids: tuple[float, ...]

    def of(self, batch_size: int) -> float:
        """Return the distinct ids of a batch of ``batch_size`` rows."""
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
class DistinctGradients:
    """Share of different gradients among those of a sequence table's rows that one rank gets.

    Attributes:
        owners: ranks that the rows are split over, ascending.
        kept: shares of the gradients that are sent, of the least read rows first; ascending.
        coalesced: different shares by ``kept`` and ``owners``, with one gradient per id and batch.
        plain: likewise, with one gradient per stored id.
    """

    owners: tuple[int, ...]
    kept: tuple[float, ...]
    coalesced: tuple[tuple[float, ...], ...]
    plain: tuple[tuple[float, ...], ...]

    def share(self, kept: float, owners: int, *, coalesced: bool) -> float:
        """Interpolate linearly in ``kept`` and in the logarithm of ``owners``."""
        of_kept = [
            np.interp(np.log(owners), np.log(self.owners), shares)
            for shares in (self.coalesced if coalesced else self.plain)
        ]
        return float(np.interp(kept, self.kept, of_kept))


@dataclass(frozen=True)
class FeatureProfile:
    """One feature, as the model gets it.

    The first of B adjacent rows is stored; each other one repeats with a fixed probability.

    Attributes:
        length: mean ids per row.
        deduplicated: whether the converter deduplicates it.
        repeated_rows: probability that a row is not stored, as an equal one is.
        repeated_ids: probability that an id is not stored, with its row.
        shared_ids: probability that an id of a sequence feature is not stored, alone or with its
            row; above ``repeated_ids`` for partial deduplication.
    """

    length: float = 1.0
    deduplicated: bool = False
    repeated_rows: float = 0.0
    repeated_ids: float = 0.0
    shared_ids: float = 0.0

    def rows(self, batch_size: int) -> float:
        """Return the unique rows of a batch."""
        return batch_size - (batch_size - 1) * self.repeated_rows

    def ids(self, batch_size: int, *, pooled: bool) -> float:
        """Return the ids that are sent and looked up, for bags or a sequence."""
        repeated = self.repeated_ids if pooled else self.shared_ids
        return self.length * (batch_size - (batch_size - 1) * repeated)

    def dedupe_factor(self, batch_size: int, *, pooled: bool) -> float:
        """Return all ids of a batch over ``ids``; 1 if there are none."""
        ids = self.ids(batch_size, pooled=pooled)
        return self.length * batch_size / ids if ids else 1.0

    def plain(self) -> FeatureProfile:
        """Return the feature without deduplication."""
        return FeatureProfile(self.length)


@dataclass(frozen=True)
class DataProfile:
    """The features of a table of data.

    Attributes:
        features: by name.
        source: origin of the figures, for messages.
        distinct: by name of coalesced tables.
        read: rows that a batch reads, each once, by table name, coalesced or not.
        gradients: by name of tables whose equal gradients are sent once.
    """

    features: Mapping[str, FeatureProfile]
    source: str = "the caller"
    distinct: Mapping[str, DistinctIds] = field(default_factory=dict)
    read: Mapping[str, DistinctIds] = field(default_factory=dict)
    gradients: Mapping[str, DistinctGradients] = field(default_factory=dict)

    def of(self, feature: str) -> FeatureProfile:
        """Return a feature's profile; one id per row for unknown features, as TorchRec assumes."""
        return self.features.get(feature, FeatureProfile())

    def ids(self, table: Table, batch_size: int) -> float:
        """Return the ids that a rank's batch looks up; distinct ones of a coalesced table."""
        if (distinct := self.distinct.get(table.name)) is not None:
            return distinct.of(batch_size)
        return sum(self.of(f).ids(batch_size, pooled=table.pooled) for f in table.features)

    def rows(self, table: Table, batch_size: int) -> float:
        """Return the lengths sent for a rank's batch, and so the vectors of a pooled table.

        In a coalesced table each id counts as a row; a coalesced sequence table sends no lengths.
        """
        if (distinct := self.distinct.get(table.name)) is not None:
            return distinct.of(batch_size) if table.pooled else 0.0
        return sum(self.of(f).rows(batch_size) for f in table.features)

    def plain(self) -> DataProfile:
        """Return the profile without deduplication of rows, ids and gradients."""
        features = {name: feature.plain() for name, feature in self.features.items()}
        return replace(self, features=features, distinct={}, gradients={})


#: The longest shift that counts as a partial duplicate.
MAX_SHIFT = 8
_VERSION = 1


def dedupe_len(batch_size: int, samples_per_session: float, length: float, stays: float) -> float:
    """Return the mean ids of a feature in a deduplicated batch: DedupeLen (RecD, section 4.3).

    Args:
        batch_size: B.
        samples_per_session: S, mean rows of a session in the batch.
        length: l, mean ids of a row.
        stays: d, the probability that the next row of a session has the same list.
    """
    stored = samples_per_session - (samples_per_session - 1) * stays
    return length * batch_size * stored / samples_per_session


def least_ids_saved(*, sequence: bool) -> float:
    """Return the ids per row that deduplication must save to be faster on one rank.

    Args:
        sequence: whether the feature has a pooling entry, which runs once per unique row.
    """
    return 2.0 if sequence else 6.0


def dedupe_factor(samples_per_session: float, stays: float) -> float:
    """Return ids over ids after deduplication: DedupeFactor (RecD, section 4.3).

    Worthwhile from about 1.5. Infinite if all rows of each session are equal.
    """
    return _ratio(1.0, dedupe_len(1, samples_per_session, 1.0, stays))


@dataclass(frozen=True)
class FeatureStatistics:
    """Sums over the rows of a feature, compared with the previous row of their session.

    Attributes:
        rows: number of rows.
        sessions: runs of neighbouring rows of one session; sessions, in a clustered table.
        ids: ids of all rows.
        unchanged_rows: rows that equal the previous row.
        unchanged_ids: ids of those rows.
        shifted_ids: ``unchanged_ids``, and of rows that begin with the previous row without its
            first ids (at most ``MAX_SHIFT``) the ids of both.
        shared_ids: ids that are anywhere in the previous row.
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
        """S, the mean rows of a session; 1 without rows."""
        return _ratio(self.rows, self.sessions)

    @property
    def stays(self) -> float:
        """d, the probability that the next row of a session is equal; 0 without such rows."""
        return _share(self.unchanged_rows, self.rows - self.sessions)

    @property
    def length(self) -> float:
        """l, the mean ids of a row."""
        return _share(self.ids, self.rows)

    @property
    def exact_rows(self) -> float:
        """Share of rows that equal the previous row (figure 4, exact)."""
        return _share(self.unchanged_rows, self.rows)

    @property
    def exact_duplication(self) -> float:
        """Share of ids in rows that equal the previous row: ``exact_rows`` weighted by length."""
        return _share(self.unchanged_ids, self.ids)

    @property
    def partial_duplication(self) -> float:
        """Share of ids that are in the previous row (figure 4, partial)."""
        return _share(self.shared_ids, self.ids)

    @property
    def dedupe_factor(self) -> float:
        """Ids over stored ids, if rows that equal the previous row are not stored."""
        return _ratio(self.ids, self.ids - self.unchanged_ids)

    @property
    def partial_dedupe_factor(self) -> float:
        """Ids over stored ids, if shifted rows store only new ids (section 7)."""
        return _ratio(self.ids, self.ids - self.shifted_ids)


@dataclass(frozen=True)
class TableStatistics:
    """Statistics of rows in stored order.

    Attributes:
        rows: number of rows.
        sessions: runs of neighbouring rows of one session.
        features: by name.
    """

    rows: int
    sessions: int
    features: Mapping[str, FeatureStatistics]

    @property
    def samples_per_session(self) -> float:
        """S, the mean rows of a session; 1 without rows."""
        return _ratio(self.rows, self.sessions)

    @property
    def total(self) -> FeatureStatistics:
        """All features as one; shares of ids are weighted by length, ``stays`` is a mean."""
        return sum(self.features.values(), FeatureStatistics())

    @staticmethod
    def merge(parts: Iterable[TableStatistics]) -> TableStatistics:
        """Add tables up; a session that continues in the next table counts twice.

        Raises:
            ValueError: the features differ.
        """
        return reduce(_merge_two, parts)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for ``from_json``."""
        own = ("rows", "sessions")
        features = {
            name: {key: count for key, count in asdict(feature).items() if key not in own}
            for name, feature in self.features.items()
        }
        counts = {"rows": self.rows, "sessions": self.sessions}
        return {"version": _VERSION, **counts, "features": features}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read the values of ``to_json``; ValueError for anything else."""
        if not isinstance(value, dict) or value.get("version") != _VERSION:
            raise ValueError(f"no statistics of version {_VERSION}")
        try:
            rows, sessions = int(value["rows"]), int(value["sessions"])
            known = {field.name for field in fields(FeatureStatistics)} - {"rows", "sessions"}
            features = {
                name: FeatureStatistics(rows, sessions, **{key: int(counts[key]) for key in known})
                for name, counts in value["features"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"incomplete statistics: {error!r}") from error
        return cls(rows, sessions, features)


def _merge_two(first: TableStatistics, second: TableStatistics) -> TableStatistics:
    if odd := sorted(first.features.keys() ^ second.features.keys()):
        raise ValueError(f"only one of two tables has {', '.join(odd)}")
    features = {name: one + second.features[name] for name, one in first.features.items()}
    return TableStatistics(first.rows + second.rows, first.sessions + second.sessions, features)


def _ratio(whole: float, part: float) -> float:
    """Return ``whole / part``: infinite without a part, 1 if both are 0."""
    if part > 0:
        return whole / part
    return float("inf") if whole > 0 else 1.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
