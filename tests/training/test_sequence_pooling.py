"""What a pooling plugin makes is looked at: when it is built, and each time it pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.data.model_input import ModelInput
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import PluginOptions, Pooling
from recd_plugins.training.sequence_pooling import SequencePooling

BATCH = ModelInput(torch.zeros(3, 0), None, torch.zeros(3), num_unique={"seq": 2})
EMBEDDINGS = {"seq": JaggedTensor(values=torch.ones(4, 8), lengths=torch.tensor([1, 3]))}


class Gives(nn.Module):
    """Pools to whatever it is told to."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, _: JaggedTensor) -> Tensor:
        return self.result


class Builds(Pooling):
    """Builds whatever it is told to."""

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


def test_the_right_shape_passes() -> None:
    assert pool(Gives(torch.ones(2, 8))).shape == (2, 1, 8)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (torch.ones(4, 8), "gave [4, 1, 8]; expected [2, 1, 8]"),
        (torch.ones(2, 4), "gave [2, 1, 4]; expected [2, 1, 8]"),
        (torch.ones(8), "gave [8, 1]; expected [2, 1, 8]"),
        ((torch.ones(2, 8), None), "TypeError: expected Tensor"),
    ],
)
def test_a_wrong_shape_names_plugin_and_feature(result: Any, found: str) -> None:
    with pytest.raises(PluginError) as caught:
        pool(Gives(result))
    assert str(caught.value).startswith("test.builds: pooling seq ")
    assert found in str(caught.value)


def test_what_is_no_module_is_refused() -> None:
    pooling = SequencePooling(["seq"], 8)
    with pytest.raises(
        PluginError, match=r"^test\.builds: build for feature seq returned None; exp"
    ):
        pooling.put("seq", Builds(lambda dim: None))
    with pytest.raises(PluginError, match=r"build for feature seq failed at .*ZeroDivisionError"):
        pooling.put("seq", Builds(lambda dim: dim / 0))


def test_a_feature_may_be_named_as_a_method_of_a_dictionary() -> None:
    pooling = SequencePooling(["items"], 8)
    pooling.put("items", Builds(lambda dim: Gives(torch.ones(2, 8))))
    batch = ModelInput(torch.zeros(3, 0), None, torch.zeros(3), num_unique={"items": 2})
    assert pooling({"items": EMBEDDINGS["seq"]}, batch).shape == (2, 1, 8)
