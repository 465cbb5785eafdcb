"""Cached kernels and the uncached ones of the same tables, without a sharded module around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_scars.runtime.kernel import CachedEmbedding, CachedEmbeddingBag
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugins.compat.portable_kernels import PortableEmbedding, PortableEmbeddingBag

CPU = torch.device("cpu")
DIM = 4
Kernel = CachedEmbedding | CachedEmbeddingBag


def config_of(
    rows: Sequence[int],
    pooling: PoolingType = PoolingType.SUM,
    *,
    features: Mapping[int, Sequence[str]] | None = None,
    device: str = "cpu",
    **fused_params: Any,
) -> GroupedEmbeddingConfig:
    """Tables t0, t1, ... with these rows; each has a feature f0, f1, ..., or those given."""
    tables = []
    for index, num_rows in enumerate(rows):
        names = list((features or {}).get(index, [f"f{index}"]))
        whole = ShardMetadata([0, 0], [num_rows, DIM], f"rank:0/{device}")
        tables.append(
            ShardedEmbeddingTable(
                name=f"t{index}",
                embedding_names=names,
                feature_names=names,
                embedding_dim=DIM,
                num_embeddings=num_rows,
                local_rows=num_rows,
                local_cols=DIM,
                data_type=DataType.FP32,
                pooling=pooling,
                compute_kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
                local_metadata=whole,
                global_metadata=ShardedTensorMetadata([whole], torch.Size([num_rows, DIM])),
            )
        )
    return GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=pooling,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=tables,
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5, **fused_params},
    )


def cached_kernel(config: GroupedEmbeddingConfig, caches: Mapping[str, TableCache]) -> Kernel:
    if config.pooling == PoolingType.NONE:
        return CachedEmbedding(config, None, CPU, caches=caches)
    return CachedEmbeddingBag(config, None, CPU, None, caches=caches)


def pair(config: GroupedEmbeddingConfig, caches: Mapping[str, TableCache]) -> tuple[Any, Kernel]:
    kind = PortableEmbedding if config.pooling == PoolingType.NONE else PortableEmbeddingBag
    plain, cached = kind(config, device=CPU), cached_kernel(config, caches)
    weights, others = (each.split_embedding_weights() for each in (plain, cached))
    for weight, other in zip(weights, others, strict=True):
        other.copy_(weight)
    return plain, cached


def batch_of(*ids: Sequence[Sequence[int]], keys: Sequence[str] | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(keys or (f"f{index}" for index in range(len(ids)))),
        values=torch.tensor([each for bags in ids for bag in bags for each in bag]).long(),
        lengths=torch.tensor([len(bag) for bags in ids for bag in bags]),
    )


def learn(output: Tensor, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    output.backward(torch.rand(output.shape, generator=generator))


def state_of(kernel: Any) -> list[Tensor]:
    kernel.flush()
    states = [each for table in kernel.emb_module.split_optimizer_states() for each in table]
    return [each.detach().clone() for each in (*kernel.split_embedding_weights(), *states)]


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(other), list(one), rtol=0, atol=0)
