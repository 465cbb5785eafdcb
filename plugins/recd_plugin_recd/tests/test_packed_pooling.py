"""CUDA's attention over packed rows, with its kernel on the CPU, against the CPU's attention."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugin_recd.pooling import (
    AttentionPooling,
    DinPooling,
    TargetAttentionPooling,
    TransformerPooling,
    din_modules,
    modules,
    packed,
    target_attention,
)
from recd_plugins.api import ModelInput, Pooling, SequencePooling, TargetPooling
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.fake_cuda import (
    HostCounts,
    efficient_attention,
    fake_cuda,
    host_counts,
)

DIM = 12
# Groups of features with the lengths of their rows.
GROUPS = {
    "ragged": [[[3, 0, 5, 1], [0, 2, 2, 9]], [[1, 0, 0, 40]]],
    "different numbers of rows": [[[3, 0, 5], [1, 1, 1]], [[2, 7, 0, 4, 4]]],
    "equal sizes": [[[3, 1], [2, 2]], [[0, 4]]],
    "one without values": [[[0, 0], [2, 5]]],
    "no values": [[[0, 0], [0, 0]], [[0, 0]]],
    "no rows": [[[], []]],
    "one feature": [[[6, 0, 2]]],
}
POOLINGS = {
    "attention": AttentionPooling(AttentionPooling.Options(heads=2)),
    "unaligned heads": AttentionPooling(AttentionPooling.Options(heads=4)),
    "pre": TransformerPooling(TransformerPooling.Options(layers=2, norm="pre", feed_forward=20)),
    "post": TransformerPooling(TransformerPooling.Options(layers=2, norm="post")),
}


@pytest.mark.parametrize("stacks", ["one stack", "several"])
@pytest.mark.parametrize("lengths", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("pooling", POOLINGS.values(), ids=POOLINGS)
def test_packed_rows_are_pooled_as_on_cpu(
    pooling: Pooling, lengths: list[list[list[int]]], stacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    groups: list[Any] = [
        ([randomized(pooling.build(DIM)) for _ in of_group], [*map(sequence, of_group)])
        for of_group in lengths
    ]
    expected = pooled_with_gradients(pooling, groups)
    if stacks == "several":
        monkeypatch.setattr(packed, "_MOST_PADDING", 3 * DIM)
    pack_on_cpu(monkeypatch)
    found = pooled_with_gradients(pooling, groups)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


STACKED = {"target": "item", "feed_forward": 8, "positions": 4, "encoder_layers": 1}


@pytest.mark.parametrize(
    "pooling",
    [
        *(DinPooling(DinPooling.Options(target="item", heads=heads)) for heads in (1, 2, 3)),
        TargetAttentionPooling(TargetAttentionPooling.Options(target="item", heads=3)),
        TargetAttentionPooling(TargetAttentionPooling.Options.model_validate(STACKED)),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [0, 0, 0, 0], [40, 0, 2, 1]])
def test_targets_attend_to_packed_rows_as_on_cpu(
    pooling: TargetPooling, shared: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    of_features = [randomized(pooling.build(DIM)) for _ in range(3)]
    sequences = [sequence(lengths), sequence(lengths[::-1]), sequence(lengths)]
    inverse = torch.tensor([2, 0, 0, 1, 3, 3, 0, 2]) if shared else None
    targets = torch.randn(8 if shared else 4, DIM, requires_grad=True)
    inputs = [targets, *(each.values() for each in sequences)]
    inputs += [each for module in of_features for each in module.parameters()]

    def pooled() -> list[Tensor]:
        vectors = pooling.pool_for(of_features, sequences, targets, inverse)
        weights = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1))
        return [vectors, *torch.autograd.grad((vectors * weights).sum(), inputs)]

    expected = pooled()
    pack_on_cpu(monkeypatch)
    torch.testing.assert_close(pooled(), expected, rtol=1e-5, atol=1e-5)


def pack_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (modules, din_modules, target_attention):
        monkeypatch.setattr(module, "can_pack", lambda sequences: True)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient_attention)


def randomized(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def sequence(lengths: list[int]) -> JaggedTensor:
    values = torch.randn(sum(lengths), DIM, requires_grad=True)
    return JaggedTensor(values, lengths=torch.tensor(lengths, dtype=torch.int32))


def pooled_with_gradients(pooling: Pooling, groups: list[Any]) -> list[Tensor]:
    pooled = pooling.pool_groups(groups)
    inputs = [each.values() for _, sequences in groups for each in sequences]
    inputs += [each for of_group, _ in groups for part in of_group for each in part.parameters()]
    generator = torch.Generator().manual_seed(1)
    total = sum((each * torch.randn(each.shape, generator=generator)).sum() for each in pooled)
    assert isinstance(total, Tensor)
    return [*pooled, *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("use", ["attention", "pre"])
def test_a_model_pools_on_cuda_as_on_cpu_without_waiting(use: str) -> None:
    launch(on_fake_cuda, 1, use)


def on_fake_cuda(_rank: int, _world_size: int, use: str) -> None:
    torch.manual_seed(0)
    pooling = SequencePooling("abcdt", DIM)
    for name in "abcdt":
        pooling.put(name, POOLINGS[use])
    for module in pooling.poolings.values():
        randomized(module)
    sizes = torch.tensor([[3, 0, 2], [0, 4, 0], [1, 1, 0], [1, 0, 5], [2, 2, 4]])
    kjt = KeyedJaggedTensor(list("abcdt"), torch.arange(25), lengths=sizes.flatten(), stride=3)
    inverse = torch.tensor([1, 0, 1, 2]), torch.tensor([1, 1, 0, 0])
    batch = ModelInput(
        torch.zeros(4, 0),
        None,
        torch.zeros(4),
        sequence_features=kjt,
        num_unique={"a": 3, "b": 3, "c": 2, "d": 3, "t": 3},
        inverse_lookup={name: inverse[name == "c"] for name in "abcdt"},
        longest={"a": 3, "b": 4, "c": 1, "d": 5, "t": 4},
    )
    embeddings = torch.randn(25, DIM)

    def pooled(device: torch.device) -> tuple[list[Tensor], HostCounts]:
        module, moved = deepcopy(pooling).to(device), batch.to(device)
        inputs = [embeddings.to(device).requires_grad_(), *module.parameters()]
        features: Any = moved.sequence_features
        values, lengths = inputs[0].split(kjt.length_per_key()), features.lengths().view(5, 3)
        rows = {
            name: JaggedTensor(each, lengths=of_rows)
            for name, each, of_rows in zip("abcdt", values, lengths.unbind(), strict=True)
        }
        with host_counts() as counts:
            vectors = module(rows, moved)
            gradients = torch.autograd.grad(vectors, inputs, torch.full_like(vectors, 0.1))
        return [vectors.cpu(), *(each.cpu() for each in gradients)], counts

    with fake_cuda() as device:
        found, counts = pooled(device)
        expected, _ = pooled(torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert counts.by_phase("sync")["all"] == 0
    launches = counts.by_phase("launch")["all"]
    assert launches <= {"attention": 45, "pre": 154}[use], f"{launches}: {counts}"
