"""The built-in cache policies."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.runtime import slot_kernels
from recd_plugin_scars.runtime.row_policy import RowPolicy, ShardRows, Slots


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
