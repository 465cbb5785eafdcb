"""FlexShard's cost model and choice of rows to copy. Does not import torch."""

from recd_plugin_flexshard.planning.costs import (
    PAPER,
    PAPER_FLAT,
    ClusterShape,
    Collective,
    Collectives,
    CollectiveSeconds,
    CostOptions,
    TableDemand,
)
from recd_plugin_flexshard.planning.plan import (
    TIERS,
    Strategy,
    TableTiers,
    Tier,
    TierPlan,
    TierTraffic,
    on_cluster,
    plan_tiers,
    traffic,
)

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
    "on_cluster",
    "plan_tiers",
    "traffic",
]
