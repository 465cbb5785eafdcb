"""What a planner knows of the data: lengths of features, and how far they are deduplicated."""

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


#: The longest shift that counts as a partial duplicate.
MAX_SHIFT = 8
_VERSION = 1


def dedupe_len(batch_size: int, samples_per_session: float, length: float, stays: float) -> float:
    """Ids of a feature in a batch after deduplication, on average: DedupeLen (RecD, section 4.3).

    Args:
        batch_size: B.
        samples_per_session: S, mean rows of a session in the batch.
        length: l, mean ids of a row.
        stays: d, the probability that the next row of a session has the same list.
    """
    stored = samples_per_session - (samples_per_session - 1) * stays
    return length * batch_size * stored / samples_per_session


def least_ids_saved(*, sequence: bool) -> float:
    """Return the ids per row that deduplicating a feature has to save to be faster on one rank.

    Args:
        sequence: whether the feature has a pooling of its own, which runs once per unique row.
    """
    return 2.0 if sequence else 6.0


def dedupe_factor(samples_per_session: float, stays: float) -> float:
    """Ids of a feature over ids after deduplication: DedupeFactor (RecD, section 4.3).

    Worth the trouble from about 1.5. Infinite where every row of every session is the same.
    """
    return _ratio(1.0, dedupe_len(1, samples_per_session, 1.0, stays))


@dataclass(frozen=True)
class FeatureStatistics:
    """Sums over the rows of a feature. Rows are compared with the row before in their session.

    Attributes:
        rows: rows.
        sessions: runs of neighbouring rows of one session; in a clustered table, sessions.
        ids: ids of all rows.
        unchanged_rows: rows that equal the row before.
        unchanged_ids: their ids.
        shifted_ids: ids of those and of rows that begin with the row before but for its first ids,
            at most ``MAX_SHIFT``: of the latter, the ids that both have.
        shared_ids: ids that the row before has too, wherever they stand.
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
        """S, the mean rows of a session; 1 where there are no rows."""
        return _ratio(self.rows, self.sessions)

    @property
    def stays(self) -> float:
        """d, the share of rows that equal the row before; 0 where no session has two rows."""
        pairs = self.rows - self.sessions
        return self.unchanged_rows / pairs if pairs else 0.0

    @property
    def length(self) -> float:
        """l, the mean ids of a row."""
        return self.ids / self.rows if self.rows else 0.0

    @property
    def exact_rows(self) -> float:
        """The share of rows that equal the row before (figure 4, exact)."""
        return self.unchanged_rows / self.rows if self.rows else 0.0

    @property
    def exact_duplication(self) -> float:
        """The share of ids in rows that equal the row before: ``exact_rows`` weighted by length."""
        return self.unchanged_ids / self.ids if self.ids else 0.0

    @property
    def partial_duplication(self) -> float:
        """The share of ids that the row before has too (figure 4, partial)."""
        return self.shared_ids / self.ids if self.ids else 0.0

    @property
    def dedupe_factor(self) -> float:
        """Ids over ids that are left where a row that equals the row before is stored once."""
        return _ratio(self.ids, self.ids - self.unchanged_ids)

    @property
    def partial_dedupe_factor(self) -> float:
        """The same where of a shifted row only the new ids are stored (section 7)."""
        return _ratio(self.ids, self.ids - self.shifted_ids)


@dataclass(frozen=True)
class TableStatistics:
    """Statistics of rows in stored order.

    Attributes:
        rows: rows.
        sessions: runs of neighbouring rows of one session.
        features: by name.
    """

    rows: int
    sessions: int
    features: Mapping[str, FeatureStatistics]

    @property
    def samples_per_session(self) -> float:
        """S, the mean rows of a session; 1 where there are no rows."""
        return _ratio(self.rows, self.sessions)

    @property
    def total(self) -> FeatureStatistics:
        """All features as one: shares of ids are weighted by length, and ``stays`` is a mean."""
        return sum(self.features.values(), FeatureStatistics())

    @staticmethod
    def merge(parts: Iterable[TableStatistics]) -> TableStatistics:
        """The statistics of several tables as one; a session that goes on in the next counts twice.

        Raises:
            ValueError: there are no parts, or their features differ.
        """
        return reduce(_merge_two, parts)

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``from_json`` takes them back."""
        own = ("rows", "sessions")
        features = {
            name: {key: count for key, count in asdict(feature).items() if key not in own}
            for name, feature in self.features.items()
        }
        return {
            "version": _VERSION,
            "rows": self.rows,
            "sessions": self.sessions,
            "features": features,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """What ``to_json`` gave.

        Raises:
            ValueError: it is something else.
        """
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
    if first.features.keys() != second.features.keys():
        odd = sorted(first.features.keys() ^ second.features.keys())
        raise ValueError(f"only one of two tables has {', '.join(odd)}")
    features = {name: one + second.features[name] for name, one in first.features.items()}
    return TableStatistics(first.rows + second.rows, first.sessions + second.sessions, features)


def _ratio(whole: float, part: float) -> float:
    """``whole / part``: 1 of nothing, infinite where nothing is left."""
    if part > 0:
        return whole / part
    return float("inf") if whole > 0 else 1.0
