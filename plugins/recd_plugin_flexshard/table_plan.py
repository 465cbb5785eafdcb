"""Tier plans for the tables of a model, from their data and the topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    from recd_plugins.api import PlanContext, Table, data_profiles, stage_costs

# Planning is repeated with the gradient share of the previous plan; a third pass changes 0.2 %.
_ROUNDS = 2


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
    """Plan the tiers of ``tables`` together."""
    from recd_plugins.api import gradients_sent_once

    here, other = cluster_of(context), options.plan_for
    cluster = here if other is None else _other(other, context)
    for one, remedy in (
        (context.nodes == 1, "training.ranks_per_node, or --nodes of recd plan and recd simulate"),
        (cluster.nodes == 1, "plan_for.nodes"),
    ):
        if one and strategy == "three_tier":
            raise SetupError(
                "three tiers need several nodes, as flex rows are once in every node: use "
                f"flexshard.two_tier, or flexshard.joint, which takes two tiers there; or set "
                f"{remedy}"
            )
    demands = _demands(options, tables, context)
    costs = CostOptions(wire_bytes=context.wire_bytes, **options.cost_options())
    known = gradients_sent_once(context)
    try:
        plan = plan_tiers(demands, cluster, strategy, costs)
        if other is not None:
            plan = on_cluster(plan, here)
            return on_cluster(plan, here, _gradient_share(known, plan, context.world_size))
        for _ in range(_ROUNDS):
            share = _gradient_share(known, plan, context.world_size)
            if share == plan.options.gradient_share:
                break
            plan = plan_tiers(demands, cluster, strategy, replace(costs, gradient_share=share))
    except SetupError as error:
        raise SetupError(f"the budget {options.budget} cannot be kept: {error}") from error
    return plan


def _gradient_share(
    known: Mapping[str, data_profiles.DistinctGradients], plan: TierPlan, world_size: int
) -> float:
    """Return the fraction of cold rows' gradients that is sent with gradient deduplication."""
    from recd_plugins.api import step_costs

    options, of_all, of_sent = plan.options, 0.0, 0.0
    for tiers in plan.tables:
        dim, share = tiers.demand.embedding_dim, 1.0
        if (gradients := known.get(tiers.name)) is not None:
            kept = tiers.shares_sent[2]
            differ = gradients.share(kept, world_size, coalesced=options.coalesce)
            share = min(1.0, differ + step_costs.NUMBER_BYTES / (dim * options.wire_bytes))
        # If all rows are copied, use the share of the first cold rows.
        cold = dim * max(tiers.cold_sent, 1e-9)
        of_all += cold
        of_sent += share * cold
    return of_sent / of_all


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
    except RecdError as error:  # without the file's line numbers, which are not the entry's
        raise SetupError(f"the option plan_for: {error}") from error
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
        # A distribution has no samples to count, and a profile may cover other features.
        counted = distinct.get(table.name) if access.samples > 1 else None
        demands.append(replace(demand, features=len(table.features), distinct=counted))
    return demands


def _dedupe_factor(options: TierOptions, table: Table, context: PlanContext) -> float:
    """Return the ids of a table's features divided by the ids that are looked up."""
    if options.dedupe != "data":
        return 1.0 if options.dedupe == "none" else options.dedupe
    known = context.data.profile()
    features = [known.of(name) for name in table.features]
    ids = sum(feature.length for feature in features)
    unique = sum(f.length / f.dedupe_factor(context.batch_size, pooled=False) for f in features)
    return ids / unique if unique else 1.0
