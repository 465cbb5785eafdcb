"""Builds the sharders for a prepared model, including TorchRec's and those of plugins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder

from recd_plugins.config import RunConfig, at_entry
from recd_plugins.config.entries import by_class, call_class
from recd_plugins.data.prepared import PreparedModel
from recd_plugins.interfaces import LookupKernels, Plugin, SharderArguments
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding import sharders as exact
from recd_plugins.sharding.other_sharders import other_sharders
from recd_plugins.sharding.sharders import (
    Codecs,
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)
from recd_plugins.sharding.wire import wire_codecs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharderDefaults:
    """``fused_params`` and codecs that the user set on a TorchRec sharder passed as ``base``."""

    fused_params: Mapping[str, Any] | None
    qcomm_codecs_registry: Codecs | None
    use_index_dedup: bool = False

    def over(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``params`` updated with the user's ``fused_params``.

        If the user's ``fused_params`` name an optimizer, they replace ``params`` completely.
        """
        chosen = self.fused_params or {}
        return dict(chosen) if "optimizer" in chosen else {**params, **chosen}


def _defaults(sharder: Any, other: SharderDefaults) -> SharderDefaults:
    """Return the arguments set on a TorchRec sharder, with missing ones copied from ``other``.

    Raises:
        SetupError: both set the same argument.
    """
    found: dict[str, Any] = {}
    for name in ("fused_params", "qcomm_codecs_registry"):
        own, given = getattr(sharder, name), getattr(other, name)
        if own and given:
            raise SetupError(
                f"argument {name!r} is set both in sharders() and on the {type(sharder).__name__} "
                "in 'base'. Remove the argument from one of them."
            )
        found[name] = own or given
    return SharderDefaults(use_index_dedup=getattr(sharder, "_use_index_dedup", False), **found)


