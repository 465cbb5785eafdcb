"""Objects with tensors come out of shared memory as they went in."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.ipc import pack, unpack
from recd_plugins.errors import SetupError


def test_tensors_keep_type_shape_and_values():
    tensors = [
        torch.arange(7),
        torch.rand(3, 5),
        torch.rand(4, 6).t()[1:3],
        torch.tensor([True, False, True]),
        torch.zeros(0, dtype=torch.int32),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    packed = pack({"tensors": tensors, "name": "x"})
    assert packed.data.is_shared()
    result = unpack(packed)
    assert result["name"] == "x"
    for before, after in zip(tensors, result["tensors"], strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert torch.equal(after, before)
        assert after.data_ptr() % 64 == 0 or not after.numel()


def test_a_tensor_that_occurs_twice_is_sent_once():
    tensor = torch.arange(1000)
    first, second = unpack(pack((tensor, tensor)))
    assert first is second
    assert pack((tensor, tensor)).data.nbytes < 1.5 * tensor.nbytes


def test_a_kjt_with_variable_batch_comes_across():
    kjt = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([3, 1, 4, 1, 5]),
        lengths=torch.tensor([2, 1, 0, 2]),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0, 0], [0, 1, 2]])),
    )
    result = unpack(pack(kjt))
    assert result.keys() == ["a", "b"]
    assert result.stride_per_key() == [1, 3]
    assert torch.equal(result.values(), kjt.values())
    assert torch.equal(result.lengths(), kjt.lengths())
    assert torch.equal(result.inverse_indices()[1], kjt.inverse_indices()[1])


def test_too_little_shared_memory_says_what_to_do(monkeypatch):
    def full(size):
        raise RuntimeError(f"unable to allocate {size} bytes")

    # A real failure leaves torch's file behind.
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    with pytest.raises(SetupError, match="/dev/shm"):
        pack(torch.arange(3))
