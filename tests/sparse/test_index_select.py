"""Jagged index select against rows that are taken one by one, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.sparse.index_select import jagged_index_select

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# Ids; embeddings that index positions are quicker for; embeddings that FBGEMM is quicker for.
SHAPES: list[tuple[int, ...]] = [(), (3,), (128,), (2, 64)]


def one_by_one(values: Tensor, lengths: list[int], rows: list[int]) -> Tensor:
    parts = values.split(lengths)
    return torch.cat([values[:0], *(parts[row] for row in rows)])


@st.composite
def lengths_and_rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    return lengths, draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(lengths_and_rows())
@settings(max_examples=40)
def test_values_weights_and_their_gradients(
    device: str, shape: tuple[int, ...], case: tuple[list[int], list[int]]
) -> None:
    lengths, rows = case
    random = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths), *shape, generator=random).to(device).requires_grad_()
    weights = torch.randn(sum(lengths), generator=random).to(device).requires_grad_()
    jagged = JaggedTensor(values, weights, torch.tensor(lengths, device=device))
    selected = jagged_index_select(jagged, torch.tensor(rows, dtype=torch.long, device=device))
    expected = [one_by_one(tensor, lengths, rows) for tensor in (values, weights)]
    got = [selected.values(), selected.weights()]
    assert selected.lengths().tolist() == [lengths[row] for row in rows]
    upstream = [torch.randn_like(tensor) for tensor in expected]
    for tensor, want in zip(got, expected, strict=True):
        assert torch.equal(tensor, want)
    gradients = [
        torch.autograd.grad(outputs, [values, weights], upstream) for outputs in (got, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.int64, torch.float64, torch.float16, torch.bfloat16, torch.bool],
    ids=str,
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    lengths, rows = [2, 0, 3], [2, 1, 2, 0]
    values = torch.arange(5 * torch.Size(shape).numel()).reshape(5, *shape).to(device, dtype)
    jagged = JaggedTensor(values, lengths=torch.tensor(lengths, dtype=index_dtype, device=device))
    selected = jagged_index_select(jagged, torch.tensor(rows, dtype=index_dtype, device=device))
    assert torch.equal(selected.values(), one_by_one(values, lengths, rows))
    assert selected.lengths().dtype == index_dtype
    assert selected.weights_or_none() is None


def test_memory_follows_the_values_that_are_taken_and_not_the_longest_row() -> None:
    lengths = torch.tensor([1000, *[1] * 99])
    values = torch.randn(int(lengths.sum()), 128, requires_grad=True)
    rows = torch.arange(1, 100).repeat(5)
    with torch.profiler.profile(profile_memory=True) as profile:
        jagged_index_select(JaggedTensor(values, lengths=lengths), rows).values().sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < 2 * values.nbytes  # padded, the rows would take 495 times 1000 values
