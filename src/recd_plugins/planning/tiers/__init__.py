"""Tiers of rows: what they cost, and where to cut them (FlexShard, arXiv 2301.02959).

NumPy alone: neither torch nor TorchRec is imported.

- ``cluster``: ranks and their collectives. ``demand``: how often rows are accessed.
- ``costs``: the strategies and their options. ``ranking``: all rows, most accessed first.
- ``cuts``, ``joint``: where the tiers end.
- ``plan``: tables into tiers. ``traffic``: what these send. ``paper``: the paper's own figures.
"""

from recd_plugins.planning.tiers.cluster import (
    PAPER,
    PAPER_FLAT,
    Cluster,
    Collective,
    Collectives,
    CollectiveSeconds,
)
from recd_plugins.planning.tiers.costs import CostOptions, breakpoints
from recd_plugins.planning.tiers.demand import TableDemand
from recd_plugins.planning.tiers.plan import (
    Strategy,
    TableTiers,
    TierPlan,
    four_points,
    on_cluster,
    pareto_curve,
    plan_tiers,
    two_tier_curve,
)
from recd_plugins.planning.tiers.traffic import TIERS, Tier, TierTraffic, traffic

__all__ = [
    "PAPER",
    "PAPER_FLAT",
    "TIERS",
    "Cluster",
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
