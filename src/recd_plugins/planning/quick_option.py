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
        total_storage: that of all of them.
    """

    storage: NDArray[np.int64]
    perf: NDArray[np.float64]
    milliseconds: Milliseconds
    total_storage: list[int]


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
        # TorchRec's proposers change how large a cache is, of copies.
        memo[id(self.shards)] = [
            Shard(each.size, each.offset, each.storage, each.perf, each.rank)
            for each in self.shards
        ]
        copied: QuickOption = super().__deepcopy__(memo)
        copied.__dict__.pop("loads", None)
        return copied

    def copied(self, ranks: Iterable[int | None]) -> QuickOption:
        """A copy with shards of its own on some ranks, which share what was estimated of these."""
        found = copy.copy(self)
        found.__dict__.pop("loads", None)
        found.shards = [
            Shard(each.size, each.offset, each.storage, each.perf, rank)
            for each, rank in zip(self.shards, ranks, strict=True)
        ]
        return found

    @cached_property
    def loads(self) -> ShardLoads:
        """Of the shards as they are estimated when it is asked for first."""
        storages = _values([shard.storage for shard in self.shards], np.int64)
        perfs = _values([shard.perf for shard in self.shards], np.float64)
        return ShardLoads(storages, perfs, milliseconds_of(perfs), storages.sum(axis=1).tolist())


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
        found = []
        for option, ranks in zip(self, self.ranks, strict=True):
            assert isinstance(option, QuickOption), "the enumerator makes these"
            found.append(option.copied(ranks.tolist()))
        return found


def _values(taken: Sequence[Storage | Perf | None], dtype: type) -> NDArray[Any]:
    """Of each, the values of its fields: most shards of a table share what was estimated of one."""
    places: dict[int, int] = {}
    rows = [places.setdefault(id(each), len(places)) for each in taken]
    distinct = {id(each): each for each in taken}.values()
    values: NDArray[Any] = np.array(
        [values_of(each) for each in distinct if each is not None], dtype
    )
    return values.T[:, rows]


def values_of(taken: Storage | Perf) -> list[float]:
    """The values of the fields, in their order."""
    return [*vars(taken).values()]


def milliseconds_of(perf: Milliseconds) -> Milliseconds:
    """``Perf.total`` of values of fields, along the first axis, added up in its order."""
    compute, backward, sent, received, fetched = (perf[field] for field in _OF_TOTAL)
    return compute + backward + sent + received + fetched
