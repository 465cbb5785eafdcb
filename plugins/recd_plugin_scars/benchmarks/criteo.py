"""Tables like Criteo's: 26 of them, one lookup a sample and table, as Zipf's law says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api.access import TableAccess, from_weights

#: Rows of the tables of Criteo Terabyte when ids are taken modulo 10 million, as DLRM's own
#: preprocessing does with ``--max-ind-range=10000000``: those that occur.
CARDINALITIES = (
    *(9_980_333, 36_084, 17_217, 7_378, 20_134, 3, 7_112, 1_442, 61, 9_758_201, 1_333_352),
    *(313_829, 10, 2_208, 11_156, 122, 4, 970, 14, 9_994_222, 7_267_859, 9_946_608, 415_421),
    *(12_420, 101, 36),
)
FEATURES = tuple(f"cat_{number}" for number in range(len(CARDINALITIES)))
EMBEDDING_DIM = 64
#: A row of the fast memory: 64 float32 and the state of row-wise Adagrad.
ROW_BYTES = 4 * EMBEDDING_DIM + 4
CACHE_BYTES = 256 * 2**20
BATCH_SIZE = 8192


@dataclass(frozen=True)
class ScaledCriteo:
    """The tables, all scaled alike.

    Attributes:
        scale: rows, cache and batch are fewer by it. A row stands for ``scale`` neighbours by rank,
            and is read as often as they together in a batch as large: so a row is read as often
            in a batch as before, and any two amounts of traffic have the same ratio.
        exponent: of Zipf's law.
        seed: which row is read how often is drawn with it, as where ids are hashed.
        full_batch_size: samples before they are scaled.
    """

    scale: int = 1
    exponent: float = 1.1
    seed: int = 0
    full_batch_size: int = BATCH_SIZE

    @property
    def batch_size(self) -> int:
        """Samples."""
        return max(1, self.full_batch_size // self.scale)

    @property
    def cached_rows(self) -> int:
        """Rows of all tables that the cache holds."""
        return CACHE_BYTES // ROW_BYTES // self.scale

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each table."""
        return tuple(-(-rows // self.scale) for rows in CARDINALITIES)

    def accesses(self) -> Iterator[TableAccess]:
        """How often the rows of each table are read, one table after the other."""
        for number, (feature, rows) in enumerate(zip(FEATURES, CARDINALITIES, strict=True)):
            weights = np.arange(1, rows + 1, dtype=np.float64) ** -self.exponent
            if self.scale > 1:
                weights = np.add.reduceat(weights, np.arange(0, rows, self.scale))
                # The last row may stand for fewer neighbours, so that the order stays.
            yield from_weights(
                f"t_{feature}", weights, 1.0, seed=self.seed + number, features=(feature,)
            )


def draw(
    access: TableAccess, rng: np.random.Generator, batches: int, batch_size: int
) -> NDArray[np.int64]:
    """Ids of a table, by the inverse of its cumulative distribution, int64 ``[batches, batch]``."""
    cumulative = np.cumsum(access.accesses)
    at = rng.random(batches * batch_size)
    # Sorted, a search goes through memory once: several times faster than in the order drawn.
    order = np.argsort(at)
    ids = np.empty(len(at), dtype=np.int64)
    ranks = np.searchsorted(cumulative[:-1], at[order] * cumulative[-1], side="right")
    ids[order] = access.rows[ranks]
    return ids.reshape(batches, batch_size)
