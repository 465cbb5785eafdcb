"""Which rows stay in the fast tier when no batch needs them any more."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.runtime import slot_kernels
from recd_plugin_scars.runtime.slots import SlotPool
from recd_plugin_scars.runtime.spec import CachePolicy

Slots = NDArray[np.int32]


class Policy(ABC):
    """Decides for the rows of one table."""

    @abstractmethod
    def release(self, used: Slots, unpinned: Slots) -> Slots:
        """A batch is done.

        Args:
            used: slots of its rows, in the order in which it names them.
            unpinned: those of them that no other batch needs.

        Returns:
            The slots of the rows that leave, none of which is pinned.
        """


class Static(Policy):
    """The hot rows stay and no other does (SCARS, section II).

    Args:
        first: slot of the hot rows.
        end: after their slots.
    """

    def __init__(self, first: int, end: int) -> None:
        self._first, self._end = first, end

    def release(self, used: Slots, unpinned: Slots) -> Slots:  # noqa: ARG002
        """All but the hot rows leave."""
        leaves: Slots = unpinned[(unpinned < self._first) | (unpinned >= self._end)]
        return leaves


class Lists:
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


class LeastRecentlyUsed(Policy):
    """At most ``capacity`` rows stay: those whose batches were done last.

    Of the rows of one batch, those leave first that it names first.

    Args:
        lists: of the pool.
        capacity: how many rows stay.
        hot: slots of rows that are there from the start, most read first.
    """

    def __init__(self, lists: Lists, capacity: int, hot: Slots) -> None:
        self._lists, self._capacity = lists, capacity
        self._heads = np.full(1, slot_kernels.NONE, np.int32)
        self._tails = self._heads.copy()
        self._lowest = 0
        self._num_kept = 0
        self._keep(hot[::-1])

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
        return leaves[self._lists.pool.pins[leaves] == 0]

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
    """At most ``capacity`` rows stay: those that the most batches used, since the start.

    Uses count while a row is not in the fast tier, too. Of equally often used rows, the longest
    unused leave first.
    """

    def __init__(
        self, lists: Lists, capacity: int, hot: Slots, first_row: int, num_rows: int
    ) -> None:
        self._first_row = first_row
        self._uses = np.zeros(num_rows, np.int32)
        super().__init__(lists, capacity, hot)

    def _count(self, used: Slots) -> None:
        rows = self._lists.pool.row_of_slot[used] - self._first_row
        self._uses[rows] += 1
        highest = int(self._uses[rows].max(initial=0))
        if highest >= len(self._heads):
            none = np.full(highest + 1, slot_kernels.NONE, np.int32)
            self._heads = np.concatenate([self._heads, none])
            self._tails = np.concatenate([self._tails, none])

    def _levels(self, slots: Slots) -> NDArray[np.int32]:
        levels: NDArray[np.int32] = self._uses[
            self._lists.pool.row_of_slot[slots] - self._first_row
        ]
        return levels


def make_policy(
    name: CachePolicy, lists: Lists, table: int, capacity: int, hot: tuple[int, int]
) -> Policy:
    """The policy of one table of a pool.

    Args:
        name: of the policy.
        lists: of the pool.
        table: its place in the pool.
        capacity: how many of its rows stay.
        hot: first and end of the slots of its rows that are there from the start, most read first.
    """
    if name == "static":
        return Static(*hot)
    slots = np.arange(*hot, dtype=np.int32)
    if name == "lru":
        return LeastRecentlyUsed(lists, capacity, slots)
    first, end = lists.pool.first_rows[table : table + 2]
    return LeastFrequentlyUsed(lists, capacity, slots, int(first), int(end - first))
