"""Built-in plugin kinds, such as ``dataset`` and ``sharding``, and their sections."""

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
    _kind(Dataset, "dataset", "one", "Dataset that provides the training rows."),
    _kind(Converter, "converter", "one", "Converter from rows to jagged tensors."),
    _kind(
        Preprocessing,
        "preprocessing",
        "several by feature",
        "Transforms of features. A feature with several entries is transformed in file order.",
    ),
    _kind(
        Ingestion,
        "ingestion",
        "optional one",
        "Plugin that produces batches outside the training process. The default is "
        "`training.workers` reader processes per rank.",
    ),
    _kind(
        Pooling,
        "pooling",
        "by feature",
        "Pooling of sequence features. At most one entry may match a feature.",
    ),
    _kind(
        Sharding,
        "sharding",
        "by table",
        "Sharding of embedding tables over ranks. At most one entry may match a table.",
    ),
    _kind(
        Cache,
        "cache",
        "by table",
        "Caches of embedding table rows. At most one entry may match a table.",
    ),
    _kind(
        Optimizer,
        "optimizers",
        "by table",
        "Optimizers of embedding tables. At most one entry may match a table. Tables without an "
        "entry use `training.optimizer`.",
    ),
    _kind(
        Metric,
        "metrics",
        "list",
        "Additional metrics of the test split. Built-in metrics are always computed.",
        observes=True,
    ),
    _kind(
        Pipeline,
        "pipeline",
        "optional one",
        "Train pipeline. The default is TorchRec's TrainPipelineSparseDist, with row prefetch if a "
        "cache needs prefetch.",
        observes=True,
    ),
    _kind(
        Callback,
        "callbacks",
        "list",
        "Callbacks that observe training. They are called in file order.",
        observes=True,
    ),
    _kind(
        Model,
        "model",
        "optional one",
        "Sizes of the built-in model, or a model plugin. Omit this section if your training script "
        "builds the model.",
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}

#: Sections of registry files without a plugin kind.
OTHER_SECTIONS = frozenset({"version", "model", "training"})
#: Sections of registry files that configure built-in kinds.
OWN_SECTIONS = frozenset(kind.section for kind in KINDS)
