"""Choice of cache sizes, and prediction of cache misses and traffic (SCARS paper).

Does not import torch, except ``statistics``, which TorchRec's planner uses.
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
