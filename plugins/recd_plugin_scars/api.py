"""Public API for packages that implement other caches or cache policies for embedding tables."""

from recd_plugin_scars.cache import CacheStrategy
from recd_plugin_scars.planning import CachePlan, TableLoad
from recd_plugin_scars.runtime.kernel import CachedKernels, cache_traffic
from recd_plugin_scars.runtime.policies import RowPolicy, ShardRows, Slots, TableCache
from recd_plugin_scars.runtime.row_cache import CacheTraffic

__all__ = [
    "CachePlan",
    "CacheStrategy",
    "CacheTraffic",
    "CachedKernels",
    "RowPolicy",
    "ShardRows",
    "Slots",
    "TableCache",
    "TableLoad",
    "cache_traffic",
]
