"""Cache sizes per table, and the remaining traffic (SCARS).

Needs only NumPy. Only ``statistics``, which TorchRec's planner uses, imports TorchRec.

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
