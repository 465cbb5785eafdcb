"""Unique ids with inverse, by hash and by sorting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recd_plugins.sharding.coalesced.input_dist import Unique, by_sorting, unique_ids

STRETCHES = st.lists(
    st.lists(st.one_of(st.integers(-3, 6), st.integers(-(2**63), 2**63 - 1)), max_size=12),
    min_size=1,
    max_size=4,
)


def check(found: Unique, stretches: list[list[int]], dtype: torch.dtype) -> None:
    assert found.ids.dtype == dtype
    assert found.inverse.dtype == torch.int64
    unique = torch.split(found.ids, found.counts)
    inverse = torch.split(found.inverse, list(map(len, stretches)))
    for ids, distinct, places in zip(stretches, unique, inverse, strict=True):
        assert sorted(distinct.tolist()) == sorted(set(ids))
        assert distinct[places].tolist() == ids


def joined(stretches: list[list[int]], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    ids = torch.tensor([each for stretch in stretches for each in stretch], dtype=dtype)
    return ids, list(map(len, stretches))


@given(STRETCHES)
def test_ids_come_back(stretches: list[list[int]]) -> None:
    ids, sizes = joined(stretches, torch.int64)
    check(unique_ids(ids, sizes), stretches, torch.int64)
    check(by_sorting(ids, sizes), stretches, torch.int64)


def test_ids_of_32_bits() -> None:
    stretches = [[7, -1, 7, 2**31 - 1], [], [7]]
    ids, sizes = joined(stretches, torch.int32)
    check(unique_ids(ids, sizes), stretches, torch.int32)
    check(by_sorting(ids, sizes), stretches, torch.int32)


def test_by_hash_ids_are_in_the_order_in_which_they_occur() -> None:
    assert unique_ids(torch.tensor([5, 1, 5, 9, 1, 2]), [6]).ids.tolist() == [5, 1, 9, 2]


def test_ids_in_steps_do_not_crowd() -> None:
    ids = torch.arange(4096) << 32
    found = unique_ids(ids, [4096])
    assert found.counts == [4096]
    assert torch.equal(found.ids[found.inverse], ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ids_come_back_on_gpus() -> None:
    stretches = [[3, 1, 3], [], [1, 1, -(2**40)]]
    ids, sizes = joined(stretches, torch.int64)
    found = unique_ids(ids.cuda(), sizes)
    check(Unique(found.ids.cpu(), found.counts, found.inverse.cpu()), stretches, torch.int64)
