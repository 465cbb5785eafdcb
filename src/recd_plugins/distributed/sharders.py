"""Sharders for DistributedModelParallel: exact ones, and TorchRec's own as the baseline."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pydantic import BaseModel
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.distributed.compiled import left_uncompiled
from recd_plugins.distributed.entry_constraints import (
    EntryConstraints,
    check_plan,
    entries_of_tables,
    entry_constraints,
)
from recd_plugins.distributed.int8 import ADDED_ON_THE_WAY, check_chosen, check_int8, int8_of
from recd_plugins.distributed.lent import Lent, check_base
from recd_plugins.distributed.lookup_kernels import check_kernels, offered_kernels
from recd_plugins.distributed.other_sharders import other_sharders
from recd_plugins.distributed.rank_agreement import entries_named
from recd_plugins.distributed.row_updates import check_updates, part_arguments
from recd_plugins.distributed.sharded_bags import ExactShardedEmbeddingBagCollection
from recd_plugins.distributed.sharded_sequences import ExactShardedEmbeddingCollection
from recd_plugins.distributed.wire import wire_codecs
from recd_plugins.errors import PluginError, SetupError
from recd_plugins.interfaces import SharderArguments
from recd_plugins.interfaces.lookup_kernels import LookupKernels
from recd_plugins.model_tables import embedding_modules, refuse_frozen, tables_of
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import at_entry
from recd_plugins.registry.training_spec import TrainingSpec
from recd_plugins.words import shortened

logger = logging.getLogger(__name__)

_PLAIN = (str, int, float, BaseModel)
_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class _OnlyIfConstrained(str):
    """A sharding type that TorchRec's planner takes only where constraints name it.

    Its enumerator drops types that are not ``!=`` ``grid_shard``, unless the ``sharding_types`` of
    a table's ParameterConstraints have them (torchrec 1.6 to 1.9). A copy is a plain string.
    """

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return not (self == other or other == ShardingType.GRID_SHARD.value)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class ExactEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection; row-wise on CPU too, deduplicated batches included.

    ``shard`` raises SetupError where a coalesced table is data-parallel, shares a feature with one
    that is not coalesced, or a module with a data-parallel one.

    Args:
        fused_params: FBGEMM's, as TorchRec takes them.
        qcomm_codecs_registry: TorchRec's.
        kernels: of tables that TorchRec's kernels are not to look up. Those of other modules'
            tables do no harm.
        coalesced: tables whose ids are made unique before they are sent. Names of other modules'
            tables do no harm.
        asked: says what entries of a registry ask of the plan, when there is one.
        entries: says which entries have which table, for ranks that shard it differently.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        kernels: Sequence[LookupKernels] = (),
        coalesced: Collection[str] = (),
        asked: Callable[[], Sequence[EntryConstraints]] = tuple,
        entries: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._kernels = tuple(kernels)
        self._coalesced = frozenset(coalesced)
        self._asked, self._entries = asked, entries

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ExactShardedEmbeddingBagCollection:
        """See TorchRec's ``ModuleSharder.shard``.

        Raises:
            SetupError: a table has a kernel that cannot train, or another one than is its own, or
                an optimizer that the device has no kernel of, or is frozen; an entry asks for
                something else; or the plan is for another kind of device.
        """
        tables = self.shardable_parameters(module)
        refuse_frozen(module_fqn or type(module).__name__, tables.items())
        _check_parameters(params, tables)
        _check_device(params, device)
        part_arguments(tables.values())
        check_updates(params, tables, self.fused_params, device)
        check_kernels(self._kernels, params, device)
        check_plan(self._asked(), params)
        check_int8(self.qcomm_codecs_registry, params, pooled=True)
        with _known_to_fbgemm(self.fused_params), entries_named(self._entries):
            sharded = self.sharded_module_type(
                module,
                params,
                env,
                self.fused_params,
                device,
                qcomm_codecs_registry=self.qcomm_codecs_registry,
                module_fqn=module_fqn,
                kernels=_as_planned(self._kernels, params, module.embedding_bag_configs()),
                coalesced=self._coalesced,
            )
        return left_uncompiled(sharded)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return TorchRec's types, and on CPU row-wise ones for tables whose constraints name them.

        TorchRec leaves those out on CPU although they run. Its planner's choice stays the same:
        it overrates row-wise tables there. With ``training.wire: int8``, types that add up sums on
        their way are left out.
        """
        types = super().sharding_types(compute_device_type)
        if compute_device_type == "cpu":
            by_rows = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
            types = [*types, *(_OnlyIfConstrained(each.value) for each in by_rows)]
        if int8_of(self.qcomm_codecs_registry) is not None:
            types = [each for each in types if each not in ADDED_ON_THE_WAY]
        return types

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's, and those of ``kernels`` on CPU too."""
        offered = super().compute_kernels(sharding_type, compute_device_type)
        return offered_kernels(self._kernels, sharding_type, offered)

    @property
    def sharded_module_type(self) -> type[ExactShardedEmbeddingBagCollection]:
        """What ``shard`` returns."""
        return ExactShardedEmbeddingBagCollection


class ExactEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection; data-parallel is right on CPU too.

    ``shard`` raises SetupError where a coalesced table is data-parallel or shares a feature with
    one that is not coalesced.

    Args:
        fused_params: FBGEMM's, as TorchRec takes them.
        qcomm_codecs_registry: TorchRec's.
        use_index_dedup: TorchRec's own, on CUDA only.
        kernels: as ExactEmbeddingBagCollectionSharder has it.
        coalesced: the same.
        asked: the same.
        entries: the same.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        *,
        kernels: Sequence[LookupKernels] = (),
        coalesced: Collection[str] = (),
        asked: Callable[[], Sequence[EntryConstraints]] = tuple,
        entries: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        self._kernels = tuple(kernels)
        self._coalesced = frozenset(coalesced)
        self._asked, self._entries = asked, entries

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ExactShardedEmbeddingCollection:
        """See TorchRec's ``ModuleSharder.shard``.

        Raises:
            SetupError: a table has a kernel that cannot train, or another one than is its own, or
                an optimizer that the device has no kernel of, or is frozen; an entry asks for
                something else; or the plan is for another kind of device.
        """
        tables = self.shardable_parameters(module)
        refuse_frozen(module_fqn or type(module).__name__, tables.items())
        _check_parameters(params, tables)
        _check_device(params, device)
        part_arguments(tables.values())
        check_updates(params, tables, self.fused_params, device)
        check_kernels(self._kernels, params, device)
        check_plan(self._asked(), params)
        check_int8(self.qcomm_codecs_registry, params, pooled=False)
        with _known_to_fbgemm(self.fused_params), entries_named(self._entries):
            sharded = self.sharded_module_type(
                module,
                params,
                env,
                self.fused_params,
                device,
                qcomm_codecs_registry=self.qcomm_codecs_registry,
                use_index_dedup=self._use_index_dedup,
                module_fqn=module_fqn,
                kernels=_as_planned(self._kernels, params, module.embedding_configs()),
                coalesced=self._coalesced,
            )
        return left_uncompiled(sharded)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's, and those of ``kernels`` on CPU too."""
        offered = super().compute_kernels(sharding_type, compute_device_type)
        return offered_kernels(self._kernels, sharding_type, offered)

    @property
    def sharded_module_type(self) -> type[ExactShardedEmbeddingCollection]:
        """What ``shard`` returns."""
        return ExactShardedEmbeddingCollection


