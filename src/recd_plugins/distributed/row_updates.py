"""Updates of rows that FBGEMM has kernels of, by the names of TorchRec."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from recd_plugins.errors import SetupError
from recd_plugins.words import shortened

logger = logging.getLogger(__name__)

_ARGUMENTS = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters

# As FBGEMM (1.6 to 1.9) asserts when a kernel is made on CPU.
_ON_CPU = {
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
}
# Arguments that FBGEMM (1.6 to 1.9) takes of every kind, and heeds of these alone, on CUDA alone.
_MOMENTS = {
    EmbOptimType.ADAM,
    EmbOptimType.LAMB,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.PARTIAL_ROWWISE_LAMB,
}
_HEEDED_BY = {
    "weight_decay": {EmbOptimType.EXACT_ROWWISE_ADAGRAD, *_MOMENTS},
    "max_norm": {EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "momentum": set[EmbOptimType](),
}
# As its get_optimizer_state has them (1.6 to 1.9), which TorchRec calls of every kernel.
_WITH_STATE = {
    EmbOptimType.SGD,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    *_MOMENTS,
}
# Those of FBGEMM's tables. On CPU a part has kernels of its own for the last one.
_FUSED = {
    "cpu": {EmbeddingComputeKernel.FUSED.value},
    "cuda": {
        EmbeddingComputeKernel.FUSED.value,
        EmbeddingComputeKernel.FUSED_UVM.value,
        EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
    },
}

#: Those that update each number by its own gradients; others have sums or norms of a row.
ELEMENTWISE = {
    EmbOptimType.SGD,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.ADAM,
}


def kind_of_update(
    optimizer: type[torch.optim.Optimizer], arguments: Mapping[str, Any]
) -> EmbOptimType:
    """FBGEMM's name of the update that a parameter brings.

    Args:
        optimizer: as ``apply_optimizer_in_backward`` takes it.
        arguments: likewise; an ``optimizer`` among them goes before the class.

    Raises:
        ValueError: FBGEMM has none; names what was given.
    """
    if (given := arguments.get("optimizer")) is not None:
        if isinstance(given, EmbOptimType):
            return given
        raise ValueError(f"the argument optimizer {given!r}, which is no EmbOptimType of FBGEMM's")
    try:
        found = optimizer_type_to_emb_opt_type(optimizer)
    except ValueError:
        found = None
    if found is None:
        raise ValueError(
            f"{optimizer.__module__}.{optimizer.__qualname__}, which FBGEMM has no kernel of; it "
            "has those of torchrec.optim, and SGD, Adagrad and Adam of torch.optim"
        )
    return found


def why_not(kind: EmbOptimType, device_type: str | None) -> str:
    """Why tables cannot be trained so, and what to do; empty where they can, or nobody knows yet.

    Args:
        kind: of the update.
        device_type: that it runs on; None where nobody knows yet.
    """
    if device_type == "cpu" and kind not in _ON_CPU:
        return (
            f"FBGEMM has {kind.value} for CUDA alone, and this table is trained on the CPU; train "
            "on a GPU, or take SGD, Adagrad or row-wise Adagrad"
        )
    if kind not in _WITH_STATE:
        return (
            f"FBGEMM shows no state of {kind.value}, which TorchRec asks its kernels for; take "
            "SGD, Adagrad, Adam or LAMB, or one of their row-wise forms"
        )
    return ""


def unknown_arguments(arguments: Iterable[str]) -> list[str]:
    """Those that no kernel of FBGEMM takes, by name."""
    return [name for name in arguments if name not in {"lr", *_ARGUMENTS}]


def unheeded_argument(
    kind: EmbOptimType, arguments: Mapping[str, Any], device_type: str | None
) -> str:
    """What is wrong with an argument that FBGEMM takes and does nothing with; empty without one."""
    for name, kinds in _HEEDED_BY.items():
        if not arguments.get(name):
            continue
        if kind not in kinds:
            return f"FBGEMM's kernels of {kind.value} do nothing with {name}: leave it out"
        if device_type == "cpu":
            return (
                f"FBGEMM's CPU kernels do nothing with {name} where they pool: leave it out, or "
                "train on a GPU"
            )
    return ""


def check_updates(
    params: Mapping[str, ParameterSharding],
    parameters: Mapping[str, nn.Parameter],
    fused_params: Mapping[str, Any] | None,
    device: torch.device | None,
) -> None:
    """Refuse updates in the backward pass that the device of a module has no kernel of.

    Args:
        params: how each table is sharded.
        parameters: of the tables, with the optimizers that they bring.
        fused_params: of the sharder.
        device: of the module.

    Raises:
        SetupError: names the table, and what to take; of arguments that FBGEMM does not take, or
            does nothing with, too.
    """
    device_type = "cpu" if device is None else device.type
    without_rate: dict[str, list[str]] = {}
    split: list[str] = []
    for table, sharding in params.items():
        if sharding.compute_kernel not in _FUSED.get(device_type, _FUSED["cpu"]):
            continue  # a dense one, and those of plugins, which say it
        # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
        classes = getattr(parameters.get(table), "_optimizer_classes", [])
        kwargs = getattr(parameters.get(table), "_optimizer_kwargs", [])
        given = dict(fused_params or {})
        try:
            kind = kind_of_update(torch.optim.SGD, given)
            for optimizer, arguments in zip(classes, kwargs, strict=True):
                kind = kind_of_update(optimizer, arguments)
                _refuse_unknown(table, optimizer, arguments)
                given |= arguments
                if other_rate(optimizer, given):
                    without_rate.setdefault(optimizer.__name__, []).append(table)
        except ValueError as error:
            raise SetupError(f"table {table} has {error}") from None
        if why := why_not(kind, device_type) or unheeded_argument(kind, given, device_type):
            raise SetupError(f"table {table}: {why}")
        shards = {
            tuple(shard.shard_sizes) for shard in getattr(sharding.sharding_spec, "shards", [])
        }
        width = max((size[1] for size in shards), default=0)
        whole = getattr(parameters.get(table), "shape", (0, width))[1]
        if width < whole and kind not in ELEMENTWISE:
            split.append(table)
    if split:
        logger.warning(
            "%s: split by columns, and each shard has sums and norms of its own part of a row, "
            "which is another update than that of whole rows: shard them by rows or as wholes, or "
            "take an optimizer that works number by number (SGD, Adagrad)",
            shortened(split),
        )
    for name, tables in without_rate.items():
        logger.warning(
            "%s: %s was given no lr, and FBGEMM's default of %g counts, not that of the class: "
            "give it one",
            shortened(tables),
            name,
            _ARGUMENTS["learning_rate"].default,
        )


def part_arguments(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters arguments of their own for the optimizers that they bring.

    TorchRec (1.6 to 1.9) writes the update of a table into them, and goes by what stands there.
    Of one dict that a trainer gives to two optimizers, tables of the second would train by the
    first.

    Args:
        parameters: of tables, before they are sharded.
    """
    for parameter in parameters:
        # Set by torch.distributed.optim._apply_optimizer_in_backward.
        if given := getattr(parameter, "_optimizer_kwargs", None):
            parameter._optimizer_kwargs = [dict(each) for each in given]  # type: ignore[attr-defined]


