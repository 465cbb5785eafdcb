"""Makes TorchRec's embedding lookups use the lookup kernels of plugins, such as caches.

TorchRec has no option to choose a table's kernel class, so its kernel factory is patched while a
sharded module is constructed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.interfaces.model_tables import outermost_sharded
from recd_plugins.interfaces.tables import LookupKernels
from recd_plugins.runtime.errors import SetupError

_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
_WITHOUT_CACHE = {
    EmbeddingComputeKernel.DENSE,
    EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM,
}


class RowKernel:
    """Mixin for kernels of plugins that store rows outside of the weight tensor, like caches."""

    # A method of TorchRec's base classes; here flush writes the rows to the tables.
    config: GroupedEmbeddingConfig
    flush: Callable[[], None]

    def prefetch(self, features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Start to fetch the rows of a batch before ``forward``, which gets the same tensors.

        The prefetch stage of train pipelines calls this, in the order of the forward passes.
        ``forward_stream`` is the CUDA stream of the forward passes.
        """

    def load(self) -> None:
        """Reread the rows from the parameters. Called after a state dict was loaded."""

    def set_rows(self, table: int, rows: Tensor, weights: Tensor) -> None:
        """Overwrite rows and set their optimizer state to zero, between a step and the next lookup.

        Args:
            table: number of the table in ``config.embedding_tables``.
            rows: rows of this rank's shard, distinct int64 ``[n]`` on the CPU.
            weights: float32 ``[n, local_cols]`` on the CPU.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release files and memory. Called after training and saving. May be called twice."""


class AskedShardedTensor(ShardedTensor):
    """A ShardedTensor that calls a function before its local shards are read.

    The function updates the shards, because a trainer may save a state dict many steps after it
    called ``state_dict()``. Copies and pickles are plain ShardedTensors.
    """

    # Read by local_shards, gather, cpu, clone and pickling.
    @property
    def _local_shards(self) -> list[Shard]:
        self.__dict__["_asked_for"]()
        shards: list[Shard] = self.__dict__["_local_shards"]
        return shards

    @_local_shards.setter
    def _local_shards(self, shards: list[Shard]) -> None:
        self.__dict__["_local_shards"] = shards

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain ShardedTensor, so that checkpoints load without this package."""
        plain = self.detach()  # shares the memory
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def tell_when_asked(module: Any, asked_for: Mapping[str, Callable[[], None]]) -> None:
    """Call ``asked_for[table]`` before a table's weight or optimizer state is read."""
    states = module.fused_optimizer.state_dict()["state"]
    for name, weights in module.state_dict().items():
        function = asked_for.get(name.partition(".")[2].removesuffix(".weight"))
        for tensor in (weights, *states.get(name, {}).values()) if function else ():
            if isinstance(tensor, ShardedTensor):  # not a DTensor
                tensor.__dict__["_asked_for"] = function
                tensor.__class__ = AskedShardedTensor


def row_kernels(module: nn.Module) -> Iterator[RowKernel]:
    """Yield all kernels of class RowKernel in a sharded model on this rank."""
    for part in module.modules():
        for lookup in getattr(part, "_lookups", ()):  # modules() skips lists
            for kernel in lookup.modules():
                if isinstance(kernel, RowKernel):
                    yield kernel


def flush_kernels(module: nn.Module) -> None:
    """Write the rows that plugin kernels store elsewhere back to the weight tensors."""
    for kernel in row_kernels(module):
        kernel.flush()


@contextmanager
def tables_of_row_kernels_stay(module: nn.Module, tables: nn.ModuleDict) -> Iterator[None]:
    """Remove the weights of row kernels from ``tables`` while ``module`` moves to a device.

    DistributedModelParallel would copy the weights, and load state dicts into the copy.
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
    """Close this rank's RowKernel objects. Raises RecdError if one could not write its rows."""
    for kernel in row_kernels(module):
        kernel.close()


