"""How much the lists of a table repeat: the characterisation of the RecD paper (section 3).

Statistics are sums over rows and over pairs of neighbouring rows of a session, so those of several
files add up to those of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import reduce
from typing import Any, Self

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
