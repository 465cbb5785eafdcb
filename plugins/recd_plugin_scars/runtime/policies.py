"""Cache policies: which rows stay in fast memory when no batch needs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.runtime import slot_kernels
from recd_plugin_scars.runtime.slots import SlotPool

Slots = NDArray[np.int32]


class SlotLists:
    """Links between slots: each is in one list at most, of whichever policy has its table.

    Args:
        pool: of the slots.

    Attributes:
        before: by slot, the one before it in its list, or -1.
        after: by slot, the one after it.
        level: by slot, which list of its policy it is in; -1 where in none.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.before = self.after = self.level = np.empty(0, np.int32)

    def fit(self) -> None:
        """Follow the pool, which may have grown."""
        more = self.pool.num_slots - len(self.level)
        if more:
            none = np.full(more, slot_kernels.NONE, np.int32)
            self.before = np.concatenate([self.before, none])
            self.after = np.concatenate([self.after, none])
            self.level = np.concatenate([self.level, none])


class ShardRows:
    """This rank's rows of one table, as a policy knows them.

    Args:
        lists: of the slots of all tables of a kernel.
        place: of the table among those.
        capacity: how many rows are to stay.
        hot: first and end of the slots of rows that are there from the start.

    Attributes:
        lists: links between slots, which a policy may use for those that it is handed.
        capacity: how many rows are to stay at most.
        hot: slots of rows that are there from the start, most read first.
        num_rows: all of them.
    """

    def __init__(self, lists: SlotLists, place: int, capacity: int, hot: tuple[int, int]) -> None:
        first, end = lists.pool.first_rows[place : place + 2]
        self._first, self.num_rows = int(first), int(end - first)
        self.lists, self.capacity = lists, capacity
        self.hot: Slots = np.arange(*hot, dtype=np.int32)

    def of_slots(self, slots: Slots) -> NDArray[np.int64]:
        """The rows in ``slots``, from 0 on, as the shard counts them."""
        rows: NDArray[np.int64] = self.lists.pool.row_of_slot[slots] - self._first
        return rows

    def pinned(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether a batch needs the rows in ``slots``, which cannot leave before it is done."""
        return self.lists.pool.pins[slots] != 0


class RowPolicy(ABC):
    """Decides for the rows of one table on this rank.

    ``TableCache.policy`` takes a subclass, or ``functools.partial`` of one with its settings; it
    is made with ``ShardRows`` alone, in every process.

    Attributes:
        name: for reports; that of the class without one.
        only_hot: whether the ``hot_rows`` of a ``TableCache`` stay and no other row does.
        rows: of the shard.
        counts: what the policy counts, by name; ``CacheTraffic.by_policy`` has it added up.
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
        """A batch is done.

        Rows that are not pinned and never leave stay in the fast memory. A row that leaves may come
        back, in another slot.

        Args:
            used: slots of its rows, in the order in which it names them.
            unpinned: those of them that no other batch needs.

        Returns:
            The slots of the rows that leave, each once, none of which is pinned.
        """


PolicyMaker = Callable[[ShardRows], RowPolicy]
"""A class of policies, or ``functools.partial`` of one."""


class Static(RowPolicy):
    """The hot rows stay and no other does (SCARS, section II)."""

    name: ClassVar[str] = "static"
    only_hot: ClassVar[bool] = True

    def release(self, used: Slots, unpinned: Slots) -> Slots:  # noqa: ARG002
        """All but the hot rows leave."""
        hot = self.rows.hot
        if not len(hot):
            return unpinned
        leaves: Slots = unpinned[(unpinned < hot[0]) | (unpinned > hot[-1])]
        return leaves


class LeastRecentlyUsed(RowPolicy):
    """The policy by which at most ``capacity`` rows stay: those whose batches were done last.

    Of the rows of one batch, those leave first that it names first.
    """

    name: ClassVar[str] = "lru"

    def __init__(self, rows: ShardRows) -> None:
        super().__init__(rows)
        self._lists, self._capacity = rows.lists, rows.capacity
        self._heads = np.full(1, slot_kernels.NONE, np.int32)
        self._tails = self._heads.copy()
        self._lowest = 0
        self._num_kept = 0
        self._keep(rows.hot[::-1])

    def release(self, used: Slots, unpinned: Slots) -> Slots:
        """The longest unused rows leave."""
        self._count(used)
        self._keep(unpinned)
        leaves = np.empty(max(self._num_kept - self._capacity, 0), np.int32)
        lists = self._lists
        self._lowest = slot_kernels.take_first(
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
        # One that a batch needs stays for its time, and comes back when that is done.
        return leaves[~self.rows.pinned(leaves)]

    def _keep(self, slots: Slots) -> None:
        levels = self._levels(slots)
        if len(levels):
            self._lowest = min(self._lowest, int(levels.min()))
        lists = self._lists
        lists.fit()
        self._num_kept += slot_kernels.append(
            slots, levels, lists.before, lists.after, lists.level, self._heads, self._tails
        )

    def _count(self, used: Slots) -> None:
        """Remember that a batch used these."""

    def _levels(self, slots: Slots) -> NDArray[np.int32]:
        """Rows of a lower level leave first."""
        return np.zeros(len(slots), np.int32)


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """The policy by which at most ``capacity`` rows stay: those that the most batches used, since
    the start.

    Uses count while a row is not in the fast memory, too. Of equally often used rows, the longest
    unused leave first.
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
            none = np.full(highest + 1, slot_kernels.NONE, np.int32)
            self._heads = np.concatenate([self._heads, none])
            self._tails = np.concatenate([self._tails, none])

    def _levels(self, slots: Slots) -> NDArray[np.int32]:
        levels: NDArray[np.int32] = self._uses[self.rows.of_slots(slots)]
        return levels


BUILT_IN: dict[str, type[RowPolicy]] = {
    policy.name: policy for policy in (Static, LeastFrequentlyUsed, LeastRecentlyUsed)
}
