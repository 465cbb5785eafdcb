"""TorchRec's planner with the constraints and costs of plugins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner, ShardingType
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from recd_plugins.config import Entry, RunConfig
from recd_plugins.config.run_config import plugin_versions
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.data.prepared import PreparedModel
from recd_plugins.interfaces import Plugin, TableStrategy
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.interfaces.model_tables import (
    embedding_modules,
    left_modules,
    sharded_modules,
    tables_of,
)
from recd_plugins.planning.constraints import (
    entry_constraints,
    feasible,
    table_constraints,
    table_optimizers,
)
from recd_plugins.planning.estimates import (
    RESERVED_SHARE,
    PerfEstimator,
    StorageEstimator,
    free_storage,
    memory_of_parts,
    step_rating,
)
from recd_plugins.planning.search import FreeRanks, Option, Placement, search
from recd_plugins.planning.step_cost import is_variable_table
from recd_plugins.planning.topologies import MACHINE, load_topology
from recd_plugins.runtime.errors import NoPlanError, RecdError, SetupError
from recd_plugins.runtime.imports import without_collections
from recd_plugins.runtime.processes import portable
from recd_plugins.runtime.rank_agreement import check_agreement
from recd_plugins.runtime.text import size_text
from recd_plugins.runtime.versions import __version__, installed_set
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)

T = TypeVar("T")
_Constraints = dict[str, ParameterConstraints]
# Fields of ``training:`` that may differ between ranks.
_OWN = {"workers", "hang_notice", "hang_timeout"}


def of_rank_0(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``make`` on rank 0; every rank returns the result or raises the RecdError of rank 0."""

    def made() -> T | RecdError:
        try:
            return make()
        except RecdError as error:
            return portable(error)

    found = invoke_on_rank_and_broadcast_result(group or dist.group.WORLD, 0, made)
    if isinstance(found, RecdError):
        raise found
    return found


@dataclass(frozen=True)
class Planned:
    """A sharding plan, and its options with rank, storage and time of each shard.

    ``static`` returns a dict from table name to the storage of each shard, without input and output
    buffers.
    """

    sharding: ShardingPlan
    options: tuple[ShardingOption, ...]
    static: Callable[[], dict[str, list[Storage]]]


