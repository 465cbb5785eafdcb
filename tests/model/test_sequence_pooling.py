from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.summed_types import SummedTypes
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.interfaces import PluginOptions, Pooling, TargetPooling
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.model.sequence_pooling import SequencePooling
from recd_plugins.runtime.errors import RecdError

BATCH = ModelInput(torch.zeros(3, 0), None, torch.zeros(3), num_unique={"seq": 2})
EMBEDDINGS = {"seq": JaggedTensor(values=torch.ones(4, 8), lengths=torch.tensor([1, 3]))}


class Gives(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, _: JaggedTensor) -> Tensor:
        return self.result


class Builds(Pooling):
    name = "test.builds"

    def __init__(self, module: Any) -> None:
        super().__init__(PluginOptions())
        self.module = module

    def build(self, embedding_dim: int) -> nn.Module:
        return self.module(embedding_dim)


def pool(module: nn.Module) -> Tensor:
    pooling = SequencePooling(["seq"], 8)
    pooling.put("seq", Builds(lambda dim: module))
    return pooling(EMBEDDINGS, BATCH)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (torch.ones(4, 8), "[4, 8]. Return one vector per row, [num_rows, embedding_dim] ="),
        (torch.ones(8), "[8]. Return"),
        ((torch.ones(2, 8), None), "'tuple' object has no attribute"),
    ],
)
def test_a_wrong_shape_names_plugin_and_feature(result: Any, found: str) -> None:
    with pytest.raises((ValueError, AttributeError), match=re.escape(found)) as caught:
        pool(Gives(result))
    assert caught.value.__notes__[0].startswith("plugin 'test.builds' failed in pooling 'seq' (")


def test_gradients_of_vectors_in_half_precision_are_summed_in_float32() -> None:
    batch = replace(BATCH, inverse_lookup={"seq": torch.zeros(1024, dtype=torch.long)})
    vectors = torch.ones(2, 8, dtype=torch.bfloat16).requires_grad_()
    pooling = SequencePooling(["seq"], 8)
    pooling.put("seq", Builds(lambda _: Gives(vectors)))
    with torch.autocast("cpu", torch.bfloat16), SummedTypes() as summed:
        pooling(EMBEDDINGS, batch).sum().backward()
    assert summed.types == {torch.float32}
    assert vectors.grad is not None
    assert vectors.grad[0].tolist() == [1024] * 8


def test_a_feature_may_be_named_as_a_method_of_a_dictionary() -> None:
    pooling = SequencePooling(["items"], 8)
    pooling.put("items", Builds(lambda dim: Gives(torch.ones(2, 8))))
    batch = ModelInput(torch.zeros(3, 0), None, torch.zeros(3), num_unique={"items": 2})
    assert pooling({"items": EMBEDDINGS["seq"]}, batch).shape == (2, 1, 8)


class Counts(Pooling):
    name = "test.counts"

    def __init__(self) -> None:
        super().__init__(PluginOptions())
        self.groups: list[int] = []

    def build(self, embedding_dim: int) -> nn.Module:
        return nn.Identity()

    def pool(self, modules: Sequence[nn.Module], sequences: Sequence[JaggedTensor]) -> Tensor:
        self.groups.append(len(modules))
        return torch.stack([rows.to_padded_dense().sum(1) for rows in sequences], dim=1)


class AddsTarget(TargetPooling):
    name = "test.adds_target"
    target = "item"

    def build(self, embedding_dim: int) -> nn.Module:
        class Add(nn.Module):
            def forward(
                self, sequences: JaggedTensor, targets: Tensor, inverse: Tensor | None
            ) -> Tensor:
                sums = sequences.to_padded_dense().sum(1)
                return targets + (sums if inverse is None else sums[inverse])

        return Add()


INVERSE, OTHER = torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1])


def group_batch(**inverse: Tensor) -> ModelInput:
    names = "abcd"
    return ModelInput(
        torch.zeros(3, 0),
        None,
        torch.zeros(3),
        num_unique={name: 2 if name in inverse else 3 for name in names},
        inverse_lookup=inverse,
    )


def group_embeddings(batch: ModelInput) -> dict[str, JaggedTensor]:
    return {
        name: JaggedTensor(
            torch.randn(num_rows * 2, 8, generator=torch.Generator().manual_seed(ord(name))),
            lengths=torch.full((num_rows,), 2),
        )
        for name, num_rows in batch.num_unique.items()
    }


@pytest.mark.parametrize(("pool_rows", "groups"), [("unique", [2, 1, 1]), ("all", [4])])
def test_features_that_share_their_rows_are_one_group(pool_rows: Any, groups: list[int]) -> None:
    plugin = Counts()
    pooling = SequencePooling("dabc", 8, pool_rows)
    for name in "abcd":
        pooling.put(name, plugin)
    batch = group_batch(a=INVERSE, b=OTHER, c=INVERSE)
    embeddings = group_embeddings(batch)
    pooled = pooling(embeddings, batch)
    assert sorted(plugin.groups, reverse=True) == groups
    for index, name in enumerate("dabc"):
        rows = embeddings[name].to_padded_dense().sum(1)
        expected = rows[batch.inverse_lookup[name]] if name in batch.inverse_lookup else rows
        torch.testing.assert_close(pooled[:, index], expected)


def test_features_of_two_entries_are_two_groups() -> None:
    first, second = Counts(), Counts()
    pooling = SequencePooling("ab", 8)
    pooling.put("a", first)
    pooling.put("b", second)
    batch = group_batch(a=INVERSE, b=INVERSE)
    pooling(group_embeddings(batch), batch)
    assert first.groups == second.groups == [1]


@pytest.mark.parametrize("pool_rows", ["unique", "all"])
@pytest.mark.parametrize("target_is_a_sequence", [False, True])
def test_a_target_comes_from_outside_or_from_another_pooling(
    pool_rows: Any, target_is_a_sequence: bool
) -> None:
    plugin = AddsTarget(PluginOptions())
    plugin.target = "d" if target_is_a_sequence else "item"
    pooling = SequencePooling("ad", 8, pool_rows)
    pooling.put("a", plugin)
    pooling.put("d", Counts())
    assert pooling.targets == (() if target_is_a_sequence else ("item",))
    batch = group_batch(a=INVERSE, d=OTHER)
    embeddings = group_embeddings(batch)
    sums = {name: rows.to_padded_dense().sum(1) for name, rows in embeddings.items()}
    item = torch.randn(3, 8)
    pooled = pooling(embeddings, batch, {"item": item})
    target = sums["d"][OTHER] if target_is_a_sequence else item
    torch.testing.assert_close(pooled[:, 0], target + sums["a"][INVERSE])
    torch.testing.assert_close(pooled[:, 1], sums["d"][OTHER])


def test_a_missing_target_is_refused() -> None:
    pooling = SequencePooling("a", 8)
    pooling.put("a", AddsTarget(PluginOptions()))
    batch = group_batch(a=INVERSE)
    with pytest.raises(
        RecdError, match=r"test\.adds_target: the vectors of the target feature 'item'"
    ):
        pooling(group_embeddings(batch), batch)
