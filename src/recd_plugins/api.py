"""What a package of plugins imports, besides ``recd_plugins.testing``.

Names are imported when they are asked for: a module that declares plugins imports no torch.

A module of plugins may say which version it needs, as ``REQUIRES_API = 5``; an older recd-plugins
then refuses the package, by name, where a registry file uses it.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.access import AccessProfile, TableAccess
    from recd_plugins.access.distributions import (
        exponential,
        from_reuse_histogram,
        half_normal,
        read_reuse_histograms,
        zipf,
    )
    from recd_plugins.access.table_access import add_counts, keep_most_read
    from recd_plugins.activity import doing
    from recd_plugins.byte_sizes import bytes_text, read_bytes
    from recd_plugins.cli.options import (
        ABOVE_0,
        AT_LEAST_1,
        BATCH_SIZE,
        CHECKPOINT,
        COUNT_FROM_0,
        OUTPUT,
        OUTPUT_FOLDER,
        OUTPUT_OR_TERMINAL,
        OUTPUT_PATH,
        PAGE,
        RANKS,
        REGISTRY,
        SETTINGS,
        SHARE,
        TOPOLOGY,
        FileKind,
        FiniteFloat,
        check_apart,
        check_output,
        chosen_topology,
        new_place,
        overrides,
        report_options,
        table_kind,
        text_kind,
        topology_options,
    )
    from recd_plugins.clock import clock_of
    from recd_plugins.compat.lookup_kernels import (
        RowKernel,
        close_kernels,
        row_kernels,
        tell_when_asked,
    )
    from recd_plugins.compat.portable_kernels import PortableEmbedding, PortableEmbeddingBag
    from recd_plugins.compat.row_wise_adagrad import use_row_wise_adagrad
    from recd_plugins.compat.torchrec_internals import require_attributes
    from recd_plugins.cores import available_cores
    from recd_plugins.data.access import measure_access
    from recd_plugins.data.access_options import AccessOptions
    from recd_plugins.data.arrow import (
        broken_list,
        dense_features,
        dictionary_column,
        labels,
        place,
        sparse_column,
    )
    from recd_plugins.data.ipc import decode, encode
    from recd_plugins.data.list_dict import (
        Layout,
        id_features,
        is_list_dict,
        to_list_dict,
        to_lists,
    )
    from recd_plugins.data.loader import hand_out, read_task
    from recd_plugins.data.lower import lower
    from recd_plugins.data.parquet import ParquetTable, read_footers, read_metadata
    from recd_plugins.data.prepared import RegistryLookups, smallest_batch, wrapped_dataset
    from recd_plugins.data.preprocess import build_preprocess, fitted_steps, num_dense_inputs
    from recd_plugins.data.reader import Piece, PlannedReader, ReadPlan, Unit, digest, prefetch
    from recd_plugins.data.row_filter import Condition
    from recd_plugins.data.row_groups import ReadOptions
    from recd_plugins.data.row_pipeline import PlainConverter, RowPipeline, fitted_transforms
    from recd_plugins.data.rows import (
        RowTable,
        concat_rows,
        rebatch,
        rows_of_split,
        slice_rows,
        training_rows,
    )
    from recd_plugins.data.stalls import STALL_TARGET, Pace, StallMeter
    from recd_plugins.data.statistics import StatisticsAccumulator, session_column
    from recd_plugins.data.storage import Location, Url
    from recd_plugins.data.table_writer import Nulls, TableWriter
    from recd_plugins.data.workers import WorkerContext
    from recd_plugins.distributed.device import choose_device, device_of_rank, lack_for_cuda
    from recd_plugins.distributed.launch import (
        backend_for,
        join_torchrun,
        launch,
        torchrun_rank,
        torchrun_ranks_per_node,
    )
    from recd_plugins.distributed.rank_agreement import (
        check_agreement,
        new_group,
        ranks_of_each_node,
        tell_all,
    )
    from recd_plugins.distributed.watch import HangLimits, watched_by_each_other
    from recd_plugins.errors import (
        DataError,
        ExactnessError,
        PluginError,
        RecdError,
        RegistryError,
        SetupError,
    )
    from recd_plugins.file_lock import locked_folder, try_lock
    from recd_plugins.files import (
        check_regular,
        check_writable,
        finite,
        is_stream,
        json_text,
        new_file,
        parse_json,
        read_note,
        real_path,
        why_not,
        without_remains,
        write_figure,
        write_json,
        write_note,
        write_text,
    )
    from recd_plugins.hookspecs import hookimpl
    from recd_plugins.html_page import Html, element, html_page, html_section, html_table
    from recd_plugins.interfaces import (
        MOST_UNKNOWN,
        Cache,
        Callback,
        Candidate,
        Choice,
        Chooser,
        Converter,
        Dataset,
        DatasetWrapper,
        Evaluation,
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
        Offered,
        Optimizer,
        Origin,
        Pipeline,
        PlanContext,
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
        SearchContext,
        Section,
        SessionKeys,
        SharderArguments,
        Sharding,
        Split,
        StepShape,
        Table,
        TableStrategy,
        TargetPooling,
        TrainedRun,
        TrainingData,
        TrainPipeline,
    )
    from recd_plugins.interfaces.callback import Quality
    from recd_plugins.interfaces.ingestion import BatchBlock, ReadTask, State, TaskReader
    from recd_plugins.manager import API_VERSION
    from recd_plugins.model.build import build_model
    from recd_plugins.model.deferred_tables import deferred_tables
    from recd_plugins.model.dlrm import DLRM
    from recd_plugins.model.sequence_pooling import SequencePooling
    from recd_plugins.model_tables import table_name, tables_of
    from recd_plugins.optional_library import optional_library
    from recd_plugins.output_console import error_console, output_console
    from recd_plugins.planning.compute import Compute, measure_compute
    from recd_plugins.planning.plan_mode import (
        Measurement,
        PlanAnswer,
        PlanMode,
        PlanQuestion,
        TablesPlan,
        measure_collectives,
    )
    from recd_plugins.planning.prepare import prepare
    from recd_plugins.planning.prepared import Prepared
    from recd_plugins.planning.profile import gradients_sent_once
    from recd_plugins.planning.report import size_text, topology_line
    from recd_plugins.planning.setting import RegistryData
    from recd_plugins.planning.step_cost import (
        COLLECTIVES,
        EVERY_RANK,
        ID_BYTES,
        NUMBER_BYTES,
        bytes_of_tables,
        collective_seconds,
        estimate_step_cost,
        fit_costs,
        predict_stages,
        shards_of,
    )
    from recd_plugins.planning.study import ShardableModel, data_of_model, report_side, with_plugins
    from recd_plugins.planning.topologies import (
        FILE_BYTES_PER_SECOND,
        TopologySpec,
        default_topology,
        load_topology,
        this_machine,
    )
    from recd_plugins.plots import COLORS, GREY, plot_style, svg_of
    from recd_plugins.plugin_call import plugin_call, plugin_items
    from recd_plugins.processes import end_with_parent, portable
    from recd_plugins.progress import AddBar, progress_bars, row_progress
    from recd_plugins.registry import ModelSpec, RunConfig, TrainingSpec, at_entry
    from recd_plugins.registry.from_file import load_registry
    from recd_plugins.scratch_folder import put, scratch_folder
    from recd_plugins.sharding.bags import ExactShardedEmbeddingBagCollection
    from recd_plugins.sharding.batch_form import refuse_inverse_indices
    from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
    from recd_plugins.sharding.coalesced.input_dist import unique_ids
    from recd_plugins.sharding.contexts import ExactSequenceContext
    from recd_plugins.sharding.guards import guard
    from recd_plugins.sharding.overlap import LookupAhead
    from recd_plugins.sharding.pipeline import build_train_pipeline
    from recd_plugins.sharding.sequences import ExactShardedEmbeddingCollection
    from recd_plugins.sharding.sharders import (
        ExactEmbeddingBagCollectionSharder,
        ExactEmbeddingCollectionSharder,
        fused_params,
        stock_sharders,
    )
    from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
    from recd_plugins.sparse.dedup import Deduplicator, JaggedColumn
    from recd_plugins.sparse.dictionaries import BrokenListError
    from recd_plugins.sparse.from_columns import (
        ikjts_from_columns,
        ikjts_from_dictionaries,
        kjt_from_columns,
        partial_from_columns,
        partial_from_dictionaries,
    )
    from recd_plugins.sparse.index_select import jagged_index_select
    from recd_plugins.sparse.jagged import offsets_of, positions_of_ranges, rounded_borders
    from recd_plugins.sparse.partial import RowPacker
    from recd_plugins.training.assembly import Variant, assemble
    from recd_plugins.training.batches import BatchSource
    from recd_plugins.training.breakdown import StepProfile, step_profile
    from recd_plugins.training.callbacks import Callbacks
    from recd_plugins.training.checkpoint import Checkpoints, Progress
    from recd_plugins.training.checkpoint_dcp import table_weights
    from recd_plugins.training.checkpoint_files import chosen_checkpoint
    from recd_plugins.training.compare import Spread
    from recd_plugins.training.evaluation import Metrics, Predictions, tie_groups
    from recd_plugins.training.identity import check_same_preprocessing
    from recd_plugins.training.measured_at_start import (
        refuse_existing,
        refuse_other_names,
        steps_in_turns,
        write_topology,
    )
    from recd_plugins.training.measurement import peak_bytes
    from recd_plugins.training.optimizer import LearningRates, build_optimizer
    from recd_plugins.training.rank_state import copy_weights, first_weights
    from recd_plugins.training.result import (
        figure_text,
        figure_words,
        figures_of,
        quality_advice,
        worse_than_base_rate,
    )
    from recd_plugins.training.resume import load_fitted
    from recd_plugins.training.session import calibration_job
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
    from recd_plugins.upstream_noise import silence as silence_upstream
    from recd_plugins.values.batch import STALL_CAUSES, Batch, MakingTimes, ModelInput, Placement
    from recd_plugins.values.channels import Channel, CollectiveKind
    from recd_plugins.values.collective_rates import CollectiveRate, CollectiveRates
    from recd_plugins.values.data_profile import DataProfile, DistinctGradients, DistinctIds
    from recd_plugins.values.internal import Internal
    from recd_plugins.values.rows import Storage
    from recd_plugins.values.stages import STAGES, Stage, StageTimes
    from recd_plugins.values.statistics import (
        FeatureStatistics,
        TableStatistics,
        dedupe_factor,
        least_ids_saved,
    )
    from recd_plugins.values.step_cost import StageCosts, StepCost
    from recd_plugins.words import did_you_mean, shortened
    from recd_plugins.work_folder import WorkFolder, machine_start, work_folder

__all__ = [
    "ABOVE_0",
    "API_VERSION",
    "AT_LEAST_1",
    "BATCH_SIZE",
    "CHECKPOINT",
    "COLLECTIVES",
    "COLORS",
    "COUNT_FROM_0",
    "DLRM",
    "EVERY_RANK",
    "FILE_BYTES_PER_SECOND",
    "GREY",
    "ID_BYTES",
    "MOST_UNKNOWN",
    "NUMBER_BYTES",
    "OUTPUT",
    "OUTPUT_FOLDER",
    "OUTPUT_OR_TERMINAL",
    "OUTPUT_PATH",
    "PAGE",
    "RANKS",
    "REGISTRY",
    "SETTINGS",
    "SHARE",
    "STAGES",
    "STALL_CAUSES",
    "STALL_TARGET",
    "TOPOLOGY",
    "AbsentData",
    "AccessOptions",
    "AccessProfile",
    "AddBar",
    "Batch",
    "BatchBlock",
    "BatchSource",
    "BrokenListError",
    "Cache",
    "Callback",
    "Callbacks",
    "Candidate",
    "Channel",
    "Checkpoints",
    "Choice",
    "Chooser",
    "CollectiveBytes",
    "CollectiveKind",
    "CollectiveRate",
    "CollectiveRates",
    "Compute",
    "Condition",
    "Converter",
    "DataError",
    "DataProfile",
    "Dataset",
    "DatasetWrapper",
    "Deduplicator",
    "DistinctGradients",
    "DistinctIds",
    "Evaluation",
    "ExactEmbeddingBagCollectionSharder",
    "ExactEmbeddingCollectionSharder",
    "ExactSequenceContext",
    "ExactShardedEmbeddingBagCollection",
    "ExactShardedEmbeddingCollection",
    "ExactnessError",
    "FeatureLookups",
    "FeatureSchema",
    "FeatureStatistics",
    "Feed",
    "FileKind",
    "FiniteFloat",
    "HangLimits",
    "Html",
    "Ingestion",
    "Internal",
    "InverseKeyedJaggedTensor",
    "JaggedColumn",
    "Job",
    "Kind",
    "Layout",
    "LearningRates",
    "Location",
    "LookupAhead",
    "LookupKernels",
    "Lookups",
    "MakingTimes",
    "Measurement",
    "Metric",
    "Metrics",
    "Model",
    "ModelFeatures",
    "ModelInput",
    "ModelSpec",
    "Nulls",
    "Offered",
    "Optimizer",
    "Origin",
    "Pace",
    "ParquetTable",
    "PartialInverseKeyedJaggedTensor",
    "Piece",
    "Pipeline",
    "Placement",
    "PlainConverter",
    "PlanAnswer",
    "PlanContext",
    "PlanMode",
    "PlanQuestion",
    "PlannedReader",
    "Plugin",
    "PluginError",
    "PluginOptions",
    "Pooling",
    "PortableEmbedding",
    "PortableEmbeddingBag",
    "Predictions",
    "Prepared",
    "Preprocessing",
    "Progress",
    "Quality",
    "ReadOptions",
    "ReadPlan",
    "ReadTask",
    "Reader",
    "RecdError",
    "RegistryData",
    "RegistryError",
    "RegistryLookups",
    "RowKernel",
    "RowMemory",
    "RowPacker",
    "RowPipeline",
    "RowTable",
    "RowUpdate",
    "Rows",
    "RunBatch",
    "RunConfig",
    "RunEnd",
    "RunEvaluation",
    "RunInterruption",
    "RunReport",
    "RunStart",
    "RunStep",
    "ScoredBatch",
    "SearchContext",
    "Section",
    "SequencePooling",
    "SessionKeys",
    "SetupError",
    "ShardableModel",
    "SharderArguments",
    "Sharding",
    "Split",
    "Spread",
    "Stage",
    "StageCosts",
    "StageTimes",
    "StallMeter",
    "State",
    "StatisticsAccumulator",
    "StepCost",
    "StepProfile",
    "StepShape",
    "Storage",
    "Table",
    "TableAccess",
    "TableStatistics",
    "TableStrategy",
    "TableWriter",
    "TablesPlan",
    "TargetPooling",
    "TaskReader",
    "TopologySpec",
    "TrainPipeline",
    "Trained",
    "TrainedJob",
    "TrainedRun",
    "TrainingData",
    "TrainingSpec",
    "Unit",
    "Url",
    "Variant",
    "WorkFolder",
    "WorkerContext",
    "add_counts",
    "assemble",
    "at_entry",
    "available_cores",
    "backend_for",
    "broken_list",
    "build_model",
    "build_optimizer",
    "build_preprocess",
    "build_train_pipeline",
    "bytes_of_tables",
    "bytes_text",
    "calibration_job",
    "check_agreement",
    "check_apart",
    "check_output",
    "check_regular",
    "check_same_preprocessing",
    "check_writable",
    "choose_device",
    "chosen_checkpoint",
    "chosen_topology",
    "clock_of",
    "close_kernels",
    "collective_seconds",
    "concat_rows",
    "copy_weights",
    "data_of_model",
    "decode",
    "dedupe_factor",
    "default_topology",
    "deferred_tables",
    "dense_features",
    "device_of_rank",
    "dictionary_column",
    "did_you_mean",
    "digest",
    "doing",
    "element",
    "encode",
    "end_with_parent",
    "error_console",
    "estimate_step_cost",
    "exponential",
    "figure_text",
    "figure_words",
    "figures_of",
    "finite",
    "first_weights",
    "fit_costs",
    "fitted_steps",
    "fitted_transforms",
    "from_reuse_histogram",
    "fused_params",
    "gradients_sent_once",
    "guard",
    "half_normal",
    "hand_out",
    "hookimpl",
    "html_page",
    "html_section",
    "html_table",
    "id_features",
    "ikjts_from_columns",
    "ikjts_from_dictionaries",
    "is_list_dict",
    "is_stream",
    "jagged_index_select",
    "join_torchrun",
    "json_text",
    "keep_most_read",
    "kjt_from_columns",
    "labels",
    "lack_for_cuda",
    "launch",
    "least_ids_saved",
    "load_fitted",
    "load_registry",
    "load_topology",
    "load_trained",
    "locked_folder",
    "lookup_ids",
    "lower",
    "machine_start",
    "measure_access",
    "measure_collectives",
    "measure_compute",
    "new_file",
    "new_group",
    "new_place",
    "num_dense_inputs",
    "offsets_of",
    "on_ranks",
    "optional_library",
    "output_console",
    "overrides",
    "parse_json",
    "partial_from_columns",
    "partial_from_dictionaries",
    "peak_bytes",
    "place",
    "plot_style",
    "plugin_call",
    "plugin_items",
    "portable",
    "positions_of_ranges",
    "predict_stages",
    "prefetch",
    "prepare",
    "progress_bars",
    "put",
    "quality_advice",
    "ranks_of_each_node",
    "read_bytes",
    "read_footers",
    "read_metadata",
    "read_note",
    "read_reuse_histograms",
    "read_task",
    "real_path",
    "rebatch",
    "refuse_existing",
    "refuse_inverse_indices",
    "refuse_other_names",
    "report_options",
    "report_side",
    "require_attributes",
    "rounded_borders",
    "row_kernels",
    "row_progress",
    "rows_of_split",
    "say_other_data",
    "scratch_folder",
    "session_column",
    "shards_of",
    "shortened",
    "silence_upstream",
    "size_text",
    "slice_rows",
    "smallest_batch",
    "sparse_column",
    "step_profile",
    "steps_in_turns",
    "stock_sharders",
    "svg_of",
    "table_kind",
    "table_name",
    "table_weights",
    "tables_of",
    "tell_all",
    "tell_when_asked",
    "text_kind",
    "this_machine",
    "tie_groups",
    "to_list_dict",
    "to_lists",
    "topology_line",
    "topology_options",
    "torchrun_rank",
    "torchrun_ranks_per_node",
    "training_rows",
    "try_lock",
    "unchecked_model",
    "unique_ids",
    "use_row_wise_adagrad",
    "watched_by_each_other",
    "whole_model",
    "why_not",
    "with_plugins",
    "with_trained_columns",
    "without_remains",
    "work_folder",
    "worse_than_base_rate",
    "wrapped_dataset",
    "write_figure",
    "write_json",
    "write_note",
    "write_text",
    "write_topology",
    "zipf",
]


def _homes() -> dict[str, tuple[str, str]]:
    """Module and name there of each name, as the imports for type checkers have them."""
    body = ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    block = next(node for node in body if isinstance(node, ast.If)).body
    imports = [node for node in block if isinstance(node, ast.ImportFrom)]
    return {
        each.asname or each.name: (str(node.module), each.name)
        for node in imports
        for each in node.names
    }


_HOMES = _homes()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, there = _HOMES[name]
        found = globals()[name] = getattr(import_module(module), there)
        return found
