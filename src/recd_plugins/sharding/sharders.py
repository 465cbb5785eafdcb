"""Sharders for DistributedModelParallel: this package's, and TorchRec's as a baseline.

This package's sharders are called exact: training gives the same result as without sharding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugins.compat.lookup_kernels import check_kernels
from recd_plugins.compat.row_updates import check_updates, copy_optimizer_arguments
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces.model_tables import refuse_frozen
from recd_plugins.interfaces.tables import LookupKernels
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.rank_agreement import check_agreement
from recd_plugins.runtime.versions import installed_set
from recd_plugins.sharding.exact_modules import (
    ExactShardedEmbeddingBagCollection,
    ExactShardedEmbeddingCollection,
)
from recd_plugins.sharding.gradient_dedup import sends_once
from recd_plugins.sharding.wire import ADDED_ON_THE_WAY, check_int8, int8_of

Codecs = dict[str, QuantizedCommCodecs]
M = TypeVar("M", bound=nn.Module)

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class _OnlyIfConstrained(str):
    """A sharding type that TorchRec's planner uses only if a table's constraints name it.

    It compares equal to ``grid_shard``, so TorchRec's enumerator (1.6 to 1.9) skips it unless a
    table's ParameterConstraints list it. A copy of this object is a plain string.
    """

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return not (self == other or other == ShardingType.GRID_SHARD.value)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class _WithKernels:
    """Base class of this package's sharders; adds plugin kernels and coalesced tables."""

    def __init__(
        self,
        *arguments: Any,
        kernels: Sequence[LookupKernels] = (),
        coalesced: Collection[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._kernels, self._coalesced = tuple(kernels), frozenset(coalesced)

    def shard(
        self: Any,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shard a module, with the arguments of TorchRec's ``ModuleSharder.shard``.

        Raises:
            SetupError: a table is frozen; its optimizer, kernel or coalescing would be ignored; or
                ranks shard the module differently.
        """
        pooled = isinstance(module, EmbeddingBagCollection)
        name = module_fqn or type(module).__name__
        tables: dict[str, nn.Parameter] = self.shardable_parameters(module)
        refuse_two_dimensions(name, env)
        refuse_frozen(name, tables.items())
        copy_optimizer_arguments(tables.values())
        check_updates(module, params, self.fused_params, device)
        check_kernels(self._kernels, params)
        check_int8(self.qcomm_codecs_registry, params, pooled=pooled)
        decided = {
            "the versions": installed_set(),
            "the plan": params,
            "the optimizers": {
                # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
                table: [
                    getattr(weight, "_optimizer_kwargs", None),
                    [each.__name__ for each in getattr(weight, "_optimizer_classes", ())],
                ]
                for table, weight in tables.items()
            },
            "fused_params": self.fused_params,
            "the flag for several nodes (LOCAL_WORLD_SIZE)": sends_once(),
        }
        check_agreement(f"sharding {name}", decided, env.process_group)
        configs = module.embedding_bag_configs() if pooled else module.embedding_configs()
        sharded = self.sharded_module_type(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            kernels=[each.as_planned(params, configs) for each in self._kernels],
            coalesced=self._coalesced,
            **({} if pooled else {"use_index_dedup": self._use_index_dedup}),
        )
        return left_uncompiled(sharded)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the names of TorchRec's compute kernels and those of plugins."""
        offered: list[str] = super().compute_kernels(sharding_type, compute_device_type)  # type: ignore[misc]
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return offered
        own = [each.compute_kernel for each in self._kernels if each.tables]
        return list(dict.fromkeys([*offered, *own]))


class ExactEmbeddingBagCollectionSharder(_WithKernels, EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection, also row-wise on CPU and for deduplicated batches.

    Accepts TorchRec's arguments (``fused_params``, ``qcomm_codecs_registry``) and two more.

    Args:
        kernels: lookup kernels of plugins, for tables of any module.
        coalesced: names of tables whose ids are deduplicated before they are sent.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return TorchRec's sharding types, and on CPU row-wise types for tables that request them.

        With ``training.wire: int8``, types that reduce partial sums between ranks are excluded.
        """
        types = super().sharding_types(compute_device_type)
        if compute_device_type == "cpu":
            by_rows = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
            types = [*types, *(_OnlyIfConstrained(each.value) for each in by_rows)]
        if int8_of(self.qcomm_codecs_registry) is not None:
            types = [each for each in types if each not in ADDED_ON_THE_WAY]
        return types

    @property
    def sharded_module_type(self) -> type[ExactShardedEmbeddingBagCollection]:
        return ExactShardedEmbeddingBagCollection


class ExactEmbeddingCollectionSharder(_WithKernels, EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection, with correct gradients of data-parallel tables on CPU.

    Accepts the arguments of ExactEmbeddingBagCollectionSharder and TorchRec's ``use_index_dedup``.
    """

    @property
    def sharded_module_type(self) -> type[ExactShardedEmbeddingCollection]:
        return ExactShardedEmbeddingCollection


def refuse_two_dimensions(name: str, env: ShardingEnv) -> None:
    """Raise SetupError if DMPCollection (2D parallelism) shards the module ``name``."""
    if isinstance(env, ShardingEnv2D):
        raise SetupError(
            f"module {name!r} is sharded by DMPCollection, but exact sharders do not support "
            "copies of tables. Use DistributedModelParallel."
        )


def left_uncompiled(sharded: M) -> M:
    """Exclude a sharded module from ``torch.compile``, and return it.

    Compiled with torch 2.11, its tables are never updated on CPU. With any version, compiled
    modules fail for deduplicated batches of row-wise tables, and for coalesced or cached tables.
    """
    reason = "recd-plugins leaves sharded modules uncompiled: docs/exactness.md"
    sharded.forward = torch.compiler.disable(sharded.forward, reason=reason)  # type: ignore[no-untyped-call]
    return sharded


def stock_sharders(training: TrainingSpec) -> list[ModuleSharder[nn.Module]]:
    """Return TorchRec's own sharders with the optimizer of ``training:``, as a baseline."""
    params = fused_params(training)
    return [EmbeddingBagCollectionSharder(dict(params)), EmbeddingCollectionSharder(dict(params))]


def fused_params(training: TrainingSpec) -> dict[str, Any]:
    """Return FBGEMM's ``fused_params`` for the optimizer in the ``training:`` section."""
    params = {
        "optimizer": _OPTIMIZERS[training.optimizer],
        "learning_rate": training.learning_rate,
    }
    if training.optimizer == "rowwise_adagrad":
        params["eps"] = training.eps
    return params
