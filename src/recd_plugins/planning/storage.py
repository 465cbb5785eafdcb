"""Memory that TorchRec's planner leaves out of account, reserved or added to its estimates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
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

from recd_plugins.distributed.cached.spec import HostMemory
from recd_plugins.distributed.tiered import TieredEmbeddingCollection
from recd_plugins.registry.schema import TrainingSpec

if TYPE_CHECKING:
    from recd_plugins.distributed.cached.spec import TableCache

#: Left to the allocator and the interpreter; and to activations where nobody counted them.
RESERVED_SHARE = 0.15

_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
# Bytes of a cached table beside rows and their state: where each row is, and what each slot holds
# and when it was used last.
_ROW_MAP, _SLOT = 4, 16


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

    A table that this package's kernels cache takes its fast tier where it is looked up, and all of
    its rows in host memory, or none of that where they are in a file: the pages of a file that are
    in memory leave it when others need it.

    Args:
        topology: the ranks.
        constraints: by table.
        training: says the optimizer of the tables.
        caches: of those tables, by name.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        training: TrainingSpec,
        caches: Mapping[str, TableCache] | None = None,
    ) -> None:
        super().__init__(topology=topology, constraints=constraints)
        self._training = training
        self._caches = caches or {}
        self._on_gpu = topology.compute_device != "cpu"

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """See TorchRec's ``ShardEstimator.estimate``."""
        cached = [
            option
            for option in sharding_options
            if option.compute_kernel == _CACHING and option.name in self._caches
        ]
        for option in cached:
            option.compute_kernel = EmbeddingComputeKernel.FUSED.value
        super().estimate(sharding_options, sharder_data_map)
        for option in cached:
            option.compute_kernel = _CACHING
            self._put_fast_tier(option)
        for option in sharding_options:
            if option.compute_kernel == _CACHING and option.name in self._caches:
                continue
            on_gpu = self._on_gpu and "uvm" not in option.compute_kernel
            for shard in option.shards:
                state = state_bytes(option, shard.size[0], self._training)
                assert shard.storage is not None, "just estimated"
                shard.storage += Storage(hbm=state, ddr=0) if on_gpu else Storage(hbm=0, ddr=state)

    def _put_fast_tier(self, option: ShardingOption) -> None:
        """Replace the rows of an uncached table by what a cached one holds."""
        in_file = not isinstance(self._caches[option.name].storage, HostMemory)
        for shard in option.shards:
            assert shard.storage is not None, "just estimated"
            rows, dim = shard.size
            all_rows = rows * dim * option.tensor.element_size()
            state = state_bytes(option, rows, self._training)
            fast = fast_tier_bytes(option, rows, dim, self._training)
            slow = 0 if in_file else all_rows + state
            shard.storage += (
                Storage(hbm=fast - all_rows, ddr=slow)
                if self._on_gpu
                else Storage(hbm=0, ddr=fast - all_rows + slow)
            )


def fast_tier_bytes(option: ShardingOption, rows: int, dim: int, training: TrainingSpec) -> int:
    """Of a shard of ``rows`` rows: cached ones, those of the batches in flight, and the row map.

    Two batches are in flight: the one that is computed, and the next, whose rows are fetched.
    """
    load_factor = option.cache_load_factor or 0.0
    slots = round(load_factor * rows)
    stats = None if option.cache_params is None else option.cache_params.stats
    if stats is not None:
        cold = stats.expected_lookups * stats.expected_miss_rate(load_factor)
        share = rows / option.tensor.shape[0]
        slots = min(rows, slots + round(2 * cold * share))
    row = dim * option.tensor.element_size() + state_bytes(option, 1, training)
    return slots * (row + _SLOT) + rows * _ROW_MAP


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
