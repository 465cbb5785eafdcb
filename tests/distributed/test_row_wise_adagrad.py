"""Row-wise Adagrad by our loops against FBGEMM's: outputs, weights and states, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recd_plugins.compat.row_wise_adagrad import RowWiseAdagrad, use_row_wise_adagrad

ROWS = 50


def kernel(
    widths: list[int],
    pooling: PoolingMode = PoolingMode.SUM,
    *,
    features: list[int] | None = None,
    rows: int = ROWS,
    **options: Any,
) -> Any:
    options = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-3} | options
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for width in widths],
        feature_table_map=features,
        pooling_mode=pooling,
        learning_rate=0.1,
        **options,
    )
    for weights in made.split_embedding_weights():
        weights.uniform_(-1, 1)
    return made


def pair(*args: Any, **options: Any) -> tuple[Any, Any]:
    stock = kernel(*args, **options)
    ours = copy.deepcopy(stock)
    use_row_wise_adagrad(ours)
    assert type(ours) is RowWiseAdagrad
    return stock, ours


def state(made: Any) -> list[Tensor]:
    return [made.weights_host.detach().clone(), made.momentum1_host.clone()]


def batch(num_bags: int, longest: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, longest + 1, (num_bags,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return (torch.rand(int(offsets[-1])) ** 3 * rows).long(), offsets


def assert_same_bits(stock: Any, ours: Any) -> None:
    for expected, got in zip(state(stock), state(ours), strict=True):
        assert torch.equal(got, expected)


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.sampled_from([4, 8, 12, 16, 32, 36, 64, 100, 128]), min_size=1, max_size=4),
    pooling=st.sampled_from([PoolingMode.SUM, PoolingMode.MEAN]),
    weighted=st.booleans(),
    num_bags=st.integers(0, 9),
    longest=st.integers(0, 9),
    size=st.sampled_from([1e-30, 1e-15, 1e-3, 1e10]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    seed=st.integers(0, 2**16),
)
def test_bits_are_those_of_fbgemm(
    widths: list[int],
    pooling: PoolingMode,
    weighted: bool,
    num_bags: int,
    longest: int,
    size: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    stock, ours = pair(widths, pooling)
    for _ in range(3):
        ids, offsets = batch(num_bags * len(widths), longest)
        weights = torch.randn(len(ids)) if weighted else None
        outputs = [
            each(ids.to(dtype), offsets.to(dtype), per_sample_weights=weights)
            for each in (stock, ours)
        ]
        assert torch.equal(*outputs)
        upstream = torch.randn_like(outputs[0]) * size
        for output in outputs:
            output.backward(upstream)
        assert_same_bits(stock, ours)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_shared_among_threads(threads: int) -> None:
    before = torch.get_num_threads()
    stock, ours = pair([16, 64], rows=60_000)
    ids, offsets = batch(60_000, 8, rows=60_000)
    torch.set_num_threads(threads)
    try:
        for each in (stock, ours):
            torch.manual_seed(1)
            output = each(ids, offsets)
            output.backward(torch.randn_like(output))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(stock, ours)


def test_what_is_left_to_fbgemm_still_learns() -> None:
    stock, ours = pair([8, 4], features=[0, 0, 1])  # two features share a table
    ids, offsets = batch(9, 3)
    for each in (stock, ours):
        each(ids, offsets).sum().backward()
    assert_same_bits(stock, ours)
    stock, ours = pair([8])
    weights = [torch.ones(len(ids)).requires_grad_() for _ in range(2)]
    for each, of_ids in zip((stock, ours), weights, strict=True):
        each(ids, offsets, per_sample_weights=of_ids).sum().backward()
    assert_same_bits(stock, ours)
    assert weights[0].grad is not None
    assert weights[1].grad is not None
    assert torch.equal(weights[0].grad, weights[1].grad)
    with torch.no_grad():
        assert torch.equal(ours(ids, offsets), stock(ids, offsets))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": EmbOptimType.EXACT_ADAGRAD},
        {"weights_precision": SparseType.FP16},
        {"output_dtype": SparseType.FP16},
        {"gradient_clipping": True, "max_gradient": 1.0},
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
        {"max_norm": 1.0},
    ],
    ids=lambda options: " ".join(options),
)
def test_updates_with_more_to_them_are_left_to_fbgemm(options: dict[str, Any]) -> None:
    stock = kernel([8], **options)
    use_row_wise_adagrad(stock)
    assert type(stock) is SplitTableBatchedEmbeddingBagsCodegen


@pytest.mark.parametrize("eps", [0.0, 1e-50])
@pytest.mark.parametrize("gradient", [0.0, 1e-30])
def test_what_is_divided_by_zero_is_what_fbgemm_makes_of_it(eps: float, gradient: float) -> None:
    stock, ours = pair([8], eps=eps)
    ids, offsets = torch.arange(6), torch.arange(7)
    for each in (stock, ours):
        output = each(ids, offsets)
        upstream = torch.ones_like(output)
        upstream[3] = gradient
        output.backward(upstream)
    for expected, got in zip(state(stock), state(ours), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def _set(tensor: Tensor) -> None:
    tensor.data.copy_(tensor.flip(0))
    with torch.no_grad():
        tensor.copy_(tensor.flip(0))


@pytest.mark.parametrize("changed", ["ids", "offsets", "weights of ids", "weights", "momentum"])
def test_what_changes_before_the_backward_pass_is_told(changed: str) -> None:
    for each in pair([8]):
        ids, offsets = batch(6, 3)
        weights = torch.rand(len(ids))
        output = each(ids, offsets, per_sample_weights=weights)
        _set(
            {
                "ids": ids,
                "offsets": offsets,
                "weights of ids": weights,
                "weights": each.weights_host,
                "momentum": each.momentum1_host,
            }[changed]
        )
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_graph_is_gone_after_its_backward_pass() -> None:
    for each in pair([8]):
        output = each(*batch(6, 3)).sum()
        output.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            output.backward()


def _any_layout(each: Any, ids: Tensor, offsets: Tensor) -> None:
    each(ids, offsets).sum().backward()  # an expanded scalar
    (each(ids, offsets).t().contiguous() ** 2).sum().backward()


def _another_rate(each: Any, ids: Tensor, offsets: Tensor) -> None:
    output = each(ids, offsets)
    each.set_learning_rate(0.5)
    output.sum().backward()
    each(ids, offsets).sum().backward()


def _ids_outside(each: Any, _ids: Tensor, _offsets: Tensor) -> None:
    ids, offsets = torch.tensor([3, ROWS + 5, 4]), torch.tensor([0, 2, 3])
    each(ids.repeat(2), torch.cat([offsets, offsets[1:] + 3])).sum().backward()
    each(ids.int().repeat(2), torch.cat([offsets, offsets[1:] + 3]).int()).sum().backward()


def _output_in_place(each: Any, ids: Tensor, offsets: Tensor) -> None:
    output = each(ids, offsets)
    output.mul_(2)
    output[:, :2] = 0
    output.sum().backward()


def _by_position(each: Any, ids: Tensor, offsets: Tensor) -> None:
    each(ids, offsets, None, torch.ones(2)).sum().backward()


def _other_weights(each: Any, ids: Tensor, offsets: Tensor) -> None:
    output = each(ids, offsets)
    each.weights_host.data = each.weights_host.detach().cos()
    output.sum().backward()


@pytest.mark.parametrize(
    "step",
    [_any_layout, _another_rate, _ids_outside, _output_in_place, _by_position, _other_weights],
)
def test_whatever_a_trainer_does_the_bits_are_those_of_fbgemm(step: Any) -> None:
    stock, ours = pair([8, 4])
    ids, offsets = batch(6, 3)
    for each in (stock, ours):
        step(each, ids.clone(), offsets)
    assert_same_bits(stock, ours)
