"""Eviction policies of dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

RowArrays = Mapping[str, NDArray[Any]]


class EvictionPolicy:
    """Decides which rows are evicted. Subclass it to write a policy of your own.

    A full bucket evicts its rows in ascending order of scores. Rows with equal scores are evicted
    in ascending order of mixed ids.

    Attributes:
        name: name in error messages.
        arrays: names and dtypes of additional values per row, which are part of checkpoints. They
            are 0 when an id gets a row. The array ``last_step``, int32, always exists. It has the
            last step in which the id occurred.
        sweep_every: number of steps between evictions of all rows with score ``-inf`` from all
            buckets. With 0, only full buckets evict.
    """

    name: ClassVar[str]
    arrays: ClassVar[Mapping[str, DTypeLike]] = {}
    sweep_every: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def update(
        self, arrays: RowArrays, rows: NDArray[np.int64], counts: NDArray[np.int64], step: int
    ) -> None:
        """Update ``arrays`` for ids of a batch. ``last_step`` is updated afterwards.

        Change ``arrays`` only at ``rows``, because delta checkpoints contain only these rows.

        Args:
            arrays: arrays of all rows of this rank, each ``[num_rows]``.
            rows: distinct rows of the ids, int64 ``[n]``. They index ``arrays``.
            counts: occurrences to add for each id, int64 ``[n]``. Training passes 1 per batch.
            step: number of the training step.
        """

    def score(self, arrays: RowArrays, step: int) -> NDArray[np.floating[Any]]:
        """Return scores of the rows of a bucket, ``[rows_per_bucket]``.

        A score of ``inf`` prevents eviction. A score of ``-inf`` evicts the row in the next sweep
        (``sweep_every``) or when the bucket is full. Scores of free rows and of rows with an id in
        the current batch have no effect.

        Args:
            arrays: arrays of one bucket, each ``[rows_per_bucket]``.
            step: number of the training step.
        """
        raise NotImplementedError


class NoEviction(EvictionPolicy):
    """Evicts nothing."""

    name: ClassVar[str] = "none"

    def score(self, arrays: RowArrays, step: int) -> NDArray[np.float64]:  # noqa: ARG002
        return np.full(len(arrays["last_step"]), np.inf)


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the ids with the earliest last step."""

    name: ClassVar[str] = "lru"

    def score(self, arrays: RowArrays, step: int) -> NDArray[np.float64]:  # noqa: ARG002
        return arrays["last_step"].astype(np.float64)


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts the ids with the fewest occurrences, which can decay by ``half_life``.

    Args:
        half_life: number of steps after which an occurrence counts half, or None for no decay.
    """

    name: ClassVar[str] = "lfu"
    arrays: ClassVar[Mapping[str, DTypeLike]] = {"count": np.float64}

    def __init__(self, half_life: float | None = None) -> None:
        self.half_life = np.inf if half_life is None else half_life

    def update(
        self, arrays: RowArrays, rows: NDArray[np.int64], counts: NDArray[np.int64], step: int
    ) -> None:
        decay = np.exp2((arrays["last_step"][rows] - step) / self.half_life)
        arrays["count"][rows] = arrays["count"][rows] * decay + counts

    def score(self, arrays: RowArrays, step: int) -> NDArray[np.float64]:
        return arrays["count"] * np.exp2((arrays["last_step"] - step) / self.half_life)


class TimeToLive(EvictionPolicy):
    """Evicts the ids that have not occurred for more than ``steps`` steps, and no other ids.

    Buckets evict these ids every ``steps // 8`` steps, and when they are full.
    """

    name: ClassVar[str] = "ttl"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.sweep_every = max(steps // 8, 1)

    def score(self, arrays: RowArrays, step: int) -> NDArray[np.float64]:
        return np.where(step - arrays["last_step"] > self.steps, -np.inf, np.inf)


class Candidates(LeastRecentlyUsed):
    """Counts the occurrences of ids that have no row in the table yet."""

    name: ClassVar[str] = "candidates"
    arrays: ClassVar[Mapping[str, DTypeLike]] = {"count": np.int64}

    def update(
        self,
        arrays: RowArrays,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        step: int,  # noqa: ARG002
    ) -> None:
        arrays["count"][rows] += counts


#: Eviction policies by name.
POLICIES: Mapping[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (NoEviction, LeastRecentlyUsed, LeastFrequentlyUsed, TimeToLive)
}
