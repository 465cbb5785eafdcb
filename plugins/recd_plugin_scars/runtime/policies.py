"""Cache policies: they decide which rows stay in fast memory when no batch needs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.runtime.slots import NONE, SlotPool, append, take_first
from recd_plugins.api import SetupError

Slots = NDArray[np.int32]


class SlotLists:
    """Linked lists of slots for a table's policy. Each slot is in at most one list.

    Attributes:
        before: the previous slot in its list for each slot, or -1.
        after: the next slot in its list for each slot, or -1.
        level: the number of the list that contains each slot, or -1.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.before = self.after = self.level = np.empty(0, np.int32)

    def fit(self) -> None:
        """Resize the arrays to the pool."""
        more = self.pool.num_slots - len(self.level)
        if more:
            none = np.full(more, NONE, np.int32)
            self.before = np.concatenate([self.before, none])
            self.after = np.concatenate([self.after, none])
            self.level = np.concatenate([self.level, none])


class ShardRows:
    """This rank's rows of one table, as seen by a policy.

    Attributes:
        lists: links between slots, which a policy may use for the slots that it gets.
        capacity: maximum number of rows that stay.
        hot: slots of rows that are cached from the start, most read first.
        num_rows: number of rows in the shard.
    """

    def __init__(self, lists: SlotLists, place: int, capacity: int, hot: tuple[int, int]) -> None:
        first, end = lists.pool.first_rows[place : place + 2]
        self._first, self.num_rows = int(first), int(end - first)
        self.lists, self.capacity = lists, capacity
        self.hot: Slots = np.arange(*hot, dtype=np.int32)

    def of_slots(self, slots: Slots) -> NDArray[np.int64]:
        """Return the rows in ``slots``, numbered from 0 within the shard."""
        rows: NDArray[np.int64] = self.lists.pool.row_of_slot[slots] - self._first
        return rows

    def pinned(self, slots: Slots) -> NDArray[np.bool_]:
        """Return whether a batch needs the rows in ``slots`` and so prevents eviction."""
        return self.lists.pool.pins[slots] != 0


class RowPolicy(ABC):
    """Decides which rows of one table stay on this rank.

    ``TableCache.policy`` takes a subclass, or ``functools.partial`` of one with its settings. Every
    process calls it with one argument, ``ShardRows``.

    Attributes:
        name: name in reports; by default that of the class.
        only_hot: whether exactly the ``hot_rows`` of a ``TableCache`` stay.
        rows: rows of the shard.
        counts: figures of the policy by name, summed in ``CacheTraffic.by_policy``.
    """

    name: ClassVar[str]
    only_hot: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def __init__(self, rows: ShardRows) -> None:
        self.rows = rows
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def release(self, used: Slots, unpinned: Slots) -> Slots:
        """Return the slots of rows to evict after a batch: each at most once, and none pinned.

        An evicted row may come back in another slot.

        Args:
            used: slots of the batch's rows, in the order of its ids.
            unpinned: slots among ``used`` that no other batch needs.
        """


PolicyMaker = Callable[[ShardRows], RowPolicy]
"""A class of policies, or ``functools.partial`` of one."""


class Static(RowPolicy):
    """Keeps only the hot rows (SCARS, section II)."""

    name: ClassVar[str] = "static"
    only_hot: ClassVar[bool] = True

    def release(self, used: Slots, unpinned: Slots) -> Slots:  # noqa: ARG002
        hot = self.rows.hot
        if not len(hot):
            return unpinned
        leaves: Slots = unpinned[(unpinned < hot[0]) | (unpinned > hot[-1])]
        return leaves


class LeastRecentlyUsed(RowPolicy):
    """Keeps the last used ``capacity`` rows. Within a batch, the first rows are evicted first."""

    name: ClassVar[str] = "lru"

    def __init__(self, rows: ShardRows) -> None:
        super().__init__(rows)
        self._lists, self._capacity = rows.lists, rows.capacity
        self._heads = np.full(1, NONE, np.int32)
        self._tails = self._heads.copy()
        self._lowest = 0
        self._num_kept = 0
        self._keep(rows.hot[::-1])

    def release(self, used: Slots, unpinned: Slots) -> Slots:
        self._count(used)
        self._keep(unpinned)
        leaves = np.empty(max(self._num_kept - self._capacity, 0), np.int32)
        lists = self._lists
        self._lowest = take_first(
            len(leaves),
            self._lowest,
            lists.before,
            lists.after,
            lists.level,
            self._heads,
            self._tails,
            leaves,
        )
        self._num_kept -= len(leaves)
        # A row that a batch needs is added again when the batch is done.
        return leaves[~self.rows.pinned(leaves)]

    def _keep(self, slots: Slots) -> None:
        levels = self._levels(slots)
        if len(levels):
            self._lowest = min(self._lowest, int(levels.min()))
        lists = self._lists
        lists.fit()
        self._num_kept += append(
            slots, levels, lists.before, lists.after, lists.level, self._heads, self._tails
        )

    def _count(self, used: Slots) -> None:
        """Count one use of each row."""

    def _levels(self, slots: Slots) -> NDArray[np.int32]:
        """Return the level of each slot; lower levels are evicted first."""
        return np.zeros(len(slots), np.int32)


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """Keeps the ``capacity`` rows that the most batches have used since the start.

    Uses of uncached rows count as well. Ties evict the least recently used row first.
    """

    name: ClassVar[str] = "lfu"

    def __init__(self, rows: ShardRows) -> None:
        self._uses = np.zeros(rows.num_rows, np.int32)
        super().__init__(rows)

    def _count(self, used: Slots) -> None:
        rows = self.rows.of_slots(used)
        self._uses[rows] += 1
        highest = int(self._uses[rows].max(initial=0))
        if highest >= len(self._heads):
            none = np.full(highest + 1, NONE, np.int32)
            self._heads = np.concatenate([self._heads, none])
            self._tails = np.concatenate([self._tails, none])

    def _levels(self, slots: Slots) -> NDArray[np.int32]:
        levels: NDArray[np.int32] = self._uses[self.rows.of_slots(slots)]
        return levels


