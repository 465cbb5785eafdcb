"""Kernels of bags that take plain batches alone: dense ones, and on CUDA those of some updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from recd_plugins.distributed.row_updates import kind_of_update
from recd_plugins.errors import SetupError
from recd_plugins.words import shortened

# As FBGEMM's kernels for CUDA (1.6 to 1.9) assert at the first batch.
_VARIABLE_ON_CUDA = {
    EmbOptimType.SGD,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
}


def why_plain_kernels(
    shardings: Mapping[str, ParameterSharding], updates: Mapping[str, str], *, on_cpu: bool
) -> str:
    """Why batches of bags have to be plain; empty where they need not be.

    Args:
        shardings: of the tables of a module, by name.
        updates: of ``plain_updates``.
        on_cpu: whether they are there, where data-parallel ones take variable batches.
    """
    replicated = ShardingType.DATA_PARALLEL.value
    dense = [
        name
        for name, sharding in shardings.items()
        if not (on_cpu and sharding.sharding_type == replicated)
        and (
            sharding.sharding_type == replicated
            or sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
        )
    ]
    if dense:
        return f"as dense kernels, those of tables {', '.join(dense)}, take no other"
    if updates:
        kinds, names = " and ".join(sorted({*updates.values()})), shortened([*updates])
        return f"as kernels of {kinds} for CUDA, those of tables {names}, take no other"
    return ""


def plain_updates(
    module: EmbeddingBagCollection | FusedEmbeddingBagCollection,
    fused_params: Mapping[str, Any] | None,
    device_type: str,
) -> dict[str, str]:
    """The tables whose kernels take no variable (deduplicated) batches, and their updates.

    Args:
        module: not sharded, with the optimizers that its parameters or it itself bring.
        fused_params: of its sharder.
        device_type: of the module.

    Returns:
        FBGEMM's name of the update by that of the table.
    """
    if device_type == "cpu":
        return {}
    found = {}
    for config in module.embedding_bag_configs():
        brought: list[tuple[Any, Mapping[str, Any]]]
        if isinstance(module, FusedEmbeddingBagCollection):
            brought = [(module.optimizer_type(), module.optimizer_kwargs())]
        else:
            # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
            weight = module.embedding_bags[config.name].weight
            classes = getattr(weight, "_optimizer_classes", [])
            brought = [*zip(classes, getattr(weight, "_optimizer_kwargs", []), strict=True)]
        with suppress(ValueError):  # which check_updates tells
            kind = kind_of_update(torch.optim.SGD, dict(fused_params or {}))
            for optimizer, arguments in brought:
                kind = kind_of_update(optimizer, arguments)
            if kind not in _VARIABLE_ON_CUDA:
                found[config.name] = kind.value
    return found


def refuse_coalesced_updates(updates: Mapping[str, str], coalesced: Collection[str]) -> None:
    """Refuse tables whose ids are to be sent once, which makes their module's batches variable.

    Args:
        updates: of the module, by ``plain_updates``.
        coalesced: tables of the module.

    Raises:
        SetupError: there are some of both; names them.
    """
    if updates and coalesced:
        raise SetupError(
            f"tables {shortened([*coalesced])} are to be coalesced, so that all tables of their "
            f"EmbeddingBagCollection get variable batches, and its tables {shortened([*updates])} "
            f"are trained by {', '.join(sorted({*updates.values()}))}, whose kernels for CUDA take "
            "none: leave coalesce out, or take SGD, row-wise Adagrad or Adam"
        )
