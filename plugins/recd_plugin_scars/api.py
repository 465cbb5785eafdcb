"""The API of cached tables: what another package builds caches with."""

from recd_plugin_scars.part import CachePart
from recd_plugin_scars.planning import CachePlan, TableLoad
from recd_plugin_scars.runtime.kernel import cache_traffic
from recd_plugin_scars.runtime.kernels import CachedKernels
from recd_plugin_scars.runtime.row_policy import RowPolicy, ShardRows, Slots
from recd_plugin_scars.runtime.spec import HostMemory, MappedFile, TableCache
from recd_plugin_scars.runtime.traffic import CacheTraffic

__all__ = [
    "CachePart",
    "CachePlan",
    "CacheTraffic",
    "CachedKernels",
    "HostMemory",
    "MappedFile",
    "RowPolicy",
    "ShardRows",
    "Slots",
    "TableCache",
    "TableLoad",
    "cache_traffic",
]
