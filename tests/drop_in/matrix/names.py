"""Public classes of TorchRec that no cell is named after, with why not."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

from torchrec.metrics.rec_metric import RecMetric, RecMetricComputation

#: Packages whose classes a trainer is made of.
PACKAGES = (
    "torchrec.modules",
    "torchrec.models",
    "torchrec.sparse",
    "torchrec.distributed.train_pipeline",
    "torchrec.optim",
    "torchrec.metrics",
)
_WITHOUT_CELL = {
    "every cell has them": """
        CombinedOptimizer EmbeddingBagConfig EmbeddingConfig JaggedTensor KeyedJaggedTensor
        KeyedOptimizer KeyedOptimizerWrapper KeyedTensor PoolingType""",
    "a cell has them, under another name": """
        BaseEmbeddingConfig BaseFeatureProcessor CountBasedEvictionPolicy
        DistanceLFU_EvictionPolicy EmbeddingTrainPipelineContext GradientAccumulationConfig
        GradientAccumulationWrapper GradientClipping GradientClippingOptimizer LFU_EvictionPolicy
        LRU_EvictionPolicy MCHEvictionPolicy MCHEvictionPolicyMetadataInfo MetricsConfig
        OptimizerWrapper PipelineStage RecMetricDef RecMetricEnum RecTaskInfo ShardingType
        SparseDataDistUtil TorchCompileConfig WarmupOptimizer WarmupPolicy WarmupStage""",
    "parts of modules, pipelines and optimizers that cells have": """
        ArgInfo ArgInfoStepFactory AsyncInplaceCopyMixin BaseArgInfoStep BaseForward
        CPUEmbeddingPipelinedForward CPUEmbeddingTrainPipelineContext CallArgs DictArgInfoStep
        EmbeddingFusedOptimizer EmbeddingPipelinedForward EmbeddingTableConfig
        EmptyFusedOptimizer FirstGradTensorFinder FusedOptimizer FutureDeque GetAttrArgInfoStep
        GetItemArgInfoStep GradTensorFinder InSyncEmbeddingPipelinedForward InjectionSite
        InjectionTargetType JaggedTensorMeta KJTAllToAllForward ListArgInfoStep
        ModelDetachedException NoOpStream NodeArgsHelper NoopArgInfoStep OutputDistTensorFinder
        OverlappingCheckerType PECPipelinedForward PECTrainPipelineContext PipelinePhase
        PipelineState PipelinedForward PipelinedPostproc PostprocArgInfoStep
        PrefetchEmbeddingPipelinedForward PrefetchPipelinedForward PrefetchTrainPipelineContext
        ScalarArgInfoStep SequenceVBEContext TensorLookup TensorPoolLookup Tracer TrainPipeline
        TrainPipelineContext""",
    "parts of what cells say is CUDA only": """
        CountTimestampMixedEvictionPolicy FeatureL2NormBasedEvictionPolicy
        FeatureScoreBasedEvictionPolicy FeatureScoreMapping HashZchEvictionConfig
        HashZchEvictionModule HashZchEvictionPolicyName HashZchEvictionScorer
        HashZchOptEvictionModule HashZchPerFeatureTtlScorer HashZchSingleTtlScorer
        HashZchThresholdEvictionModule NoEvictionPolicy PruningLogBase PruningLogger
        PruningLoggerDefault TimestampBasedEvictionPolicy UVMCachingFloatLookup
        UVMCachingInt32Lookup UVMCachingInt64Lookup VirtualTableEvictionPolicy""",
    "dense layers and models, behind the vectors of all rows": """
        CrossNet DLRMTrain DLRMWrapper DLRM_Transformer DenseArch FMInteractionArch
        FactorizationMachine InteractionArch InteractionDCNArch InteractionProjectionArch
        InteractionTransformerArch KTRegroupAsDict LazyModuleExtensionMixin LowRankCrossNet
        LowRankMixtureCrossNet MLP OverArch Perceptron PermuteMultiEmbedding
        SimpleDeepFMNNWrapper SwishLayerNorm VectorCrossNet""",
    "of the parameters alone: it says which of two optimizers of a trainer steps": """
        SemisyncOptimizer""",
    "make another KeyedJaggedTensor in the model, which is for the loader to do": """
        ComputeJTDictToKJT ComputeKJTToJTDict""",
    "for inference": """
        QuantConfig""",
    "logs": """
        ConsoleScalarLoggerBackend ScalarLogger ScalarLoggerBackend""",
    "see what RecMetricModule is given: predictions, labels, weights": """
        BatchSizeStage CPUCommsRecMetricModule CPUOffloadedRecMetricModule DeferrableMetrics
        GroupingKeyConfig MetricComputationReport MetricComputeJob MetricName MetricNameBase
        MetricNamespace MetricNamespaceBase MetricPrefix MetricStateSnapshot MetricUpdateJob
        NoOpMetricModule RecComputeMode RecMetricEnumBase RecMetricException RecMetricList
        SessionMetricDef StateMetric StateMetricEnum StrValueMixin SynchronizationMarker
        ThroughputDef ThroughputMetric WindowBuffer""",
}
#: Why there is no cell, by name; each RecMetric and its computation has the last reason.
WITHOUT_CELL = {name: why for why, names in _WITHOUT_CELL.items() for name in names.split()}


def public_classes() -> Iterator[type]:
    """The classes of ``PACKAGES``, but for metrics that are all alike to a trainer."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        found = pkgutil.walk_packages(root.__path__, f"{package}.")
        names = [each.name for each in found if not re.search("test|benchmark", each.name)]
        for name in (package, *names):
            for kind in vars(importlib.import_module(name)).values():
                if isinstance(kind, type) and kind.__module__ == name:
                    alike = issubclass(kind, RecMetric | RecMetricComputation)
                    if not alike and not kind.__name__.startswith("_"):
                        yield kind
