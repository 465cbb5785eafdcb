"""Built-in plugin kinds."""

from __future__ import annotations

from typing import Any

from recd_plugins.interfaces import (
    Cache,
    Callback,
    Converter,
    Dataset,
    Ingestion,
    Kind,
    Metric,
    Model,
    Optimizer,
    Pipeline,
    Pooling,
    Preprocessing,
    Sharding,
)


def _kind(interface: Any, section: str, claims: Any, description: str, **options: Any) -> Kind:
    return Kind(interface.kind, interface, section, claims, description, **options)


#: Built-in kinds, in the order in which data passes through them.
KINDS = (
    _kind(Dataset, "dataset", "one", "Where rows come from."),
    _kind(Converter, "converter", "one", "How rows become tensors."),
    _kind(
        Preprocessing,
        "preprocessing",
        "several by feature",
        "Transforms of features; those of one feature run in this order.",
    ),
    _kind(
        Ingestion,
        "ingestion",
        "optional one",
        "Who makes the batches of a rank; without it, training.workers processes or the rank "
        "itself.",
    ),
    _kind(
        Pooling,
        "pooling",
        "by feature",
        "Sequence features and what pools them, one entry a feature.",
    ),
    _kind(Sharding, "sharding", "by table", "Where the rows of tables live, one entry a table."),
    _kind(Cache, "cache", "by table", "Caches in front of tables, one entry a table."),
    _kind(
        Optimizer,
        "optimizers",
        "by table",
        "What trains the rows of tables, one entry a table; training.optimizer trains the others.",
    ),
    _kind(
        Metric,
        "metrics",
        "list",
        "Figures of the test split beside normalized entropy and AUC.",
        observes=True,
    ),
    _kind(
        Pipeline,
        "pipeline",
        "optional one",
        "How the steps of training overlap; without it, TorchRec's TrainPipelineSparseDist, with "
        "lookahead where a cache wants it.",
        observes=True,
    ),
    _kind(
        Callback,
        "callbacks",
        "list",
        "What looks on while the model is trained, called in this order.",
        observes=True,
    ),
    _kind(
        Model,
        "model",
        "optional one",
        "The model: kind and sizes of the built-in one, or a plugin; leave it out to bring one.",
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}

#: Sections of registry files without a plugin kind.
OTHER_SECTIONS = frozenset({"version", "model", "training"})
#: Sections of these kinds.
OWN_SECTIONS = frozenset(kind.section for kind in KINDS)
