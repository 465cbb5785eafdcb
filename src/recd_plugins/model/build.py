"""The model of a registry: the built-in one, or a plugin's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.config.document import short_repr
from recd_plugins.config.entries import matched
from recd_plugins.data.access import positive_counts
from recd_plugins.data.prepared import UnknownLookups, plan_placement
from recd_plugins.data.preprocess import num_dense_inputs
from recd_plugins.interfaces import FeatureSchema, Model, ModelFeatures
from recd_plugins.interfaces.model_tables import embedding_modules, table_name
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.model.dlrm import DLRM
from recd_plugins.runtime.errors import PluginError, RecdError, RegistryError
from recd_plugins.runtime.text import did_you_mean, shortened

# What TorchRec and torch say of a forward that cannot be trained, after it has returned.
_OF_FORWARD = {
    "Invalid PipelinedForward usage": "forward calls a module of tables more than once, and a "
    "pipeline has one batch of ids for each: call it once, and use twice what it returns",
    "modified by an inplace operation": "forward changes in place what its gradients are made of: "
    "make a new tensor",
}


def build_model(registry: RunConfig, schema: FeatureSchema) -> nn.Module:
    """The model of the registry's ``model:`` section, without pooling modules.

    Raises:
        RecdError: the registry has no ``model:`` section, or the model does not fit the data.
        RegistryError: a pattern of ``model.tables`` matches no table.
        PluginError: a plugin makes it, and fails or makes something else.
    """
    for entry in registry.entries("model"):
        return _built(registry, schema, entry)
    if registry.model is None:
        raise RecdError(
            f"{registry.path}: no model: section; add one, or bring a model of your own"
        )
    if not schema.sparse and not schema.dense:
        raise RecdError(
            f"{registry.path}: the dataset has no feature; name columns of ids or numbers in its "
            "options"
        )
    _check_tables(registry, [table_name(feature) for feature in schema.sparse])
    num_dense = num_dense_inputs(registry, schema)
    placement = plan_placement(registry, schema)
    bag_order = [feature for feature in schema.sparse if feature not in placement.sequence]
    model = DLRM(registry.model, num_dense, placement, bag_order)
    mean = registry.wrap_dataset(UnknownLookups()).label_mean()
    if mean is not None and 0 < mean < 1:
        model.start_at(mean)
    return model


def _built(registry: RunConfig, schema: FeatureSchema, entry: Entry[Model]) -> nn.Module:
    """What a plugin makes."""
    plugin, sequence = entry.plugin, registry.claim("pooling", schema.sparse)
    features = ModelFeatures(
        num_dense=num_dense_inputs(registry, schema),
        pooled=tuple(feature for feature in schema.sparse if feature not in sequence),
        sequence=tuple(sequence),
        replicated=tuple(
            pattern
            for each in registry.sharding
            if each.plugin.replicates
            for pattern in each.patterns
        ),
        positive_counts=partial(positive_counts, registry),
    )
    with at_entry(registry.path, entry):
        return model_of(plugin, features)


def model_of(plugin: Model, features: ModelFeatures) -> nn.Module:
    """What a plugin makes; its ``forward`` is checked whenever it is called.

    Raises:
        PluginError: it fails, makes no module, or tables of none, or of other features.
    """
    with plugin_call(plugin, "build"):
        model = plugin.build(features)
    if not isinstance(model, nn.Module):
        raise PluginError(f"{plugin.title}: build returned {model!r}; expected a torch.nn.Module")
    model.register_forward_hook(partial(_check_output, plugin))
    tables = [table for module in embedding_modules(model) for table in module.tables]
    if not tables:
        raise PluginError(
            f"{plugin.title}: build made a {type(model).__name__} without tables; expected "
            "EmbeddingBagCollections or EmbeddingCollections of TorchRec in it"
        )
    known = [*features.pooled, *features.sequence]
    for table in tables:
        if unknown := [name for name in table.features if name not in known]:
            raise PluginError(
                f"{plugin.title}: build made table {table.name} for feature {unknown[0]}, which is "
                "no sparse feature of the dataset"
                + (did_you_mean(unknown[0], known) or f"; the sparse features: {shortened(known)}")
            )
    return model


@contextmanager
def model_code(registry: RunConfig, model: nn.Module) -> Iterator[None]:
    """A context in which the registry's model runs: what code of a plugin fails at names it."""
    entry = next(iter(registry.entries("model")), None)
    if entry is None:
        yield
        return
    try:
        with plugin_call(entry.plugin, "forward", type(model)):
            yield
    except (RuntimeError, AssertionError) as error:
        for said, meant in _OF_FORWARD.items():
            if said in str(error):
                raise PluginError(f"{entry.plugin.title}: {meant} ({error})") from error
        raise


def _check_output(plugin: Model, module: nn.Module, args: Any, output: Any) -> None:
    """Refuse what no run can train on; tensors with a graph would keep it to the run's end."""
    expected = args[0].labels
    match output:
        case (Tensor() as loss, (Tensor() as again, Tensor() as logits, Tensor() as labels)):
            scalars = loss.dim() + again.dim() == 0
            rows = logits.shape == labels.shape == expected.shape
            detached = not any(tensor.requires_grad for tensor in output[1])
            if not (scalars and rows and detached):
                found = ", ".join(_described(tensor) for tensor in (loss, again, logits, labels))
                found += f" of {len(expected)} rows"
            elif not _same(loss.detach(), again):
                found = "another loss to show than to train by"
            elif not _same(labels, expected):
                found = "other labels than those of the batch"
            elif module.training and torch.is_grad_enabled() and not loss.requires_grad:
                found = "a loss without its graph, by which nothing learns"
            else:
                return
        case _:
            found = short_repr(output)
    raise PluginError(
        f"{plugin.title}: forward returned {found}; expected loss, (loss, logits, labels): the "
        "mean loss of the batch, a scalar, and detached the same again, logits [B] and the batch's "
        "labels [B]"
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether values are the same, which is looked at where the memory is another."""
    if type(one) is not Tensor or type(other) is not Tensor:
        return True  # traced, without values
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return bool(torch.isclose(one, other.to(one.dtype), rtol=0, atol=0, equal_nan=True).all())


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}{' with its graph' if tensor.requires_grad else ''}"


def _check_tables(registry: RunConfig, names: list[str]) -> None:
    """Refuse patterns of ``model.tables`` that match nothing: a table would keep its usual size."""
    assert registry.model is not None, "the caller builds a model"
    known = frozenset(names)
    unmatched = [pattern for pattern in registry.model.tables if not matched(pattern, known)]
    if unmatched:
        raise RegistryError(
            [
                registry.problem(
                    ("model", "tables", pattern),
                    "matches no table"
                    + (did_you_mean(pattern, names) or f"; the tables: {shortened(names)}"),
                )
                for pattern in unmatched
            ]
        )
