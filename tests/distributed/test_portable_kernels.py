"""The kernel for variable batches on CPU against FBGEMM's: outputs, and weights after a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.portable_kernels import PortableEmbeddingBag

ROWS = 7


def kernel(
    widths: list[int], pooling: PoolingType, *, weighted: bool, shared: bool
) -> BatchedFusedEmbeddingBag:
    """One table a width; with ``shared``, the first has a second feature."""
    tables = [
        ShardedEmbeddingTable(
            name=f"t{index}",
            embedding_names=[f"f{index}"] + (["g"] if shared and index == 0 else []),
            feature_names=[f"f{index}"] + (["g"] if shared and index == 0 else []),
            embedding_dim=width,
            local_cols=width,
            num_embeddings=ROWS,
            local_rows=ROWS,
            data_type=DataType.FP32,
            pooling=pooling,
            compute_kernel=EmbeddingComputeKernel.FUSED,
            local_metadata=_whole(width),
            global_metadata=ShardedTensorMetadata([_whole(width)], torch.Size([ROWS, width])),
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
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.1,
            "eps": 1e-3,
        },
    )
    return BatchedFusedEmbeddingBag(config, device=torch.device("cpu"))


def _whole(width: int) -> ShardMetadata:
    return ShardMetadata(shard_offsets=[0, 0], shard_sizes=[ROWS, width], placement="rank:0/cpu")


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """The kernels' optimizer asks for its process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@settings(max_examples=25, deadline=None)
@given(
    widths=st.lists(st.sampled_from([4, 8, 12, 16]), min_size=1, max_size=4),
    pooling=st.sampled_from([PoolingType.SUM, PoolingType.MEAN]),
    weighted=st.booleans(),
    shared=st.booleans(),
    num_ranks=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_variable_batches(
    widths: list[int],
    pooling: PoolingType,
    weighted: bool,
    shared: bool,
    num_ranks: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    stock, portable = (kernel(widths, pooling, weighted=weighted, shared=shared) for _ in range(2))
    for weight, other in zip(
        stock.split_embedding_weights(), portable.split_embedding_weights(), strict=True
    ):
        other.copy_(weight)
    portable.__class__ = PortableEmbeddingBag
    names = stock.config.feature_names()
    # Some features have no row from some ranks, and some rows have no id.
    strides = torch.randint(0, 4, (len(names), num_ranks))
    strides[0, 0] += 1
    lengths = torch.randint(0, 4, (int(strides.sum()),))
    features = KeyedJaggedTensor(
        keys=names,
        values=torch.randint(0, ROWS, (int(lengths.sum()),)),
        lengths=lengths,
        weights=torch.rand(int(lengths.sum())) if weighted else None,
        stride_per_key_per_rank=strides.tolist(),
    )
    outputs = [module(features) for module in (stock, portable)]
    torch.testing.assert_close(*outputs)
    upstream = torch.randn_like(outputs[0])
    for output in outputs:
        output.backward(upstream)
    weights = [
        torch.cat([w.flatten() for w in m.split_embedding_weights()]) for m in (stock, portable)
    ]
    torch.testing.assert_close(*weights)


def test_plain_batches() -> None:
    stock = kernel([4, 8], PoolingType.SUM, weighted=False, shared=False)
    features = KeyedJaggedTensor(
        ["f0", "f1"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 0, 2])
    )
    expected = stock(features)
    stock.__class__ = PortableEmbeddingBag
    assert torch.equal(stock(features), expected)


def test_it_makes_no_metadata() -> None:
    stock = kernel([4], PoolingType.SUM, weighted=False, shared=False)
    features = KeyedJaggedTensor(
        ["f0"],
        torch.tensor([1, 2]),
        lengths=torch.tensor([1, 0, 1]),
        stride_per_key_per_rank=[[1, 2]],
    )
    called = []
    for kind in (BatchedFusedEmbeddingBag, PortableEmbeddingBag):
        stock.__class__ = kind
        with torch.profiler.profile() as profile:
            stock(features)
        called.append({event.name for event in profile.events()})
    assert "fbgemm::generate_vbe_metadata" in called[0]
    assert "fbgemm::generate_vbe_metadata" not in called[1]
