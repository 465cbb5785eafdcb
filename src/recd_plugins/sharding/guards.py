"""Rejects models that would silently train incorrectly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat.row_updates import check_deduplicated
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.model_tables import left_modules
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sharding.batch_form import accepts_deduplicated, refuse_inverse_indices


def guard(model: nn.Module) -> None:
    """Make ``model`` raise an error if it misreads deduplicated sequences.

    Unsharded EmbeddingCollections ignore inverse indices, so they refuse a batch that has them. If
    the model is called with a ModelInput (a batch of ``recd run``), its forward pass must read the
    unique rows or the inverse indices of each deduplicated sequence. Tables with gradient clipping
    refuse deduplicated sequences.
    """
    model.register_forward_hook(_check_taken, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, EmbeddingCollection) and not accepts_deduplicated(module):
            module.register_forward_pre_hook(_check_input, with_kwargs=True)


def check_every_parameter_is_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise an error if a parameter is updated by no optimizer.

    TorchRec's ``table_row_wise()`` defaults to the dense kernel, which has no optimizer in the
    backward pass. ``optimizer`` must contain all parameters that the backward pass does not update.

    Raises:
        ExactnessError: the message names the parameters.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    forgotten = [
        name
        for name, parameter in in_backward_optimizer_filter(model.named_parameters())
        if parameter.requires_grad and id(parameter) not in trained
    ]
    if forgotten:
        raise ExactnessError(
            f"no optimizer updates the parameters {', '.join(map(repr, forgotten))}. Pass them to "
            "the dense optimizer with in_backward_optimizer_filter(model.named_parameters()), or "
            "shard the table with compute_kernel='fused'."
        )


def check_sharded_as_wholes(model: nn.Module) -> None:
    """Refuse a module with an id map or feature processor if only its tables are sharded.

    DistributedModelParallel shards only the tables if it has no sharder for the module. Each rank
    would then train its own id map or weights.

    Raises:
        ExactnessError: the message names the module and its type.
    """
    for left in left_modules(get_unwrapped_module(model)):
        if any(isinstance(child, ShardedModule) for child in left.shardable.modules()):
            kind = type(left.shardable).__name__
            raise ExactnessError(
                f"module {left.path!r} is a {kind}, but only its tables are sharded, so each rank "
                "would train its own id map or weights. Pass DistributedModelParallel a sharder "
                f"for {kind}, for example from prepared.sharders()."
            )


def _check_input(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, KeyedJaggedTensor):
            refuse_inverse_indices(value)


def _check_taken(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any
) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, ModelInput):
            value.check_taken()
            check_deduplicated(model, value)