def build_sharders(
    prepared: PreparedModel,
    base: Sequence[ModuleSharder[nn.Module]] = (),
    *,
    fused_params: Mapping[str, Any] | None = None,
    qcomm_codecs_registry: Codecs | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of a prepared model, for DistributedModelParallel.

    The list contains this package's sharders, plugins' sharders, and TorchRec's for other modules.

    If ``base`` is not empty, only its module types and those of plugins are sharded. ``defaults``
    are FBGEMM parameters that replace those of the ``training:`` section. See
    ``PreparedModel.sharders``.
    """
    registry, kernels = prepared.registry, lookup_kernels(prepared)
    training = registry.training
    of_training = exact.fused_params(training) if defaults is None else defaults
    given = SharderDefaults(fused_params, qcomm_codecs_registry)

    def joined(stock: type[Any]) -> tuple[dict[str, Any], Codecs | None, bool]:
        found = _in_base(base, stock)
        both = given if found is None else _defaults(found, given)
        _check_optimizer(both, registry, file_counts=bool(defaults))
        codecs = wire_codecs(training, both.qcomm_codecs_registry, prepared.tables)
        return both.over(of_training), codecs, both.use_index_dedup

    bag_params, bag_codecs, _ = joined(EmbeddingBagCollectionSharder)
    params, codecs, use_index_dedup = joined(EmbeddingCollectionSharder)
    coalesced = prepared.coalesced
    bags = ExactEmbeddingBagCollectionSharder(
        bag_params, bag_codecs, kernels=kernels, coalesced=coalesced
    )
    sequences = ExactEmbeddingCollectionSharder(
        dict(params), codecs, use_index_dedup, kernels=kernels, coalesced=coalesced
    )

    def arguments(inner: Any) -> tuple[dict[str, Any], Codecs | None]:
        """Return ``fused_params`` and codecs for ``inner``, a sharder inside a user's sharder."""
        own = SharderDefaults(inner.fused_params, inner.qcomm_codecs_registry)
        _check_optimizer(own, registry, file_counts=bool(defaults))
        codecs = own.qcomm_codecs_registry or qcomm_codecs_registry
        return (
            dict(own.fused_params or given.over(of_training)),
            wire_codecs(training, codecs, prepared.tables),
        )

    every = (bags, sequences, *other_sharders(base, bags, sequences, arguments))
    types = {sharder.module_type for sharder in base}
    found: dict[type[nn.Module], ModuleSharder[nn.Module]] = {
        sharder.module_type: sharder
        for sharder in every
        if not base or sharder.module_type in types
    }
    for entry in registry.sharding:
        of_plugin = SharderArguments(dict(params), kernels, coalesced, codecs)
        with at_entry(registry.path, entry), plugin_call(entry.plugin, "sharders"):
            for sharder in entry.plugin.sharders(of_plugin):
                vars(sharder)["shard"] = _guarded(entry.plugin, sharder)
                first = found.setdefault(sharder.module_type, sharder)
                if type(first) is not type(sharder):
                    raise SetupError(
                        f"{type(first).__name__} and {type(sharder).__name__} both shard "
                        f"{sharder.module_type.__name__}. Remove the registry entry of one of "
                        "these sharders."
                    )
    if base:
        _warn_of_unsharded(prepared, found.keys())
    return list(found.values())


def lookup_kernels(prepared: PreparedModel) -> tuple[LookupKernels, ...]:
    """Return the lookup kernels that replace TorchRec's kernels, caches first."""
    caches = {entry.field for entry in prepared.registry.cache}
    parts = sorted(prepared.plugin_strategies, key=lambda part: part.entry.field not in caches)
    found = (call_class(of_class, "kernels") for of_class in by_class(parts).values())
    return tuple(kernels for kernels in found if kernels is not None)


def _guarded(plugin: Plugin, sharder: ModuleSharder[nn.Module]) -> Callable[..., nn.Module]:
    """Return ``sharder.shard`` with the plugin's name in its errors."""

    def shard(*arguments: Any, **named: Any) -> nn.Module:
        with plugin_call(plugin, "shard", type(sharder)):
            return type(sharder).shard(sharder, *arguments, **named)

    return shard


def _in_base(base: Sequence[ModuleSharder[nn.Module]], stock: type[Any]) -> Any:
    """Return the user's sharder for the module type that ``stock`` shards, or None."""
    found = [each for each in base if each.module_type is stock().module_type]
    if found and type(found[-1]) is not stock:
        raise SetupError(
            f"argument 'base' contains a sharder of type {type(found[-1]).__name__}, but only "
            f"TorchRec's own {stock.__name__} can be replaced by the exact sharder. Remove "
            f"{type(found[-1]).__name__} from base, or add it to the list that sharders() returns."
        )
    return found[-1] if found else None


def _check_optimizer(given: SharderDefaults, registry: RunConfig, *, file_counts: bool) -> None:
    """Raise SetupError if the user's ``fused_params`` and the run config both set an optimizer."""
    optimizer = (given.fused_params or {}).get("optimizer")
    if optimizer is None:
        return
    where = [
        f"{entry.line} {entry.field} sets {entry.plugin.name}"
        for entry in registry.entries("optimizer")
    ]
    if where or file_counts:
        named = where[0] if where else f" training.optimizer is {registry.training.optimizer}"
        raise SetupError(
            f"{registry.path}:{named}, but the fused_params of a sharder also set an optimizer "
            f"({optimizer}). Remove one of these two settings."
        )


def _warn_of_unsharded(prepared: PreparedModel, types: Collection[type[nn.Module]]) -> None:
    """Warn about settings of modules whose type no given sharder shards: they have no effect."""
    registry = prepared.registry
    entries = (*registry.sharding, *registry.cache, *registry.entries("optimizer"))
    for module in embedding_modules(prepared.model):
        kind = type(module.shardable)
        path = f"module {module.path!r}" if module.path else "the model"
        if kind in types:
            continue
        named = [t.name for t in module.tables if any(each.matches(t.name) for each in entries)]
        if module.ours and named:
            logger.warning(
                "registry entries select the tables %s, but %s stays unsharded. Add a "
                "sharder for %s to argument 'base'.",
                *(shortened(named), path, kind.__name__),
            )
        if not module.ours and any(type(child) in types for child in module.shardable.modules()):
            logger.warning(
                "argument 'base' shards only the tables inside %s (%s), so each rank "
                "trains its own id map or weights. Add a sharder for %s to argument 'base'.",
                *(path, kind.__name__, kind.__name__),
            )
