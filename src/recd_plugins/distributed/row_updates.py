"""Updates of rows that FBGEMM has kernels of, by the names of TorchRec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from recd_plugins.errors import SetupError

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
    "weight_decay": {EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.LARS_SGD, *_MOMENTS},
    "max_norm": {EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "momentum": {EmbOptimType.LARS_SGD},
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


def why_not_on_cpu(kind: EmbOptimType) -> str:
    """Why tables on CPU cannot be trained so, and what to do; empty where they can."""
    if kind in _ON_CPU:
        return ""
    return (
        f"FBGEMM has {kind.value} for CUDA alone, and this table is trained on the CPU; train on a "
        "GPU, or take SGD, Adagrad or row-wise Adagrad"
    )


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
            return f"FBGEMM's CPU kernels do nothing with {name}: leave it out, or train on a GPU"
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
        SetupError: names the table, and what to take.
    """
    for table, sharding in params.items():
        if sharding.compute_kernel != EmbeddingComputeKernel.FUSED.value:
            continue  # a dense one, those of CUDA alone, and those of plugins, which say it
        # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
        classes = getattr(parameters.get(table), "_optimizer_classes", [])
        kwargs = getattr(parameters.get(table), "_optimizer_kwargs", [])
        try:
            kind = kind_of_update(torch.optim.SGD, fused_params or {})
            for optimizer, arguments in zip(classes, kwargs, strict=True):
                kind = kind_of_update(optimizer, arguments)
        except ValueError as error:
            raise SetupError(f"table {table} has {error}") from None
        on_cpu = device is None or device.type == "cpu"
        if on_cpu and (why := why_not_on_cpu(kind)):
            raise SetupError(f"table {table}: {why}")
