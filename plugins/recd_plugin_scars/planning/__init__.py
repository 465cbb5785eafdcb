"""Cache sizes per table, and the remaining traffic (SCARS).

Needs only NumPy. Only ``statistics``, which TorchRec's planner uses, imports TorchRec.
"""

from recd_plugin_scars.planning.load import BatchRows, TableLoad, row_bytes
from recd_plugin_scars.planning.order import Memory, RowOrder, StepCosts
from recd_plugin_scars.planning.plan import CachedTable, CachePlan

__all__ = [
    "BatchRows",
    "CachePlan",
    "CachedTable",
    "Memory",
    "RowOrder",
    "StepCosts",
    "TableLoad",
    "row_bytes",
]
