"""TorchRec's partitioner, behind the tables whose ranks table parts have chosen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    DeviceHardware,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from recd_plugins.planning.table_ranks import ON_A_NODE, TableGroup


class RankPartitioner(GreedyPerfPartitioner):
    """Places groups of tables where they may be, then all other tables.

    Groups with the fewest ranks to choose from come first, of these the largest.

    Args:
        groups: of tables.
    """

    def __init__(self, groups: Sequence[TableGroup]) -> None:
        super().__init__()
        self._groups = groups

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology, *arguments: Any
    ) -> list[ShardingOption]:
        """See TorchRec's ``Partitioner.partition``."""
        left = copy.deepcopy(storage_constraint)
        options = {option.name: option for option in proposal}
        chosen = [
            (group, [options.pop(name) for name in sorted(group.tables) if name in options])
            for group in self._groups
        ]
        chosen.sort(key=lambda pair: (len(pair[0].ranks), -sum(map(_num_bytes, pair[1]))))
        for group, tables in chosen:
            _place(group, tables, left)
        super().partition(list(options.values()), left, *arguments)
        return proposal


def _num_bytes(option: ShardingOption) -> int:
    storage = option.total_storage
    return int(storage.hbm + storage.ddr)


def _place(group: TableGroup, options: Sequence[ShardingOption], topology: Topology) -> None:
    """Give shards their ranks, of the least busy where all fit, and take from what is left."""
    shards = [shard for option in options for shard in option.shards]
    kinds = {option.sharding_type for option in options}
    for devices in sorted(_choices(group, kinds, topology), key=_busy):
        left = {device.rank: copy.copy(device) for device in devices}
        for number, shard in enumerate(shards):
            # A node's ranks hold the parts of a table that is split by rows in their order.
            in_order = ShardingType.TABLE_ROW_WISE.value in kinds
            tried = [devices[number]] if in_order else devices
            fitting = [left[d.rank] for d in tried if shard.storage.fits_in(left[d.rank].storage)]
            if not fitting:
                break
            device = min(fitting, key=lambda each: _busy([each]))
            device.storage -= shard.storage
            device.perf += shard.perf
            shard.rank = device.rank
        else:
            for device in devices:
                device.storage, device.perf = left[device.rank].storage, left[device.rank].perf
            return
    raise PlannerError(
        error_type=PlannerErrorType.PARTITION, message=f"there is no room for {group}"
    )


def _choices(group: TableGroup, kinds: set[str], topology: Topology) -> list[list[DeviceHardware]]:
    """Ranks that may hold all the shards of a group."""
    choices: list[tuple[int, ...]]
    if group.is_together:
        choices = [(rank,) for rank in sorted(group.ranks)]
    elif kinds.isdisjoint(ON_A_NODE):
        choices = [tuple(sorted(group.ranks))]
    else:
        choices = group.nodes(topology.local_world_size)
    return [[topology.devices[rank] for rank in ranks] for ranks in choices]


def _busy(devices: Sequence[DeviceHardware]) -> tuple[float, int]:
    """By which the least busy ones are found, always the same of several."""
    return sum(device.perf.total for device in devices), devices[0].rank
