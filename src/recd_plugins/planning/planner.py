"""TorchRec's planner, told of deduplication and of the registry's plugins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    Proposer,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.distributed.build import build_sharders
from recd_plugins.distributed.entry_constraints import entries_of_tables
from recd_plugins.distributed.rank_agreement import check_agreement, entries_named
from recd_plugins.distributed.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)
from recd_plugins.errors import NoPlanError, RecdError, SetupError
from recd_plugins.imports import without_collections
from recd_plugins.interfaces import Choice, TablePart
from recd_plugins.model_tables import (
    all_tables_of,
    left_modules,
    sharded_modules,
    tables_of,
)
from recd_plugins.planning.collectives import variable_bags
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.decided import decided
from recd_plugins.planning.feasible import feasible
from recd_plugins.planning.machines import machine_of
from recd_plugins.planning.no_plan import explain
from recd_plugins.planning.partitioner import RankPartitioner
from recd_plugins.planning.performance import PerfEstimator, StepTime
from recd_plugins.planning.profile import measure_profile
from recd_plugins.planning.proposers import UntilOneFits, few_proposers, proposers
from recd_plugins.planning.quick_option import Placement, QuickOption
from recd_plugins.planning.storage import Reservation, StorageEstimator
from recd_plugins.planning.table_optimizers import table_optimizers
from recd_plugins.planning.table_ranks import TableGroup, table_groups, with_ranks
from recd_plugins.processes import portable
from recd_plugins.registry.checked_part import CheckedPart
from recd_plugins.registry.training_spec import TrainingSpec
from recd_plugins.values.data_profile import DataProfile

logger = logging.getLogger(__name__)

_Constraints = dict[str, ParameterConstraints]
_Decided = Callable[[nn.Module, list[ModuleSharder[nn.Module]]], dict[str, Any]]


def build_planner(
    prepared: PreparedModel,
    topology: Topology | None = None,
    *,
    profile: DataProfile | None = None,
    activation_bytes: int | Callable[[], int] = 0,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device: torch.device | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    replicate: bool = False,
) -> RegistryPlanner:
    """A planner for models that are trained as a registry says.

    ``Prepared.planner`` describes the arguments and errors.
    """
    registry, setting = prepared.registry, prepared.setting
    if topology is None:
        if device is None and setting is not None and torch.cuda.is_available():
            device = torch.device(setting.device_type)
        topology = machine_of(registry.training, world_size, local_world_size, device).to_torchrec()
    decides = prepared.chosen is not None or prepared.parts
    if decides and setting is not None and setting.device_type != topology.compute_device:
        logger.warning(
            "%s: its entries decided for tables on %s, and this plan is for %s: prepare or wrap "
            "the model with device=",
            *(registry.path, setting.device_type, topology.compute_device),
        )
    known = profile or profile_of(prepared)

    def of_tables(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> _Constraints:
        return table_constraints(
            prepared,
            tables_of(module),
            profile=known,
            device_type=topology.compute_device,
            optimizers=table_optimizers(module, sharders),
            replicate=replicate,
            exact=_of_exact_sharders(module, sharders),
            wishes=constraints,
            left=left_modules(module),
        )

    measured = setting.costs if setting is not None and setting.measured else None
    planner = RegistryPlanner(
        topology,
        StepTime(topology, variable_bags(prepared.tables, known), measured),
        registry.training,
        of_tables,
        activation_bytes,
        prepared.checked_parts,
        partial(decided, prepared, known),
        partial(entries_of_tables, prepared),
        prepared.chosen,
    )
    planner.constraints(prepared.model, build_sharders(prepared))
    return planner


def profile_of(prepared: PreparedModel) -> DataProfile:
    """Of the registry's data, as the model is fed it.

    Raises:
        DataError: the data is missing or wrong.
    """
    return measure_profile(
        prepared.registry,
        num_embeddings=prepared.num_embeddings,
        coalesced=[table for table in prepared.tables if table.name in prepared.coalesced],
        others=prepared.tables,
    )


@dataclass(frozen=True)
class Planned:
    """A plan, and what TorchRec's planner estimates of it.

    Attributes:
        sharding: what DistributedModelParallel takes.
        options: how each table is sharded, with rank, storage and time of each shard.
        static: asked for, storage of each of those shards without inputs and outputs, by table
            name: of plans that are only compared nobody asks.
        groups: of tables whose ranks table parts have chosen.
    """

    sharding: ShardingPlan
    options: tuple[ShardingOption, ...]
    static: Callable[[], dict[str, list[Storage]]]
    groups: tuple[TableGroup, ...] = ()


class RegistryPlanner(ShardingPlanner):
    """Plans with an EmbeddingShardingPlanner whose constraints come from the model."""

    def __init__(
        self,
        topology: Topology,
        step_time: StepTime,
        training: TrainingSpec,
        constraints: Callable[[nn.Module, list[ModuleSharder[nn.Module]]], _Constraints],
        activation_bytes: int | Callable[[], int] = 0,
        parts: Sequence[CheckedPart] = (),
        decided: Callable[[nn.Module, list[ModuleSharder[nn.Module]]], dict[str, Any]]
        | None = None,
        entries: Callable[[], Mapping[str, str]] = dict,
        chosen: Choice | None = None,
    ) -> None:
        self._topology, self._step_time = topology, step_time
        self._decided, self._entries = decided, entries
        self._training = training
        self._constraints_of = constraints
        self._activation_bytes = activation_bytes
        self._parts = parts
        self._chosen = chosen

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The plan that rank 0 makes, on every rank of ``pg``; of all without it. See ``plan``.

        Raises:
            SetupError: ranks have other tables, data, plugins or versions than one another.
            RecdError: what ``plan`` raises, on every rank: the others would wait for the plan.
        """
        group = pg or dist.group.WORLD
        if self._decided is not None:
            with entries_named(self._entries):
                check_agreement("planning", self._decided(module, sharders), group)

        def plan() -> ShardingPlan | RecdError:
            try:
                return self.plan(module, sharders)
            except RecdError as error:
                return portable(error)

        found = invoke_on_rank_and_broadcast_result(group, 0, plan)
        if isinstance(found, RecdError):
            raise found
        return found

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The best plan for ``module``.

        Raises:
            RegistryError: a pattern matches no table, or two entries claim one.
            SetupError: there is no plan; names the tables and what constrains them.
        """
        return self.plan_in_detail(module, sharders).sharding

    def plan_in_detail(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], *, haste: bool = False
    ) -> Planned:
        """The same plan with its estimates; ``module`` may stand on the meta device.

        In ``haste`` it may be one that is hardly worse.

        Raises:
            RegistryError: a pattern matches no table, or two entries claim one.
            NoPlanError: no plan fits into memory; names the largest tables.
            SetupError: plugins and tables do not go together.
        """
        tried = few_proposers() if haste else self._proposers(module)
        return self._search(module, sharders, tried)

    def fits(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> bool:
        """Whether there is a plan, which takes less time than to find the best one.

        Raises:
            RecdError: plugins and tables do not go together.
        """
        try:
            self._search(module, sharders, [UntilOneFits(self._proposers(module))])
        except NoPlanError:
            return False
        return True

    def constraints(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> _Constraints:
        """What TorchRec's planner may do with each table.

        Raises:
            PluginError: a part speaks of a table that is none of its own.
            SetupError: what is said of a table contradicts itself; says who says it.
        """
        wanted = self._constraints_of(module, sharders)
        return with_ranks(wanted, self._groups(module), self._topology)

    def _proposers(self, module: nn.Module) -> list[Proposer]:
        return proposers(self._topology.world_size, len(all_tables_of(module)))

    def _groups(self, module: nn.Module) -> tuple[TableGroup, ...]:
        tables = [table.name for table in tables_of(module)]
        return table_groups(self._parts, tables, self._topology.world_size)

    def _search(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        tried: list[Proposer],
    ) -> Planned:
        _check_sharders(module, sharders)
        constraints = feasible(
            module, sharders, self.constraints(module, sharders), self._topology.compute_device
        )
        groups = self._groups(module)
        enumerator = SortedEnumerator(self._topology, constraints, self._training, self._parts)
        kept = self._activation_bytes
        activation_bytes = kept() if callable(kept) else kept
        chosen: list[QuickOption] = []

        def keep(best: list[ShardingOption]) -> list[QuickOption]:
            assert isinstance(best, Placement), "the partitioner makes these"
            chosen.extend(best.options())
            return chosen

        planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self._training.batch_size,
            enumerator=enumerator,
            storage_reservation=Reservation(self._training, activation_bytes, self._parts),
            proposer=tried,
            partitioner=RankPartitioner(groups),
            performance_model=self._step_time,
            constraints=constraints,
            debug=False,
            callbacks=[keep],
            stats=[],
        )
        try:
            with without_collections():  # in millions of shards there is no garbage
                sharding = planner.plan(module, sharders)
        except PlannerError as error:
            raise explain(
                error,
                module,
                constraints,
                self._topology,
                self._training,
                self._parts,
                enumerator.options,
                groups,
                activation_bytes,
                self._chosen,
            ) from error
        except ValueError as error:  # of a table that cannot be split as it is to be
            raise SetupError(f"TorchRec's planner: {error}") from error
        static = partial(enumerator.static_storage, chosen)
        return Planned(sharding, tuple(chosen), static, groups)


class SortedEnumerator(EmbeddingEnumerator):
    """Sharding options in one order in every process.

    TorchRec's own (1.6 to 1.9) goes through sets of strings; where two options are equally good
    the plan would differ from run to run, and a resumed run from an uninterrupted one. The last
    that were enumerated are ``options``.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: _Constraints,
        training: TrainingSpec,
        parts: Sequence[TablePart] = (),
    ) -> None:
        self._storage = StorageEstimator(topology, constraints, training, parts)
        super().__init__(
            topology=topology,
            batch_size=training.batch_size,
            constraints=constraints,
            estimator=[PerfEstimator(topology, constraints, parts), self._storage],
        )
        empty = {
            name: replace(table, batch_sizes=[0] * len(table.batch_sizes or ()))
            for name, table in constraints.items()
        }
        self._without_batch = StorageEstimator(topology, empty, training, parts)
        self.options: list[ShardingOption] = []

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """See TorchRec's ``Enumerator.enumerate``."""
        options: list[ShardingOption] = super().enumerate(module, sharders)
        place = {name: i for i, name in enumerate(dict.fromkeys(o.fqn for o in options))}
        self.options = sorted(
            options, key=lambda o: (place[o.fqn], o.sharding_type, o.compute_kernel)
        )
        return self.options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """See TorchRec's ``Enumerator``.

        Shards of a table that have one size take as much, so one of them is estimated: of 1,024
        ranks with a part of a table most have as large a part.
        """
        every = [option.shards for option in sharding_options]
        for option in sharding_options:
            option.shards = list({tuple(shard.size): shard for shard in option.shards}.values())
        super().populate_estimates(sharding_options)
        for option, shards in zip(sharding_options, every, strict=True):
            QuickOption.adopt(option, shards)

    def _get_num_buckets(self, parameter: str, module: nn.Module) -> int | None:
        """As the base class, which refuses managed collision by MCH on more than one rank.

        MCH has one bucket, which says that its rows may be split anywhere. TorchRec 1.8 and 1.9;
        older ones have no ``table_to_number_buckets``, and refuse nothing.
        """
        if isinstance(module, BaseManagedCollisionEmbeddingCollection):
            maps = module._managed_collision_collection
            num_buckets: dict[str, int] = getattr(maps, "table_to_number_buckets", dict)()
            if num_buckets.get(parameter) == 1:
                return None
        return super()._get_num_buckets(parameter, module)

    def static_storage(self, options: Sequence[QuickOption]) -> dict[str, list[Storage]]:
        """Storage of the shards of options of ``enumerate``, without inputs and outputs."""
        copies = [option.copied(option.get_shards_assignment()) for option in options]
        self._without_batch.estimate(copies, self._storage.sharder_data_map)
        return {option.name: [shard.storage for shard in option.shards] for option in copies}


def _of_exact_sharders(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> set[str]:
    """Tables that this library's own sharders shard; what those of plugins do is not known."""
    own = (ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder)
    return {
        table
        for child, sharder in sharded_modules(module, sharders)
        if type(sharder) in own
        for table in sharder.shardable_parameters(child)
    }


def _check_sharders(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
    """Refuse modules that have to be sharded as a whole, and would be sharded inside."""
    known = {sharder.module_type for sharder in sharders}
    for left in left_modules(module):
        kind = type(left.shardable)
        if kind not in known:
            raise SetupError(
                f"{left.why_left}; but no sharder is for that type, so DistributedModelParallel "
                "would shard what is inside and leave the rest to each rank, or leave all to each "
                f"rank: add TorchRec's sharder of {kind.__name__} to the base of sharders(base=...)"
            )
