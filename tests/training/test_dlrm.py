"""The demo model computes what its features say, in whatever order TorchRec returns them."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from recd_plugins.data.model_input import Placement
from recd_plugins.registry import ModelSpec
from recd_plugins.training.dlrm import DLRM


def test_the_order_of_a_keyed_tensor_does_not_matter() -> None:
    placement = Placement(pooled=("a", "b", "c"))
    model = DLRM(ModelSpec(embedding_dim=4), num_dense=2, placement=placement)
    dense, vectors = torch.randn(5, 2), {name: torch.randn(5, 4) for name in "abc"}
    logits = []
    for order in ("abc", "cab"):
        tensor = KeyedTensor(list(order), [4] * 3, torch.cat([vectors[k] for k in order], dim=1))
        logits.append(model.top(dense, tensor, None, None))
    assert torch.equal(*logits)