def check_update_of_fused(
    name: str,
    module: FusedEmbeddingBagCollection | FusedEmbeddingCollection,
    params: Mapping[str, ParameterSharding],
    device: torch.device | None,
) -> None:
    """As ``check_updates``, of a module that brings one optimizer for its tables.

    Args:
        name: of the module.
        module: not sharded.
        params: how each table is sharded.
        device: of the module.

    Raises:
        SetupError: names the module, and what to take.
    """
    device_type = "cpu" if device is None else device.type
    fused = _FUSED.get(device_type, _FUSED["cpu"])
    if all(sharding.compute_kernel not in fused for sharding in params.values()):
        return  # a dense one, whose optimizer is that of torch
    given = module.optimizer_kwargs()
    kind = kind_of_update(module.optimizer_type(), given)
    if why := why_not(kind, device_type) or unheeded_argument(kind, given, device_type):
        raise SetupError(f"{name}: {why}")


def other_rate(optimizer: type[torch.optim.Optimizer], given: Mapping[str, Any]) -> bool:
    """Whether nobody says the learning rate, and that of the class is not FBGEMM's."""
    of_class = inspect.signature(optimizer).parameters.get("lr")
    return (
        given.keys().isdisjoint({"lr", "learning_rate"})
        and of_class is not None
        and of_class.default != _ARGUMENTS["learning_rate"].default
    )


def _refuse_unknown(
    table: str, optimizer: type[torch.optim.Optimizer], arguments: Mapping[str, Any]
) -> None:
    """Refuse what FBGEMM's kernels would answer with a TypeError that names no table."""
    if unknown := unknown_arguments(arguments):
        raise SetupError(
            f"table {table}: {optimizer.__name__} was given {', '.join(unknown)}, which FBGEMM's "
            "kernels do not take: leave that out, or give the table to the dense optimizer "
            "(data-parallel)"
        )
