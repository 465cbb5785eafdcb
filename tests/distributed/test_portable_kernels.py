from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sharded import CPU, one_rank
from torch import Tensor, nn
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
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat.portable_kernels import (
    PortableDenseEmbedding,
    PortableDenseEmbeddingBag,
    PortableEmbedding,
    PortableEmbeddingBag,
    use_portable_lookups,
)
from recd_plugins.runtime.errors import DataError

ROWS = 7
OPTIMIZERS = [
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ADAGRAD,
]
KINDS: dict[tuple[bool, bool], Any] = {
    (False, False): BatchedFusedEmbeddingBag,
    (False, True): BatchedFusedEmbedding,
    (True, False): BatchedDenseEmbeddingBag,
    (True, True): BatchedDenseEmbedding,
}


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


def kernel(
    widths: list[int],
    pooling: PoolingType,
    *,
    weighted: bool = False,
    shared: bool = False,
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    dense: bool = False,
    rows: Sequence[int] = (),
    output_dtype: SparseType = SparseType.FP32,
) -> Any:
    """TorchRec's, a table a width, of ``rows``; with ``shared`` the first has a second feature."""
    tables = []
    sizes = zip(widths, rows or [ROWS] * len(widths), strict=True)
    for index, (width, num_rows) in enumerate(sizes):
        names = [f"f{index}"] + (["g"] if shared and index == 0 else [])
        whole = ShardMetadata([0, 0], [num_rows, width], placement="rank:0/cpu")
        tables.append(
            ShardedEmbeddingTable(
                name=f"t{index}",
                embedding_names=names,
                feature_names=names,
                embedding_dim=width,
                local_cols=width,
                num_embeddings=ROWS,
                local_rows=num_rows,
                data_type=DataType.FP32,
                pooling=pooling,
                compute_kernel=EmbeddingComputeKernel.FUSED,
                local_metadata=whole,
                global_metadata=ShardedTensorMetadata([whole], torch.Size([num_rows, width])),
            )
        )
    params = {"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-3}
    config = GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=pooling,
        is_weighted=weighted,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=tables,
        fused_params={**params, "output_dtype": output_dtype},
    )
    return KINDS[dense, pooling == PoolingType.NONE](config, device=CPU)


def pair(
    portable: type[nn.Module], widths: list[int], pooling: PoolingType, **options: Any
) -> list[Any]:
    modules = [kernel(widths, pooling, **options) for _ in range(2)]
    tables = [module.split_embedding_weights() for module in modules]
    for weight, other in zip(*tables, strict=True):
        other.copy_(weight)
    modules[1].__class__ = portable
    return modules


def state(module: Any) -> list[Tensor]:
    states = [tensor for table in module.emb_module.split_optimizer_states() for tensor in table]
    return [*(w.clone() for w in module.split_embedding_weights()), *states]


@settings(max_examples=25)
@given(st.data())
def test_variable_batches(data: st.DataObject) -> None:
    draw = data.draw
    widths = draw(st.lists(st.sampled_from([4, 8, 12, 16]), min_size=1, max_size=4))
    widths = draw(st.sampled_from([widths, [8] * len(widths)]))
    pooling = draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN]))
    weighted, shared = draw(st.booleans()), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 2**16)))
    modules = pair(PortableEmbeddingBag, widths, pooling, weighted=weighted, shared=shared)
    names = modules[0].config.feature_names()
    # Some features have no row from some ranks, and some rows have no id.
    strides = torch.randint(0, 4, (len(names), draw(st.integers(1, 3))))
    strides[0, 0] += 1
    lengths = torch.randint(0, 4, (int(strides.sum()),))
    features = KeyedJaggedTensor(
        keys=names,
        values=torch.randint(0, ROWS, (int(lengths.sum()),)),
        lengths=lengths,
        weights=torch.rand(int(lengths.sum())) if weighted else None,
        stride_per_key_per_rank=strides.tolist(),
    )
    assert_trained_alike(modules, [features, features])


def assert_trained_alike(modules: list[Any], batches: list[KeyedJaggedTensor]) -> None:
    before = state(modules[0])
    for features in batches:
        outputs = [module(features) for module in modules]
        torch.testing.assert_close(*outputs)
        upstream = torch.randn_like(outputs[0])
        for output in outputs:
            output.backward(upstream)
    stock, portable = (state(module) for module in modules)
    torch.testing.assert_close(portable, stock)
    if any(len(features.values()) for features in batches):
        assert any(not torch.equal(*each) for each in zip(stock, before, strict=True))


