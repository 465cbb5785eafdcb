"""Ids of several modules come in one all-to-all as they come in many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_sharding import (
    FusedKJTListSplitsAwaitable,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.overlap import JoinedIds
from recd_plugins.testing.gloo import run_on_ranks

# Lengths, ids and sizes of ``plain``; of ``weighted``, weights too, which stay apart with theirs.
_MODULES = {"plain": 2, "variable": 3, "weighted": 3}


def _ids(rank: int, kind: str, world_size: int) -> KeyedJaggedTensor:
    """Two features for the first rank, one for each other, of rows that differ in number."""
    generator = torch.Generator().manual_seed(10 * rank + len(kind))
    keys = [f"{kind}{number}" for number in range(world_size + 1)]
    rows = [rank + 1] * len(keys)
    if kind == "variable":
        rows = [(rank + number) % 3 for number in range(len(keys))]
    lengths = torch.randint(4, (sum(rows),), generator=generator, dtype=torch.int32)
    values = torch.randint(1 << 40, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(
        keys,
        values,
        lengths=lengths,
        weights=torch.rand(len(values), generator=generator) if kind == "weighted" else None,
        stride_per_key_per_rank=[[count] for count in rows] if kind == "variable" else None,
    )


def arrived(
    rank: int, world_size: int, kinds: list[str], joined: bool
) -> tuple[list[dict[str, Tensor]], int, int]:
    """What comes to this rank, and the collectives and bytes that it took."""
    group = dist.group.WORLD
    splits = [2] + [1] * (world_size - 1)
    context: Any = SimpleNamespace()
    requests: list[Any] = [
        KJTListSplitsAwaitable(
            [KJTAllToAllForward(group, splits)(_ids(rank, kind, world_size))], context
        )
        for kind in kinds
    ]
    with CollectiveBytes() as counter:
        sizes: Any = FusedKJTListSplitsAwaitable(requests, [context] * len(kinds), group)
        coming = (JoinedIds(sizes) if joined else sizes).wait()
        found = [each for request in coming for each in request.wait()]
    tensors = [
        {"values": kjt.values(), "lengths": kjt.lengths()}
        | ({"weights": kjt.weights()} if kjt.weights_or_none() is not None else {})
        for kjt in found
    ]
    assert [each.keys() for each in found] == [
        [f"{kind}{0 if rank == 0 else rank + 1}", *([f"{kind}1"] if rank == 0 else [])]
        for kind in kinds
    ]
    return tensors, sum(counter.calls.values()), counter.total


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "kinds", [["plain"], ["plain", "variable"], ["variable", "weighted", "plain"], ["weighted"]]
)
def test_they_are_the_same_in_fewer_collectives(world_size: int, kinds: list[str]) -> None:
    apart = run_on_ranks(arrived, world_size, kinds, False)
    together = run_on_ranks(arrived, world_size, kinds, True)
    of_sizes = 1
    alone = _MODULES["weighted"] if "weighted" in kinds else 0
    for (ids, calls, sent), (joined_ids, joined_calls, joined_sent) in zip(
        apart, together, strict=True
    ):
        assert calls == of_sizes + sum(map(_MODULES.__getitem__, kinds))
        assert joined_calls == of_sizes + alone + (set(kinds) != {"weighted"})
        assert joined_sent == sent
        for module, joined_module in zip(ids, joined_ids, strict=True):
            assert module.keys() == joined_module.keys()
            for name, values in module.items():
                assert values.dtype == joined_module[name].dtype
                assert torch.equal(values, joined_module[name]), name


def test_one_rank_sends_nothing() -> None:
    (apart,), (together,) = (
        run_on_ranks(arrived, 1, ["plain"], joined) for joined in (False, True)
    )
    assert together[1:] == apart[1:]
    assert together[2] == 0
    assert torch.equal(together[0][0]["values"], apart[0][0]["values"])