def follow_state_dicts(module: nn.Module) -> None:
    """Make row kernels reload rows after ``load_state_dict``, and write rows back before saves."""
    kernels = tuple(row_kernels(module))
    of_table: dict[str, list[RowKernel]] = {}
    for kernel in kernels:
        for table in kernel.config.embedding_tables:
            of_table.setdefault(table.name, []).append(kernel)

    def flush(_: nn.Module, state: Mapping[str, Any], *__: Any) -> None:
        for table, own in of_table.items():
            if any(name.endswith(f".{table}.weight") for name in state):
                _flush(own)

    def load(*_: Any) -> None:
        for kernel in kernels:
            kernel.load()

    if kernels:
        module.register_load_state_dict_pre_hook(flush)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(load)  # type: ignore[no-untyped-call]
        tell_when_asked(module, {table: partial(_flush, own) for table, own in of_table.items()})


def _flush(kernels: Iterable[RowKernel]) -> None:
    for kernel in kernels:
        kernel.flush()


def prefetches(model: nn.Module) -> bool:
    """Return whether the model prefetches embedding rows into a cache. Equal on all ranks.

    Prefetching is enabled by kernels of plugins, or by ``prefetch_pipeline`` in CacheParams or
    ``fused_params``.
    """
    for module in model.modules():
        kernels = getattr(module, "lookup_kernels", ())
        for table, sharding in getattr(module, "module_sharding_plan", {}).items():
            if (own := _of_table(table, kernels)) is not None:
                if own.prefetches(table):
                    return True
            elif sharding.compute_kernel == _CACHING:
                planned = sharding.cache_params and sharding.cache_params.prefetch_pipeline
                if planned is None:
                    fused_params = getattr(module, "fused_params", None) or {}
                    planned = fused_params.get("prefetch_pipeline")
                if planned:
                    return True
    return False


def _of_table(table: str, kernels: Sequence[LookupKernels]) -> LookupKernels | None:
    return next((each for each in kernels if table in each.tables), None)


def check_kernels(
    kernels: Sequence[LookupKernels], params: Mapping[str, ParameterSharding]
) -> None:
    """Check that the plan uses the compute kernel of the cache plugin for each cached table.

    Raises SetupError if the plan has another kernel for a cached table.
    """
    for table, sharding in params.items():
        own = _of_table(table, kernels)
        if own is not None and own.compute_kernel != sharding.compute_kernel:
            raise SetupError(
                f"table {table!r} has a cache, but the sharding plan uses the compute kernel "
                f"{sharding.compute_kernel!r} ({sharding.sharding_type}), which has no cache. Plan "
                f"the table with {own.compute_kernel!r}, or remove its cache entry."
            )


@contextmanager
def lookups_with(kernels: Sequence[LookupKernels]) -> Iterator[None]:
    """Within this context, TorchRec builds lookups with the kernels of plugins.

    A TorchRec kernel must not be created first and then replaced, because it allocates the table.
    """
    if not kernels:
        yield
        return
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
        if (own := _of_group(config, kernels)) is None:
            return stock_bags(lookup, config, device, pg, sharding_type, env)
        lookup.prefetch = partial(_prefetch, lookup)
        return own.bags(config, pg, device, sharding_type)

    def sequences(
        lookup: GroupedEmbeddingsLookup,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        env: Any = None,
    ) -> nn.Module:
        if (own := _of_group(config, kernels)) is None:
            return stock(lookup, config, pg, device, env)
        lookup.prefetch = partial(_prefetch, lookup)
        return own.sequences(config, pg, device)

    factory = "_create_embedding_kernel"
    with (
        mock.patch.object(GroupedPooledEmbeddingsLookup, factory, bags),
        mock.patch.object(GroupedEmbeddingsLookup, factory, sequences),
    ):
        yield


def _prefetch(
    lookup: GroupedEmbeddingsLookup | GroupedPooledEmbeddingsLookup,
    sparse_features: KeyedJaggedTensor,
    forward_stream: torch.cuda.Stream | None = None,
) -> None:
    """Prefetch rows, except for kernels without a cache, or whose cache does not lock rows."""
    kernels = list(lookup._emb_modules)
    features = sparse_features.split([kernel.config.num_features() for kernel in kernels])
    for kernel, mine in zip(kernels, features, strict=True):
        # The kernel type of a group is fused, whatever its tables have.
        planned = {table.compute_kernel for table in kernel.config.embedding_tables}
        locks = getattr(kernel.emb_module, "prefetch_pipeline", False)
        if isinstance(kernel, RowKernel):
            kernel.prefetch(mine, forward_stream)
        elif locks and not planned <= _WITHOUT_CACHE:
            sizes = mine.stride_per_key_per_rank() if mine.variable_stride_per_key() else None
            kernel.emb_module.prefetch(mine.values(), mine.offsets(), forward_stream, sizes)


