"""Kernels in TorchRec's lookups: which of them are asked to fetch rows ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed import lookup_kernels
from recd_plugins.distributed.sharded_bags import ExactShardedEmbeddingBagCollection


class Kernel:
    """Keeps the ids of which it is asked to fetch the rows."""

    def __init__(self, compute_kernel: EmbeddingComputeKernel, num_features: int) -> None:
        self.fetched: list[list[int]] = []
        self.emb_module = self
        tables = [SimpleNamespace(compute_kernel=compute_kernel)]
        # As TorchRec groups tables.
        self.config = SimpleNamespace(
            compute_kernel=EmbeddingComputeKernel.FUSED,
            embedding_tables=tables,
            num_features=lambda: num_features,
        )

    def prefetch(self, indices: torch.Tensor, offsets: torch.Tensor, **_: Any) -> None:
        assert int(offsets[-1]) == len(indices)
        self.fetched.append(indices.tolist())


def test_only_kernels_with_a_cache_fetch_ahead() -> None:
    plain = Kernel(EmbeddingComputeKernel.FUSED, 1)
    cached = Kernel(EmbeddingComputeKernel.FUSED_UVM_CACHING, 2)
    lookup: Any = SimpleNamespace(_emb_modules=[plain, cached])
    features = KeyedJaggedTensor(
        ["a", "b", "c"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 2, 1])
    )
    lookup_kernels._prefetch(lookup, features)
    assert (plain.fetched, cached.fetched) == ([], [[2, 3, 4]])


@pytest.mark.parametrize(
    ("planned", "of_sharder", "ahead"),
    [
        (CacheParams(prefetch_pipeline=True), False, True),
        (CacheParams(prefetch_pipeline=False), True, False),
        (CacheParams(load_factor=0.5), True, True),
        (None, True, True),
        (None, False, False),
    ],
)
def test_a_cache_looks_ahead_where_plan_or_sharder_ask(
    planned: CacheParams | None, of_sharder: bool, ahead: bool
) -> None:
    sharding = ParameterSharding(
        "table_wise", EmbeddingComputeKernel.FUSED_UVM_CACHING.value, [0], cache_params=planned
    )
    sharded: Any = object.__new__(ExactShardedEmbeddingBagCollection)
    nn.Module.__init__(sharded)
    sharded.module_sharding_plan = {"t": sharding}
    sharded.fused_params = {"prefetch_pipeline": of_sharder}
    assert lookup_kernels.prefetches(sharded) == ahead
