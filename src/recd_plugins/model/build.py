"""Builds the model of a run config: the built-in model or a plugin's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import nn

from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.config.run_config import table_problems
from recd_plugins.data.access import positive_counts
from recd_plugins.data.prepared import UnknownLookups, plan_placement
from recd_plugins.data.preprocess import dense_columns
from recd_plugins.interfaces import FeatureSchema, Model, ModelFeatures, TargetPooling
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.model.dlrm import DLRM
from recd_plugins.runtime.errors import Problem, RecdError, RegistryError
from recd_plugins.runtime.text import did_you_mean, shortened


def build_model(registry: RunConfig, schema: FeatureSchema) -> nn.Module:
    """Build the model of the ``model:`` section, without its sequence pooling modules.

    Raises:
        RecdError: the run config has no ``model:`` section, or the model does not fit the data.
        RegistryError: a pattern of ``model.tables`` matches no table.
    """
    for entry in registry.entries("model"):
        return _built(registry, schema, entry)
    if registry.model is None:
        raise RecdError(
            f"{registry.path}: the registry file has no model: section. Add a model: section, or "
            "pass your own model to prepare()."
        )
    if not schema.sparse and not schema.dense:
        raise RecdError(
            f"{registry.path}: the dataset has no features. Name columns of ids or numbers in "
            "dataset.options."
        )
    num_dense = len(dense_columns(registry, schema))  # reports problems of preprocessing first
    problems = table_problems(registry, schema)
    for each in registry.pooling:
        target = each.plugin.target if isinstance(each.plugin, TargetPooling) else None
        if target is not None and target not in schema.sparse:
            hint = (
                did_you_mean(target, schema.sparse) or f". Use one of: {shortened(schema.sparse)}"
            )
            where = str(registry.path), each.line, f"{each.field}.options.target"
            problems.append(Problem(*where, f"no feature is named {target!r}{hint}"))
    if problems:
        raise RegistryError(problems)
    placement = plan_placement(registry, schema)
    bag_order = [feature for feature in schema.sparse if feature not in placement.sequence]
    graphs = registry.training.cuda_graphs
    if registry.model.multi_task is not None and not schema.tasks:
        raise RecdError(
            f"{registry.path}: model.multi_task: the dataset has one label. Remove the section, or "
            "list several labels in dataset.options.label."
        )
    model = DLRM(registry.model, num_dense, placement, bag_order, graphs, schema.tasks)
    dataset = registry.wrap_dataset(UnknownLookups())
    if schema.tasks:
        model.start_tasks_at(dataset.task_means())
        return model
    mean = dataset.label_mean()
    if mean is not None and 0 < mean < 1:
        model.start_at(mean)
    return model


def _built(registry: RunConfig, schema: FeatureSchema, entry: Entry[Model]) -> nn.Module:
    sequence = registry.claim("pooling", schema.sparse)
    features = ModelFeatures(
        dense=dense_columns(registry, schema),
        pooled=tuple(feature for feature in schema.sparse if feature not in sequence),
        sequence=tuple(sequence),
        replicated=tuple(
            pattern
            for each in registry.sharding
            if each.plugin.replicates
            for pattern in each.patterns
        ),
        positive_counts=partial(positive_counts, registry),
        tasks=schema.tasks,
    )
    if schema.tasks and not entry.plugin.multi_task:
        raise RecdError(
            f"{registry.path}:{entry.line}: {entry.plugin.name} predicts one label, but the "
            f"dataset has {', '.join(map(repr, schema.labels))}. Keep one label, or use the "
            "built-in model."
        )
    with at_entry(registry.path, entry), plugin_call(entry.plugin, "build"):
        return entry.plugin.build(features)


def model_code(registry: RunConfig, model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which errors of the model name the model plugin."""
    entry = next(iter(registry.entries("model")), None)
    return plugin_call(entry.plugin, "forward", type(model)) if entry else nullcontext()