BUILT_IN: dict[str, type[RowPolicy]] = {
    policy.name: policy for policy in (Static, LeastFrequentlyUsed, LeastRecentlyUsed)
}


CachePolicy = Literal["static", "lfu", "lru"]
"""A built-in policy: the hot rows stay, or the most often used, or the last used ones."""


@dataclass(frozen=True)
class TableCache:
    """Selects the rows of a table that are in fast memory, under any sharding (SCARS, section II).

    Args:
        policy: name of a built-in policy, a subclass of ``RowPolicy``, or ``functools.partial`` of
            one.
        load_factor: cached share of the rows, 0 to 1. With ``lfu`` and ``lru`` a row-wise shard
            caches this share of its own rows.
        hot_rows: int, rows of the whole table, most read first. ``static`` caches the first
            ``num_cached_rows`` of them; other policies start with these.
        folder: folder of temporary files with all rows; None keeps them in host memory.
        lookahead: whether the rows of the next batch are read during the current one.

    Raises:
        SetupError: unknown policy, or ``load_factor`` is not from 0 to 1.
    """

    policy: CachePolicy | PolicyMaker
    load_factor: float
    hot_rows: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    folder: Path | None = None
    lookahead: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in get_args(CachePolicy):
            raise SetupError(
                f"cache policy {self.policy!r} does not exist. Use "
                f"{', '.join(get_args(CachePolicy))} or a subclass of RowPolicy."
            )
        if not 0 <= self.load_factor <= 1:
            raise SetupError(
                f"TableCache: load_factor is {self.load_factor}, but it must be from 0 to 1. Set "
                "load_factor to the cached share of the table's rows."
            )
        if self.hot_rows is None and self.policy_class.only_hot and self.load_factor:
            raise SetupError(
                f"cache policy {self.policy_name} needs hot_rows. Pass the rows of the table, "
                "most read first, or use policy lfu or lru."
            )

    @property
    def policy_maker(self) -> PolicyMaker:
        return BUILT_IN[self.policy] if isinstance(self.policy, str) else self.policy

    @property
    def policy_class(self) -> type[RowPolicy]:
        maker = self.policy_maker
        made = maker.func if isinstance(maker, partial) else maker
        assert isinstance(made, type)
        return made

    @property
    def policy_name(self) -> str:
        return self.policy_class.name

    def num_cached_rows(self, num_embeddings: int) -> int:
        """Return how many rows of a table with ``num_embeddings`` rows are cached."""
        return round(self.load_factor * num_embeddings)

    def first_hot_rows(self, table: str, num_embeddings: int) -> NDArray[np.int64]:
        """Return rows that are cached at the start, most read first, ``[<= num_cached_rows]``.

        Raises:
            SetupError: a row is not in the table or occurs twice, or ``static`` has too few rows.
        """
        num_cached = self.num_cached_rows(num_embeddings)
        if self.hot_rows is None:
            return np.empty(0, np.int64)
        rows = self.hot_rows[:num_cached].astype(np.int64)
        if self.policy_class.only_hot and len(rows) < num_cached:
            raise SetupError(
                f"table {table!r}: the cache has {num_cached} rows, but hot_rows has only "
                f"{len(rows)}. Reduce load_factor, or pass more hot_rows."
            )
        wrong = rows[(rows < 0) | (rows >= num_embeddings)]
        if len(wrong):
            raise SetupError(
                f"table {table!r}: hot_rows contains row {wrong[0]}, but the table has "
                f"{num_embeddings} rows. Profile the current table."
            )
        if len(np.unique(rows)) < len(rows):
            raise SetupError(f"table {table!r}: hot_rows contains a row twice. Remove duplicates.")
        return rows


@dataclass(frozen=True)
class CachedShard:
    """This rank's part of a table: ``capacity`` rows stay in fast memory, at first ``hot_rows``."""

    name: str
    num_rows: int
    policy: PolicyMaker
    capacity: int
    hot_rows: NDArray[np.int64]