def build_sharders(
    prepared: PreparedModel,
    base: Sequence[ModuleSharder[nn.Module]] = (),
    *,
    fused_params: Mapping[str, Any] | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> list[ModuleSharder[nn.Module]]:
    """Return exact sharders, those of the registry's plugins, and TorchRec's for other modules.

    With ``base`` only its module types are sharded, besides those of plugins.
    ``Prepared.sharders`` describes the arguments and errors.
    ``defaults`` are FBGEMM's parameters in place of those of ``training:``.
    """
    check_base(base)
    of_bags = Lent.by(base, EmbeddingBagCollectionSharder, fused_params, qcomm_codecs_registry)
    of_sequences = Lent.by(base, EmbeddingCollectionSharder, fused_params, qcomm_codecs_registry)
    registry, kernels = prepared.registry, prepared.lookup_kernels
    for lent in (of_bags, of_sequences):
        lent.check_optimizer(registry, file_counts=bool(defaults))
    of_training = _of_training(registry.training) if defaults is None else defaults
    asked = partial(entry_constraints, prepared, tables_of(prepared.model))
    entries = partial(entries_of_tables, prepared)
    params = of_sequences.over(of_training)
    codecs = wire_codecs(registry.training, of_sequences.qcomm_codecs_registry, prepared.tables)
    bags = ExactEmbeddingBagCollectionSharder(
        of_bags.over(of_training),
        wire_codecs(registry.training, of_bags.qcomm_codecs_registry, prepared.tables),
        kernels=kernels,
        coalesced=prepared.coalesced,
        asked=asked,
        entries=entries,
    )
    sequences = ExactEmbeddingCollectionSharder(
        dict(params),
        codecs,
        of_sequences.use_index_dedup,
        kernels=kernels,
        coalesced=prepared.coalesced,
        asked=asked,
        entries=entries,
    )
    params_said = Lent(fused_params, qcomm_codecs_registry).over(of_training)

    def with_said(own: Lent) -> Lent:
        own.check_optimizer(registry, file_counts=bool(defaults))
        lent = own.or_else(params_said, qcomm_codecs_registry)
        codecs = wire_codecs(registry.training, lent.qcomm_codecs_registry, prepared.tables)
        return replace(lent, qcomm_codecs_registry=codecs)

    unique_bags = [t.name for t in prepared.tables if t.pooled and t.name in prepared.coalesced]
    check_chosen(prepared.chosen, unique_bags, bags.qcomm_codecs_registry)
    types = {sharder.module_type for sharder in base}
    every = (bags, sequences, *other_sharders(base, bags, sequences, with_said))
    sharders: list[ModuleSharder[nn.Module]] = [
        sharder for sharder in every if not base or sharder.module_type in types
    ]
    made_by = {sharder.module_type: ("recd_plugins", sharder) for sharder in sharders}
    for entry in registry.sharding:
        given = SharderArguments(dict(params), kernels, prepared.coalesced, codecs)
        where = f"{registry.path}:{entry.line} {entry.field}: {entry.plugin.name}"
        with at_entry(registry.path, entry), plugin_call(entry.plugin, "sharders"):
            of_entry = entry.plugin.sharders(given)
        is_list = isinstance(of_entry, Sequence) and not isinstance(of_entry, str)
        if not (is_list and all(isinstance(each, ModuleSharder) for each in of_entry)):
            raise PluginError(
                f"{where}: sharders returned {of_entry!r:.80}; expected a list of ModuleSharders"
            )
        for sharder in of_entry:
            name, first = made_by.setdefault(sharder.module_type, (entry.plugin.name, sharder))
            if first is sharder:
                if codecs and sharder.qcomm_codecs_registry is not codecs:
                    raise SetupError(
                        f"{where} shards {sharder.module_type.__name__} by a sharder of its own, "
                        "which takes no qcomm_codecs_registry (training.wire, or the trainer's): "
                        "leave one of the two away"
                    )
                sharders.append(sharder)
            elif type(first) is not type(sharder):
                raise SetupError(
                    f"{where} and {name} both shard {sharder.module_type.__name__}; a plugin gives "
                    "a module type of its own"
                )
            elif name == entry.plugin.name and (unlike := _unlike(first, sharder)):
                raise SetupError(
                    f"{where} and an entry of it before shard {sharder.module_type.__name__} by "
                    f"sharders of other {', '.join(unlike)}, and one shards all modules of a type: "
                    "let the modules that rewrite puts in have what is an entry's own"
                )
    if base:
        _warn_of_unsharded(prepared, set(made_by))
    return sharders


def _warn_of_unsharded(prepared: PreparedModel, types: Collection[type[nn.Module]]) -> None:
    """Warn of entries, and of collision maps and processors, for which ``base`` has no sharder."""
    entries = entries_of_tables(prepared)
    for module in embedding_modules(prepared.model):
        kind = type(module.shardable)
        if kind in types:
            continue
        path = module.path or "the model"
        named = [table.name for table in module.tables if table.name in entries]
        if module.ours and named:
            logger.warning(
                "registry entries name tables %s, but %s stays unsharded; add a sharder of %s to "
                "base",
                *(shortened(named), path, kind.__name__),
            )
        if not module.ours and any(type(child) in types for child in module.shardable.modules()):
            logger.warning(
                "base shards only the tables inside %s (%s), so each rank keeps its own id map or "
                "weights; add a sharder of %s to base",
                *(path, kind.__name__, kind.__name__),
            )


def _unlike(first: object, second: object) -> list[str]:
    """Names of values, such as options are, that two sharders do not share."""
    one, other = (
        {name: value for name, value in vars(each).items() if isinstance(value, _PLAIN)}
        for each in (first, second)
    )
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))


