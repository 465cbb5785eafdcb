"""TorchRec's partitioner, behind tables on all ranks and those whose ranks parts have chosen."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    PartitionByType,
    Partitioner,
    ShardingOption,
    Topology,
)

from recd_plugins.planning.quick_option import Placement, QuickOption, Ranks
from recd_plugins.planning.quick_ranks import QuickRanks, no_room
from recd_plugins.planning.table_ranks import ON_A_NODE, TableGroup


class RankPartitioner(Partitioner):
    """Places groups of tables where they may be, then all others as TorchRec does.

    Groups with the fewest ranks to choose from come first, of these the largest.

    Args:
        groups: of tables.
    """

    def __init__(self, groups: Sequence[TableGroup]) -> None:
        super().__init__()
        self._groups = groups
        self._others = GreedyPerfPartitioner()
        self._free: tuple[Topology, QuickRanks] | None = None

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> Placement:
        """See TorchRec's ``Partitioner.partition``."""
        left = self._ranks_of(storage_constraint)
        placed: dict[ShardingOption, Ranks] = {}
        # Two modules may have tables of one name.
        rest = proposal
        chosen: list[tuple[TableGroup, list[ShardingOption]]] = []
        for group in self._groups:
            tables = [option for option in rest if option.name in group.tables]
            chosen.append((group, sorted(tables, key=lambda option: option.name)))
            rest = [option for option in rest if option.name not in group.tables]
        chosen.sort(key=lambda pair: (len(pair[0].ranks), -sum(map(_num_bytes, pair[1]))))
        for group, tables in chosen:
            placed |= zip(tables, _place(group, tables, left, storage_constraint), strict=True)
        others: list[ShardingOption] = []
        for option in rest:
            if option.partition_by == PartitionByType.UNIFORM.value:
                placed[option] = left.place_on_all(option)
            else:
                others.append(option)
        if all(map(left.places, others)):
            for option in sorted(others, key=_storage, reverse=True):
                placed[option] = left.place(option)
        else:
            self._others.partition(others, left.on(storage_constraint))
            placed |= {option: np.array(option.get_shards_assignment()) for option in others}
        return Placement(proposal, [placed[option] for option in proposal])

    def _ranks_of(self, topology: Topology) -> QuickRanks:
        """Those of the one topology that all plans are tried on, read once."""
        if self._free is None or self._free[0] is not topology:
            self._free = topology, QuickRanks(topology)
        return copy.deepcopy(self._free[1])


def _storage(option: ShardingOption) -> list[int]:
    assert isinstance(option, QuickOption), "the enumerator makes these"
    return option.loads.total_storage


def _num_bytes(option: ShardingOption) -> int:
    hbm, ddr, *_ = _storage(option)
    return hbm + ddr


def _place(
    group: TableGroup, options: Sequence[ShardingOption], left: QuickRanks, topology: Topology
) -> list[Ranks]:
    """The ranks of shards, of the least busy that may hold all, where they fit."""
    kinds = {option.sharding_type for option in options}
    choices = _choices(group, kinds, topology.local_world_size)
    for ranks in sorted(choices, key=lambda each: (left.busy(each), each[0])):
        if (placed := left.place_together(options, ranks)) is not None:
            return placed
    raise no_room(f"there is no room for {group}")


def _choices(group: TableGroup, kinds: set[str], ranks_per_node: int) -> list[Ranks]:
    """Ranks that may hold all the shards of a group."""
    choices: list[tuple[int, ...]]
    if group.is_together:
        choices = [(rank,) for rank in sorted(group.ranks)]
    elif kinds.isdisjoint(ON_A_NODE):
        choices = [tuple(sorted(group.ranks))]
    else:
        choices = group.nodes(ranks_per_node)
    return [np.array(ranks) for ranks in choices]
