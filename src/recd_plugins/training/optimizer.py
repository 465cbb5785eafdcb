"""Optimizers: the sharded tables' run inside the backward pass, the others after it."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugins.registry.schema import TrainingSpec


def build_optimizer(
    dmp: DistributedModelParallel, tables: set[str], training: TrainingSpec
) -> CombinedOptimizer:
    """One optimizer over the fused ones of ``dmp``, its replicated tables and its dense layers.

    A table gets the same update rule wherever it lives: ``rowwise_adagrad`` on a data-parallel
    table is TorchRec's RowWiseAdagrad, elsewhere FBGEMM's. Dense layers get SGD or Adagrad.

    Args:
        dmp: the sharded model.
        tables: the names of its tables.
        training: the registry's ``training:`` section.
    """
    parameters = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    replicated = {n: p for n, p in parameters.items() if _table_of(n) in tables}
    dense = {n: p for n, p in parameters.items() if n not in replicated}
    dense_rate = training.dense_learning_rate or training.learning_rate
    optimizers = [dmp.fused_optimizer]
    for group, rate, rowwise in (
        (replicated, training.learning_rate, True),
        (dense, dense_rate, False),
    ):
        if group:
            optimizers.append(_keyed(group, training, rate, rowwise))
    return CombinedOptimizer(optimizers)


def _keyed(
    parameters: dict[str, Tensor], training: TrainingSpec, rate: float, rowwise: bool
) -> KeyedOptimizerWrapper:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        if training.optimizer == "sgd":
            return torch.optim.SGD(params, lr=rate)
        if rowwise:
            return RowWiseAdagrad(params, lr=rate, eps=training.eps)
        return torch.optim.Adagrad(params, lr=rate, eps=training.eps)

    return KeyedOptimizerWrapper(parameters, make)


def _table_of(parameter: str) -> str:
    """The table's name in ``...embedding_bags.<table>.weight``."""
    return parameter.removesuffix(".weight").rpartition(".")[2]
