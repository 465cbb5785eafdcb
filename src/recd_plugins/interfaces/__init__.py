"""The kinds of plugins, one abstract class a file; and table parts."""

from recd_plugins.interfaces.cache import Cache
from recd_plugins.interfaces.callback import (
    Callback,
    RunBatch,
    RunEnd,
    RunEvaluation,
    RunInterruption,
    RunStart,
    RunStep,
)
from recd_plugins.interfaces.chooser import (
    Candidate,
    Choice,
    Chooser,
    Evaluation,
    Offered,
    SearchContext,
)
from recd_plugins.interfaces.converter import Converter
from recd_plugins.interfaces.dataset import Dataset, DatasetWrapper, Reader, Split
from recd_plugins.interfaces.ingestion import Feed, Ingestion
from recd_plugins.interfaces.kind import Kind
from recd_plugins.interfaces.lookup_kernels import LookupKernels
from recd_plugins.interfaces.lookups import FeatureLookups, Lookups
from recd_plugins.interfaces.metric import Metric, ScoredBatch
from recd_plugins.interfaces.model import Model, ModelFeatures
from recd_plugins.interfaces.optimizer import Optimizer, RowUpdate
from recd_plugins.interfaces.pipeline import Pipeline, TrainPipeline
from recd_plugins.interfaces.plugin import Plugin, PluginOptions
from recd_plugins.interfaces.pooling import Pooling, TargetPooling
from recd_plugins.interfaces.preprocessing import MOST_UNKNOWN, Preprocessing
from recd_plugins.interfaces.run_report import RunReport
from recd_plugins.interfaces.setting import PlanContext, TrainingData
from recd_plugins.interfaces.sharding import SharderArguments, Sharding
from recd_plugins.interfaces.table_part import (
    RowMemory,
    Section,
    StepShape,
    TableStrategy,
    TrainedRun,
)
from recd_plugins.values.rows import FeatureSchema, Origin, Rows, SessionKeys, Table

__all__ = [
    "MOST_UNKNOWN",
    "Cache",
    "Callback",
    "Candidate",
    "Choice",
    "Chooser",
    "Converter",
    "Dataset",
    "DatasetWrapper",
    "Evaluation",
    "FeatureLookups",
    "FeatureSchema",
    "Feed",
    "Ingestion",
    "Kind",
    "LookupKernels",
    "Lookups",
    "Metric",
    "Model",
    "ModelFeatures",
    "Offered",
    "Optimizer",
    "Origin",
    "Pipeline",
    "PlanContext",
    "Plugin",
    "PluginOptions",
    "Pooling",
    "Preprocessing",
    "Reader",
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
    "SearchContext",
    "Section",
    "SessionKeys",
    "SharderArguments",
    "Sharding",
    "Split",
    "StepShape",
    "Table",
    "TableStrategy",
    "TargetPooling",
    "TrainPipeline",
    "TrainedRun",
    "TrainingData",
]
