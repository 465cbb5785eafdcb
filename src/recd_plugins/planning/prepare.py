"""``Registry.prepare``: put poolings and what sharding plugins replace into a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from recd_plugins.data.placement import placement_of
from recd_plugins.data.prepared import Prepared
from recd_plugins.distributed.guards import guard
from recd_plugins.distributed.torchrec_internals import refuse_other_versions
from recd_plugins.errors import PluginError, Problem, RegistryError
from recd_plugins.interfaces import (
    Setting,
    Sharding,
    Table,
)
from recd_plugins.model.poolings import put_poolings
from recd_plugins.model_tables import (
    EmbeddingModule,
    embedding_modules,
    refuse_shared_tables,
    rows_by_feature,
)
from recd_plugins.planning.optimizer_entries import apply_optimizers
from recd_plugins.planning.prepare_parts import prepare_parts
from recd_plugins.planning.setting import setting_of
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, Registry, at_entry

logger = logging.getLogger(__name__)


def prepare_model(registry: Registry, model: nn.Module, setting: Setting | None = None) -> Prepared:
    """Put what the registry names into ``model``; each change is logged.

    Args:
        registry: says what goes where.
        model: any model with EmbeddingBagCollections (fed ``batch.sparse_features``) and
            EmbeddingCollections (fed ``batch.sequence_features`` and pooled by SequencePooling).
        setting: the ranks that it will be sharded for; ``setting_of(registry, model)`` without it.

    Raises:
        RegistryError: a pattern matches no table or feature, or two entries claim one.
        ExactnessError: a combination that cannot be exact.
        SetupError: modules share a table; or TorchRec, FBGEMM or torch lacks what this package
            relies on.
    """
    refuse_other_versions()
    refuse_shared_tables(model)
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
    # Without a setting a trainer may still choose, where there is a choice.
    device_type = None if torch.cuda.is_available() else "cpu"
    device_type = setting.device_type if setting else device_type
    setting = setting or setting_of(registry, model)
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
    names = ", ".join(table.name for table in tables)
    logger.info("%s shards %s", entry.plugin.name, names)
    return rewritten
