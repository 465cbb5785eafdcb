"""Cache policies, which decide the rows to evict after each batch."""

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
    """Doubly linked lists of slots (row indices of the cache memory), used by eviction policies.

    Attributes:
        before: previous slot of each slot in its list, or -1.
        after: next slot of each slot in its list, or -1.
        level: number of the list that contains each slot, or -1. A slot is in at most one list.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.before = self.after = self.level = np.empty(0, np.int32)

    def fit(self) -> None:
        """Grow the arrays to the current number of cache slots."""
        more = self.pool.num_slots - len(self.level)
        if more:
            none = np.full(more, NONE, np.int32)
            self.before = np.concatenate([self.before, none])
            self.after = np.concatenate([self.after, none])
            self.level = np.concatenate([self.level, none])


class ShardRows:
    """Gives a cache policy access to this rank's rows of one table.

    A slot is a row index of the cache memory.

    Attributes:
        lists: linked lists that the policy may use for its slots.
        capacity: maximum number of rows that stay in the cache.
        hot: slots of rows that are cached from the start, int32, most read first.
        num_rows: number of rows in this rank's shard of the table.
    """

    def __init__(self, lists: SlotLists, place: int, capacity: int, hot: tuple[int, int]) -> None:
        first, end = lists.pool.first_rows[place : place + 2]
        self._first, self.num_rows = int(first), int(end - first)
        self.lists, self.capacity = lists, capacity
        self.hot: Slots = np.arange(*hot, dtype=np.int32)

    def of_slots(self, slots: Slots) -> NDArray[np.int64]:
        """Return the row in each cache slot, int64, numbered from 0 within the shard."""
        rows: NDArray[np.int64] = self.lists.pool.row_of_slot[slots] - self._first
        return rows

    def pinned(self, slots: Slots) -> NDArray[np.bool_]:
        """Return whether the row in each slot is used by a batch in flight, bool ``[n]``."""
        return self.lists.pool.pins[slots] != 0


class RowPolicy(ABC):
    """Decides which rows of one table stay in this rank's cache.

    Pass a subclass, or ``functools.partial`` of a subclass, to ``TableCache.policy``. Each rank
    calls it with one argument, a ``ShardRows``.

    Attributes:
        name: name in reports, by default the class name.
        only_hot: whether exactly the ``hot_rows`` of the ``TableCache`` stay in the cache.
        rows: this rank's rows of the table.
        counts: custom counters to report, summed over ranks in ``CacheTraffic.by_policy``.
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
        """Return the cache slots (row indices of the cache memory) to evict after a batch.

        The result must not contain a slot twice, or a slot that another batch in flight needs. An
        evicted row may get another slot when it is used again.

        Args:
            used: slots of the batch's rows, int32, in the order of the ids.
            unpinned: slots of ``used`` that no other batch in flight needs, int32.
        """


PolicyMaker = Callable[[ShardRows], RowPolicy]
"""A subclass of ``RowPolicy``, or ``functools.partial`` of a subclass."""


class Static(RowPolicy):
    """Keeps only the most read rows of the access profile in the cache (SCARS, section II)."""

    name: ClassVar[str] = "static"
    only_hot: ClassVar[bool] = True

    def release(self, used: Slots, unpinned: Slots) -> Slots:  # noqa: ARG002
        hot = self.rows.hot
        if not len(hot):
            return unpinned
        leaves: Slots = unpinned[(unpinned < hot[0]) | (unpinned > hot[-1])]
        return leaves


