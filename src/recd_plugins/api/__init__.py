"""The API of plugins: what a package of plugins imports, besides ``recd_plugins.testing``.

Here is what declares plugins. What they are made of is in the modules of this package, by subject:
without torch ``commands``, ``files``, ``registry``, ``reading``, ``tables``, ``columns`` and
``access``, with torch ``batches``, ``ingestion``, ``model``, ``distributed``, ``planning`` and
``training``.

A module of plugins may say which version it needs; an older recd-plugins then refuses the package,
by name, where a registry file uses it::

    from recd_plugins.api import Preprocessing, hookimpl

    REQUIRES_API = 2

What needs torch is imported when it is asked for: the bases of sharders and sharded modules.
Modules that declare plugins import these names inside methods.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recd_plugins.errors import (
    DataError,
    ExactnessError,
    PluginError,
    RecdError,
    RegistryError,
    SetupError,
)
from recd_plugins.hookspecs import hookimpl
from recd_plugins.interfaces import (
    MOST_UNKNOWN,
    Cache,
    Callback,
    Choice,
    ChoiceQuestion,
    Chooser,
    Converter,
    Dataset,
    DatasetWrapper,
    FeatureLookups,
    FeatureSchema,
    Feed,
    Ingestion,
    Kind,
    LookupKernels,
    Lookups,
    Metric,
    Model,
    ModelFeatures,
    Offer,
    Offered,
    Optimizer,
    Origin,
    Pipeline,
    Plugin,
    PluginOptions,
    Pooling,
    Preprocessing,
    Reader,
    RowMemory,
    Rows,
    RowUpdate,
    RunBatch,
    RunEnd,
    RunEvaluation,
    RunInterruption,
    RunReport,
    RunStart,
    RunStep,
    ScoredBatch,
    Section,
    SessionKeys,
    Setting,
    SharderArguments,
    Sharding,
    Split,
    StepShape,
    Table,
    TablePart,
    TargetPooling,
    TrainedRun,
    TrainingData,
    TrainPipeline,
    Trial,
)
from recd_plugins.manager import API_VERSION
from recd_plugins.optional_library import optional_library
from recd_plugins.planning.plan_mode import Measurement, PlanAnswer, PlanMode, PlanQuestion
from recd_plugins.values.step_cost import StepCost

if TYPE_CHECKING:
    from recd_plugins.sharding.bags import ExactShardedEmbeddingBagCollection
    from recd_plugins.sharding.contexts import ExactSequenceContext
    from recd_plugins.sharding.sequences import ExactShardedEmbeddingCollection
    from recd_plugins.sharding.sharders import (
        ExactEmbeddingBagCollectionSharder,
        ExactEmbeddingCollectionSharder,
    )

#: Modules of names that need torch.
_WITH_TORCH = {
    "ExactEmbeddingBagCollectionSharder": "recd_plugins.sharding.sharders",
    "ExactEmbeddingCollectionSharder": "recd_plugins.sharding.sharders",
    "ExactSequenceContext": "recd_plugins.sharding.contexts",
    "ExactShardedEmbeddingBagCollection": "recd_plugins.sharding.bags",
    "ExactShardedEmbeddingCollection": "recd_plugins.sharding.sequences",
}

__all__ = [
    "API_VERSION",
    "MOST_UNKNOWN",
    "Cache",
    "Callback",
    "Choice",
    "ChoiceQuestion",
    "Chooser",
    "Converter",
    "DataError",
    "Dataset",
    "DatasetWrapper",
    "ExactEmbeddingBagCollectionSharder",
    "ExactEmbeddingCollectionSharder",
    "ExactSequenceContext",
    "ExactShardedEmbeddingBagCollection",
    "ExactShardedEmbeddingCollection",
    "ExactnessError",
    "FeatureLookups",
    "FeatureSchema",
    "Feed",
    "Ingestion",
    "Kind",
    "LookupKernels",
    "Lookups",
    "Measurement",
    "Metric",
    "Model",
    "ModelFeatures",
    "Offer",
    "Offered",
    "Optimizer",
    "Origin",
    "Pipeline",
    "PlanAnswer",
    "PlanMode",
    "PlanQuestion",
    "Plugin",
    "PluginError",
    "PluginOptions",
    "Pooling",
    "Preprocessing",
    "Reader",
    "RecdError",
    "RegistryError",
    "RowMemory",
    "RowUpdate",
    "Rows",
    "RunBatch",
    "RunEnd",
    "RunEvaluation",
    "RunInterruption",
    "RunReport",
    "RunStart",
    "RunStep",
    "ScoredBatch",
    "Section",
    "SessionKeys",
    "Setting",
    "SetupError",
    "SharderArguments",
    "Sharding",
    "Split",
    "StepCost",
    "StepShape",
    "Table",
    "TablePart",
    "TargetPooling",
    "TrainPipeline",
    "TrainedRun",
    "TrainingData",
    "Trial",
    "hookimpl",
    "optional_library",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
