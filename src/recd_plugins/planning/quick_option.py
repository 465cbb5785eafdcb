"""Sharding options of many shards that TorchRec's planner copies, compares and places fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Storage


@dataclass(frozen=True, eq=False)
class ShardLoads:
    """What the shards of an option take, in their order.

    Attributes:
        storage: int64 ``[num_shards, 3]``, the fields of TorchRec's ``Storage``.
        perf: float64 ``[num_shards, num_fields]``, those of its ``Perf``.
        milliseconds: float64 ``[num_shards]``, ``Perf.total``.
    """

    storage: NDArray[np.int64]
    perf: NDArray[np.float64]
    milliseconds: NDArray[np.float64]


class QuickOption(ShardingOption):
    """One way of sharding a table, which is told from others by its identity.

    TorchRec hashes each shard of each table for each plan that it tries, and copies whatever a
    shard refers to: of 1,024 ranks with a part of each of 100 tables, most of the time of a plan.
    Here sizes, storage and times are shared by copies; nobody changes them but for another's.
    """

    @classmethod
    def adopt(cls, option: ShardingOption) -> None:
        """Make an option that TorchRec has estimated one of these."""
        option.__class__ = cls
        option.__dict__.pop("loads", None)

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuickOption:
        memo[id(self.shards)] = [
            Shard(each.size, each.offset, each.storage, each.perf, each.rank)
            for each in self.shards
        ]
        copied: QuickOption = super().__deepcopy__(memo)
        copied.__dict__.pop("loads", None)
        return copied

    @cached_property
    def loads(self) -> ShardLoads:
        """Of the shards as they are estimated when it is asked for first."""
        # Most shards of a table are alike, and share what was estimated of one.
        storage = {id(s.storage): values_of(s.storage) for s in self.shards}
        perf = {id(s.perf): (values_of(s.perf), s.perf.total) for s in self.shards}
        times = [perf[id(s.perf)] for s in self.shards]
        return ShardLoads(
            np.array([storage[id(s.storage)] for s in self.shards], np.int64),
            np.array([values for values, _ in times]),
            np.array([total for _, total in times]),
        )


def values_of(taken: Storage | Perf) -> list[float]:
    """The values of the fields, in their order."""
    return [*vars(taken).values()]
