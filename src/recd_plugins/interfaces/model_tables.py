"""Functions that find the embedding tables of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from recd_plugins.interfaces.rows import Table
from recd_plugins.interfaces.rows import table_name as table_name
from recd_plugins.runtime.errors import SetupError

_POOLED = (EmbeddingBagCollection, FusedEmbeddingBagCollection)
_UNPOOLED = (EmbeddingCollection, FusedEmbeddingCollection)

# TorchRec modules that remap ids for an inner module. By name, because versions differ.
_REMAPPING = {
    "BaseManagedCollisionEmbeddingCollection",
    "ITEPEmbeddingBagCollection",
    "ITEPEmbeddingCollection",
    "PECEmbeddingCollection",
}
_HOLDING = _REMAPPING | {"FeatureProcessedEmbeddingBagCollection"}


@dataclass(frozen=True)
class EmbeddingModule:
    """Submodule of a model that contains embedding tables.

    Attributes:
        path: name of ``shardable`` in the model, as in ``named_modules``.
        shardable: the module with the tables, or the TorchRec module around it that remaps ids or
            weights.
        tables: tables of the unsharded module.
        takes_rows: whether input ids are row numbers of the tables.
    """

    path: str
    shardable: nn.Module
    tables: tuple[Table, ...]
    takes_rows: bool

    @property
    def ours(self) -> bool:
        """Whether the type is exactly EmbeddingBagCollection or EmbeddingCollection."""
        return type(self.shardable) in (EmbeddingBagCollection, EmbeddingCollection)

    @property
    def is_subclass(self) -> bool:
        """Whether the type is a subclass of an embedding collection, which no sharder supports."""
        return _is_collection(self.shardable) and not self.ours

    @property
    def why_left(self) -> str:
        """Reason why this package does not shard the module, for error messages."""
        why = "which TorchRec's own sharder shards"
        if self.is_subclass:
            pooled = isinstance(self.shardable, EmbeddingBagCollection)
            base = "EmbeddingBagCollection" if pooled else "EmbeddingCollection"
            why = f"a subclass of {base}, but DistributedModelParallel matches types exactly"
        return f"{_named(self.path)} has the type {type(self.shardable).__name__}, {why}"


def rows_by_feature(
    tables: Iterable[Table], limits: Mapping[str, int | None] = MappingProxyType({})
) -> dict[str, int]:
    """Return a dict from feature to the exclusive bound of its ids.

    Args:
        tables: tables of a model.
        limits: maps table names to bounds that replace the number of rows; None allows any id. A
            feature with several tables has the smallest bound.
    """
    rows: dict[str, int] = {}
    for table in tables:
        limit = limits.get(table.name, table.num_embeddings)
        if limit is None:
            continue
        for feature in table.features:
            rows[feature] = min(rows.get(feature, limit), limit)
    return rows


def tables_of(model: nn.Module) -> list[Table]:
    """Return the tables of a model's unsharded EmbeddingBagCollections and EmbeddingCollections.

    Tables inside other modules of TorchRec, such as managed collision, are not included.
    """
    modules = embedding_modules(model)
    return [table for each in modules if _is_collection(each.shardable) for table in each.tables]


def all_tables_of(model: nn.Module) -> list[Table]:
    """Return all unsharded tables, also those inside TorchRec modules that wrap a collection.

    ManagedCollisionEmbeddingBagCollection is an example of such a module.
    """
    return [table for module in embedding_modules(model) for table in module.tables]


def names_of_several(tables: Iterable[Table]) -> list[str]:
    """Return the table names that occur more than once."""
    counts = Counter(table.name for table in tables)
    return [name for name, count in counts.items() if count > 1]


def left_modules(model: nn.Module) -> list[EmbeddingModule]:
    """Return the modules with tables that TorchRec shards, instead of this package."""
    return [each for each in embedding_modules(model) if not _is_collection(each.shardable)]


def embedding_modules(model: nn.Module) -> Iterator[EmbeddingModule]:
    """Yield the unsharded modules of a model that contain embedding tables."""
    for path, module in _outermost(model, lambda m: _is_one_of(m, _HOLDING) or bool(_tables(m))):
        tables = tuple(table for child in module.modules() for table in _tables(child))
        yield EmbeddingModule(path, module, tables, not _is_one_of(module, _REMAPPING))


def _outermost(
    model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each wanted module, once, but none inside a wanted module."""
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if wanted(module):
            yield path, module
            return
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)

    yield from visit("", model)


def _named(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def refuse_frozen(path: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise SetupError for frozen table parameters, which TorchRec's kernels would train."""
    for name, parameter in parameters:
        if not parameter.requires_grad:
            raise SetupError(
                f"parameter {name!r} of {_named(path)} is frozen (requires_grad=False), but "
                "TorchRec's kernels would train its table. Set requires_grad=True, and use an "
                "optimizer with learning rate 0 for this table"
            )


def refuse_shared_tables(model: nn.Module) -> None:
    """Raise SetupError for shared or frozen tables, which cannot be sharded correctly."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {path: module for path, module in modules.items() if _tables(module)}
    paths: dict[int, str] = {}
    for path, module in found.items():
        refuse_frozen(path, module.named_parameters())
        names: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if (first := names.setdefault(id(parameter), name)) != name:
                raise SetupError(
                    f"parameters {first!r} and {name!r} of {_named(path)} are the same tensor, but "
                    "sharding would create two copies. Use one table with the features of both"
                )
        for parameter in module.parameters():
            first = paths.setdefault(id(parameter), path)
            if first != path:
                raise SetupError(
                    f"modules {first!r} and {path!r} share a table, but sharding would create two "
                    "copies. Use one module, and list the features of both modules in its table"
                )
    for path, module in modules.items():
        if any(f"{path}.".startswith(f"{outer}." if outer else "") for outer in found):
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if (owner := paths.get(id(parameter))) is not None:
                raise SetupError(
                    f"parameter {name!r} is also the weight of a table of {_named(owner)}, but "
                    "sharding would create two copies. Use separate tensors for the parameter and "
                    "the table"
                )


def sharded_modules(
    model: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]
) -> Iterator[tuple[nn.Module, ModuleSharder[nn.Module]]]:
    """Yield each module that ``DistributedModelParallel`` shards, with the module's sharder."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    for _, module in _outermost(model, lambda m: type(m) in by_type):
        yield module, by_type[type(module)]


def outermost_sharded(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each sharded module that is not inside a sharded module."""
    return _outermost(model, lambda module: isinstance(module, ShardedModule))


def _is_collection(module: nn.Module) -> bool:
    return isinstance(module, EmbeddingBagCollection | EmbeddingCollection)


def _is_one_of(module: nn.Module, names: set[str]) -> bool:
    return any(
        base.__name__ in names and base.__module__.startswith("torchrec.")
        for base in type(module).__mro__
    )


def _tables(module: nn.Module) -> list[Table]:
    if isinstance(module, _POOLED):
        configs, pooled = module.embedding_bag_configs(), True
    elif isinstance(module, _UNPOOLED):
        configs, pooled = module.embedding_configs(), False
    else:
        return []
    return [
        Table(
            name=config.name,
            features=tuple(config.feature_names),
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            pooled=pooled,
        )
        for config in configs
    ]
