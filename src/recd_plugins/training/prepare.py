"""``Registry.prepare``: put poolings and what sharding plugins replace into a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from recd_plugins.data.feature_steps import num_dense_inputs
from recd_plugins.data.placement import placement_of, plan_placement
from recd_plugins.distributed import guard
from recd_plugins.errors import PluginError, Problem, RecdError, RegistryError
from recd_plugins.interfaces import (
    FeatureSchema,
    Setting,
    Sharding,
    Table,
    TargetPooling,
)
from recd_plugins.model_tables import (
    EmbeddingModule,
    embedding_modules,
    rows_by_feature,
    table_name,
    tables_of,
)
from recd_plugins.planning.setting import setting_of
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, Prepared, at_entry
from recd_plugins.registry.loader import read_yaml
from recd_plugins.registry.resolve import did_you_mean, shortened
from recd_plugins.training.dlrm import DLRM
from recd_plugins.training.prepare_parts import prepare_parts
from recd_plugins.training.sequence_pooling import SequencePooling

if TYPE_CHECKING:
    from recd_plugins.registry import Registry

logger = logging.getLogger(__name__)


def build_model(registry: Registry, schema: FeatureSchema) -> DLRM:
    """The demo model of the registry's ``model:`` section, without pooling modules.

    Raises:
        RecdError: the registry has no ``model:`` section, or the demo model does not fit the data.
        RegistryError: a pattern of ``model.tables`` matches no table.
    """
    if registry.model is None:
        raise RecdError(
            f"{registry.path}: no model: section; add one, or bring a model of your own"
        )
    if not schema.sparse:
        raise RecdError(
            f"{registry.path}: the dataset has no sparse feature, which the demo model needs; name "
            "columns of ids in its option sparse, or bring a model of your own"
        )
    _check_tables(registry, [table_name(feature) for feature in schema.sparse])
    num_dense = num_dense_inputs(registry, schema)
    placement = plan_placement(registry, schema)
    bag_order = [feature for feature in schema.sparse if feature not in placement.sequence]
    return DLRM(registry.model, num_dense, placement, bag_order)


def _check_tables(registry: Registry, names: list[str]) -> None:
    """Refuse patterns of ``model.tables`` that match nothing: a table would keep its usual size."""
    assert registry.model is not None, "the caller builds a model"
    unmatched = [
        pattern
        for pattern in registry.model.tables
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if unmatched:
        document = read_yaml(registry.path)  # once more: it knows the lines
        raise RegistryError(
            [
                document.problem(
                    ("model", "tables", pattern),
                    "matches no table"
                    + (did_you_mean(pattern, names) or f"; the tables: {shortened(names)}"),
                )
                for pattern in unmatched
            ]
        )


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
    """
    modules = list(embedding_modules(model))
    tables = [table for module in modules if module.ours for table in module.tables]
    _refuse_claims(registry, modules)
    num_embeddings = rows_by_feature(
        table for module in modules if module.takes_rows for table in module.tables
    )
    claims = registry.claim("sharding", [table.name for table in tables])
    registry.claim("cache", [table.name for table in tables])
    plugins = {name: entry.plugin for name, entry in claims.items()}
    placement_of(model, plugins)  # refuses what cannot be, before plugins change the model
    setting = setting or setting_of(registry, model)
    for entry in registry.sharding:
        claimed = [table for table in tables if claims.get(table.name) is entry]
        model = _rewritten(registry.path, model, entry, claimed, setting)
    parts = prepare_parts(registry, tables, setting)
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
        for entry in (*registry.sharding, *registry.cache)
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


def put_poolings(registry: Registry, model: nn.Module) -> None:
    """Fill the SequencePooling modules of ``model``.

    Raises:
        RecdError: a sequence feature has no pooling, or its plugin makes none.
        RegistryError: a pooling does not suit the model, or its target is no feature of it.
    """
    modules = [m for m in model.modules() if isinstance(m, SequencePooling)]
    claims = registry.claim("pooling", [f for module in modules for f in module.features])
    for module in modules:
        for feature in module.features:
            entry = claims.get(feature)
            if entry is not None:
                with at_entry(registry.path, entry):
                    module.put(feature, entry.plugin)
                logger.info("%s pools %s", entry.plugin.name, feature)
            elif feature not in module.pooled_by:
                raise RecdError(
                    f"{registry.path}: nothing pools the sequence feature {feature}; "
                    "name it in a pooling: entry"
                )
    _check_targets(registry, model, modules)


def _check_targets(
    registry: Registry, model: nn.Module, modules: Sequence[SequencePooling]
) -> None:
    features = list(rows_by_feature(tables_of(model)))
    unknown = {t for module in modules for t in module.targets if t not in features}
    problems = [
        Problem(
            str(registry.path),
            entry.line,
            f"{entry.field}.options.target",
            f"{entry.plugin.target} is no feature that the model looks up"
            + (
                did_you_mean(entry.plugin.target, features)
                or f"; the features: {shortened(features)}"
            ),
        )
        for entry in registry.pooling
        if isinstance(entry.plugin, TargetPooling) and entry.plugin.target in unknown
    ]
    if problems:
        raise RegistryError(problems)
