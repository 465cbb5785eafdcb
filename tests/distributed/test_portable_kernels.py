"""The kernels for CPU against FBGEMM's: outputs, and weights and optimizer state after training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.distributed.kernel_cases import OPTIMIZERS, ROWS, kernel
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbeddingBag,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat.portable_kernels import (
    PortableDenseEmbedding,
    PortableDenseEmbeddingBag,
    PortableEmbedding,
    PortableEmbeddingBag,
    fits_one_table,
    use_portable_lookups,
)
from recd_plugins.runtime.errors import DataError


def pair(
    portable: type[nn.Module], widths: list[int], pooling: PoolingType, **options: Any
) -> list[Any]:
    """FBGEMM's kernel and the portable one, with the same weights."""
    modules = [kernel(widths, pooling, **options) for _ in range(2)]
    tables = [module.split_embedding_weights() for module in modules]
    for weight, other in zip(*tables, strict=True):
        other.copy_(weight)
    modules[1].__class__ = portable
    return modules


def state(module: Any) -> list[Tensor]:
    """Weights and optimizer state, table by table."""
    states = [tensor for table in module.emb_module.split_optimizer_states() for tensor in table]
    return [*(w.clone() for w in module.split_embedding_weights()), *states]


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """The kernels' optimizer asks for its process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@settings(max_examples=25, deadline=None)
@given(
    widths=st.one_of(
        st.lists(st.sampled_from([4, 8, 12, 16]), min_size=1, max_size=4),
        st.integers(1, 4).map(lambda num_tables: [8] * num_tables),
    ),
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
    modules = pair(PortableEmbeddingBag, widths, pooling, weighted=weighted, shared=shared)
    names = modules[0].config.feature_names()
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


@settings(max_examples=40, deadline=None)
@given(
    num_tables=st.integers(1, 4),
    width=st.sampled_from([4, 12, 16]),
    optimizer=st.sampled_from(OPTIMIZERS),
    shared=st.booleans(),
    weighted=st.booleans(),
    longest=st.integers(0, 5),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    seed=st.integers(0, 2**16),
)
def test_sequences(
    num_tables: int,
    width: int,
    optimizer: EmbOptimType,
    shared: bool,
    weighted: bool,
    longest: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    modules = pair(
        PortableEmbedding,
        [width] * num_tables,
        PoolingType.NONE,
        weighted=False,
        shared=shared,
        optimizer=optimizer,
    )
    names = modules[0].config.feature_names()
    batches = []
    for _ in range(3):
        # Some features have no id at all.
        lengths = torch.randint(0, longest + 1, (len(names), 3)) * torch.randint(
            0, 2, (len(names), 1)
        )
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
def test_an_id_out_of_its_table_is_not_one_of_the_next_table(pooling: PoolingType) -> None:
    """FBGEMM warns, and takes the first row."""
    portable = PortableEmbedding if pooling == PoolingType.NONE else PortableEmbeddingBag
    modules = pair(portable, [4, 4], pooling, weighted=False, shared=False)
    strides = None if pooling == PoolingType.NONE else [[1], [2]]
    outputs = [
        module(
            KeyedJaggedTensor(
                ["f0", "f1"],
                torch.tensor([1, ROWS + 2, 3]),
                lengths=torch.tensor([2, 1] if strides is None else [2, 1, 0]),
                stride_per_key_per_rank=strides,
            )
        )
        for module in modules
    ]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("pooling", [PoolingType.NONE, PoolingType.SUM])
@pytest.mark.parametrize(
    ("mode", "wrong"),
    [
        (BoundsCheckMode.WARNING, -1),
        (BoundsCheckMode.IGNORE, -1),
        (BoundsCheckMode.FATAL, -1),
        (BoundsCheckMode.NONE, -1),
        (BoundsCheckMode.NONE, -2),
        (BoundsCheckMode.NONE, ROWS),
    ],
)
def test_an_id_that_fbgemm_leaves_out_of_its_table_is_refused(
    mode: BoundsCheckMode, wrong: int, pooling: PoolingType
) -> None:
    """FBGEMM's kernels raise, and a row of the table before or behind it is none of this one."""
    portable = PortableEmbedding if pooling == PoolingType.NONE else PortableEmbeddingBag
    stock, mine = pair(portable, [4, 4, 4], pooling, weighted=False, shared=False)
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
        with pytest.raises(RuntimeError, match=f"out of bounds: {wrong}"):
            stock(features)
        with pytest.raises(
            DataError, match=rf"table t1: id {wrong} of feature f1 was looked up, .* rows 0 to 6"
        ):
            mine(features)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_variable_batches_of_replicated_tables(pooling: PoolingType) -> None:
    module = kernel([4, 12], pooling, weighted=False, shared=True, dense=True)
    module.__class__ = PortableDenseEmbeddingBag
    first, second = module.split_embedding_weights()
    features = KeyedJaggedTensor(
        keys=["f0", "g", "f1"],
        values=torch.tensor([6, 0, 3, 1, 5]),
        lengths=torch.tensor([2, 0, 1, 2]),
        stride_per_key_per_rank=[[1], [2], [1]],
    )
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
    module = kernel([4, 4], PoolingType.NONE, weighted=False, shared=False, dense=True)
    module.__class__ = PortableDenseEmbedding
    inside = KeyedJaggedTensor(["f0", "f1"], torch.tensor([6, 0]), lengths=torch.tensor([1, 1]))
    tables = module.split_embedding_weights()
    torch.testing.assert_close(module(inside), torch.stack([tables[0][6], tables[1][0]]))
    for wrong in (-1, ROWS):
        ids = torch.tensor([wrong, 0] if wrong > 0 else [0, wrong])
        features = KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([1, 1]))
        with pytest.raises(DataError, match=rf"table t[01]: id {wrong} of feature f[01] "):
            module(features)


def test_state_dicts_are_unchanged() -> None:
    stock, portable = pair(
        PortableEmbedding, [4, 4], PoolingType.NONE, weighted=False, shared=False
    )
    features = KeyedJaggedTensor(["f0", "f1"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    portable(features).sum().backward()
    assert portable.state_dict().keys() == stock.state_dict().keys()
    assert [n for n, _ in portable.named_parameters()] == [n for n, _ in stock.named_parameters()]
    kernels = portable.emb_module, stock.emb_module
    assert kernels[0].state_dict().keys() == kernels[1].state_dict().keys()
    assert kernels[0].pooling_mode == kernels[1].pooling_mode


def test_what_is_looked_up_as_one_table() -> None:
    equal, mixed, sequences = modules = [
        kernel(widths, pooling, weighted=False, shared=True)
        for widths, pooling in (
            ([4, 4], PoolingType.MEAN),
            ([4, 8], PoolingType.SUM),
            ([8, 8], PoolingType.NONE),
        )
    ]
    assert fits_one_table(equal.emb_module)
    assert not fits_one_table(mixed.emb_module)
    assert fits_one_table(sequences.emb_module)
    use_portable_lookups(modules)
    assert [type(m) for m in modules] == [PortableEmbeddingBag] * 2 + [PortableEmbedding]


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