@settings(max_examples=40)
@given(st.data())
def test_sequences(data: st.DataObject) -> None:
    draw = data.draw
    options = {"shared": draw(st.booleans()), "optimizer": draw(st.sampled_from(OPTIMIZERS))}
    widths = [draw(st.sampled_from([4, 12, 16]))] * draw(st.integers(1, 4))
    weighted, longest = draw(st.booleans()), draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    modules = pair(PortableEmbedding, widths, PoolingType.NONE, **options)
    names = modules[0].config.feature_names()
    batches = []
    for _ in range(3):
        # Some features have no id at all.
        lengths = torch.randint(0, longest + 1, (len(names), 3))
        lengths *= torch.randint(0, 2, (len(names), 1))
        num_ids = int(lengths.sum())
        batches.append(
            KeyedJaggedTensor(
                keys=names,
                values=torch.randint(0, ROWS, (num_ids,), dtype=dtype),
                lengths=lengths.flatten(),
                weights=torch.rand(num_ids) if weighted else None,  # not read without pooling
            )
        )
    assert_trained_alike(modules, batches)
    # What is set later counts, too.
    for module in modules:
        module.emb_module.set_learning_rate(0.3)
        module.emb_module.update_hyper_parameters({"eps": 0.5})
    assert_trained_alike(modules, batches)


@pytest.mark.parametrize("pooling", [PoolingType.NONE, PoolingType.SUM])
@pytest.mark.parametrize(
    ("mode", "wrong"),
    [
        (BoundsCheckMode.WARNING, ROWS),  # FBGEMM takes the first row instead
        (BoundsCheckMode.WARNING, -1),
        (BoundsCheckMode.IGNORE, -1),
        (BoundsCheckMode.FATAL, -1),
        (BoundsCheckMode.NONE, -2),
        (BoundsCheckMode.NONE, ROWS),
    ],
)
def test_an_id_out_of_its_table_is_not_one_of_the_table_beside_it(
    mode: BoundsCheckMode, wrong: int, pooling: PoolingType
) -> None:
    portable = PortableEmbedding if pooling == PoolingType.NONE else PortableEmbeddingBag
    stock, mine = pair(portable, [4, 4, 4], pooling)
    strides = None if pooling == PoolingType.NONE else [[1], [2], [0]]
    for index_type in (torch.int64, torch.int32):
        features = KeyedJaggedTensor(
            ["f0", "f1", "f2"],
            torch.tensor([1, 2, wrong], dtype=index_type),
            lengths=torch.tensor([2, 1, 0]),
            stride_per_key_per_rank=strides,
        )
        for module in (stock, mine):
            module.emb_module.bounds_check_mode_int = mode.value
        if (mode, wrong) == (BoundsCheckMode.WARNING, ROWS):
            torch.testing.assert_close(mine(features), stock(features))
            continue
        with pytest.raises(RuntimeError, match=f"out of bounds: {wrong}"):
            stock(features)
        told = f"table 't1': feature 'f1' has the id {wrong}, .* rows 0 to 6"
        with pytest.raises(DataError, match=told):
            mine(features)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_variable_batches_of_replicated_tables(pooling: PoolingType) -> None:
    module = kernel([4, 12], pooling, shared=True, dense=True)
    module.__class__ = PortableDenseEmbeddingBag
    first, second = module.split_embedding_weights()
    ids, lengths = torch.tensor([6, 0, 3, 1, 5]), torch.tensor([2, 0, 1, 2])
    strides: Any = {"stride_per_key_per_rank": [[1], [2], [1]]}
    features = KeyedJaggedTensor(["f0", "g", "f1"], ids, lengths=lengths, **strides)
    # Rows of feature f0, then those of g, which has one without ids, then that of f1.
    bags = [first[[6, 0]], torch.zeros(1, 4), first[[3]], second[[1, 5]]]
    pooled = [bag.sum(0) if pooling == PoolingType.SUM else bag.mean(0) for bag in bags]
    output = module(features)
    torch.testing.assert_close(output, torch.cat(pooled))
    output.backward(torch.arange(24.0))
    gradients = module.emb_module.weights.grad
    of_bag = torch.arange(4.0) / (1 if pooling == PoolingType.SUM else 2)
    torch.testing.assert_close(gradients[:4], of_bag)  # row 0 of the first table
    torch.testing.assert_close(gradients[3 * 4 : 4 * 4], torch.arange(8.0, 12.0))