class LeastRecentlyUsed(RowPolicy):
    """Keeps the ``capacity`` most recently used rows. Earlier ids of a batch are evicted first."""

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
        """Count one use of each row in ``used``. LRU counts nothing."""

    def _levels(self, slots: Slots) -> NDArray[np.int32]:
        """Return the eviction priority of each slot, int32. Low values are evicted first."""
        return np.zeros(len(slots), np.int32)


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """Keeps the ``capacity`` rows used by the most batches since the start.

    Also counts uses of rows that are not cached. Of rows with equal counts, evicts the least
    recently used row first.
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
"""Built-in policies: keep given hot rows, the most often used, or the most recently used rows."""
#: Policies of FBGEMM's UVM cache.
UVM_POLICIES = ("lru", "lfu")


@dataclass(frozen=True)
class TableCache:
    """Configuration of the cache of one table (SCARS, section II).

    Args:
        policy: name of a built-in policy, a subclass of ``RowPolicy``, or ``functools.partial`` of
            a subclass.
        load_factor: fraction of the table's rows to cache, 0 to 1. With ``lfu`` and ``lru`` a
            row-wise shard caches this fraction of its own rows.
        hot_rows: row numbers in the unsharded table, int64, most read first. ``static`` caches
            the first ``num_cached_rows`` of these rows. Other policies start with these rows.
        folder: folder of temporary files with all rows; None keeps all rows in host memory.
        lookahead: whether to fetch the rows of the next batch during the current step.
        uvm: use FBGEMM's cache in GPU memory, with all rows in host memory (UVM). It needs CUDA,
            policy ``lru`` or ``lfu``, and no ``folder``. It starts empty.

    Raises:
        SetupError: the policy does not exist, ``load_factor`` is not from 0 to 1, ``static`` has
            no ``hot_rows``, or FBGEMM's cache does not support the configuration.
    """

    policy: CachePolicy | PolicyMaker
    load_factor: float
    hot_rows: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    folder: Path | None = None
    lookahead: bool = True
    uvm: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in get_args(CachePolicy):
            raise SetupError(
                f"TableCache: no policy named {self.policy!r}. Use "
                f"{', '.join(map(repr, get_args(CachePolicy)))} or a subclass of RowPolicy."
            )
        if not 0 <= self.load_factor <= 1:
            raise SetupError(
                f"TableCache: load_factor is {self.load_factor}, but must be from 0 to 1. Set "
                "load_factor to the fraction of rows to cache."
            )
        if self.hot_rows is None and self.policy_class.only_hot and self.load_factor:
            raise SetupError(
                f"TableCache: policy {self.policy_name!r} needs hot_rows. Pass the row numbers of "
                "the table, most read first, or use policy 'lfu' or 'lru'."
            )
        if self.uvm and (self.policy not in UVM_POLICIES or self.folder is not None):
            raise SetupError(
                f"TableCache: FBGEMM's UVM cache has no policy {self.policy_name!r} and no files. "
                "Set uvm=False, or use policy 'lru' or 'lfu' without a folder."
            )

    @property
    def prefetches(self) -> bool:
        """Return whether the train pipeline prefetches rows, which FBGEMM supports for LRU only."""
        return self.lookahead and not (self.uvm and self.policy == "lfu")

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
        """Return the number of cached rows of a table with ``num_embeddings`` rows."""
        return round(self.load_factor * num_embeddings)

    def first_hot_rows(self, table: str, num_embeddings: int) -> NDArray[np.int64]:
        """Return the rows that are cached at the start, int64, most read first.

        Raises:
            SetupError: ``hot_rows`` has a row that is not in the table, or a row twice, or too few
                rows for the policy ``static``.
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
                f"table {table!r}: hot_rows contains row {wrong[0]}, but the table has only "
                f"{num_embeddings} rows. Use an access profile of the current table."
            )
        if len(np.unique(rows)) < len(rows):
            raise SetupError(f"table {table!r}: hot_rows contains a row twice. Remove duplicates.")
        return rows


@dataclass(frozen=True)
class CachedShard:
    """This rank's shard of a cached table. The cache starts with ``hot_rows``, int64 ``[n]``."""

    name: str
    num_rows: int
    policy: PolicyMaker
    capacity: int
    hot_rows: NDArray[np.int64]
