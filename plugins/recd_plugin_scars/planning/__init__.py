"""Cache sizes by table, and the traffic that is left (SCARS).

NumPy alone: neither torch nor TorchRec is imported, but in ``statistics``, which TorchRec's planner
asks.

- ``load``: what lookups read. ``cost``: rows that a batch reads.
- ``traffic``: what is moved for them. ``plan``: sizes of caches, and their traffic.
- ``joint``, ``solve``: rows of several tables in one fast memory, and the batch size beside them.
"""

from recd_plugin_scars.planning.load import (
    BatchRows,
    TableLoad,
    TableTraffic,
    expected_unique,
    row_bytes,
    traffic,
)
from recd_plugin_scars.planning.order import Memory, Optimum, RowOrder, StepCosts
from recd_plugin_scars.planning.plan import CachedTable, CachePlan

__all__ = [
    "BatchRows",
    "CachePlan",
    "CachedTable",
    "Memory",
    "Optimum",
    "RowOrder",
    "StepCosts",
    "TableLoad",
    "TableTraffic",
    "expected_unique",
    "row_bytes",
    "traffic",
]
