"""TorchRec's planner, told of deduplication and of the registry's plugins."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner

from recd_plugins.data.row_pipeline import fit_converter
from recd_plugins.errors import SetupError
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.feasible import feasible
from recd_plugins.planning.tables import tables_of

if TYPE_CHECKING:
    from recd_plugins.registry import Registry

_Constraints = dict[str, ParameterConstraints]

# Bytes a millisecond between processes over gloo: an assumption, 1 GiB/s. TorchRec's default is
# that of NVLink, 600 GiB/s, with which communication would count for nothing.
_GLOO_BANDWIDTH = 2**30 / 1000
# Left to dense layers, batches and the interpreter.
_RESERVED_MEMORY = 0.15


def build_planner(
    registry: Registry,
    topology: Topology | None = None,
    *,
    model: nn.Module | None = None,
    dedupe_factors: Mapping[str, float] | None = None,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device: torch.device | None = None,
) -> RegistryPlanner:
    """A planner for models that are trained as ``registry`` says.

    Args:
        registry: its batch size, sharding and caches.
        topology: the ranks and their memory; ``default_topology`` of the next arguments without.
        model: checked at once where it is given; ``plan`` and ``collective_plan`` check theirs.
        dedupe_factors: rows over unique rows, by feature that travels deduplicated; without it
            those of the converter, which then reads the first rows of the data.
        world_size: ranks; those of the process group, else of the registry, without it.
        local_world_size: ranks a node; ``LOCAL_WORLD_SIZE``, else all ranks, without it.
        device: of the tables; CPU without it.

    Raises:
        RegistryError: a pattern matches no table of ``model``, or two entries claim one.
        SetupError: plugins contradict each other. From ``plan``: there is no plan; says why.
    """
    if topology is None:
        if world_size is None:
            world_size = dist.get_world_size() if dist.is_initialized() else registry.training.ranks
        topology = default_topology(world_size, local_world_size, device)

    if dedupe_factors is None:
        fit_converter(registry)
        dedupe_factors = registry.converter.dedupe_factors()
    factors = dedupe_factors

    def constraints(module: nn.Module) -> _Constraints:
        return table_constraints(
            registry,
            tables_of(module),
            dedupe_factors=factors,
            device_type=topology.compute_device,
        )

    if model is not None:
        constraints(model)
    return RegistryPlanner(topology, registry.training.batch_size, constraints)


def default_topology(
    world_size: int, local_world_size: int | None = None, device: torch.device | None = None
) -> Topology:
    """Ranks on machines like this one, which share its memory, each with a GPU on CUDA."""
    local = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_cuda = device is not None and device.type == "cuda"
    gpu_memory = torch.cuda.get_device_properties(device).total_memory if on_cuda else None
    gloo = BasicCommsBandwidths(inter_host_bw=_GLOO_BANDWIDTH, intra_host_bw=_GLOO_BANDWIDTH)
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=local),
        HardwareConfig(
            ddr_cap_bytes=memory // local,
            hbm_cap_bytes=gpu_memory,
        ),
        KernelConfig(
            compute_device="cuda" if on_cuda else "cpu",
            generalized_comms_bandwidths=None if on_cuda else gloo,
        ),
    )


class RegistryPlanner(ShardingPlanner):
    """Plans with an EmbeddingShardingPlanner whose constraints come from the model."""

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Callable[[nn.Module], _Constraints],
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._constraints_of = constraints

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The plan that rank 0 makes, on every rank of ``pg``; of all without it. See ``plan``."""
        group = pg or dist.group.WORLD
        return invoke_on_rank_and_broadcast_result(group, 0, self.plan, module, sharders)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The best plan for ``module``.

        Raises:
            RegistryError: a pattern matches no table, or two entries claim one.
            SetupError: there is no plan; names the tables and what constrains them.
        """
        constraints = feasible(
            module, sharders, self._constraints_of(module), self._topology.compute_device
        )
        planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            enumerator=SortedEnumerator(
                topology=self._topology,
                batch_size=self._batch_size,
                constraints=constraints,
            ),
            storage_reservation=FixedPercentageStorageReservation(_RESERVED_MEMORY),
            constraints=constraints,
            debug=False,
        )
        try:
            return planner.plan(module, sharders)
        except PlannerError as error:
            raise SetupError(_explain(error, module, constraints, self._topology)) from error


class SortedEnumerator(EmbeddingEnumerator):
    """Sharding options in one order in every process.

    TorchRec's own (1.6 to 1.9) goes through sets of strings; where two options are equally good
    the plan would differ from run to run, and a resumed run from an uninterrupted one.
    """

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """See TorchRec's ``Enumerator.enumerate``."""
        options: list[ShardingOption] = super().enumerate(module, sharders)
        place = {name: i for i, name in enumerate(dict.fromkeys(o.fqn for o in options))}
        return sorted(options, key=lambda o: (place[o.fqn], o.sharding_type, o.compute_kernel))


def _explain(
    error: PlannerError, module: nn.Module, constraints: _Constraints, topology: Topology
) -> str:
    if error.error_type not in (
        PlannerErrorType.INSUFFICIENT_STORAGE,
        PlannerErrorType.STRICT_CONSTRAINTS,
        PlannerErrorType.PARTITION,
    ):
        return f"TorchRec's planner: {error}"
    tables = tables_of(module)
    size = {table.name: 4 * table.num_embeddings * table.embedding_dim for table in tables}
    largest = sorted(size, key=lambda name: -size[name])[:3]
    storage = topology.devices[0].storage
    memory = storage.hbm if topology.compute_device == "cuda" else storage.ddr
    listed = ", ".join(
        f"{name} ({_gib(size[name])}, {_describe(constraints[name])})" for name in largest
    )
    return (
        f"no plan fits: the tables take {_gib(sum(size.values()))} without optimizer state and "
        f"batches, on {topology.world_size} ranks with {_gib(memory)} each; the largest: {listed}. "
        "Use more ranks or smaller tables, or let large tables be split: torchrec.row_wise"
    )


def _describe(constraints: ParameterConstraints) -> str:
    wishes = [*(constraints.compute_kernels or [])]
    kinds = constraints.sharding_types or []
    if 0 < len(kinds) <= 3:
        wishes = [*kinds, *wishes]
    return " ".join(wishes) or "any way"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
