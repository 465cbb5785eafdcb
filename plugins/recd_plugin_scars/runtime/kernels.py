"""The cached kernels of tables, as sharders take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recd_plugin_scars.runtime.kept_tables import check_kept
from recd_plugin_scars.runtime.kernel import (
    CachedEmbedding,
    CachedEmbeddingBag,
    cached_kernels,
)
from recd_plugin_scars.runtime.mapped_file import FileStore
from recd_plugin_scars.runtime.planned import as_planned
from recd_plugin_scars.runtime.spec import MappedFile, TableCache
from recd_plugins.api import LookupKernels


class CachedKernels(LookupKernels):
    """Kernels with fast memory and a backing store, for tables planned with ``fused_uvm_caching``.

    Args:
        caches: by table.
    """

    compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value

    def __init__(self, caches: Mapping[str, TableCache]) -> None:
        self._caches = dict(caches)

    @property
    def tables(self) -> Mapping[str, TableCache]:
        """The caches by table."""
        return self._caches

    def bags(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> CachedEmbeddingBag:
        """See ``LookupKernels.bags``."""
        return CachedEmbeddingBag(config, pg, device, sharding_type, caches=self._caches)

    def sequences(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None
    ) -> CachedEmbedding:
        """See ``LookupKernels.sequences``."""
        return CachedEmbedding(config, pg, device, caches=self._caches)

    def as_planned(
        self, params: Mapping[str, ParameterSharding], configs: Iterable[BaseEmbeddingConfig]
    ) -> CachedKernels:
        """With the load factors of the plan."""
        return CachedKernels(as_planned(self._caches, params, configs))

    def check_opened(self, module: nn.Module, group: Any) -> None:
        """Refuse tables of which an earlier run kept a part; see ``LookupKernels.check_opened``.

        Raises:
            DataError: names the table and a rank.
        """
        storages = [cache.storage for cache in self._caches.values()]
        files = [each for each in storages if isinstance(each, MappedFile) and each.keep]
        if files:
            stores = [kernel.store for kernel in cached_kernels(module)]
            kept = [each for each in stores if isinstance(each, FileStore) and each.keep]
            check_kept(kept, [Path(each.folder) for each in files], group)

    def prefetches(self, table: str) -> bool:
        """Whether its cache looks ahead."""
        return self._caches[table].lookahead
