"""The embedding tables of a model, and those that are left to TorchRec's own sharders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
from recd_plugins.runtime.errors import SetupError

_POOLED = (EmbeddingBagCollection, FusedEmbeddingBagCollection)
_UNPOOLED = (EmbeddingCollection, FusedEmbeddingCollection)

# Modules of TorchRec that do something to ids before they look them up in a module inside, and have
# to be sharded together with that one. By name, as not every version of TorchRec has them all.
_REMAPPING = {
    "BaseManagedCollisionEmbeddingCollection",
    "ITEPEmbeddingBagCollection",
    "ITEPEmbeddingCollection",
    "PECEmbeddingCollection",
}
_HOLDING = _REMAPPING | {"FeatureProcessedEmbeddingBagCollection"}


@dataclass(frozen=True)
class EmbeddingModule:
    """A module of a model that has tables.

    Attributes:
        path: of ``shardable``, as ``DistributedModelParallel`` names it.
        shardable: the module that has to be sharded as a whole: the one with the tables, or one
            of TorchRec's around it, which changes ids or weights.
        tables: of the module; none of what is sharded already.
        takes_rows: whether the ids that it is fed are rows of its tables.
    """

    path: str
    shardable: nn.Module
    tables: tuple[Table, ...]
    takes_rows: bool

    @property
    def ours(self) -> bool:
        """Whether ``Prepared.sharders`` shards it, and plugins may have its tables.

        ``DistributedModelParallel`` matches types exactly, so a subclass is another module.
        """
        return type(self.shardable) in (EmbeddingBagCollection, EmbeddingCollection)

    @property
    def is_subclass(self) -> bool:
        """Whether it is a subclass of a collection, which nobody shards."""
        ours = isinstance(self.shardable, EmbeddingBagCollection | EmbeddingCollection)
        return ours and not self.ours

    @property
    def why_left(self) -> str:
        """Why it is not ``ours``, for messages and tables."""
        kind = type(self.shardable)
        if self.is_subclass:
            pooled = isinstance(self.shardable, EmbeddingBagCollection)
            base = "EmbeddingBagCollection" if pooled else "EmbeddingCollection"
            return (
                f"{self.path or 'the model'} is a {kind.__name__}, a subclass of {base}, and "
                "DistributedModelParallel matches types exactly"
            )
        return (
            f"{self.path or 'the model'} is a {kind.__name__}, which TorchRec's own sharder takes "
            "as a whole"
        )


def rows_by_feature(
    tables: Iterable[Table], limits: Mapping[str, int | None] = MappingProxyType({})
) -> dict[str, int]:
    """How many ids a feature may have: the rows of the smallest table that it looks up.

    Args:
        tables: of a model.
        limits: by table, a bound of ids in place of its rows; None for any id.
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
    """The tables of the unsharded EmbeddingBagCollections and EmbeddingCollections of ``model``.

    Without those inside modules that are left to TorchRec, as managed collision.
    """
    return [
        table
        for module in embedding_modules(model)
        if isinstance(module.shardable, EmbeddingBagCollection | EmbeddingCollection)
        for table in module.tables
    ]


def all_tables_of(model: nn.Module) -> list[Table]:
    """The tables of all of them, those inside modules that are left to TorchRec too."""
    return [table for module in embedding_modules(model) for table in module.tables]


def names_of_several(tables: Iterable[Table]) -> list[str]:
    """Names that more than one of the tables has."""
    counts = Counter(table.name for table in tables)
    return [name for name, count in counts.items() if count > 1]


def left_modules(model: nn.Module) -> list[EmbeddingModule]:
    """The other modules with tables, which have to be sharded as a whole."""
    return [
        module
        for module in embedding_modules(model)
        if not isinstance(module.shardable, EmbeddingBagCollection | EmbeddingCollection)
    ]


def embedding_modules(model: nn.Module) -> Iterator[EmbeddingModule]:
    """The unsharded modules of ``model`` that have tables, each once."""
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[EmbeddingModule]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if _is_one_of(module, _HOLDING) or _tables(module):
            tables = tuple(table for child in module.modules() for table in _tables(child))
            yield EmbeddingModule(path, module, tables, not _is_one_of(module, _REMAPPING))
            return
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)

    yield from visit("", model)


def refuse_frozen(path: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters of tables that are frozen.

    Args:
        path: of their module.
        parameters: by name.

    Raises:
        SetupError: TorchRec would train one.
    """
    for name, parameter in parameters:
        if not parameter.requires_grad:
            raise SetupError(
                f"{name} of {path or 'the model'} is frozen (requires_grad=False), which the "
                "kernels of TorchRec do not heed: they would train it. Give its table an optimizer "
                "with a learning rate of 0"
            )


def _refuse_tied(path: str, module: nn.Module) -> None:
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise SetupError(
                f"{first} and {name} of {path or 'the model'} are one weight, of which sharding "
                "would make two that train apart: give one table the features of both"
            )


def refuse_shared_tables(model: nn.Module) -> None:
    """Refuse tables that several modules have: each would be sharded to a table of its own.

    Raises:
        SetupError: an embedding module is at two paths, or has a parameter of another module, or
            one twice; or a table is frozen, and TorchRec would train it.
    """
    paths: dict[int, str] = {}
    others: list[tuple[str, nn.Parameter]] = []

    def visit(
        path: str, module: nn.Module, around: tuple[nn.Module, ...], inside: bool = False
    ) -> None:
        if any(module is each for each in around):  # a model may refer to itself
            return
        has_tables = bool(_tables(module))
        inside = inside or has_tables
        if not inside:
            others.extend(module.named_parameters(path, recurse=False))
        if has_tables:
            refuse_frozen(path, module.named_parameters())
            _refuse_tied(path, module)
        for parameter in module.parameters() if has_tables else ():
            first = paths.setdefault(id(parameter), path)
            if first != path:
                raise SetupError(
                    f"{first} and {path} share a table, and DistributedModelParallel would make "
                    "two of it, which train apart: look it up in one module, as features of one "
                    "table, and keep that module at one place of the model"
                )
        for name, child in module._modules.items():  # named_children() has each but once
            if child is not None:
                visit(f"{path}.{name}" if path else name, child, (*around, module), inside)

    visit("", model, ())
    for name, parameter in others:
        if (first := paths.get(id(parameter))) is not None:
            raise SetupError(
                f"{name} is a table of {first or 'the model'}, and DistributedModelParallel would "
                "make two of it, which train apart: give it a parameter of its own, or look the "
                "rows that it takes up in the table"
            )


def sharded_modules(
    model: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]
) -> Iterator[tuple[nn.Module, ModuleSharder[nn.Module]]]:
    """The modules that ``DistributedModelParallel`` shards, each with its sharder."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[tuple[nn.Module, ModuleSharder[nn.Module]]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if (sharder := by_type.get(type(module))) is not None:
            yield module, sharder
            return
        for child in module.children():
            yield from visit(child)

    yield from visit(model)


def outermost_sharded(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield sharded modules with their paths, without those inside of others."""
    if isinstance(module, ShardedModule):
        yield path, module
        return
    for name, child in module.named_children():
        yield from outermost_sharded(child, f"{path}.{name}" if path else name)


def _is_one_of(module: nn.Module, names: set[str]) -> bool:
    return any(
        base.__name__ in names and base.__module__.startswith("torchrec.")
        for base in type(module).__mro__
    )


def _tables(module: nn.Module) -> list[Table]:
    """The tables of an embedding module; none of any other module."""
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


def table_name(feature: str) -> str:
    """The demo model has one table a feature."""
    return f"t_{feature}"
