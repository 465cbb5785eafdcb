"""Kernels for CPU whose tables have no row on this rank, as row-wise tables of few rows have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from tests.distributed.kernel_cases import OPTIMIZERS, ROWS, kernel
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat.portable_kernels import use_portable_lookups
from recd_plugins.runtime.errors import DataError


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """The kernels' optimizer asks for its process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("pooling", [PoolingType.NONE, PoolingType.SUM])
def test_a_table_without_rows_here_has_none_of_any_id(pooling: PoolingType) -> None:
    module = kernel([4], pooling, weighted=False, shared=False)
    module._local_rows = [0]
    use_portable_lookups([module])
    features = KeyedJaggedTensor(["f0"], torch.tensor([3]), lengths=torch.tensor([1]))
    with pytest.raises(DataError, match=r"table t0: id 3 of feature f0 .* it has no row here"):
        module(features)


@pytest.mark.parametrize("dtype", [SparseType.FP32, SparseType.FP16])
@pytest.mark.parametrize("pooling", [PoolingType.NONE, PoolingType.SUM])
def test_a_table_without_rows_here_sends_the_type_that_other_ranks_send(
    pooling: PoolingType, dtype: SparseType
) -> None:
    options: Any = {"weighted": False, "shared": False, "output_dtype": dtype}
    here, there = (kernel([4], pooling, **options) for _ in range(2))
    here._local_rows = [0]
    use_portable_lookups([here, there])
    no_ids = KeyedJaggedTensor(["f0"], torch.tensor([]).long(), lengths=torch.tensor([0]))
    one_id = KeyedJaggedTensor(["f0"], torch.tensor([3]), lengths=torch.tensor([1]))
    nothing = here(no_ids)
    assert nothing.dtype == there(one_id).dtype == dtype.as_dtype()
    nothing.sum().backward()


def test_weights_of_tables_without_rows_here_have_a_gradient() -> None:
    """Else a rank would sum no gradient of what makes them, and the others wait for it."""
    module = kernel([4, 8], PoolingType.SUM, weighted=True, shared=False, rows=[0, 0])
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
    options: Any = {"weighted": False, "shared": False, "optimizer": optimizer}
    mine = kernel(widths, PoolingType.SUM, rows=rows, **options)
    alone = kernel([widths[at] for at in there], PoolingType.SUM, **options)
    use_portable_lookups([mine])
    for at, weight in zip(there, alone.split_embedding_weights(), strict=True):
        mine.split_embedding_weights()[at].copy_(weight)
    lengths = torch.tensor([[2, 1, 0, 3] if at in there else [0] * 4 for at in range(len(rows))])
    ids = torch.randint(0, ROWS, (int(lengths.sum()),))
    names = mine.config.feature_names()
    features = KeyedJaggedTensor(names, ids, lengths=lengths.flatten())
    only = KeyedJaggedTensor(
        [f"f{at}" for at in range(len(there))], ids, lengths=lengths[there].flatten()
    )
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
