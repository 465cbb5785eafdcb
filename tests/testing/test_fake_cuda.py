"""The fake CUDA device rejects CPU tensors, and deduplication runs on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.runtime.launch import launch
from recd_plugins.sharding.coalesced.input_dist import unique_ids
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor
from recd_plugins.testing.fake_cuda import fake_cuda


def _makers_of_tensors(rank: int, world_size: int) -> None:
    with fake_cuda() as device:
        made = [torch.tensor([0, 1], device=device), torch.arange(2, device=device)]
        made += [torch.zeros_like(made[0]).add_(made[1]), made[0].new_tensor([0, 1])]
        assert [each.device for each in made] == [device] * 4
        assert [each.tolist() for each in made] == [[0, 1]] * 4
        assert torch.tensor([0, 1]).device.type == made[0].cpu().device.type == "cpu"
    assert not torch.accelerator.is_available()


def _devices_do_not_mix(rank: int, world_size: int) -> None:
    with fake_cuda() as device:
        there, here = torch.arange(3, device=device), torch.arange(3)
        with pytest.raises(RuntimeError, match=r"aten.add.Tensor got tensors on cuda:0"):
            there + here
        with pytest.raises(RuntimeError, match=r"index_select"):
            there.index_select(0, here)
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        assert (there + torch.tensor(1)).tolist() == [1, 2, 3], "a number is of any device"
        assert there[here].tolist() == [0, 1, 2], "so are indices"
        there.copy_(here + 1)
        assert there.tolist() == [1, 2, 3]


def _summed(rank: int, world_size: int) -> list[float]:
    with fake_cuda() as device:
        ours = torch.full((2,), float(rank), device=device)
        dist.all_reduce(ours)
        theirs = torch.empty(2, device=device)
        dist.all_to_all_single(theirs, ours + rank)
        return theirs.tolist()


def test_collectives() -> None:
    assert launch(_summed, 2) == [[1.0, 2.0], [1.0, 2.0]]


def _deduplicated_batches(rank: int, world_size: int) -> None:
    ids, lengths = torch.tensor([1, 2, 1, 2, 3, 4, 4, 5, 6, 4]), torch.tensor([2, 2, 1, 2, 2, 1])
    kjt = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)
    (ikjt,) = InverseKeyedJaggedTensor.from_kjt(kjt, [["a", "b"]])
    partial = PartialInverseKeyedJaggedTensor.from_kjt(kjt)
    with fake_cuda() as device:
        for batch in (ikjt, partial):
            moved, back = batch.to(device), batch.to_kjt()
            found = moved.to_kjt()
            assert found.values().device == found.lengths().device == device
            assert found.values().tolist() == back.values().tolist()
            assert found.lengths().tolist() == back.lengths().tolist()


def _unique_ids(rank: int, world_size: int) -> None:
    ids = torch.tensor([7, 3, 7, 5, 5])
    with fake_cuda() as device:
        found = unique_ids(ids.to(device), [3, 2])
        assert found.ids.device == found.inverse.device == device
        assert (found.ids.tolist(), found.counts, found.first) == ([3, 7, 5], [2, 1], [0, 2])
        assert found.inverse.tolist() == [1, 0, 1, 2, 2]


@pytest.mark.parametrize(
    "check", [_makers_of_tensors, _devices_do_not_mix, _deduplicated_batches, _unique_ids]
)
def test_on_it(check: Callable[[int, int], None]) -> None:
    launch(check, 1)
