"""Kernels of plugins in TorchRec's lookups: which tables they look up, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.asked_shards import tell_when_asked
from recd_plugins.distributed.torchrec_internals import require_attributes
from recd_plugins.errors import SetupError
from recd_plugins.interfaces.lookup_kernels import LookupKernels

_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
_WITHOUT_CACHE = {
    EmbeddingComputeKernel.DENSE,
    EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM,
}


class RowKernel:
    """A kernel of a plugin's that keeps rows in a place of its own. Mixed into TorchRec's."""

    # Of TorchRec's base classes; flush writes rows to the tables.
    config: GroupedEmbeddingConfig
    flush: Callable[[], None]

    def load(self) -> None:
        """Follow the parameters, which a state dict was just loaded into."""

    def close(self) -> None:
        """Give everything up, after all training and saving. A second call does nothing."""


def row_kernels(module: nn.Module) -> Iterator[RowKernel]:
    """The row kernels of this rank, in a sharded module or in a model with sharded modules."""
    for part in module.modules():
        # A private list (torchrec 1.6 to 1.9), which modules() does not go through.
        for lookup in getattr(part, "_lookups", ()):
            for kernel in lookup.modules():
                if isinstance(kernel, RowKernel):
                    yield kernel


def flush_kernels(module: nn.Module) -> None:
    """Write the rows of this rank's row kernels to their tables; they are read again before use."""
    for kernel in row_kernels(module):
        kernel.flush()


@contextmanager
def tables_of_row_kernels_stay(module: nn.Module, tables: nn.ModuleDict) -> Iterator[None]:
    """While it is open, parameters of tables that have row kernels are none of the module's.

    Moving a model to a device (DistributedModelParallel does) would copy those tables there as a
    whole, and state dicts would load into the copy.

    Args:
        module: sharded.
        tables: its modules of tables, by name.
    """
    names = {t.name for kernel in row_kernels(module) for t in kernel.config.embedding_tables}
    held = [tables[name]._parameters for name in names if name in tables]
    weights = [parameters.pop("weight") for parameters in held]
    try:
        yield
    finally:
        for parameters, weight in zip(held, weights, strict=True):
            parameters["weight"] = weight


def close_kernels(module: nn.Module) -> None:
    """Close the row kernels of this rank. Without any it does nothing.

    Raises:
        RecdError: rows could not be written.
    """
    for kernel in row_kernels(module):
        kernel.close()


def follow_state_dicts(module: nn.Module) -> None:
    """Have the row kernels of a sharded module follow the state dicts that it loads and gives.

    Rows are written to the tables when somebody asks for tensors of one, taken before or after.
    """
    following = tuple(row_kernels(module))
    of_table: dict[str, list[RowKernel]] = {}
    for kernel in following:
        for table in kernel.config.embedding_tables:
            of_table.setdefault(table.name, []).append(kernel)

    def flush(_: nn.Module, state: Mapping[str, Any], *__: Any) -> None:
        for table, kernels in of_table.items():
            if any(name.endswith(f".{table}.weight") for name in state):
                _flush(kernels)

    def load(*_: Any) -> None:
        for kernel in following:
            kernel.load()

    if following:
        module.register_load_state_dict_pre_hook(flush)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(load)  # type: ignore[no-untyped-call]
        tell_when_asked(
            module, {table: partial(_flush, kernels) for table, kernels in of_table.items()}
        )


def _flush(kernels: Iterable[RowKernel]) -> None:
    for kernel in kernels:
        kernel.flush()


def prefetches(model: nn.Module) -> bool:
    """Whether a table wants its rows fetched before the batch that needs them is computed.

    Those are tables whose ``LookupKernels`` say so, and those that FBGEMM caches
    (``fused_uvm_caching`` with ``prefetch_pipeline``, of ``CacheParams`` in the plan or else of the
    sharder's ``fused_params``). All ranks say the same, those without a row of such a table too:
    their pipelines have to send in one order.

    Args:
        model: sharded.
    """
    return any(
        plan_prefetches(
            getattr(module, "module_sharding_plan", {}),
            getattr(module, "lookup_kernels", ()),
            getattr(module, "fused_params", None),
        )
        for module in model.modules()
    )


def plan_prefetches(
    plan: Mapping[str, ParameterSharding],
    kernels: Sequence[LookupKernels],
    fused_params: Mapping[str, Any] | None = None,
) -> bool:
    """The same of one module, by its plan, by who makes its kernels, and by its sharder's."""
    otherwise = bool((fused_params or {}).get("prefetch_pipeline"))
    return any(
        _prefetches(table, sharding, kernels, otherwise=otherwise)
        for table, sharding in plan.items()
    )


def _prefetches(
    table: str,
    sharding: ParameterSharding,
    kernels: Sequence[LookupKernels],
    *,
    otherwise: bool,
) -> bool:
    for each in kernels:
        if table in each.tables:
            return each.prefetches(table)
    if sharding.compute_kernel != _CACHING:
        return False
    planned = sharding.cache_params and sharding.cache_params.prefetch_pipeline
    return otherwise if planned is None else bool(planned)


def offered_kernels(
    kernels: Sequence[LookupKernels], sharding_type: str, offered: list[str]
) -> list[str]:
    """Compute kernels for a sharding type: TorchRec's, and those of ``kernels``."""
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return offered
    return list(
        dict.fromkeys([*offered, *(each.compute_kernel for each in kernels if each.tables)])
    )


