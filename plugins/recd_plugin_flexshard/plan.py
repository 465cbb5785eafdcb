"""A plan of tiers, made of demands and a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recd_plugin_flexshard.demands import demands_of
from recd_plugin_flexshard.planning import (
    ClusterShape,
    CostOptions,
    TierPlan,
    on_cluster,
    plan_tiers,
)
from recd_plugin_flexshard.planning.sections import (
    TierMemory,
    cluster_of,
    collectives_of,
    memory_of,
)
from recd_plugins.api import RecdError, SetupError

if TYPE_CHECKING:
    from recd_plugin_flexshard.options import OtherCluster, TierOptions
    from recd_plugin_flexshard.planning import Strategy
    from recd_plugins.api import Setting, Table
    from recd_plugins.api.planning import DistinctGradients


def plan(
    strategy: Strategy, options: TierOptions, tables: Sequence[Table], setting: Setting
) -> TierPlan:
    """The tiers of ``tables`` together.

    Raises:
        DataError: the data cannot be read, or the access profile is not of these tables.
        SetupError: there is no such plan; says what to change.
    """
    if strategy == "three_tier" and setting.nodes == 1:
        raise _one_node(
            "the ranks are one node",
            "training.ranks_per_node has ranks of one machine stand for nodes, recd plan and recd "
            "simulate take --nodes",
        )
    from recd_plugins.api.planning import gradients_sent_once

    demands = demands_of(options, tables, setting)
    cluster, memory = cluster_of(setting), memory_of(setting)
    if options.plan_for is not None:
        cluster, memory = _other(options.plan_for, setting)
        if strategy == "three_tier" and cluster.nodes == 1:
            raise _one_node("plan_for is one node", "it may have more nodes")
    costs = _costs(options, memory, cluster.world_size, setting.wire_bytes)
    known = gradients_sent_once(setting)

    def share_of(plan: TierPlan) -> float:
        return _gradient_share(known, plan, setting.world_size)

    try:
        if options.plan_for is None:
            return plan_tiers(demands, cluster, strategy, costs, share_of)
        chosen = plan_tiers(demands, cluster, strategy, costs)
    except SetupError as error:
        raise SetupError(f"the budget {options.budget} cannot be kept: {error}") from error
    here = on_cluster(chosen, cluster_of(setting))
    return on_cluster(here, here.cluster, share_of(here))


def _gradient_share(
    known: Mapping[str, DistinctGradients], plan: TierPlan, world_size: int
) -> float:
    """The share of the gradients of cold rows that is sent, where equal ones are sent once."""
    from recd_plugins.api.planning import NUMBER_BYTES

    options, of_all, of_sent = plan.options, 0.0, 0.0
    for tiers in plan.tables:
        dim, share = tiers.demand.embedding_dim, 1.0
        if (gradients := known.get(tiers.demand.name)) is not None:
            kept = tiers.shares_sent[2]
            differ = gradients.share(kept, world_size, coalesced=options.coalesce)
            share = min(1.0, differ + NUMBER_BYTES / (dim * options.wire_bytes))
        # Where all rows are copied it is what the first cold ones would have.
        cold = dim * max(tiers.cold_sent, 1e-9)
        of_all += cold
        of_sent += share * cold
    return of_sent / of_all


def _one_node(what: str, remedy: str) -> SetupError:
    return SetupError(
        f"three tiers need several nodes, as flex rows are once in every node, and {what}: use "
        f"flexshard.two_tier, or flexshard.joint, which takes two tiers there ({remedy})"
    )


def _costs(
    options: TierOptions, memory: TierMemory | None, world_size: int, wire_bytes: float
) -> CostOptions:
    multiplier, saved = options.memory_multiplier, options.saved_activations
    if multiplier is None:
        known = CostOptions.memory_multiplier
        multiplier = memory.multiplier(world_size) if memory else known
    if saved is None:
        saved = memory.saved_activations if memory else CostOptions.saved_activations
    return CostOptions(
        memory_multiplier=multiplier,
        saved_activations=saved,
        wire_bytes=wire_bytes,
        **options.cost_options(),
    )


def _other(other: OtherCluster, setting: Setting) -> tuple[ClusterShape, TierMemory | None]:
    from recd_plugins.api.planning import load_topology

    try:
        spec = load_topology(
            other.topology,
            nodes=other.nodes,
            ranks_per_node=other.ranks_per_node,
            ranks=setting.ranks_per_node,
            device=setting.device_type,
        )
    except RecdError as error:  # that of a file names its own lines, not the entry's
        raise SetupError(f"the option plan_for: {error}") from error
    batch_size = other.batch_size or setting.batch_size
    rates = collectives_of(spec.collective_rates)
    return ClusterShape(spec.nodes, spec.ranks_per_node, batch_size, rates), memory_of(spec)
