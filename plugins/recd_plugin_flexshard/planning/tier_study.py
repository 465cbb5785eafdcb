"""Plans the tiers of a registry's tables for a topology, and what other choices would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recd_plugin_flexshard.joint import Joint
from recd_plugin_flexshard.part import TieredPart
from recd_plugin_flexshard.planning.costs import CostOptions
from recd_plugin_flexshard.planning.plan import (
    Strategy,
    TierPlan,
    four_points,
    pareto_curve,
    plan_tiers,
    two_tier_curve,
)
from recd_plugin_flexshard.planning.tier_plan_report import STRATEGIES, EntryTiers, TiersReport
from recd_plugin_flexshard.three_tier import ThreeTier
from recd_plugin_flexshard.two_tier import TwoTier
from recd_plugins.api import RecdError, SetupError
from recd_plugins.api.planning import Candidate, TopologySpec, with_plugins
from recd_plugins.api.registry import RunConfig, at_entry, shortened, wrapped_dataset

# Plans of a curve: those of two tiers take less time.
_TWO_TIER_PLANS, _PLANS = 96, 32


def study_tiers(
    registry: RunConfig,
    topology: str,
    spec: TopologySpec,
    *,
    what_if: dict[str, float],
    say: Callable[[str], None],
) -> TiersReport:
    """The tiers of each sharding entry that has some.

    Args:
        registry: with the batch size to plan for.
        topology: its name.
        spec: nodes and ranks.
        what_if: options of the cost model in place of the entries', as ``memory_ratio``.
        say: told what is being done, in words.

    Raises:
        RecdError: no entry has tiers; or registry, data and model do not go together.
    """
    planned = planned_tiers(registry, spec)
    entries = []
    for entry in registry.sharding:
        if entry.field in planned.plans:
            say(f"planning tiers of {entry.field} on {spec.world_size:,} ranks")
            plan = planned.plans[entry.field]
            with at_entry(registry.path, entry):
                entries.append(study_entry(entry.field, entry.plugin.name, plan, what_if))
    return TiersReport(topology, spec, registry.training.batch_size, what_if, tuple(entries))


@dataclass(frozen=True)
class PlannedTiers:
    """A prepared model, and the plans of the sharding entries that have tiers.

    ``plans`` are by ``Entry.field``; there is one at least.
    """

    candidate: Candidate
    plans: Mapping[str, TierPlan]


def planned_tiers(registry: RunConfig, spec: TopologySpec) -> PlannedTiers:
    """Prepare data and model, for the ranks of ``spec``.

    Raises:
        RecdError: no entry has tiers; says which one to add.
    """
    wrapped_dataset(registry).prepare()
    candidate = with_plugins(registry, spec)
    parts = candidate.prepared.parts.items()
    plans = {field: part.plan for field, part in parts if isinstance(part, TieredPart)}
    if plans:
        return PlannedTiers(candidate, plans)
    names = [cls.name for cls in (TwoTier, ThreeTier, Joint)]
    sequences = [table.name for table in candidate.prepared.tables if not table.pooled]
    if (chosen := candidate.prepared.chosen) is not None:
        raise RecdError(
            f"{registry.path}: no table has tiers of rows: {chosen}. recd plan shows what else was "
            f"tried; an entry that uses {' or '.join(names)} gives them tiers all the same"
        )
    raise RecdError(
        f"{registry.path}: no table has tiers of rows; "
        + (
            f"add an entry for tables of {shortened(sequences)} to the section sharding, that uses "
            f"{' or '.join(names)}"
            if sequences
            else f"{', '.join(names)} are for tables of sequences, and this model has none: name "
            "features in the section pooling"
        )
    )


def study_entry(field: str, plugin: str, plan: TierPlan, what_if: dict[str, Any]) -> EntryTiers:
    """``plan`` of a sharding entry, or what it is with other options, and what stands next to it.

    Raises:
        SetupError: these options allow no plan.
    """
    demands = [table.demand for table in plan.tables]
    options = replace(plan.options, **what_if)
    if "memory_ratio" in what_if:
        options = replace(options, memory_bytes=None)
    if what_if:
        plan = plan_tiers(demands, plan.cluster, plan.strategy, options)
    alternatives: dict[Strategy, TierPlan] = {}
    problems: dict[Strategy, str] = {}
    for strategy in STRATEGIES:
        try:
            alternatives[strategy] = (
                plan
                if strategy == plan.strategy
                else plan_tiers(demands, plan.cluster, strategy, options)
            )
        except SetupError as error:
            problems[strategy] = str(error)
    points = four_points(demands, plan.cluster, options)
    return EntryTiers(
        field, plugin, plan, alternatives, problems, points, _curves(plan, options, points)
    )


def _curves(
    plan: TierPlan, options: CostOptions, points: Mapping[str, TierPlan]
) -> dict[Strategy, Sequence[TierPlan]]:
    demands = [table.demand for table in plan.tables]
    rows = sum(table.num_embeddings for table in demands)
    # None to all, evenly on a logarithmic axis, and the points.
    hot = {0, *np.geomspace(1, rows, _TWO_TIER_PLANS).astype(int).tolist()}
    hot |= {sum(table.hot for table in point.tables) for point in points.values()}
    curves: dict[Strategy, Sequence[TierPlan]] = {
        "two_tier": two_tier_curve(demands, plan.cluster, options, sorted(hot))
    }
    if plan.cluster.nodes > 1:
        further: Strategy = "joint" if plan.strategy == "joint" else "three_tier"
        # From least memory on there are plans; the sums of some are rounded.
        least = _ratio(points["least_memory"]) * (1 + 1e-9)
        ratios = np.geomspace(least, max(least, _ratio(points["least_communication"])), _PLANS)
        curves[further] = pareto_curve(demands, plan.cluster, further, options, ratios.tolist())
    return curves


def _ratio(plan: TierPlan) -> float:
    return plan.memory_bytes / plan.row_wise_memory_bytes
