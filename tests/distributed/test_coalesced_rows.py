"""Rows and bags from rows of unique ids: compiled and by torch, against F.embedding_bag."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.summed_types import SummedTypes

from recd_plugins.sharding.coalesced import outputs
from recd_plugins.sharding.coalesced.input_dist import Coalesced, by_sorting, unique_ids
from recd_plugins.sharding.coalesced.outputs import BagColumns, BagLayout, expand


@pytest.mark.parametrize("first", [0, 3])
def test_expand_and_its_gradient(first: int) -> None:
    sources = [torch.randn(5, 3, requires_grad=True), torch.randn(2, 4, requires_grad=True)]
    indices = [torch.tensor([4, 0, 0, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([0])]
    indices += [torch.tensor([1, 1])]
    of = [0, 1, 0, 1]
    outputs = expand(sources, of, [each + first for each in indices], [first] * len(of))
    for output, n, index in zip(outputs, of, indices, strict=True):
        assert torch.equal(output, sources[n][index])
    (outputs[0].sin().sum() + 2 * outputs[2].sum()).backward()
    rows = sources[0].detach()
    expected = torch.zeros(5, 3).index_add_(0, indices[0], rows[indices[0]].cos())
    expected[0] += 2
    torch.testing.assert_close(sources[0].grad, expected)
    assert sources[1].grad is None


def test_expand_without_a_gradient() -> None:
    rows = torch.randn(2, 3, requires_grad=True)
    one = torch.tensor([1])
    used, unused = expand([rows, rows.detach()], [0, 1], [one, one], [0, 0])
    assert used.requires_grad
    assert not unused.requires_grad
    assert expand([], [], [], []) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_expand_sums_gradients_of_half_precision_in_float32(dtype: torch.dtype) -> None:
    half, whole = torch.ones(2, 3, dtype=dtype).requires_grad_(), torch.rand(2, 3)
    often = torch.zeros(2048, dtype=torch.int64)
    *outputs, other = expand([half, whole], [0, 0, 1], [often, often, often], [0, 0, 0])
    assert [each.dtype for each in (*outputs, other)] == [dtype, dtype, torch.float32]
    with SummedTypes() as summed:
        torch.cat(outputs).sum().backward()
    assert summed.types <= {torch.float32}
    assert half.grad.tolist() == [[4096] * 3, [0] * 3]


@dataclass(frozen=True)
class _Feature:
    name: str
    source: int
    dim: int
    rows: int  # received rows; 0 if another feature of the group carries them
    carrier: int
    mean: bool = False


#: Columns of two sources; "plain" and "row_wise" are of tables without coalescing.
FEATURES = (
    _Feature("a", 0, 4, 5, 0),
    _Feature("b", 0, 4, 0, 0),
    _Feature("c", 0, 2, 7, 2),
    _Feature("c", 0, 4, 7, 3),
    _Feature("plain", 0, 4, 3, 4),
    _Feature("d", 1, 4, 6, 5, mean=True),
    _Feature("row_wise", 1, 4, 3, 6, mean=True),
)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("features", [FEATURES, FEATURES[:2], FEATURES[4:5]], ids=len)
def test_bags_by_compiled_loops_are_those_of_torch(
    features: tuple[_Feature, ...], variable: bool, weighted: bool
) -> None:
    torch.manual_seed(0)
    first, num_rows = features[0].carrier, [each.rows for each in features]
    ends = list(accumulate(f.dim for f in features))  # the last feature has the first columns
    layout = BagLayout.__new__(BagLayout)
    layout.dims = [each.dim for each in features]
    layout.columns = [
        BagColumns(f.name, f.dim, ends[-1] - ends[n], f.carrier - first, f.mean)
        for n, f in enumerate(features)
    ]
    sizes = [sum(f.rows * f.dim for f in features if f.source == n) for n in (0, 1)]
    lengths = {each.name: torch.tensor([2, 0, 3], dtype=torch.int32) for each in features}
    rows = {f.name: features[f.carrier - first].rows for f in features}
    own = [name for name in rows if name not in ("plain", "row_wise")]
    batch = Coalesced(
        inverse={name: torch.randint(rows[name], (5,)) for name in own},
        lengths=lengths,
        ids={},
        weights={name: torch.rand(5) for name in own} if weighted else {},
        inverse_indices={n: torch.tensor([2, 0, 0, 1]) for n in rows} if variable else {},
        num_rows=4 if variable else 3,
        first=dict.fromkeys(own, 0),
    )
    sources = [torch.randn(size) for size in sizes if size]
    found = []
    for on_cpu in (True, False):
        mine = [source.clone().requires_grad_() for source in sources]
        with patch.object(outputs, "_is_on_cpu", return_value=on_cpu):
            pooled = layout.pool(mine, batch, num_rows)
        pooled.mul(torch.arange(float(pooled.numel())).view_as(pooled)).sum().backward()
        found.append([pooled, *(source.grad for source in mine)])
    for compiled, by_torch in zip(*found, strict=True):
        torch.testing.assert_close(compiled, by_torch)


SEGMENTS = st.lists(
    st.lists(st.one_of(st.integers(-3, 6), st.integers(-(2**48), 2**48)), max_size=12),
    min_size=1,
    max_size=4,
)


def check(segments: list[list[int]], dtype: torch.dtype, device: str = "cpu") -> None:
    ids = torch.tensor([each for segment in segments for each in segment], dtype=dtype).to(device)
    sizes = list(map(len, segments))
    for found in (unique_ids(ids, sizes), by_sorting(ids, sizes)):
        assert found.ids.dtype == dtype
        assert found.inverse.dtype == torch.int64
        unique = torch.split(found.ids, found.counts)
        inverse = torch.split(found.inverse, sizes)
        for own, distinct, at, first in zip(segments, unique, inverse, found.first, strict=True):
            assert sorted(distinct.tolist()) == sorted(set(own))
            assert distinct[at - first].tolist() == own


@given(SEGMENTS)
@settings(max_examples=60)
def test_ids_come_back(segments: list[list[int]]) -> None:
    check(segments, torch.int64)


def test_ids_of_32_bits() -> None:
    check([[7, -1, 7, 2**31 - 1], [], [7]], torch.int32)


def test_by_hash_ids_are_in_the_order_in_which_they_occur() -> None:
    assert unique_ids(torch.tensor([5, 1, 5, 9, 1, 2]), [6]).ids.tolist() == [5, 1, 9, 2]


def test_ids_in_steps_do_not_crowd() -> None:
    ids = torch.arange(4096) << 32
    found = unique_ids(ids, [4096])
    assert found.counts == [4096]
    assert torch.equal(found.ids[found.inverse], ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ids_come_back_on_gpus() -> None:
    check([[3, 1, 3], [], [1, 1, -(2**40)]], torch.int64, "cuda")
