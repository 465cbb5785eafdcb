"""TorchRec's partitioner, behind tables on all ranks and those whose ranks parts have chosen."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    DeviceHardware,
    PartitionByType,
    Partitioner,
    Perf,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType

from recd_plugins.planning.quick_option import QuickOption, values_of
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
        self._copied: tuple[Topology, Topology] | None = None

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """See TorchRec's ``Partitioner.partition``."""
        left = self._copy_of(storage_constraint)
        # Two modules may have tables of one name.
        rest = proposal
        chosen: list[tuple[TableGroup, list[ShardingOption]]] = []
        for group in self._groups:
            tables = [option for option in rest if option.name in group.tables]
            chosen.append((group, sorted(tables, key=lambda option: option.name)))
            rest = [option for option in rest if option.name not in group.tables]
        chosen.sort(key=lambda pair: (len(pair[0].ranks), -sum(map(_num_bytes, pair[1]))))
        for group, tables in chosen:
            _place(group, tables, left)
        on_all: list[ShardingOption] = []
        others: list[ShardingOption] = []
        for option in rest:
            uniform = option.partition_by == PartitionByType.UNIFORM.value
            (on_all if uniform else others).append(option)
        _place_on_all(on_all, left.devices)
        if others:
            self._others.partition(others, left)
        return proposal

    def _copy_of(self, topology: Topology) -> Topology:
        """The same copy for every plan that is tried."""
        if self._copied is None or self._copied[0] is not topology:
            self._copied = topology, copy.deepcopy(topology)
        copied = self._copied[1]
        for device, full in zip(copied.devices, topology.devices, strict=True):
            device.storage, device.perf = full.storage, full.perf
        return copied


def _place_on_all(options: Sequence[ShardingOption], devices: Sequence[DeviceHardware]) -> None:
    """Give each device its shard of each option, as TorchRec does, of all devices at once."""
    storage = np.array([values_of(device.storage) for device in devices], np.int64)
    perf = np.array([values_of(device.perf) for device in devices], np.float64)
    for option in options:
        assert isinstance(option, QuickOption), "the enumerator makes these"
        if option.num_shards != len(devices):
            raise _no_room(f"{option.num_shards} shards of {option.name} on {len(devices)} ranks")
        loads = option.loads
        if (loads.storage > storage).any():
            raise _no_room(f"a shard of {option.name} fits on no rank")
        storage -= loads.storage
        perf += loads.perf
        for shard, device in zip(option.shards, devices, strict=True):
            shard.rank = device.rank
    for device, left, busy in zip(devices, storage.tolist(), perf.tolist(), strict=True):
        device.storage, device.perf = Storage(*left), Perf(*busy)


def _no_room(message: str) -> PlannerError:
    return PlannerError(error_type=PlannerErrorType.PARTITION, message=message)


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
    raise _no_room(f"there is no room for {group}")


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
