"""How the gradients of dense layers are summed over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recd_plugins.errors import PluginError


def summed_in_fixed_buckets(*, always_trained: bool) -> DefaultDataParallelWrapper:
    """A wrapper whose first step sums in the order of all others.

    TorchRec's default makes the buckets of DistributedDataParallel anew after the first step, and
    where a gradient stands in its bucket decides in which order three or more ranks sum it. A run
    that goes on from a checkpoint would differ by rounding from one that never stopped.

    Args:
        always_trained: whether each parameter gets a gradient in each step; DistributedDataParallel
            raises RuntimeError where that is not so. Else ranks tell one another in each step which
            did, which costs an all-reduce, and a walk over the graph of the step.
    """
    if always_trained:
        return _MadeAnewAtOnce(static_graph=False, find_unused_parameters=False)
    # To look for unused parameters keeps the buckets.
    return DefaultDataParallelWrapper(
        static_graph=False,
        find_unused_parameters=True,
        ddp_kwargs={"skip_all_reduce_unused_params": True},
    )


class EveryGradient:
    """A look at whether a step gave each dense parameter its gradient.

    DistributedDataParallel sums none of a bucket that one is missing from, and says so at the next
    step, if there is one.

    Args:
        dmp: wrapped by ``summed_in_fixed_buckets``; where it is not always trained, none is missed.
        makers: names of the plugins that made the parameters, for the message.
    """

    def __init__(self, dmp: DistributedModelParallel, makers: Sequence[str]) -> None:
        self._makers = makers
        self._parameters = {
            name: parameter
            for child in dmp.children()
            if isinstance(child, DistributedDataParallel) and not child.find_unused_parameters
            for name, parameter in in_backward_optimizer_filter(_trained_by(child).items())
        }

    def check(self, step: int) -> None:
        """Look at the gradients that ``step`` left; a pipeline may have dropped them all.

        Raises:
            PluginError: some are missing; names their parameters.
        """
        missing = [name for name, each in self._parameters.items() if each.grad is None]
        if missing and len(missing) < len(self._parameters):
            raise PluginError(
                f"{' and '.join(self._makers) or 'the model'}: step {step} gave no gradient to "
                f"{', '.join(missing)}, and ranks sum gradients together. Every parameter needs "
                "one in every step: leave out layers that no loss reaches, give those that a batch "
                "does not need a zero (loss + 0 * parameter.sum()), or set requires_grad to False"
            )


class _MadeAnewAtOnce(DefaultDataParallelWrapper):
    """Has buckets made anew before the first step, by one in which all gradients are zeros."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """See ``DataParallelWrapper.wrap``. A collective call."""
        super().wrap(dmp, env, device)
        for child in dmp.children():
            if isinstance(child, DistributedDataParallel):
                _train_on_nothing(child)


def _train_on_nothing(wrapped: DistributedDataParallel) -> None:
    parameters = [*_trained_by(wrapped).values()]
    model, wrapped.module = wrapped.module, _Nothing(parameters)
    try:
        # With an argument: DistributedDataParallel moves those to a GPU, and fails without any.
        wrapped(0.0).backward()
    finally:
        wrapped.module = model
    for parameter in parameters:
        parameter.grad = None


def _trained_by(wrapped: DistributedDataParallel) -> dict[str, nn.Parameter]:
    ignored = wrapped.parameters_to_ignore
    return {
        name: parameter
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


class _Nothing(nn.Module):
    """A loss to which no parameter contributes; the last one's gradient comes first.

    Args:
        parameters: one or more.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._used = [*parameters]  # a list: they are the model's

    def forward(self, nothing: float) -> Tensor:
        return torch.stack([parameter.sum() * nothing for parameter in self._used]).sum()
