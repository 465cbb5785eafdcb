"""The kinds of recd-plugins itself, registered as those of a third party are."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.config.hookspecs import hookimpl
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

_CONTRACTS = "recd_plugins.testing.contracts"

#: In the order in which data meets them.
KINDS = (
    Kind(
        name="dataset",
        interface=Dataset,
        section="dataset",
        claims="one",
        description="Where rows come from.",
        contract=f"{_CONTRACTS}.DatasetContract",
    ),
    Kind(
        name="converter",
        interface=Converter,
        section="converter",
        claims="one",
        description="How rows become tensors.",
        contract=f"{_CONTRACTS}.ConverterContract",
    ),
    Kind(
        name="preprocessing",
        interface=Preprocessing,
        section="preprocessing",
        claims="several by feature",
        description="Transforms of features; those of one feature run in this order.",
        contract=f"{_CONTRACTS}.PreprocessingContract",
    ),
    Kind(
        name="ingestion",
        interface=Ingestion,
        section="ingestion",
        claims="optional one",
        description="Who makes the batches of a rank; without it, training.workers processes or "
        "the rank itself.",
        contract=f"{_CONTRACTS}.IngestionContract",
    ),
    Kind(
        name="pooling",
        interface=Pooling,
        section="pooling",
        claims="by feature",
        description="Sequence features and what pools them, one entry a feature.",
        contract=f"{_CONTRACTS}.PoolingContract",
    ),
    Kind(
        name="sharding",
        interface=Sharding,
        section="sharding",
        claims="by table",
        description="Where the rows of tables live, one entry a table.",
        contract=f"{_CONTRACTS}.ShardingContract",
    ),
    Kind(
        name="cache",
        interface=Cache,
        section="cache",
        claims="by table",
        description="Caches in front of tables, one entry a table.",
        contract=f"{_CONTRACTS}.CacheContract",
    ),
    Kind(
        name="optimizer",
        interface=Optimizer,
        section="optimizers",
        claims="by table",
        description="What trains the rows of tables, one entry a table; training.optimizer trains "
        "the others.",
        contract=f"{_CONTRACTS}.OptimizerContract",
    ),
    Kind(
        name="metric",
        interface=Metric,
        section="metrics",
        claims="list",
        description="Figures of the test split beside normalized entropy and AUC.",
        contract=f"{_CONTRACTS}.MetricContract",
        observes=True,
    ),
    Kind(
        name="pipeline",
        interface=Pipeline,
        section="pipeline",
        claims="optional one",
        description="How the steps of training overlap; without it, TorchRec's "
        "TrainPipelineSparseDist, with lookahead where a cache wants it.",
        contract=f"{_CONTRACTS}.PipelineContract",
        observes=True,
    ),
    Kind(
        name="callback",
        interface=Callback,
        section="callbacks",
        claims="list",
        description="What looks on while the model is trained, called in this order.",
        contract=f"{_CONTRACTS}.CallbackContract",
        observes=True,
    ),
    Kind(
        name="model",
        interface=Model,
        section="model",
        claims="optional one",
        description="The model: kind and sizes of the built-in one, or a plugin; leave it out to "
        "bring one.",
        contract=f"{_CONTRACTS}.ModelContract",
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}

#: Sections of registry files that are of no kind.
OTHER_SECTIONS = frozenset({"version", "model", "training"})
#: Those of the kinds of recd-plugins itself.
OWN_SECTIONS = frozenset(kind.section for kind in KINDS)


@hookimpl
def register_kinds() -> Sequence[Kind]:
    """See :func:`recd_plugins.config.hookspecs.register_kinds`."""
    return KINDS