def stock_sharders(training: TrainingSpec) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's own sharders with the same optimizer: the baseline of a comparison."""
    params = fused_params(training)
    return [EmbeddingBagCollectionSharder(dict(params)), EmbeddingCollectionSharder(dict(params))]


def fused_params(training: TrainingSpec) -> dict[str, Any]:
    """FBGEMM's parameters for the optimizer that ``training:`` names."""
    params = {
        "optimizer": _OPTIMIZERS[training.optimizer],
        "learning_rate": training.learning_rate,
    }
    if training.optimizer == "rowwise_adagrad":
        params["eps"] = training.eps
    return params


@contextmanager
def _known_to_fbgemm(fused_params: Mapping[str, Any] | None) -> Iterator[None]:
    """Name a parameter that FBGEMM's kernels do not take; they say so by a TypeError."""
    try:
        yield
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in (fused_params or {}):
            raise
        raise SetupError(
            f"fused_params have {unknown[1]}, which FBGEMM's kernels do not take; see its "
            "SplitTableBatchedEmbeddingBagsCodegen for those that they do"
        ) from error


def _as_planned(
    kernels: Iterable[LookupKernels],
    params: Mapping[str, ParameterSharding],
    configs: Sequence[BaseEmbeddingConfig],
) -> tuple[LookupKernels, ...]:
    return tuple(each.as_planned(params, configs) for each in kernels)


def _of_training(training: TrainingSpec) -> dict[str, Any]:
    return fused_params(training)  # not the argument of that name


def _check_device(params: Mapping[str, ParameterSharding], device: torch.device | None) -> None:
    """Refuse a plan for another kind of device, of which torch says that shards do not match."""
    kind = "cpu" if device is None else device.type
    for name, sharding in params.items():
        shards = getattr(sharding.sharding_spec, "shards", None) or ()
        placed = {shard.placement.device().type for shard in shards if shard.placement is not None}
        if placed - {kind} and kind != "meta":
            raise SetupError(
                f"the plan has table {name} on {', '.join(sorted(placed - {kind}))}, and it is "
                f"sharded on {kind}: plan for that, as planner(device=...) of what is prepared and "
                "Topology(compute_device=...) of TorchRec do"
            )


def _check_parameters(
    params: Mapping[str, ParameterSharding], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Refuse kernels that cannot train, and warn of optimizers that TorchRec drops."""
    lost = {
        name: brought[0].__name__
        for name, sharding in params.items()
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
        and (brought := getattr(parameters.get(name), "_optimizer_classes", None))
    }
    if lost:
        logger.warning(
            "data-parallel tables lose the optimizer of their backward pass (%s) and train with "
            "the dense optimizer, if at all: %s",
            ", ".join(sorted(set(lost.values()))),
            ", ".join(lost),
        )
    for name, sharding in params.items():
        if sharding.compute_kernel == EmbeddingComputeKernel.QUANT.value:
            raise SetupError(
                f"table {name} has the kernel quant, which cannot train; TorchRec's "
                "row_wise((sizes, device)) chooses it: use row_wise() with even shards"
            )
