"""Memory that TorchRec's planner leaves out of account, reserved or added to its estimates."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    SharderDataMap,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingType

from recd_plugins.distributed.tiered import TieredEmbeddingCollection
from recd_plugins.registry.schema import TrainingSpec

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


def state_bytes(option: ShardingOption, rows: int, training: TrainingSpec) -> int:
    """The optimizer's state of a shard of ``rows`` rows, and gradients of replicated tables.

    Row-wise Adagrad has a float32 a row. The other tables' gradients are rows of a batch, which the
    optimizer takes in the backward pass; those of a replicated table are whole, and twice: in the
    buckets of DistributedDataParallel too.
    """
    state = 4 * rows if training.optimizer == "rowwise_adagrad" else 0
    if option.sharding_type == ShardingType.DATA_PARALLEL.value:
        state += 2 * option.tensor.numel() * option.tensor.element_size()
    return state


def copies_bytes(module: nn.Module, ranks_per_node: int, training: TrainingSpec) -> int:
    """What a rank holds of copies of rows (tiers): with optimizer state, and their gradients.

    Gradients are of all copies, and there while a backward pass runs.
    """
    return sum(
        child.overlay_bytes(ranks_per_node, training.optimizer)
        + 4 * child.embedding_dim() * (child.num_hot + -(-child.num_flex // ranks_per_node))
        for child in module.modules()
        if isinstance(child, TieredEmbeddingCollection)
    )


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimate, and ``state_bytes``, of which it knows nothing where a sharder decides.

    Args:
        topology: the ranks.
        constraints: by table.
        training: says the optimizer of the tables.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        training: TrainingSpec,
    ) -> None:
        super().__init__(topology=topology, constraints=constraints)
        self._training = training
        self._on_gpu = topology.compute_device != "cpu"

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """See TorchRec's ``ShardEstimator.estimate``."""
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            on_gpu = self._on_gpu and "uvm" not in option.compute_kernel
            for shard in option.shards:
                state = state_bytes(option, shard.size[0], self._training)
                assert shard.storage is not None, "just estimated"
                shard.storage += Storage(hbm=state, ddr=0) if on_gpu else Storage(hbm=0, ddr=state)


class Reservation(FixedPercentageStorageReservation):
    """``RESERVED_SHARE`` of each rank's memory, and what layers and copies of rows take.

    TorchRec's reserves memory of GPUs only.

    Args:
        training: says the optimizer of the dense layers.
        activation_bytes: what a rank keeps of a forward pass beside its lookups.
    """

    def __init__(self, training: TrainingSpec, activation_bytes: int = 0) -> None:
        super().__init__(RESERVED_SHARE)
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
            + copies_bytes(module, topology.local_world_size, self._training)
            + self._activation_bytes
        )
        for device in reserved.devices:
            if topology.compute_device == "cpu":
                device.storage.ddr = int((1 - RESERVED_SHARE) * device.storage.ddr) - taken
            else:
                device.storage.hbm -= taken
        return reserved
