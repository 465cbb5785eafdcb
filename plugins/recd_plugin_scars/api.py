"""The API of cached tables: what another package builds caches with."""

from recd_plugin_scars.part import CachePart
from recd_plugin_scars.planning import CachePlan
from recd_plugin_scars.runtime.kernels import CachedKernels
from recd_plugin_scars.runtime.spec import HostMemory, MappedFile, TableCache

__all__ = ["CachePart", "CachePlan", "CachedKernels", "HostMemory", "MappedFile", "TableCache"]
