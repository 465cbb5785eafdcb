"""Builds optimizers and learning rate schedules."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
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
