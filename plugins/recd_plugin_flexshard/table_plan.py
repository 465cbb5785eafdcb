"""Chooses the rows of a model's tables to copy to ranks and nodes, for its data and topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from recd_plugin_flexshard.planning import (
    ClusterShape,
    Collective,
    Collectives,
    CostOptions,
    Strategy,
    TableDemand,
    TierPlan,
    on_cluster,
    plan_tiers,
)
from recd_plugins.api import RecdError, SetupError

if TYPE_CHECKING:
    from recd_plugin_flexshard.options import OtherCluster, TierOptions
    from recd_plugins.api import PlanContext, Table, stage_costs


def collectives_of(rates: stage_costs.CollectiveRates) -> Collectives:
    return Collectives(
        **{name: Collective(rate.bytes_per_second, rate.seconds) for name, rate in rates}
    )


def cluster_of(context: PlanContext) -> ClusterShape:
    rates = collectives_of(context.rates)
    return ClusterShape(context.nodes, context.ranks_per_node, context.batch_size, rates)


def plan_tables(
    strategy: Strategy, options: TierOptions, tables: Sequence[Table], context: PlanContext
) -> TierPlan:
    """Choose the rows of ``tables`` to copy to ranks and nodes, with one memory budget.

    Raises:
        SetupError: the tables do not fit into the budget, ``three_tier`` is planned for one node,
            or the topology in the option ``plan_for`` does not exist.
    """
    here, other = cluster_of(context), options.plan_for
    cluster = here if other is None else _other(other, context)
    for one, remedy in (
        (context.nodes == 1, "training.ranks_per_node, or --nodes of recd plan and recd simulate"),
        (cluster.nodes == 1, "plan_for.nodes"),
    ):
        if one and strategy == "three_tier":
            raise SetupError(
                "sharding plugin 'flexshard.three_tier' needs several nodes, but this plan is for "
                f"one node. Use 'flexshard.two_tier' or 'flexshard.joint', or set {remedy}."
            )
    demands = _demands(options, tables, context)
    costs = CostOptions(wire_bytes=context.wire_bytes, **options.cost_options())
    try:
        plan = plan_tiers(demands, cluster, strategy, costs)
    except SetupError as error:
        raise SetupError(
            f"the option 'budget' ({options.budget!r}) is too small: {error}"
        ) from error
    return plan if other is None else on_cluster(plan, here)


def _other(other: OtherCluster, context: PlanContext) -> ClusterShape:
    from recd_plugins.api import topologies

    try:
        spec = topologies.load_topology(
            other.topology,
            nodes=other.nodes,
            ranks_per_node=other.ranks_per_node,
            ranks=context.ranks_per_node,
            device=context.device_type,
        )
    except RecdError as error:  # drop the line number, which refers to the topology file
        raise SetupError(f"option 'plan_for': {error}") from error
    batch_size = other.batch_size or context.batch_size
    rates = collectives_of(spec.collective_rates)
    return ClusterShape(spec.nodes, spec.ranks_per_node, batch_size, rates)


def _demands(
    options: TierOptions, tables: Sequence[Table], context: PlanContext
) -> list[TableDemand]:
    profile = options.accesses(tables, context, deduplicated=options.dedupe == "data")
    counts_distinct = options.coalesce or options.sync != "dense"
    distinct = context.data.distinct(tables) if counts_distinct else {}
    demands = []
    for table in tables:
        access = profile.covering(table.name, table.num_embeddings)
        if access.batch_size is None or options.dedupe != "data":
            factor = _dedupe_factor(options, table, context)
        else:  # counted after deduplication
            factor = access.dedupe_factor
        demand = TableDemand.from_access(access, table.embedding_dim, factor)
        # Distinct ids are unknown if accesses come from a distribution instead of samples.
        counted = distinct.get(table.name) if access.samples > 1 else None
        demands.append(replace(demand, features=len(table.features), distinct=counted))
    return demands


def _dedupe_factor(options: TierOptions, table: Table, context: PlanContext) -> float:
    """Return the ids looked up in a table divided by the ids left after deduplication."""
    if options.dedupe != "data":
        return 1.0 if options.dedupe == "none" else options.dedupe
    known = context.data.profile()
    features = [known.of(name) for name in table.features]
    ids = sum(feature.length for feature in features)
    unique = sum(f.length / f.dedupe_factor(context.batch_size, pooled=False) for f in features)
    return ids / unique if unique else 1.0
