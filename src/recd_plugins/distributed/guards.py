"""Refuses what would go wrong without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.sharded_modules import refuse_inverse_indices
from recd_plugins.errors import ExactnessError


def guard(model: nn.Module) -> None:
    """Make the unsharded EmbeddingCollections of ``model`` refuse input with inverse indices.

    They ignore the indices: each row would get the sequence of another. Sharded by
    ``build_sharders`` they check it themselves, and this guard goes with the module.
    """
    for module in model.modules():
        if isinstance(module, EmbeddingCollection):
            module.register_forward_pre_hook(_check_input, with_kwargs=True)


def check_every_parameter_is_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse parameters that nothing updates.

    TorchRec's ``table_row_wise()`` defaults to the dense kernel: unlike the fused ones it has no
    optimizer in the backward pass, and without a dense optimizer its table stays as it was.

    Args:
        model: sharded by DistributedModelParallel, or not.
        optimizer: everything that updates parameters outside the backward pass.

    Raises:
        ExactnessError: names the parameters.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    outside = in_backward_optimizer_filter(model.named_parameters())
    forgotten = [
        name
        for name, parameter in outside
        if parameter.requires_grad and id(parameter) not in trained
    ]
    if forgotten:
        raise ExactnessError(
            f"no optimizer updates {', '.join(forgotten)}: give them to the dense optimizer (as "
            "in_backward_optimizer_filter(model.named_parameters()) lists them), or give the "
            'table a fused kernel (compute_kernel="fused")'
        )


def _check_input(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, KeyedJaggedTensor):
            refuse_inverse_indices(value)
