"""What of the constraints a table's sharder can do: the rest is refused or left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder

from recd_plugins.distributed.wire import int8_of
from recd_plugins.errors import SetupError
from recd_plugins.model_tables import sharded_modules

_CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING.value


def feasible(
    module: nn.Module,
    sharders: Iterable[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints],
    device_type: str,
) -> dict[str, ParameterConstraints]:
    """The constraints without sharding types that have none of the kernels asked for.

    TorchRec tries every type, and warns of each that has no kernel: data-parallel tables, say, have
    no fused one, so it would warn of every table with a cache. And it tries every kernel of a
    sharder for all of its tables: the cached one, on CPU, is of those alone that ask for it.

    Raises:
        SetupError: a table is left without a sharding type or without a kernel; says which.
    """
    narrowed = dict(constraints)
    for child, sharder in sharded_modules(module, sharders):
        offered = {
            str(kind): sharder.compute_kernels(kind, device_type)
            for kind in sharder.sharding_types(device_type)
        }
        who = type(sharder).__name__
        if int8_of(getattr(sharder, "qcomm_codecs_registry", None)) is not None:
            who += " with training.wire int8"
        for name in sharder.shardable_parameters(child):
            wanted = constraints.get(name, ParameterConstraints())
            kinds = _kinds(name, wanted, offered, who, device_type)
            others = dict.fromkeys(kernel for each in offered.values() for kernel in each)
            if wanted.compute_kernels is None and device_type == "cpu" and _CACHED in others:
                del others[_CACHED]
                narrowed[name] = replace(wanted, compute_kernels=list(others))
            elif wanted.compute_kernels:
                narrowed[name] = replace(wanted, sharding_types=kinds)
    return narrowed


def _kinds(
    table: str,
    wanted: ParameterConstraints,
    offered: Mapping[str, list[str]],
    sharder: str,
    device_type: str,
) -> list[str]:
    kinds = [kind for kind in offered if kind in (wanted.sharding_types or offered)]
    if not kinds:
        raise SetupError(
            f"table {table} cannot be sharded {', '.join(wanted.sharding_types or [])} on "
            f"{device_type}: {sharder} offers {', '.join(offered)}; name another sharding for it, "
            "or leave it to the planner"
        )
    if not wanted.compute_kernels:
        return kinds
    with_kernel = [kind for kind in kinds if set(offered[kind]) & set(wanted.compute_kernels)]
    if not with_kernel:
        known = dict.fromkeys(kernel for kind in kinds for kernel in offered[kind])
        raise SetupError(
            f"table {table} cannot have the compute kernel "
            f"{', '.join(wanted.compute_kernels)} on {device_type}: {sharder} offers "
            f"{', '.join(known)} for {', '.join(kinds)}; name another cache or sharding for it"
        )
    return with_kernel