def test_a_replicated_table_is_not_read_beyond_its_rows() -> None:
    module = kernel([4, 4], PoolingType.NONE, dense=True)
    module.__class__ = PortableDenseEmbedding
    inside = KeyedJaggedTensor(["f0", "f1"], torch.tensor([6, 0]), lengths=torch.tensor([1, 1]))
    tables = module.split_embedding_weights()
    torch.testing.assert_close(module(inside), torch.stack([tables[0][6], tables[1][0]]))
    for wrong in (-1, ROWS):
        ids = torch.tensor([wrong, 0] if wrong > 0 else [0, wrong])
        features = KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([1, 1]))
        with pytest.raises(DataError, match=rf"table 't[01]': feature 'f[01]' has the id {wrong}"):
            module(features)


@pytest.mark.parametrize("dtype", [SparseType.FP32, SparseType.FP16])
@pytest.mark.parametrize("pooling", [PoolingType.NONE, PoolingType.SUM])
def test_a_table_without_rows_here_refuses_ids_and_sends_the_type_that_others_send(
    pooling: PoolingType, dtype: SparseType
) -> None:
    here, there = (kernel([4], pooling, output_dtype=dtype) for _ in range(2))
    here._local_rows = [0]
    use_portable_lookups([here, there])
    no_ids = KeyedJaggedTensor(["f0"], torch.tensor([]).long(), lengths=torch.tensor([0]))
    one_id = KeyedJaggedTensor(["f0"], torch.tensor([3]), lengths=torch.tensor([1]))
    nothing = here(no_ids)
    assert nothing.dtype == there(one_id).dtype == dtype.as_dtype()
    nothing.sum().backward()
    with pytest.raises(DataError, match=r"table 't0': feature 'f0' has the id 3, .* has no rows"):
        here(one_id)


def test_weights_of_tables_without_rows_here_have_a_gradient() -> None:
    """Else a rank would sum no gradient of what makes them, and the others wait for it."""
    module = kernel([4, 8], PoolingType.SUM, weighted=True, rows=[0, 0])
    use_portable_lookups([module])
    weights = torch.empty(0, requires_grad=True)
    nothing = KeyedJaggedTensor(
        ["f0", "f1"], torch.empty(0, dtype=torch.int64), weights, lengths=torch.zeros(4).int()
    )
    pooled = module(nothing)
    assert pooled.tolist() == [[0.0] * 12] * 2
    pooled.sum().backward()
    assert weights.grad is not None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("widths", "rows"),
    [
        ([4, 8, 4], [ROWS, 0, ROWS]),
        ([8, 4, 4], [0, ROWS, ROWS]),
        ([4, 12, 8], [0, ROWS, ROWS]),
        ([4, 8, 8], [ROWS, ROWS, 0]),
        ([4, 8, 16], [ROWS, 0, 0]),
        ([16, 8, 4], [0, 0, ROWS]),
    ],
)
def test_a_table_without_rows_here_is_no_part_of_the_next(
    widths: list[int], rows: list[int], optimizer: EmbOptimType
) -> None:
    """FBGEMM takes the width of the one for the other, and writes what is not theirs."""
    torch.manual_seed(0)
    there = [at for at, num_rows in enumerate(rows) if num_rows]
    mine = kernel(widths, PoolingType.SUM, rows=rows, optimizer=optimizer)
    alone = kernel([widths[at] for at in there], PoolingType.SUM, optimizer=optimizer)
    use_portable_lookups([mine])
    for at, weight in zip(there, alone.split_embedding_weights(), strict=True):
        mine.split_embedding_weights()[at].copy_(weight)
    lengths = torch.tensor([[2, 1, 0, 3] if at in there else [0] * 4 for at in range(len(rows))])
    ids = torch.randint(0, ROWS, (int(lengths.sum()),))
    names = mine.config.feature_names()
    features = KeyedJaggedTensor(names, ids, lengths=lengths.flatten())
    only = KeyedJaggedTensor(names[: len(there)], ids, lengths=lengths[there].flatten())
    for _ in range(2):
        outputs = mine(features).split(widths, 1)
        expected = alone(only)
        pooled = torch.cat([outputs[at] for at in there], 1)
        torch.testing.assert_close(pooled, expected)
        upstream = torch.randn_like(expected)
        pooled.backward(upstream)
        expected.backward(upstream)
    got = [mine.split_embedding_weights()[at] for at in there]
    torch.testing.assert_close(got, alone.split_embedding_weights())
    states = mine.emb_module.split_optimizer_states()
    of_others = alone.emb_module.split_optimizer_states()
    assert len(of_others) == (0 if optimizer == EmbOptimType.EXACT_SGD else len(there))
    torch.testing.assert_close([states[at] for at in there[: len(of_others)]], of_others)
