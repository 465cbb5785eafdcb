"""Sharding options of many shards that TorchRec's planner copies, compares and places fast."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Storage

Ranks = NDArray[np.int64]
Milliseconds = NDArray[np.float64]
# Places of the fields that ``Perf.total`` adds up, in its order.
_OF_TOTAL = [
    [field.name for field in fields(Perf)].index(name)
    for name in ("fwd_compute", "bwd_compute", "fwd_comms", "bwd_comms", "prefetch_compute")
]


@dataclass(frozen=True, eq=False)
class ShardLoads:
    """What the shards of an option take, in their order.

    Attributes:
        storage: int64 ``[3, num_shards]``, the fields of TorchRec's ``Storage``.
        perf: float64 ``[num_fields, num_shards]``, those of its ``Perf``.
        milliseconds: float64 ``[num_shards]``, ``Perf.total``.
        most_storage: int64 ``[3]``, that of the shard that takes most.
        total_storage: that of all of them.
    """

    storage: NDArray[np.int64]
    perf: NDArray[np.float64]
    milliseconds: Milliseconds
    most_storage: NDArray[np.int64]
    total_storage: list[int]

    @classmethod
    def of(cls, distinct: Sequence[Shard], rows: Sequence[int]) -> ShardLoads:
        """Of shards that are each estimated as the one in a row of distinct ones."""
        storages = _values([shard.storage for shard in distinct], np.int64)[:, rows]
        perfs = _values([shard.perf for shard in distinct], np.float64)[:, rows]
        most = storages.max(axis=1)
        return cls(storages, perfs, milliseconds_of(perfs), most, storages.sum(axis=1).tolist())

    @cached_property
    def memory(self) -> tuple[int, int, int, int]:
        """Bytes of the device, of the shard that takes most and of all, and of the host."""
        device, host, *_ = self.most_storage.tolist()
        devices, hosts, *_ = self.total_storage
        return device, devices, host, hosts


class QuickOption(ShardingOption):
    """One way of sharding a table, which is told from others by its identity.

    TorchRec hashes each shard of each table for each plan that it tries, and copies whatever a
    shard refers to: of 1,024 ranks with a part of each of 100 tables, most of the time of a plan.
    Here sizes, storage and times are shared by copies; nobody changes them but for another's.
    """

    loads: ShardLoads

    @classmethod
    def adopt(cls, option: ShardingOption, shards: list[Shard]) -> None:
        """Make an option one of these.

        Args:
            option: whose shards, one of each size, TorchRec has estimated.
            shards: all of them, each of one of those sizes.
        """
        places = {tuple(shard.size): place for place, shard in enumerate(option.shards)}
        rows = [places[tuple(shard.size)] for shard in shards]
        for shard, row in zip(shards, rows, strict=True):
            alike = option.shards[row]
            shard.storage, shard.perf = alike.storage, alike.perf
        option.__class__ = cls
        option.__dict__["loads"] = ShardLoads.of(option.shards, rows)
        option.shards = shards

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuickOption:
        # TorchRec's proposers change how large a cache is, of copies.
        memo[id(self.shards)] = [
            Shard(each.size, each.offset, each.storage, each.perf, each.rank)
            for each in self.shards
        ]
        memo[id(self.loads)] = self.loads
        return super().__deepcopy__(memo)

    def copied(self, ranks: Iterable[int | None]) -> QuickOption:
        """A copy with shards of its own on some ranks, which share what was estimated of these."""
        found = copy.copy(self)
        found.shards = [
            Shard(each.size, each.offset, each.storage, each.perf, rank)
            for each, rank in zip(self.shards, ranks, strict=True)
        ]
        return found


def quick(options: Iterable[ShardingOption]) -> list[QuickOption]:
    """The options, which the enumerator made such ones."""
    found = []
    for option in options:
        assert isinstance(option, QuickOption), "the enumerator makes these"
        found.append(option)
    return found


class Placement(list[ShardingOption]):
    """A proposal with the ranks of its shards, which stand beside them.

    TorchRec writes ranks into shards, and copies these for each plan that is better than all
    before it.

    Args:
        proposal: an option of each table.
        ranks: of the shards of each.
    """

    def __init__(self, proposal: Iterable[ShardingOption], ranks: Sequence[Ranks]) -> None:
        super().__init__(proposal)
        self.ranks = ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        return self  # nobody changes it

    def options(self) -> list[QuickOption]:
        """Copies of the options, with ranks in their shards."""
        pairs = zip(quick(self), self.ranks, strict=True)
        return [option.copied(ranks.tolist()) for option, ranks in pairs]


def _values(taken: Sequence[Storage | Perf | None], dtype: type) -> NDArray[Any]:
    values: NDArray[Any] = np.array([values_of(each) for each in taken if each is not None], dtype)
    return values.T


def values_of(taken: Storage | Perf) -> list[float]:
    """The values of the fields, in their order."""
    return [*vars(taken).values()]


def milliseconds_of(perf: Milliseconds) -> Milliseconds:
    """``Perf.total`` of values of fields, along the first axis, added up in its order."""
    compute, backward, sent, received, fetched = (perf[field] for field in _OF_TOTAL)
    return compute + backward + sent + received + fetched