class RegistryPlanner(ShardingPlanner):
    """TorchRec sharding planner for a prepared model and a topology."""

    def __init__(
        self,
        prepared: PreparedModel,
        topology: Topology,
        profile: DataProfile,
        activation_bytes: int | Callable[[], int] = 0,
        wishes: Mapping[str, ParameterConstraints] | None = None,
        replicate: bool = False,
    ) -> None:
        self._prepared, self._topology, self._profile = prepared, topology, profile
        self._training = prepared.registry.training
        self._parts = prepared.plugin_strategies
        self._activation_bytes = activation_bytes
        self._wishes, self._replicate = wishes or {}, replicate

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Compute the plan on rank 0 and return it on every rank of ``pg``; default: all ranks.

        Raises:
            SetupError: ranks have different tables, data, plugins or versions.
            RecdError: ``plan`` failed on rank 0; raised on every rank.
        """
        group = pg or dist.group.WORLD
        decided = _decided(self._prepared, self._profile, module, sharders)
        check_agreement("planning", decided, group)
        return of_rank_0(lambda: self.plan(module, sharders), group)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Return the best plan for ``module``; raise SetupError if none fits."""
        return self.plan_in_detail(module, sharders).sharding

    def plan_in_detail(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        *,
        fast: bool = False,
        first: bool = False,
    ) -> Planned:
        """Return the plan of ``module``, which may be on the meta device, with its estimates.

        ``fast`` tries fewer proposals; the plan may be slightly worse. ``first`` returns the first
        plan that fits.

        Raises:
            NoPlanError: no plan fits into memory.
            SetupError: plugins, tables and sharders contradict each other.
        """
        _check_sharders(module, sharders)
        topology, training, parts = self._topology, self._training, self._parts
        constraints = feasible(
            module, sharders, self.constraints(module, sharders), topology.compute_device
        )
        kept = self._activation_bytes
        activation_bytes = kept() if callable(kept) else kept
        free = free_storage(topology, training, parts, module, sharders, activation_bytes)
        context = self._prepared.context
        costs = context.costs if context is not None and context.measured else None
        bags = {
            table.name
            for table in self._prepared.tables
            if table.pooled and is_variable_table(table, self._profile)
        }
        rate = step_rating(topology, bags, costs)
        enumerator = SortedEnumerator(topology, constraints, training, parts)
        with without_collections():  # millions of shards, but no garbage
            try:
                options = enumerator.options_of(module, sharders)
            except (PlannerError, ValueError) as error:  # a table cannot be split as constrained
                raise SetupError(
                    f"TorchRec's planner cannot shard a table as its entry requests ({error}). "
                    "Change the sharding entry or the constraints of this table."
                ) from error
            found = search(options, FreeRanks(topology, free), rate, fast=fast, first=first)
        if found is None and options:
            raise self._no_plan(module, constraints, activation_bytes)
        placement: Placement = found or {}
        chosen = [option.on(ranks.tolist()) for option, ranks in placement.items()]
        sharding = to_sharding_plan(chosen, topology) if chosen else ShardingPlan({})
        return Planned(sharding, tuple(chosen), partial(enumerator.static_storage, chosen))

    def fits(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> bool:
        """Return True if some plan fits into memory; faster than ``plan``."""
        try:
            self.plan_in_detail(module, sharders, first=True)
        except NoPlanError:
            return False
        return True

    def constraints(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> _Constraints:
        """Return the planner constraints of all tables; raise SetupError if they contradict."""
        return table_constraints(
            self._prepared,
            tables_of(module),
            profile=self._profile,
            device_type=self._topology.compute_device,
            optimizers=table_optimizers(module, sharders),
            replicate=self._replicate,
            exact=_of_exact_sharders(module, sharders),
            wishes=self._wishes,
            left=left_modules(module),
        )

    def _no_plan(
        self, module: nn.Module, constraints: _Constraints, activation_bytes: int
    ) -> NoPlanError:
        topology, training = self._topology, self._training
        sizes = {t.name: 4 * t.num_embeddings * t.embedding_dim for t in tables_of(module)}
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        listed = ", ".join(
            f"{name!r} ({size_text(sizes[name])}{_describe(constraints[name])})" for name in largest
        )
        allowed = [constraints[name].sharding_types for name in largest]
        by_rows = any(kinds and not any("row" in kind for kind in kinds) for kinds in allowed)
        storage = topology.devices[0].storage
        memory = storage.hbm if topology.compute_device == "cuda" else storage.ddr
        held = memory_of_parts(self._parts, topology.local_world_size, training.optimizer)
        besides = sum(held.values()) + activation_bytes
        return NoPlanError(
            f"no plan fits batches of {training.batch_size:,} rows on {topology.world_size} "
            f"ranks with {size_text(memory)} each ({RESERVED_SHARE:.0%} is reserved). The tables "
            f"need {size_text(sum(sizes.values()))} in total; activations and other data need "
            f"{size_text(besides)} per rank. Largest tables: {listed}. Use more ranks, smaller "
            f"batches or smaller tables{', or allow row-wise sharding' if by_rows else ''}."
        )


class SortedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator of sharding options, with the same order in every process.

    TorchRec (1.6 to 1.9) iterates over sets of strings, so its plans differ between runs.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: _Constraints,
        training: TrainingSpec,
        parts: Sequence[TableStrategy] = (),
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
        self._made: dict[int, Option] = {}

    def options_of(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[Option]:
        """Return the sharding options of all tables, in the same order in every process."""
        return [self._made[id(option)] for option in self.enumerate(module, sharders)]

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        options: list[ShardingOption] = super().enumerate(module, sharders)
        place = {name: i for i, name in enumerate(dict.fromkeys(o.fqn for o in options))}
        if self._compute_device == "cuda" and self._world_size == 1:
            # One rank has whole tables, so other shardings only launch more kernels.
            whole = [o for o in options if o.sharding_type == ShardingType.TABLE_WISE.value]
            names = {(o.fqn, o.compute_kernel) for o in whole}
            options = whole + [o for o in options if (o.fqn, o.compute_kernel) not in names]
        return sorted(options, key=lambda o: (place[o.fqn], o.sharding_type, o.compute_kernel))

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate storage and time of each option, only once per shard size."""
        every = [option.shards for option in sharding_options]
        for option in sharding_options:
            option.shards = list({tuple(shard.size): shard for shard in option.shards}.values())
        super().populate_estimates(sharding_options)
        for option, shards in zip(sharding_options, every, strict=True):
            estimated = {tuple(shard.size): shard for shard in option.shards}
            option.shards = shards
            self._made[id(option)] = Option.of(option, estimated)

    def _get_num_buckets(self, parameter: str, module: nn.Module) -> int | None:
        """Return the number of hash buckets of table ``parameter``; None if it may be split freely.

        TorchRec 1.8 and 1.9 would place a managed collision table (MCH) with one bucket on one
        rank. Older versions have no ``table_to_number_buckets``.
        """
        if isinstance(module, BaseManagedCollisionEmbeddingCollection):
            maps = module._managed_collision_collection
            num_buckets: dict[str, int] = getattr(maps, "table_to_number_buckets", dict)()
            if num_buckets.get(parameter) == 1:
                return None
        return super()._get_num_buckets(parameter, module)

    def static_storage(self, options: Sequence[ShardingOption]) -> dict[str, list[Storage]]:
        """Return a dict from table name to each shard's storage, without input/output buffers."""
        copies = [copy.copy(option) for option in options]
        for option in copies:
            option.shards = [copy.copy(shard) for shard in option.shards]
        self._without_batch.estimate(copies, self._storage.sharder_data_map)
        return {option.name: [shard.storage for shard in option.shards] for option in copies}


def document(registry: RunConfig) -> dict[str, Any]:
    """Return the run config entries that must be equal on all ranks, including default options."""
    entries = {
        # Options of observers may differ between ranks.
        name: [
            {"use": each.plugin.name} if kind.observes else _entry(each)
            for each in registry.entries(name)
        ]
        for name, kind in registry.kinds.items()
    }
    return {
        **{kind: of_kind for kind, of_kind in entries.items() if of_kind},
        "wrap": [_entry(entry) for entry in registry.wrappers],
        "model": registry.model and registry.model.model_dump(mode="json"),
        "training": registry.training.model_dump(mode="json", exclude=_OWN),
    }


def _entry(entry: Entry[Plugin]) -> dict[str, Any]:
    plugin = entry.plugin
    options = plugin.options.model_dump(mode="json", exclude=set(plugin.free_options))
    return {"use": plugin.name, "for": list(entry.patterns), "options": options}


def _decided(
    prepared: PreparedModel,
    profile: DataProfile,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> dict[str, Any]:
    """Return the values (versions, tables, profile) that must be equal on all ranks."""
    registry = prepared.registry
    seen = asdict(profile)
    del seen["source"]  # contains the path of a file
    named = registry.training.topology
    # Each node reads its own file.
    cluster = None if named in (None, MACHINE) else load_topology(str(named)).model_dump()
    return {
        "the versions": {
            "recd-plugins": __version__,
            "packages": installed_set(),
            "plugins": plugin_versions(registry),
        },
        "the registry file": document(registry),
        **({"the topology": cluster} if cluster else {}),
        "the model's tables": {
            each.path: {table.name: asdict(table) for table in each.tables}
            for each in embedding_modules(module)
        },
        "the constraints of plugins": _asked(prepared, module),
        "the tables' optimizers": table_optimizers(module, sharders),
        "the deduplicated features": dict(registry.converter.dedupe_factors()),
        "the profile of the data": seen,
    }


def _asked(prepared: PreparedModel, module: nn.Module) -> dict[str, Any]:
    """Return the sharding types and kernels that plugins request, keyed by plugin and table."""
    found: dict[str, Any] = {}
    for entry in entry_constraints(prepared, tables_of(module)):
        for table, constraints in entry.of_tables.items():
            names = "sharding_types", "compute_kernels"
            # Sorted, since a set is ordered differently in every process.
            asked = {n: sorted(each) for n in names if (each := getattr(constraints, n))}
            found.setdefault(entry.plugin, {}).setdefault(table, {}).update(asked)
    return found


def _of_exact_sharders(
    module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> Collection[str]:
    own = (ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder)
    return {
        table
        for child, sharder in sharded_modules(module, sharders)
        if type(sharder) in own
        for table in sharder.shardable_parameters(child)
    }


def _check_sharders(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
    """Raise SetupError if an embedding module has no sharder for its exact type."""
    known = {sharder.module_type for sharder in sharders}
    for left in left_modules(module):
        kind = type(left.shardable)
        if kind not in known:
            raise SetupError(
                f"{left.why_left}. No sharder for this type was passed. Add a sharder for "
                f"{kind.__name__} to the argument 'base' of sharders()."
            )


def _describe(constraints: ParameterConstraints) -> str:
    kinds, kernels = constraints.sharding_types or [], constraints.compute_kernels or []
    text = f"; allowed sharding types: {', '.join(kinds)}" if 0 < len(kinds) <= 3 else ""
    return text + (f"; kernels: {', '.join(kernels)}" if kernels else "")
