"""Ranks that shards are placed on as by TorchRec's partitioner, all ranks at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    PartitionByType,
    Perf,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType

from recd_plugins.planning.quick_option import (
    Milliseconds,
    QuickOption,
    Ranks,
    ShardLoads,
    milliseconds_of,
    values_of,
)


class QuickRanks:
    """What is left of ranks while shards are placed on them.

    TorchRec's ``GreedyPerfPartitioner`` copies the ranks of each node that it tries, and adds up
    what every rank does for each table. Ranks and sums are the same here, to the last bit.

    Args:
        topology: the ranks as they are.
    """

    def __init__(self, topology: Topology) -> None:
        devices = topology.devices
        # As of ``ShardLoads``.
        self._storage = np.array([values_of(each.storage) for each in devices], np.int64).T.copy()
        self._perf = np.array([values_of(each.perf) for each in devices], np.float64).T.copy()
        self._busy = milliseconds_of(self._perf)
        # No rank has less left.
        self._least = self._storage.min(axis=1)
        self._every = np.arange(len(devices))
        # Of ranks that are as busy, the first of each node go before the second.
        self._in_order = np.lexsort((self._every, self._every % topology.local_world_size))
        # Older TorchRec knows nodes only.
        size = getattr(topology, "intra_group_size", topology.local_world_size)
        self._nodes = self._every[: len(devices) // size * size].reshape(-1, size)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuickRanks:
        copied = copy.copy(self)
        copied._storage, copied._perf = self._storage.copy(), self._perf.copy()
        copied._busy, copied._least = self._busy.copy(), self._least.copy()
        return copied

    @staticmethod
    def places(option: ShardingOption) -> bool:
        """Whether ``place`` knows where an option goes: not on several nodes, with tables that
        depend on it, or where rows are in no memory."""
        return (
            option.partition_by in (PartitionByType.HOST.value, PartitionByType.DEVICE.value)
            and option.dependency is None
            and option.compute_kernel != EmbeddingComputeKernel.KEY_VALUE.value
        )

    def busy(self, ranks: Ranks) -> float:
        """Milliseconds of all of them."""
        return sum(self._busy[ranks].tolist())

    def on(self, topology: Topology) -> Topology:
        """A copy of a topology whose ranks are these."""
        copied = copy.deepcopy(topology)
        left = zip(copied.devices, self._storage.T.tolist(), self._perf.T.tolist(), strict=True)
        for device, storage, perf in left:
            device.storage, device.perf = Storage(*storage), Perf(*perf)
        return copied

    def place_on_all(self, option: ShardingOption) -> Ranks:
        """Each rank with its shard.

        Raises:
            PlannerError: there is no room.
        """
        if not self._takes_each(option, slice(None)):
            raise no_room(f"a shard of {option.name} fits on no rank")
        return self._every

    def place(self, option: ShardingOption) -> Ranks:
        """The ranks of shards: the least busy, or those of the least busy node that has room.

        Raises:
            PlannerError: there is no room.
        """
        placed: Ranks | None
        if option.partition_by == PartitionByType.DEVICE.value:
            placed = self._on_some(option, self._in_order)
        elif option.sharding_type == ShardingType.TABLE_ROW_WISE.value:
            placed = self._on_a_node(option)
        else:
            nodes = self._nodes[np.argsort(self._busy_nodes(), kind="stable")]
            tried = (self.place_together([option], node) for node in nodes)
            [placed] = next((each for each in tried if each is not None), [None])
        if placed is None:
            raise no_room(f"there is no room for {option.name}")
        return placed

    def place_together(self, options: Sequence[ShardingOption], ranks: Ranks) -> list[Ranks] | None:
        """The ranks of the shards of each option, all among some; None where there is no room."""
        before = self._storage[:, ranks], self._perf[:, ranks], self._busy[ranks]
        placed = []
        for option in options:
            # A node's ranks hold the parts of a table that is split by rows in their order.
            in_order = option.sharding_type == ShardingType.TABLE_ROW_WISE.value
            found = (self._on_each if in_order else self._on_some)(option, ranks)
            if found is None:
                self._storage[:, ranks], self._perf[:, ranks], self._busy[ranks] = before
                return None
            placed.append(found)
        return placed

    def _busy_nodes(self) -> Milliseconds:
        """Of all ranks of each node, added up in their order."""
        return reduce(np.add, self._busy[self._nodes].T)

    def _on_a_node(self, option: ShardingOption) -> Ranks | None:
        """The ranks of the least busy node that has room, which take a shard each."""
        loads = _loads(option)
        if loads.storage.shape[1] != self._nodes.shape[1]:
            return None
        busy = self._busy_nodes()
        if not (loads.most_storage <= self._least).all():
            left = self._storage[:, self._nodes]
            busy[~(loads.storage[:, None] <= left).all(axis=(0, 2))] = np.inf
        node = busy.argmin()
        return self._on_each(option, self._nodes[node])

    def _on_each(self, option: ShardingOption, ranks: Ranks) -> Ranks | None:
        """The ranks, which take a shard each in their order."""
        return ranks if self._takes_each(option, ranks) else None

    def _takes_each(self, option: ShardingOption, ranks: Ranks | slice) -> bool:
        """Whether each of the ranks has room for its shard, which it takes then."""
        loads, left = _loads(option), self._storage[:, ranks]
        if loads.storage.shape != left.shape or (loads.storage > left).any():
            return False
        self._take(ranks, loads.storage, loads.perf)
        return True

    def _on_some(self, option: ShardingOption, ranks: Ranks) -> Ranks | None:
        """The least busy of the ranks for one shard after the other; of several the first."""
        loads = _loads(option)
        placed = []
        for storage, perf in zip(loads.storage.T, loads.perf.T, strict=True):
            busy = self._busy[ranks]
            if not (storage <= self._least).all():
                fits = (storage[:, None] <= self._storage[:, ranks]).all(axis=0)
                if not fits.any():
                    return None
                busy[~fits] = np.inf
            rank = ranks[busy.argmin()]
            self._take(rank, storage, perf)
            placed.append(rank)
        return np.array(placed)

    def _take(self, ranks: Ranks | slice, storage: Ranks, perf: Milliseconds) -> None:
        self._storage[:, ranks] -= storage
        self._perf[:, ranks] += perf
        self._busy[ranks] = milliseconds_of(self._perf[:, ranks])
        left = self._storage[:, ranks].reshape(len(self._least), -1)
        np.minimum(self._least, left.min(axis=1), out=self._least)


def no_room(message: str) -> PlannerError:
    """The error for a plan that cannot be placed."""
    return PlannerError(error_type=PlannerErrorType.PARTITION, message=message)


def _loads(option: ShardingOption) -> ShardLoads:
    assert isinstance(option, QuickOption), "the enumerator makes these"
    return option.loads
