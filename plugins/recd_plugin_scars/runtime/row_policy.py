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
from recd_plugins.api import PluginError, RecdError
from recd_plugins.api.registry import failure_in_words

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


def class_of(maker: PolicyMaker) -> type[RowPolicy]:
    """The class of policies that are made so."""
    made = maker.func if isinstance(maker, partial) else maker
    assert isinstance(made, type)
    return made


def made_by(maker: PolicyMaker, table: str, rows: ShardRows) -> RowPolicy:
    """The policy of a shard.

    Raises:
        PluginError: it cannot be made; names the policy and the table.
    """
    try:
        policy = maker(rows)
        _ = policy.rows, policy.counts.clear
    except RecdError:
        raise
    except Exception as error:
        cls = class_of(maker)
        what = f"{_name(cls)}.__init__ of table {table}"
        raise PluginError(
            f"{failure_in_words(what, error, cls)}; it is made with ShardRows alone and "
            "calls super().__init__(rows)"
        ) from error
    return policy


def released(policy: RowPolicy, table: str, used: Slots, unpinned: Slots) -> Slots:
    """What ``policy.release`` returns.

    Raises:
        PluginError: it raised something, or returned what would give a row's slot to another one
            while it is needed; names the policy and the table.
    """
    what = f"{_name(type(policy))}.release of table {table}"
    try:
        leaves = policy.release(used, unpinned)
    except RecdError:
        raise
    except Exception as error:
        raise PluginError(failure_in_words(what, error, type(policy))) from error
    if not isinstance(leaves, np.ndarray) or leaves.ndim != 1:
        raise PluginError(f"{what} returned {leaves!r:.200}; expected a NumPy array of slots")
    if wrong := _wrong(policy, leaves):
        raise PluginError(
            f"{what} returned {len(leaves)} slots, {wrong}; return slots that are not pinned, each "
            "once"
        )
    return leaves.astype(np.int32, copy=False)


def check_residents(policy: RowPolicy, table: str, residents: int, in_flight: int) -> None:
    """Refuse that more rows stay than the cache has room for.

    Args:
        policy: of the table.
        table: its name.
        residents: rows in the fast memory.
        in_flight: how many of them batches need at most, which do not count.

    Raises:
        PluginError: names the policy and the table.
    """
    capacity = policy.rows.capacity
    if residents - in_flight > capacity:
        raise PluginError(
            f"{_name(type(policy))} of table {table} lets {residents - in_flight} rows stay that "
            f"no batch needs, and the capacity is {capacity}: release must return the slots of "
            "rows beyond rows.capacity"
        )


def _wrong(policy: RowPolicy, leaves: Slots) -> str | None:
    """What is wrong with slots that are to be free."""
    if not len(leaves):
        return None
    if leaves.dtype.kind not in "iu":
        return f"which are {leaves.dtype} and no integers"
    if leaves.min() < 0 or leaves.max() >= policy.rows.lists.pool.num_slots:
        return "of which some are none"
    rows = policy.rows.of_slots(leaves)
    if policy.rows.pinned(leaves).any():
        return "of which a batch needs some"
    if ((rows < 0) | (rows >= policy.rows.num_rows)).any():
        return "of which some have no row of the table"
    if len(np.unique(leaves)) < len(leaves):
        return "some of them twice"
    return None


def _name(cls: type[RowPolicy]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
