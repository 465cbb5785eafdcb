"""Tiers of rows: what they cost, and where to cut them (FlexShard, arXiv 2301.02959).

NumPy alone: neither torch nor TorchRec is imported.

- ``cluster``: ranks and their collectives. ``demand``: how often rows are accessed.
- ``costs``: the strategies and their options. ``cuts``, ``joint``: where the tiers end.
- ``plan``: tables into tiers. ``traffic``: what these send. ``paper``: the paper's own figures.
"""

from recd_plugins.planning.tiers.cluster import (
    PAPER,
    PAPER_FLAT,
    Cluster,
    Collective,
    Collectives,
)
from recd_plugins.planning.tiers.costs import CostOptions
from recd_plugins.planning.tiers.demand import TableDemand
from recd_plugins.planning.tiers.plan import (
    CollectiveSeconds,
    Strategy,
    TableTiers,
    TierPlan,
    plan_tiers,
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
    "plan_tiers",
    "traffic",
]
