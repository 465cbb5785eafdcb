"""Memory that TorchRec's planner leaves out of account, reserved or added to its estimates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingStorageEstimator,
    _get_optimizer_multipler,  # private, torchrec 1.6 to 1.9: nothing public says it
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    SharderDataMap,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingType

from recd_plugins.interfaces import RowMemory, Table, TablePart
from recd_plugins.registry.checked_part import one_answer
from recd_plugins.registry.training_spec import TrainingSpec
from recd_plugins.values.data_profile import DataProfile

#: Left to the allocator and the interpreter; and to activations where nobody counted them.
RESERVED_SHARE = 0.15


def dense_bytes(
    module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]], training: TrainingSpec
) -> int:
    """What a rank holds of everything that is no table: parameters, gradients, optimizer state.

    Gradients count twice: DistributedDataParallel has buckets of its own.
    """
    copies = 3 + (training.optimizer != "sgd")
    module_types = {sharder.module_type for sharder in sharders}
    tables = {
        id(parameter)
        for child in module.modules()
        if type(child) in module_types
        for parameter in child.parameters()
    }
    return copies * sum(
        parameter.numel() * parameter.element_size()
        for parameter in module.parameters()
        if id(parameter) not in tables
    )


def state_bytes(option: ShardingOption, shard: Shard, training: TrainingSpec) -> int:
    """The optimizer's state of a shard, and gradients of replicated tables.

    Row-wise Adagrad has a float32 a row; that of a table which brings an optimizer is as TorchRec
    estimates it. The other tables' gradients are rows of a batch, which the optimizer takes in the
    backward pass; those of a replicated table are whole, and twice: in the buckets of
    DistributedDataParallel too.
    """
    state = 4 * shard.size[0] if training.optimizer == "rowwise_adagrad" else 0
    if (brought := _brought(option)) is not None:
        num_bytes = math.prod(shard.size) * option.tensor.element_size()
        state = math.ceil(num_bytes * _get_optimizer_multipler(brought, option.tensor.shape))
    if option.sharding_type == ShardingType.DATA_PARALLEL.value:
        state += 2 * option.tensor.numel() * option.tensor.element_size()
    return state


def _brought(option: ShardingOption) -> type[torch.optim.Optimizer] | None:
    """The optimizer that a table brings (``apply_optimizer_in_backward``); TorchRec counts it."""
    classes: list[type[torch.optim.Optimizer]] = getattr(option.tensor, "_optimizer_classes", [])
    return classes[0] if classes else None


def memory_of_parts(
    parts: Iterable[TablePart], ranks_per_node: int, optimizer: str
) -> dict[str, int]:
    """What a rank holds beside tables and layers, by what it is."""
    found = Counter[str]()
    for part in parts:
        found.update(part.memory_of_rank(ranks_per_node, optimizer))
    return dict(found)


def activations_of_parts(
    parts: Iterable[TablePart], tables: Iterable[Table], profile: DataProfile, batch_size: int
) -> int:
    """Bytes that parts keep of a rank's forward pass beside its lookups in sharded tables."""
    ids = [(table, profile.ids(table, batch_size)) for table in tables]
    return round(sum(part.activation_bytes(*each) for part in parts for each in ids))


def row_memory(
    parts: Iterable[TablePart],
    option: ShardingOption,
    shard: Shard,
    optimizer: str,
    device_type: str,
) -> RowMemory | None:
    """What the part of a table says of its rows; None where they are as in TorchRec's kernels."""
    return one_answer(
        parts,
        option.name,
        "row_memory",
        lambda part: part.row_memory(option, shard, optimizer, device_type),
    )


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimate, and ``state_bytes``, of which it knows nothing where a sharder decides
    the optimizer.

    The rows of a table whose part knows what they take are taken from it.

    Args:
        topology: the ranks.
        constraints: by table.
        training: says the optimizer of the tables.
        parts: of entries.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        training: TrainingSpec,
        parts: Sequence[TablePart] = (),
    ) -> None:
        super().__init__(topology=topology, constraints=constraints)
        self._training = training
        self._parts = parts
        self._device_type = topology.compute_device
        #: What TorchRec said of its sharders when it asked last.
        self.sharder_data_map: SharderDataMap = {}

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """See TorchRec's ``ShardEstimator.estimate``."""
        self.sharder_data_map = sharder_data_map
        known = [
            (option, option.compute_kernel)
            for option in sharding_options
            if self._row_memory(option, option.shards[0]) is not None
        ]
        for option, _ in known:
            option.compute_kernel = EmbeddingComputeKernel.FUSED.value
        super().estimate(sharding_options, sharder_data_map)
        for option, kernel in known:
            option.compute_kernel = kernel
            self._put_rows(option)
        done = {id(option) for option, _ in known}
        for option in sharding_options:
            if id(option) in done or _brought(option) is not None:
                continue
            on_gpu = self._on_gpu and "uvm" not in option.compute_kernel
            for shard in option.shards:
                state = state_bytes(option, shard, self._training)
                assert shard.storage is not None, "just estimated"
                shard.storage += Storage(hbm=state, ddr=0) if on_gpu else Storage(hbm=0, ddr=state)

    @property
    def _on_gpu(self) -> bool:
        return self._device_type != "cpu"

    def _row_memory(self, option: ShardingOption, shard: Shard) -> RowMemory | None:
        return row_memory(self._parts, option, shard, self._training.optimizer, self._device_type)

    def _put_rows(self, option: ShardingOption) -> None:
        """Replace what the rows of a table take in TorchRec's kernels by what its part says."""
        for shard in option.shards:
            rows = self._row_memory(option, shard)
            assert shard.storage is not None, "just estimated"
            assert rows is not None, "its part knows all shards or none"
            fewer = rows.there - math.prod(shard.size) * option.tensor.element_size()
            shard.storage += (
                Storage(hbm=fewer, ddr=rows.on_host)
                if self._on_gpu
                else Storage(hbm=0, ddr=fewer + rows.on_host)
            )


class Reservation(FixedPercentageStorageReservation):
    """``RESERVED_SHARE`` of each rank's memory, and what layers and parts of tables take.

    TorchRec's reserves memory of GPUs only.

    Args:
        training: says the optimizer of the dense layers.
        activation_bytes: what a rank keeps of a forward pass beside its lookups.
        parts: of entries.
    """

    def __init__(
        self,
        training: TrainingSpec,
        activation_bytes: int = 0,
        parts: Sequence[TablePart] = (),
    ) -> None:
        super().__init__(RESERVED_SHARE)
        self._parts = parts
        self._training = training
        self._activation_bytes = activation_bytes

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """See TorchRec's ``StorageReservation.reserve``."""
        reserved = super().reserve(topology, batch_size, module, sharders, constraints)
        taken = (
            dense_bytes(module, sharders, self._training)
            + sum(self._beside_tables(topology.local_world_size).values())
            + self._activation_bytes
        )
        for device in reserved.devices:
            if topology.compute_device == "cpu":
                device.storage.ddr = int((1 - RESERVED_SHARE) * device.storage.ddr) - taken
            else:
                device.storage.hbm -= taken
        return reserved

    def _beside_tables(self, ranks_per_node: int) -> dict[str, int]:
        return memory_of_parts(self._parts, ranks_per_node, self._training.optimizer)
