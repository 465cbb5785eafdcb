"""Optimizers: the sharded tables' run inside the backward pass, the others after it."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugins.registry.training_spec import TrainingSpec


def build_optimizer(dmp: DistributedModelParallel, training: TrainingSpec) -> CombinedOptimizer:
    """One optimizer over the fused ones of ``dmp``, its replicated tables and its dense layers.

    A table gets the same update rule wherever it lives: ``rowwise_adagrad`` on a data-parallel
    table is TorchRec's RowWiseAdagrad, elsewhere FBGEMM's. Dense layers get SGD or Adagrad.

    Args:
        dmp: the sharded model.
        training: the registry's ``training:`` section.
    """
    outside = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    tables = {name for name in outside if in_embedding_module(dmp, name)}
    replicated = {name: p for name, p in outside.items() if name in tables}
    dense = {name: p for name, p in outside.items() if name not in tables}
    optimizers = [dmp.fused_optimizer]
    if replicated:
        optimizers.append(_keyed(replicated, training, training.learning_rate, rowwise=True))
    if dense:
        rate = training.dense_learning_rate or training.learning_rate
        optimizers.append(_keyed(dense, training, rate, rowwise=False))
    return CombinedOptimizer(optimizers)


def in_embedding_module(dmp: DistributedModelParallel, parameter: str) -> bool:
    """Whether a sharded embedding module holds the parameter: then it is a replicated table.

    Feature processors are layers, around a module of tables that counts by itself.
    """
    return any(
        parameter.startswith(f"{name}.")
        for name, module in dmp.module.named_modules()
        if isinstance(module, ShardedEmbeddingModule)
        and not isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection)
    )


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