def _of_group(
    config: GroupedEmbeddingConfig, kernels: Sequence[LookupKernels]
) -> LookupKernels | None:
    """Return the plugin kernels for a group of tables; None if TorchRec builds the kernel."""
    tables = config.embedding_tables
    if not any(table.local_rows for table in tables):
        return None  # as row-wise tables with few rows have it on some ranks
    own = {table.name: _of_table(table.name, kernels) for table in tables}
    if len(set(own.values())) > 1:
        raise SetupError(
            f"tables {', '.join(map(repr, own))} share one lookup kernel, but are not all in the "
            "same cache entry. Put all of these tables into one cache entry, or plan the cached "
            "tables with CacheParams(prefetch_pipeline=True)."
        )
    return own[tables[0].name]


def counting(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the FBGEMM kernels that count optimizer steps, as Adam does."""
    return [each for each in modules if hasattr(each, "iter_cpu") or hasattr(each, "iter")]


def step_counts(kernels: Iterable[nn.Module]) -> list[Tensor]:
    """Return the step counters of FBGEMM kernels: their tensors ``iter_cpu`` and ``iter``."""
    found = (getattr(each, name, None) for each in kernels for name in ("iter_cpu", "iter"))
    return [each for each in found if isinstance(each, Tensor)]


@contextmanager
def steps_kept(model: nn.Module) -> Iterator[None]:
    """Restore FBGEMM's step counters after evaluation, because FBGEMM counts every lookup."""
    kernels = counting(nn.ModuleList(_lookups_of(model)).modules())
    before = [count.clone() for count in step_counts(kernels)]
    try:
        yield
    finally:
        for count, then in zip(step_counts(kernels), before, strict=True):
            count.copy_(then)


def steps_of_tables(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from module path and table name to the optimizer step count on this rank."""
    return {
        name: kernel.iter.to("cpu", copy=True)
        for names, kernel in _learning_by_steps(model)
        for name in names
    }


def set_steps_of_tables(model: nn.Module, steps: Mapping[str, Tensor], otherwise: int) -> None:
    """Set optimizer steps, keyed as in ``steps_of_tables``; ``otherwise`` is for missing keys.

    Raises SetupError if tables of one FBGEMM kernel would get different counts.
    """
    found = []
    for names, kernel in _learning_by_steps(model):
        of_tables = {name: int(steps.get(name, otherwise)) for name in names}
        if len(set(of_tables.values())) > 1:
            told = ", ".join(f"{name!r} {step} steps" for name, step in of_tables.items())
            raise SetupError(
                "tables that share one FBGEMM kernel were trained for different numbers of steps: "
                f"{told}. Use the sharding plan of the run that trained these tables."
            )
        found.append((kernel, of_tables[names[0]]))
    for kernel, step in found:
        for count in step_counts([kernel]):
            count.fill_(step)


def _learning_by_steps(model: nn.Module) -> Iterator[tuple[list[str], Any]]:
    for path, outermost in outermost_sharded(model):
        each: Any
        for each in nn.ModuleList(_lookups_of(outermost)).modules():
            kernel = getattr(each, "emb_module", None)
            if (
                isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)
                # FBGEMM uses this attribute to decide whether the count is part of the state.
                and "iter" not in kernel._non_persistent_buffers_set
            ):
                tables = each.config.embedding_tables
                yield [f"{path}.{table.name}" for table in tables], kernel


def _lookups_of(model: nn.Module) -> Iterator[nn.Module]:
    for part in model.modules():
        # A private list (torchrec 1.6 to 1.9), which modules() does not enter.
        yield from getattr(part, "_lookups", ())
