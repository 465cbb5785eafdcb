"""Tiers of rows: what they cost, and where to cut them (FlexShard, arXiv 2301.02959).

NumPy alone: neither torch nor TorchRec is imported.

- ``cluster``: ranks and their collectives. ``demand``: how often rows are accessed.
- ``costs``: the strategies and their options. ``ranking``: all rows, most accessed first.
- ``cuts``, ``joint``: where the tiers end.
- ``plan``: tables into tiers. ``traffic``: what these send. ``paper``: the paper's own figures.
"""

from recd_plugin_flexshard.planning.cluster import (
    PAPER,
    PAPER_FLAT,
    ClusterShape,
    Collective,
    Collectives,
    CollectiveSeconds,
)
from recd_plugin_flexshard.planning.costs import CostOptions, breakpoints
from recd_plugin_flexshard.planning.demand import TableDemand
from recd_plugin_flexshard.planning.plan import (
    Strategy,
    TableTiers,
    TierPlan,
    four_points,
    on_cluster,
    pareto_curve,
    plan_tiers,
    two_tier_curve,
)
from recd_plugin_flexshard.planning.traffic import TIERS, Tier, TierTraffic, traffic

__all__ = [
    "PAPER",
    "PAPER_FLAT",
    "TIERS",
    "ClusterShape",
    "Collective",
    "CollectiveSeconds",
    "Collectives",
    "CostOptions",
    "Strategy",
    "TableDemand",
    "TableTiers",
    "Tier",
    "TierPlan",
    "TierTraffic",
    "breakpoints",
    "four_points",
    "on_cluster",
    "pareto_curve",
    "plan_tiers",
    "traffic",
    "two_tier_curve",
]
