"""A training run: put together, measured, profiled and compared.

For calibrations and benchmarks. Needs torch and TorchRec.
"""

from recd_plugins.interfaces.callback import Quality
from recd_plugins.planning.plan_mode import measure_collectives
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.training.assembly import Side, assemble
from recd_plugins.training.batches import BatchSource
from recd_plugins.training.breakdown import (
    PROFILED_STEP,
    Span,
    StepEvents,
    StepProfile,
    device_seconds,
    host_seconds,
    read_profile,
    static_bytes,
    step_profile,
)
from recd_plugins.training.callbacks import Callbacks
from recd_plugins.training.checkpoint import Checkpoints, Progress
from recd_plugins.training.checkpoint_dcp import table_weights
from recd_plugins.training.compare import Spread, loss_max_abs_diff
from recd_plugins.training.data_report import GroupShare
from recd_plugins.training.evaluation import Metrics, Predictions, tie_groups
from recd_plugins.training.identity import check_same_preprocessing, identity_of
from recd_plugins.training.measured_at_start import (
    calibration_job,
    refuse_existing,
    refuse_other_names,
    topology_at_start,
    write_topology,
)
from recd_plugins.training.measurement import peak_bytes, sections_of, sum_by_kind
from recd_plugins.training.optimizer import LearningRates
from recd_plugins.training.result import (
    Result,
    figure_text,
    figure_words,
    figures_of,
    quality_advice,
    worse_than_base_rate,
)
from recd_plugins.training.resume import load_fitted
from recd_plugins.training.session import session
from recd_plugins.training.trained import (
    AbsentData,
    Trained,
    TrainedJob,
    load_trained,
    on_ranks,
    say_other_data,
    unchecked_model,
    whole_model,
    with_trained_columns,
)
from recd_plugins.training.trainer import Job
from recd_plugins.versions import fbgemm_has_cuda

__all__ = [
    "PROFILED_STEP",
    "AbsentData",
    "BatchSource",
    "Callbacks",
    "Checkpoints",
    "GroupShare",
    "Job",
    "LearningRates",
    "Metrics",
    "Predictions",
    "Progress",
    "Quality",
    "Result",
    "Side",
    "Span",
    "Spread",
    "StepEvents",
    "StepProfile",
    "Trained",
    "TrainedJob",
    "assemble",
    "build_train_pipeline",
    "calibration_job",
    "check_same_preprocessing",
    "device_seconds",
    "fbgemm_has_cuda",
    "figure_text",
    "figure_words",
    "figures_of",
    "host_seconds",
    "identity_of",
    "load_fitted",
    "load_trained",
    "loss_max_abs_diff",
    "measure_collectives",
    "on_ranks",
    "peak_bytes",
    "quality_advice",
    "read_profile",
    "refuse_existing",
    "refuse_other_names",
    "say_other_data",
    "sections_of",
    "session",
    "static_bytes",
    "step_profile",
    "sum_by_kind",
    "table_weights",
    "tie_groups",
    "topology_at_start",
    "unchecked_model",
    "whole_model",
    "with_trained_columns",
    "worse_than_base_rate",
    "write_topology",
]
