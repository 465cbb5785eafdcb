"""TorchRec's kernels on CPU, for tests of what takes their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import DataType, PoolingType

ROWS = 7


OPTIMIZERS = [
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ADAGRAD,
]


def kernel(
    widths: list[int],
    pooling: PoolingType,
    *,
    weighted: bool,
    shared: bool,
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    dense: bool = False,
    rows: Sequence[int] = (),
    output_dtype: SparseType = SparseType.FP32,
) -> Any:
    """One table a width, of ``rows``; with ``shared``, the first has a second feature."""
    rows = rows or [ROWS] * len(widths)
    tables = [
        ShardedEmbeddingTable(
            name=f"t{index}",
            embedding_names=[f"f{index}"] + (["g"] if shared and index == 0 else []),
            feature_names=[f"f{index}"] + (["g"] if shared and index == 0 else []),
            embedding_dim=width,
            local_cols=width,
            num_embeddings=ROWS,
            local_rows=rows[index],
            data_type=DataType.FP32,
            pooling=pooling,
            compute_kernel=EmbeddingComputeKernel.FUSED,
            local_metadata=_whole(width, rows[index]),
            global_metadata=ShardedTensorMetadata(
                [_whole(width, rows[index])], torch.Size([rows[index], width])
            ),
        )
        for index, width in enumerate(widths)
    ]
    config = GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=pooling,
        is_weighted=weighted,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=tables,
        fused_params={
            "optimizer": optimizer,
            "learning_rate": 0.1,
            "eps": 1e-3,
            "output_dtype": output_dtype,
        },
    )
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): BatchedFusedEmbeddingBag,
        (False, True): BatchedFusedEmbedding,
        (True, False): BatchedDenseEmbeddingBag,
        (True, True): BatchedDenseEmbedding,
    }
    return kinds[dense, pooling == PoolingType.NONE](config, device=torch.device("cpu"))


def _whole(width: int, rows: int = ROWS) -> ShardMetadata:
    return ShardMetadata(shard_offsets=[0, 0], shard_sizes=[rows, width], placement="rank:0/cpu")
