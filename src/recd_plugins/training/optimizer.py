"""Builds optimizers and learning rate schedules, and fixes the order of gradient sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugins.config.schema import ScheduleSpec, TrainingSpec

_TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def build_optimizer(dmp: DistributedModelParallel, training: TrainingSpec) -> CombinedOptimizer:
    """Combine FBGEMM's fused optimizers with the optimizer of dense parameters.

    All tables use the same update rule, ``training.optimizer``. For ``rowwise_adagrad``,
    data-parallel tables use TorchRec's RowWiseAdagrad, and other tables use FBGEMM's. Dense layers
    use ``training.dense_optimizer``.

    Args:
        dmp: the sharded model.
        training: section ``training`` of the run config.
    """
    outside = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    tables = {name for name in outside if in_embedding_module(dmp, name)}
    replicated = {name: p for name, p in outside.items() if name in tables}
    dense = {name: p for name, p in outside.items() if name not in tables}
    optimizers = [dmp.fused_optimizer]
    if replicated:
        rate = training.learning_rate
        optimizers.append(_keyed(replicated, training.optimizer, rate, training.eps))
    if dense:
        rate = training.dense_learning_rate or training.learning_rate
        optimizers.append(_keyed(dense, training.dense_update, rate, training.eps))
    return CombinedOptimizer(optimizers)


def in_embedding_module(dmp: DistributedModelParallel, parameter: str) -> bool:
    """Return True if a parameter is a data-parallel table in a sharded embedding module."""
    return any(
        parameter.startswith(f"{name}.")
        for name, module in dmp.module.named_modules()
        if isinstance(module, ShardedEmbeddingModule)
        and not isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection)
    )


def _keyed(
    parameters: dict[str, Tensor], update: str, rate: float, eps: float
) -> KeyedOptimizerWrapper:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        if update == "rowwise_adagrad":
            return RowWiseAdagrad(params, lr=rate, eps=eps)
        # One kernel updates all parameters, and no step count is read. CPU results stay the same.
        fused = all(each.is_cuda for each in params) or None
        if update == "adagrad":
            return torch.optim.Adagrad(params, lr=rate, eps=eps, fused=fused)
        return _TORCH[update](params, lr=rate, fused=fused)

    return KeyedOptimizerWrapper(parameters, make)


class LearningRates:
    """Applies a learning rate schedule to an optimizer.

    Args:
        optimizer: optimizer with its initial learning rates, before a checkpoint is loaded.
        schedule: the schedule; None for constant learning rates.
    """

    def __init__(self, optimizer: CombinedOptimizer, schedule: ScheduleSpec | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def factor(self, step: int) -> float:
        """Return the factor on the initial learning rates at a step, starting at 0."""
        return 1.0 if self._schedule is None else factor(self._schedule, step)

    def set(self, step: int) -> None:
        """Set the learning rates of a step; ``zero_grad`` then passes them to FBGEMM."""
        if self._schedule is None:
            return
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor(self._schedule, step)


def factor(schedule: ScheduleSpec, step: int) -> float:
    """Return the schedule's factor on the learning rate at a step, starting at 0."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.decay == "none" or schedule.steps is None:
        return 1.0
    done = min((step - schedule.warmup) / (schedule.steps - schedule.warmup), 1.0)
    left = 1 - done if schedule.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.floor + (1 - schedule.floor) * left


def summed_in_fixed_buckets(*, always_trained: bool) -> DefaultDataParallelWrapper:
    """Return a DDP wrapper for dense layers that sums gradients in the same order in every step.

    DistributedDataParallel rebuilds its buckets after the first step. The position of a gradient in
    its bucket determines the order in which three or more ranks sum it. A resumed run would
    therefore differ by rounding from an uninterrupted one.

    Args:
        always_trained: whether every dense parameter gets a gradient in every step.
    """
    if always_trained:
        return _FixedBuckets(static_graph=False, find_unused_parameters=False)
    # With find_unused_parameters, buckets are not rebuilt.
    return _ForSeveralRanks(
        static_graph=False,
        find_unused_parameters=True,
        ddp_kwargs={"skip_all_reduce_unused_params": True},
    )


class _ForSeveralRanks(DefaultDataParallelWrapper):
    """DDP wrapper that leaves out DDP on one rank, where no gradients are summed."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        if env.process_group is not None and env.process_group.size() == 1:
            dmp._dmp_wrapped_module.to(device)
        else:
            super().wrap(dmp, env, device)


class _FixedBuckets(_ForSeveralRanks):
    """DDP wrapper that runs a step with zero gradients to rebuild buckets before the first step."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        super().wrap(dmp, env, device)
        for child in dmp.children():
            if isinstance(child, DistributedDataParallel):
                _train_on_nothing(child)


def _train_on_nothing(wrapped: DistributedDataParallel) -> None:
    ignored = wrapped.parameters_to_ignore
    named = wrapped.module.named_parameters()
    parameters = [p for name, p in named if p.requires_grad and name not in ignored]
    model, wrapped.module = wrapped.module, _Nothing(parameters)
    try:
        # Pass an argument: on a GPU, DistributedDataParallel fails without any.
        wrapped(0.0).backward()
    finally:
        wrapped.module = model
    for parameter in parameters:
        parameter.grad = None


class _Nothing(nn.Module):
    """Module whose loss is zero and has zero gradients, last parameter first."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._used = [*parameters]  # a list: they are the model's

    def forward(self, nothing: float) -> Tensor:
        return torch.stack([parameter.sum() * nothing for parameter in self._used]).sum()
