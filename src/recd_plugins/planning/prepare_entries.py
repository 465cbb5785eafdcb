"""The entries of a registry put into a model: what ``prepare_model`` does, and every trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from recd_plugins.data.placement import placement_of
from recd_plugins.data.prepared import Prepared
from recd_plugins.distributed.guards import guard
from recd_plugins.errors import PluginError, Problem, RegistryError
from recd_plugins.interfaces import Setting, Sharding, Table
from recd_plugins.model.poolings import put_poolings
from recd_plugins.model_tables import EmbeddingModule, embedding_modules, rows_by_feature
from recd_plugins.planning.optimizer_entries import apply_optimizers
from recd_plugins.planning.prepare_parts import prepare_parts
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, Registry, at_entry


def prepare_entries(
    registry: Registry, model: nn.Module, setting: Setting, device_type: str | None
) -> Prepared:
    """Put what the registry names into ``model``.

    Args:
        registry: says what goes where; none of its entries is ``auto``.
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
    num_embeddings = rows_by_feature(
        table for module in modules if module.takes_rows for table in module.tables
    )
    claims = registry.claim("sharding", [table.name for table in tables])
    for kind in ("cache", "optimizer"):
        registry.claim(kind, [table.name for table in tables])
    plugins = {name: entry.plugin for name, entry in claims.items()}
    placement_of(model, plugins)  # refuses what cannot be, before plugins change the model
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
        frozenset(name for name, plugin in plugins.items() if plugin.coalesces),
        setting=setting,
    )


def _refuse_claims(registry: Registry, modules: Sequence[EmbeddingModule]) -> None:
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
    setting: Setting,
) -> nn.Module:
    with plugin_call(entry.plugin, "rewrite"), at_entry(path, entry):
        rewritten = entry.plugin.rewrite(model, tables, setting)
    if not isinstance(rewritten, nn.Module):
        raise PluginError(
            f"{entry.plugin.name}: rewrite returned {rewritten!r}; expected the model"
        )
    return rewritten
