"""How often a table's rows are read, in the few segments that sums over them need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import DataError

if TYPE_CHECKING:
    from recd_plugins.api.access import TableAccess

# So many of the most read rows are kept apart; further ones are together while their reads differ
# by less than this part. Sums over them are then exact to about its square over 24.
_APART, _WIDTH = 1 << 16, 1e-3


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows, most read first, of which neighbours that are read alike are together.

    Attributes:
        probabilities: float64 ``[segments]``, of one lookup to be of one row of the segment; the
            mean where these differ a little.
        ends: int64 ``[segments + 1]``: the segment has the rows of ranks ``ends[i]`` to
            ``ends[i + 1]``.
    """

    probabilities: NDArray[np.float64]
    ends: NDArray[np.int64]

    @property
    def num_rows(self) -> NDArray[np.int64]:
        """The number of rows of each segment."""
        return np.diff(self.ends)


@dataclass(frozen=True, eq=False)
class TableLoad:
    """A table and what its lookups read (SCARS).

    Where data is deduplicated, lookups are those that are sent, as the profile counts them.

    Attributes:
        access: how often each row is read.
        embedding_dim: scalars of a row.

    Raises:
        DataError: the profile has no reads.
    """

    access: TableAccess
    embedding_dim: int

    def __post_init__(self) -> None:
        if not self.access.total > 0:
            raise DataError(
                f"table {self.name}: its access profile has no reads, so there is nothing to plan "
                "by; profile data that looks it up"
            )

    @property
    def name(self) -> str:
        """The name of the table."""
        return self.access.table

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.access.num_embeddings

    @property
    def lookups(self) -> float:
        """l: lookups of one sample, mean; after deduplication."""
        return self.access.total / self.access.samples

    @cached_property
    def segments(self) -> Segments:
        """All rows, those that are not known one by one at the end."""
        access = self.access
        reads, tail_rows, tail_reads = access.accesses, access.tail_rows, access.tail_accesses
        if tail_rows:
            # A sketch cannot tell rows apart that have fewer reads than those it does not know.
            kept = len(reads) - int(np.searchsorted(reads[::-1], tail_reads / tail_rows, "left"))
            tail_rows += len(reads) - kept
            tail_reads += float(reads[kept:].sum())
            reads = reads[:kept]
        ends = _ends(reads)
        sums = np.add.reduceat(reads, ends[:-1]) if len(reads) else reads
        probabilities = sums / np.diff(ends)
        if tail_rows:
            probabilities = np.append(probabilities, tail_reads / tail_rows)
            ends = np.append(ends, self.num_embeddings)
        return Segments(np.minimum(probabilities / access.total, 1.0), ends)

    @cached_property
    def read_rows(self) -> int:
        """Rows that are read at all, as far as the profile knows."""
        segments = self.segments
        return int(segments.num_rows[segments.probabilities > 0].sum())

    def covered(self, rows: int) -> float:
        """The share of lookups that the ``rows`` most read rows have."""
        return self.access.covered(rows)

    def hot_rows(self, rows: int) -> NDArray[np.int64]:
        """The ids of the ``rows`` most read rows, int64 ``[rows]``, most read first.

        Those that are not known one by one follow by number.
        """
        known = self.access.rows[:rows]
        if rows <= len(known):
            return known
        others = np.ones(self.num_embeddings, dtype=np.bool_)
        others[known] = False
        return np.concatenate([known, np.flatnonzero(others)[: rows - len(known)]])


def _ends(reads: NDArray[np.float64]) -> NDArray[np.int64]:
    """Where segments of ``reads``, non-increasing, begin, and the end."""
    if len(reads) <= _APART:
        return np.arange(len(reads) + 1)
    further = reads[_APART:]
    read = len(further) - int(np.searchsorted(further[::-1], 0.0, "right"))
    starts = [np.arange(_APART + 1)]
    if read:
        bounds = np.exp(np.arange(np.log(further[0]), np.log(further[read - 1]) - _WIDTH, -_WIDTH))
        # Of a falling array: how many are at or above a bound.
        starts.append(len(reads) - np.searchsorted(reads[::-1], bounds, "left"))
        starts.append(np.array([_APART + read]))
    # Almost in order, so this is much faster than np.unique, which hashes.
    inner = np.sort(np.concatenate(starts))
    return np.append(inner[np.diff(inner, append=len(reads)) > 0], len(reads))
