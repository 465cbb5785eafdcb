"""Cache sizes per table, and the remaining traffic (SCARS).

Needs only NumPy. Only ``statistics``, which TorchRec's planner uses, imports TorchRec.
"""

from recd_plugin_scars.planning.load import BatchRows, TableLoad, row_bytes
from recd_plugin_scars.planning.plan import CachedTable, CachePlan, RowOrder

__all__ = [
    "BatchRows",
    "CachePlan",
    "CachedTable",
    "RowOrder",
    "TableLoad",
    "row_bytes",
]
