"""The entries of a registry put into a model: what ``prepare`` does, and every trial."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.data.prepared import placement_of
from recd_plugins.data.preprocess import refuse_ids_apart
from recd_plugins.errors import Problem, RegistryError, SetupError
from recd_plugins.interfaces import Cache, PlanContext, Sharding, Table, TableStrategy
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.model_tables import (
    EmbeddingModule,
    embedding_modules,
    rows_by_feature,
)
from recd_plugins.planning.optimizer_entries import apply_optimizers
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.setting import id_limits
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, RunConfig, at_entry
from recd_plugins.registry.checked_part import CheckedPart, call_class
from recd_plugins.sharding.batch_form import set_takes_stored_rows, takes_stored_rows
from recd_plugins.sharding.coalesced.groups import feature_groups
from recd_plugins.sharding.guards import guard

logger = logging.getLogger(__name__)


def prepare_entries(
    registry: RunConfig, model: nn.Module, setting: PlanContext, device_type: str | None
) -> Prepared:
    """Put what the registry names into ``model``.

    Args:
        registry: says what goes where; none of its entries is a chooser.
        model: not prepared.
        setting: the ranks that it will be sharded for.
        device_type: of the tables, as far as it is known.

    Raises:
        RegistryError: a pattern matches no table or feature, or two entries claim one.
        ExactnessError: a combination that cannot be exact.
    """
    modules = list(embedding_modules(model))
    tables = [table for module in modules if module.ours for table in module.tables]
    _refuse_claims(registry, modules)
    refuse_ids_apart(registry, tables)
    num_embeddings = rows_by_feature(
        (table for module in modules if module.takes_rows for table in module.tables),
        id_limits(registry, tables),
    )
    claims = registry.claim("sharding", [table.name for table in tables])
    for kind in ("cache", "optimizer"):
        registry.claim(kind, [table.name for table in tables])
    plugins = {name: entry.plugin for name, entry in claims.items()}
    coalesced = frozenset(name for name, plugin in plugins.items() if plugin.coalesces)
    # What cannot be is refused before plugins change the model.
    placement_of(model, plugins)
    _refuse_split_features(registry, modules, coalesced)
    for entry in registry.sharding:
        claimed = [table for table in tables if claims.get(table.name) is entry]
        model = _rewritten(registry.path, model, entry, claimed, setting)
    parts = prepare_parts(registry, tables, setting)
    apply_optimizers(registry, model, tables, device_type, parts)
    put_poolings(registry, model)
    guard(model)
    return Prepared(
        registry,
        model,
        placement_of(model, plugins),
        num_embeddings,
        tuple(tables),
        parts,
        coalesced,
        setting=setting,
    )


def prepare_parts(
    registry: RunConfig, tables: Sequence[Table], setting: PlanContext
) -> dict[str, TableStrategy]:
    """The table parts of entries, by the field of the entry.

    Args:
        registry: its sharding and cache entries.
        tables: of the model.
        setting: the ranks that it will be sharded for.

    Raises:
        RegistryError: a pattern matches no table, two entries claim one, a plugin refuses a table,
            or a table with kernels of its own is on every rank or needs TorchRec's.
    """
    names = [table.name for table in tables]
    sharded, cached = registry.claim("sharding", names), registry.claim("cache", names)
    parts: dict[str, TableStrategy] = {}
    why: dict[str, str] = {}
    for entry in registry.sharding:
        claimed = [table for table in tables if sharded.get(table.name) is entry]
        if (part := _part(registry.path, entry, claimed, setting)) is not None:
            parts[entry.field] = part
            why |= CheckedPart(registry.path, entry, part).needs_stock_kernels()
    for cache in registry.cache:
        claimed = [table for table in tables if cached.get(table.name) is cache]
        if (part := _part(registry.path, cache, claimed, setting)) is not None:
            parts[cache.field] = part
            _check_kernels(registry.path, cache, part, sharded, why)
    return parts


def _refuse_split_features(
    registry: RunConfig, modules: Sequence[EmbeddingModule], coalesced: Collection[str]
) -> None:
    """Refuse entries that coalesce some tables of a feature, and leave others as they are."""
    for entry in registry.sharding:
        for module in modules if entry.plugin.coalesces else ():
            if module.ours and any(entry.matches(table.name) for table in module.tables):
                with at_entry(registry.path, entry):
                    feature_groups(_configs(module.shardable), coalesced)


def _configs(module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    assert isinstance(module, EmbeddingCollection), "of the two that are ours"
    return module.embedding_configs()


def _refuse_claims(registry: RunConfig, modules: Sequence[EmbeddingModule]) -> None:
    """Refuse entries that name tables which these sharders leave to others."""
    problems = [
        Problem(
            str(registry.path),
            entry.line,
            f"{entry.field}.tables",
            f"table {table.name} is left alone: {module.why_left}. Let the entry name others, or "
            "move the table into an EmbeddingBagCollection or EmbeddingCollection",
        )
        for entry in (*registry.sharding, *registry.cache, *registry.entries("optimizer"))
        for module in modules
        if not module.ours
        for table in module.tables
        if entry.matches(table.name)
    ]
    if problems:
        raise RegistryError(problems)


def _rewritten(
    path: Path,
    model: nn.Module,
    entry: Entry[Sharding],
    tables: list[Table],
    setting: PlanContext,
) -> nn.Module:
    pooled = [name for name, module in model.named_modules() if takes_stored_rows(module)]
    with plugin_call(entry.plugin, "rewrite"), at_entry(path, entry):
        rewritten = entry.plugin.rewrite(model, tables, setting)
    # What stands in place of a collection of PooledSequences gets the rows that are stored, too.
    by_name = dict(rewritten.named_modules())
    for name in pooled:
        if name in by_name:
            set_takes_stored_rows(by_name[name])
    return rewritten


def _part(
    path: Path, entry: Entry[Sharding] | Entry[Cache], tables: list[Table], setting: PlanContext
) -> TableStrategy | None:
    with plugin_call(entry.plugin, "part"), at_entry(path, entry):
        return entry.plugin.part(tables, setting)


def _check_kernels(
    path: Path,
    entry: Entry[Cache],
    part: TableStrategy,
    sharded: Mapping[str, Entry[Sharding]],
    why: Mapping[str, str],
) -> None:
    """Refuse kernels of tables that are on every rank or need TorchRec's kernels."""
    kernels = call_class([CheckedPart(path, entry, part)], "kernels")
    if kernels is None:
        return
    for table in kernels.tables:
        if (sharding := sharded.get(table)) is None:
            continue
        where = f"{sharding.plugin.name} ({sharding.field}, line {sharding.line})"
        with at_entry(path, entry):
            if sharding.plugin.replicates:
                raise SetupError(
                    f"table {table} has a cache, and {where} puts it whole on every rank, where "
                    "nothing is fetched: leave one of them out, or shard the table by "
                    "rows, by columns or as a whole"
                )
            if table in why:
                raise SetupError(f"table {table} has a cache, and {where} {why[table]}")
    logger.info("%s caches %s", entry.plugin.name, ", ".join(kernels.tables))
