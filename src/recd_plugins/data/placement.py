"""Which features are looked up how: from the registry for the demo model, else from the model."""

from __future__ import annotations

from torch import nn

from recd_plugins.errors import ExactnessError, SetupError
from recd_plugins.interfaces import FeatureSchema, Sharding
from recd_plugins.model_tables import embedding_modules, table_name
from recd_plugins.registry import RunConfig
from recd_plugins.values.batch import Placement


def plan_placement(registry: RunConfig, schema: FeatureSchema) -> Placement:
    """The placement for the demo model: features that a pooling entry claims are sequences, tables
    that a replicating sharding entry claims are replicated, and all else is pooled.
    """
    if registry.entries("model"):
        raise SetupError(
            f"{registry.path}: what its model looks up how is known when prepare has seen "
            "it: read by what it returns, as prepared.dataloader()"
        )
    sequence = registry.claim("pooling", schema.sparse)
    sharding = registry.claim("sharding", [table_name(feature) for feature in schema.sparse])
    replicated = {
        feature
        for feature in schema.sparse
        if feature not in sequence
        and (entry := sharding.get(table_name(feature))) is not None
        and entry.plugin.replicates
    }
    return Placement(
        pooled=tuple(f for f in schema.sparse if f not in sequence and f not in replicated),
        replicated=tuple(f for f in schema.sparse if f in replicated),
        sequence=tuple(f for f in schema.sparse if f in sequence),
    )


def placement_of(model: nn.Module, sharding: dict[str, Sharding]) -> Placement:
    """The placement of a model's features, read from its embedding modules."""
    pooled: list[str] = []
    replicated: list[str] = []
    sequence: list[str] = []
    for module in embedding_modules(model):
        bags = [table for table in module.tables if table.pooled]
        copies = [table.name for table in bags if _replicates(sharding.get(table.name))]
        if copies and len(copies) < len(bags):
            raise ExactnessError(
                f"{module.path}: tables {', '.join(copies)} are replicated on every rank, the "
                "others are not. Data-parallel kernels take no deduplicated input: give these "
                "tables an EmbeddingBagCollection of their own, fed by batch.replicated_features, "
                "or another sharding"
            )
        for table in module.tables:
            if not table.pooled:
                sequence.extend(table.features)
            else:
                (replicated if copies else pooled).extend(table.features)
    return Placement(_once(pooled), _once(replicated), _once(sequence))


def _replicates(plugin: Sharding | None) -> bool:
    return plugin is not None and plugin.replicates


def _once(features: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(features))
