"""Abstract base classes of all plugin kinds, such as datasets, converters and shardings."""

from recd_plugins.interfaces.callback import (
    Callback as Callback,
    Metric as Metric,
    Pipeline as Pipeline,
    RunBatch as RunBatch,
    RunEnd as RunEnd,
    RunEvaluation as RunEvaluation,
    RunInterruption as RunInterruption,
    RunReport as RunReport,
    RunStart as RunStart,
    RunStep as RunStep,
    ScoredBatch as ScoredBatch,
    TrainPipeline as TrainPipeline,
)
from recd_plugins.interfaces.dataset import (
    Dataset as Dataset,
    DatasetWrapper as DatasetWrapper,
    FeatureLookups as FeatureLookups,
    Lookups as Lookups,
    Reader as Reader,
    Split as Split,
    StreamReader as StreamReader,
)
from recd_plugins.interfaces.ingestion import Feed as Feed, Ingestion as Ingestion
from recd_plugins.interfaces.model import (
    Model as Model,
    ModelFeatures as ModelFeatures,
    Pooling as Pooling,
    TargetPooling as TargetPooling,
)
from recd_plugins.interfaces.plugin import (
    Kind as Kind,
    Plugin as Plugin,
    PluginOptions as PluginOptions,
)
from recd_plugins.interfaces.preprocessing import (
    MOST_UNKNOWN as MOST_UNKNOWN,
    Converter as Converter,
    Preprocessing as Preprocessing,
)
from recd_plugins.interfaces.rows import (
    FeatureSchema as FeatureSchema,
    Origin as Origin,
    Rows as Rows,
    SessionKeys as SessionKeys,
    Table as Table,
)
from recd_plugins.interfaces.sharding import (
    Cache as Cache,
    Candidate as Candidate,
    Choice as Choice,
    Chooser as Chooser,
    Evaluation as Evaluation,
    Offered as Offered,
    SearchContext as SearchContext,
    SharderArguments as SharderArguments,
    Sharding as Sharding,
)
from recd_plugins.interfaces.tables import (
    LookupKernels as LookupKernels,
    Optimizer as Optimizer,
    PlanContext as PlanContext,
    RowMemory as RowMemory,
    RowUpdate as RowUpdate,
    Section as Section,
    StepShape as StepShape,
    TableStrategy as TableStrategy,
    TrainedRun as TrainedRun,
    TrainingData as TrainingData,
)
