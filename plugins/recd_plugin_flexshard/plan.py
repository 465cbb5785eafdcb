"""From tables, their accesses and a cluster to a plan of tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.access.profile import AccessProfile
from recd_plugins.errors import DataError, SetupError
from recd_plugins.planning.tiers import (
    Cluster,
    CostOptions,
    TableDemand,
    TierPlan,
    on_cluster,
    plan_tiers,
)

if TYPE_CHECKING:
    from recd_plugin_flexshard.options import OtherCluster, TierOptions
    from recd_plugins.access.profile import TableAccess
    from recd_plugins.interfaces import Setting, Table
    from recd_plugins.planning.collective_rates import TierMemory
    from recd_plugins.planning.tiers import Strategy


def plan(
    strategy: Strategy, options: TierOptions, tables: Sequence[Table], setting: Setting
) -> TierPlan:
    """The tiers of ``tables`` together.

    Raises:
        DataError: the data cannot be read, or the access profile is not of these tables.
        SetupError: there is no such plan; says what to change.
    """
    if strategy == "three_tier" and setting.nodes == 1:
        raise _one_node("the ranks are one node")
    demands = _demands(options, tables, setting)
    cluster, memory = setting.cluster, setting.memory
    if options.plan_for is not None:
        cluster, memory = _other(options.plan_for, setting)
        if strategy == "three_tier" and cluster.nodes == 1:
            raise _one_node("plan_for is one node")
    costs = _costs(options, memory, cluster.world_size)
    try:
        chosen = plan_tiers(demands, cluster, strategy, costs)
    except SetupError as error:
        raise SetupError(f"the budget {options.budget} cannot be kept: {error}") from error
    return chosen if options.plan_for is None else on_cluster(chosen, setting.cluster)


def _one_node(what: str) -> SetupError:
    return SetupError(
        f"three tiers need several nodes, as flex rows are once in every node, and {what}: use "
        "flexshard.two_tier, or flexshard.joint, which takes two tiers there (ranks of one machine "
        "can stand for nodes: training.ranks_per_node)"
    )


def _costs(options: TierOptions, memory: TierMemory | None, world_size: int) -> CostOptions:
    multiplier, saved = options.memory_multiplier, options.saved_activations
    if multiplier is None:
        known = CostOptions.memory_multiplier
        multiplier = memory.multiplier(world_size) if memory else known
    if saved is None:
        saved = memory.saved_activations if memory else CostOptions.saved_activations
    return CostOptions(
        memory_multiplier=multiplier, saved_activations=saved, **options.cost_options()
    )


def _other(other: OtherCluster, setting: Setting) -> tuple[Cluster, TierMemory | None]:
    from recd_plugins.planning.topologies import load_topology

    spec = load_topology(
        other.topology,
        nodes=other.nodes,
        ranks_per_node=other.ranks_per_node,
        ranks=setting.ranks_per_node,
        device=setting.device_type,
    )
    batch_size = other.batch_size or setting.batch_size
    rates = spec.collective_rates.collectives()
    return Cluster(spec.nodes, spec.ranks_per_node, batch_size, rates), spec.tiers


def _demands(options: TierOptions, tables: Sequence[Table], setting: Setting) -> list[TableDemand]:
    of_data = options.dedupe == "data"
    if options.profile is None:
        profile = setting.data.access(tables, options.profile_rows, deduplicated=of_data)
    else:
        profile = AccessProfile.load(options.profile)
    demands = []
    for table in tables:
        access = profile.covering(table.name, table.num_embeddings)
        if access.batch_size is None:
            factor = _dedupe_factor(options, table, setting, setting.batch_size)
        elif of_data:
            factor = _counted_factor(access, access.batch_size, options, table, setting)
        else:
            raise DataError(
                f"{options.profile} counts {access.counted} for table {table.name}, and so has the "
                "dedupe factor of the data: leave the option dedupe out, or profile again with "
                "--all-rows"
            )
        demands.append(TableDemand.from_access(access, table.embedding_dim, factor))
    return demands


def _counted_factor(
    access: TableAccess, batch_size: int, options: TierOptions, table: Table, setting: Setting
) -> float:
    """That of a profile, for the batch size of ``setting``: it grows as that of the data does."""
    known = setting.data.profile()
    if not any(known.of(name).deduplicated for name in table.features):
        raise DataError(
            f"the access profile counts {access.counted} for table {table.name}, and the "
            f"registry's converter deduplicates none of {', '.join(table.features)}: profile again "
            "with this converter"
        )
    if batch_size == setting.batch_size:
        return access.dedupe_factor
    there, here = (
        _dedupe_factor(options, table, setting, size) for size in (batch_size, setting.batch_size)
    )
    return max(1.0, access.dedupe_factor * here / there)


def _dedupe_factor(options: TierOptions, table: Table, setting: Setting, batch_size: int) -> float:
    """Ids of a table's features over those that are looked up, in a batch of so many rows."""
    dedupe = options.dedupe
    if dedupe == "none":
        return 1.0
    if isinstance(dedupe, float):
        return dedupe
    known = setting.data.profile()
    all_ids = unique_ids = 0.0
    for name in table.features:
        feature = known.of(name)
        if isinstance(dedupe, dict):
            if name not in dedupe:
                raise DataError(
                    f"the option dedupe has no number for feature {name} of table {table.name}; "
                    "give it one, 1 if it is not deduplicated"
                )
            factor = dedupe[name]
        else:
            factor = feature.dedupe_factor(batch_size, pooled=False)
        all_ids += feature.length
        unique_ids += feature.length / factor
    return all_ids / unique_ids if unique_ids else 1.0