def check_kernels(
    kernels: Sequence[LookupKernels],
    params: Mapping[str, ParameterSharding],
    device: torch.device | None,
) -> None:
    """Refuse a plan that would leave out a table's kernel, or ask for one that is not there.

    Args:
        kernels: of all tables, those of other modules too.
        params: how each table of one module is sharded.
        device: of the module; TorchRec's own cached kernel needs CUDA.

    Raises:
        SetupError: names the table and what to change.
    """
    on_cuda = device is not None and device.type == "cuda"
    for table, sharding in params.items():
        wanted = next((each.compute_kernel for each in kernels if table in each.tables), None)
        if wanted not in (None, sharding.compute_kernel):
            raise SetupError(
                f"table {table} has a cache, and its plan the kernel {sharding.compute_kernel} "
                f"({sharding.sharding_type}), which has none: plan it with the kernel "
                f"{wanted}, or give it no cache"
            )
        if sharding.compute_kernel == _CACHING and wanted is None and not on_cuda:
            raise SetupError(
                f"table {table} is planned with the kernel {_CACHING}, which TorchRec has on CUDA "
                "only, and the sharder knows no cache of it: give it lookup kernels that have one, "
                "or plan the table with the kernel fused"
            )


@contextmanager
def lookups_with(kernels: Sequence[LookupKernels]) -> Iterator[None]:
    """While it is open, lookups that are constructed get the kernels of their tables.

    A stock kernel would allocate the whole table on the device, so that it cannot be replaced
    afterwards. TorchRec has no other place to say which kernel to make.

    Raises:
        SetupError: TorchRec has other internals than 1.6 to 1.9.
    """
    if not kernels:
        yield
        return
    # Private, torchrec 1.6 to 1.9: what makes the kernel of a group of tables.
    require_attributes(GroupedPooledEmbeddingsLookup, "_create_embedding_kernel")
    require_attributes(GroupedEmbeddingsLookup, "_create_embedding_kernel")
    stock_bags = GroupedPooledEmbeddingsLookup._create_embedding_kernel
    stock = GroupedEmbeddingsLookup._create_embedding_kernel

    def bags(
        lookup: GroupedPooledEmbeddingsLookup,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: Any,
        sharding_type: ShardingType | None,
        env: Any,
    ) -> nn.Module:
        if (own := _kernels_of(config, kernels)) is None:
            return stock_bags(lookup, config, device, pg, sharding_type, env)
        return own.bags(config, pg, device, sharding_type)

    def sequences(
        lookup: GroupedEmbeddingsLookup,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        env: Any = None,
    ) -> nn.Module:
        if (own := _kernels_of(config, kernels)) is None:
            return stock(lookup, config, pg, device, env)
        require_attributes(lookup, "_emb_modules")
        lookup.prefetch = partial(_prefetch, lookup)
        return own.sequences(config, pg, device)

    GroupedPooledEmbeddingsLookup._create_embedding_kernel = bags
    GroupedEmbeddingsLookup._create_embedding_kernel = sequences
    try:
        yield
    finally:
        GroupedPooledEmbeddingsLookup._create_embedding_kernel = stock_bags
        GroupedEmbeddingsLookup._create_embedding_kernel = stock


def _prefetch(
    lookup: GroupedEmbeddingsLookup,
    sparse_features: KeyedJaggedTensor,
    forward_stream: torch.cuda.Stream | None = None,
) -> None:
    """As TorchRec's own, which asks kernels without a cache, too, and fails so on CPU."""
    kernels = list(lookup._emb_modules)
    features = sparse_features.split([kernel.config.num_features() for kernel in kernels])
    for kernel, mine in zip(kernels, features, strict=True):
        # A group's own kernel is fused, whatever that of its tables.
        planned = {table.compute_kernel for table in kernel.config.embedding_tables}
        if not planned <= _WITHOUT_CACHE and hasattr(kernel.emb_module, "prefetch"):
            kernel.emb_module.prefetch(
                indices=mine.values(), offsets=mine.offsets(), forward_stream=forward_stream
            )


def _kernels_of(
    config: GroupedEmbeddingConfig, kernels: Sequence[LookupKernels]
) -> LookupKernels | None:
    """Who makes the kernel of a group of tables; None for TorchRec.

    Raises:
        SetupError: some have kernels of their own and some have not, or others.
    """
    tables: list[ShardedEmbeddingTable] = config.embedding_tables
    if not any(table.local_rows for table in tables):
        return None  # as row-wise tables with few rows have it on some ranks
    own = {
        table.name: next((each for each in kernels if table.name in each.tables), None)
        for table in tables
    }
    chosen = set(own.values())
    if len(chosen) == 1:
        return chosen.pop()
    cached = next(name for name, each in own.items() if each is not None)
    other = next(name for name, each in own.items() if each is not own[cached])
    if own[other] is not None:
        raise SetupError(
            f"tables {cached} and {other} have kernels of two kinds, as of caches of two plugins, "
            "and TorchRec makes one for tables of a module that are equally wide: let entries of "
            "one plugin have both, or leave one out"
        )
    raise SetupError(
        f"tables {cached}, which has a cache, and {other}, which has none, got one kernel: "
        "plan cached tables with CacheParams(prefetch_pipeline=True), by which TorchRec keeps "
        "them apart"
    )
