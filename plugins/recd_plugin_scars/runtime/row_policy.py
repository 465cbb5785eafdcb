"""Interface of cache policies: which rows stay in the fast memory when no batch needs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.runtime import slot_kernels
from recd_plugin_scars.runtime.slots import SlotPool
from recd_plugins.api import PluginError

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
        name: for reports.
        only_hot: whether the ``hot_rows`` of a ``TableCache`` stay and no other row does.
        rows: of the shard.
        counts: what the policy counts, by name; ``CacheTraffic.by_policy`` has it added up.
    """

    name: ClassVar[str]
    only_hot: ClassVar[bool] = False

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


def class_of(maker: PolicyMaker) -> type[RowPolicy]:
    """The class of policies that are made so."""
    made = maker.func if isinstance(maker, partial) else maker
    assert isinstance(made, type)
    return made


def check_leaving(policy: RowPolicy, table: str, leaves: Slots) -> None:
    """Refuse what would give a row's slot to another one while it is needed.

    Raises:
        PluginError: names the policy and the table.
    """
    rows = policy.rows.of_slots(leaves)
    if policy.rows.pinned(leaves).any():
        wrong = "of which a batch needs some"
    elif ((rows < 0) | (rows >= policy.rows.num_rows)).any():
        wrong = "of which some have no row of the table"
    elif len(np.unique(leaves)) < len(leaves):
        wrong = "some of them twice"
    else:
        return
    raise PluginError(
        f"{type(policy).__module__}.{type(policy).__qualname__}.release of table {table} returned "
        f"{len(leaves)} slots, {wrong}; return slots that are not pinned, each once"
    )
