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
    from recd_plugins.interfaces.access import (
        AccessProfile as AccessProfile,
        TableAccess as TableAccess,
    )
    from recd_plugins.interfaces.distributions import (
        exponential as exponential,
        from_reuse_histogram as from_reuse_histogram,
        half_normal as half_normal,
        read_reuse_histograms as read_reuse_histograms,
        zipf as zipf,
    )
    from recd_plugins.interfaces.access import (
        add_counts as add_counts,
        keep_most_read as keep_most_read,
    )
    from recd_plugins.runtime.activity import doing as doing
    from recd_plugins.runtime.text import (
        bytes_text as bytes_text,
        read_bytes as read_bytes,
        size_text as size_text,
    )
    from recd_plugins.cli.options import (
        ABOVE_0 as ABOVE_0,
        AT_LEAST_1 as AT_LEAST_1,
        BATCH_SIZE as BATCH_SIZE,
        CHECKPOINT as CHECKPOINT,
        COUNT_FROM_0 as COUNT_FROM_0,
        OUTPUT as OUTPUT,
        OUTPUT_FOLDER as OUTPUT_FOLDER,
        OUTPUT_OR_TERMINAL as OUTPUT_OR_TERMINAL,
        OUTPUT_PATH as OUTPUT_PATH,
        RANKS as RANKS,
        SETTINGS as SETTINGS,
        SHARE as SHARE,
        check_apart as check_apart,
        check_output as check_output,
        chosen_topology as chosen_topology,
        new_place as new_place,
        overrides as overrides,
        report_options as report_options,
        topology_options as topology_options,
    )
    from recd_plugins.runtime.machine import clock_of as clock_of
    from recd_plugins.compat.lookup_kernels import (
        RowKernel as RowKernel,
        close_kernels as close_kernels,
        row_kernels as row_kernels,
        tell_when_asked as tell_when_asked,
    )
    from recd_plugins.compat.portable_kernels import (
        PortableEmbedding as PortableEmbedding,
        PortableEmbeddingBag as PortableEmbeddingBag,
    )
    from recd_plugins.compat.row_wise_adagrad import use_row_wise_adagrad as use_row_wise_adagrad
    from recd_plugins.compat.torchrec_internals import require_attributes as require_attributes
    from recd_plugins.runtime.machine import available_cores as available_cores
    from recd_plugins.data.access import measure_access as measure_access
    from recd_plugins.data.access_options import AccessOptions as AccessOptions
    from recd_plugins.data.arrow import (
        broken_list as broken_list,
        dense_features as dense_features,
        dictionary_column as dictionary_column,
        labels as labels,
        place as place,
        sparse_column as sparse_column,
    )
    from recd_plugins.data.ipc import decode as decode, encode as encode
    from recd_plugins.data.list_dict import (
        Layout as Layout,
        id_features as id_features,
        is_list_dict as is_list_dict,
        to_list_dict as to_list_dict,
        to_lists as to_lists,
    )
    from recd_plugins.data.workers import hand_out as hand_out
    from recd_plugins.data.loader import read_task as read_task
    from recd_plugins.data.lower import lower as lower
    from recd_plugins.data.parquet import (
        ParquetTable as ParquetTable,
        read_footers as read_footers,
        read_metadata as read_metadata,
    )
    from recd_plugins.data.prepared import (
        RegistryLookups as RegistryLookups,
        smallest_batch as smallest_batch,
        wrapped_dataset as wrapped_dataset,
    )
    from recd_plugins.data.preprocess import (
        build_preprocess as build_preprocess,
        fitted_steps as fitted_steps,
        num_dense_inputs as num_dense_inputs,
    )
    from recd_plugins.data.reader import (
        Piece as Piece,
        PlannedReader as PlannedReader,
        ReadPlan as ReadPlan,
        Unit as Unit,
        digest as digest,
        prefetch as prefetch,
    )
    from recd_plugins.data.row_filter import Condition as Condition
    from recd_plugins.data.plain import PlainConverter as PlainConverter
    from recd_plugins.data.row_pipeline import (
        RowPipeline as RowPipeline,
        fitted_transforms as fitted_transforms,
    )
    from recd_plugins.data.rows import (
        RowTable as RowTable,
        concat_rows as concat_rows,
        rebatch as rebatch,
        rows_of_split as rows_of_split,
        slice_rows as slice_rows,
        training_rows as training_rows,
    )
    from recd_plugins.data.stalls import (
        STALL_TARGET as STALL_TARGET,
        Pace as Pace,
        StallMeter as StallMeter,
    )
    from recd_plugins.data.statistics import (
        StatisticsAccumulator as StatisticsAccumulator,
        session_column as session_column,
    )
    from recd_plugins.data.storage import Location as Location, Url as Url
    from recd_plugins.data.table_writer import Nulls as Nulls, TableWriter as TableWriter
    from recd_plugins.data.workers import WorkerContext as WorkerContext
    from recd_plugins.config.device import (
        choose_device as choose_device,
        device_of_rank as device_of_rank,
        lack_for_cuda as lack_for_cuda,
    )
    from recd_plugins.runtime.launch import (
        backend_for as backend_for,
        join_torchrun as join_torchrun,
        launch as launch,
        torchrun_rank as torchrun_rank,
        torchrun_ranks_per_node as torchrun_ranks_per_node,
    )
    from recd_plugins.runtime.rank_agreement import (
        check_agreement as check_agreement,
        new_group as new_group,
        ranks_of_each_node as ranks_of_each_node,
        tell_all as tell_all,
    )
    from recd_plugins.runtime.watch import (
        HangLimits as HangLimits,
        watched_by_each_other as watched_by_each_other,
    )
    from recd_plugins.runtime.errors import (
        DataError as DataError,
        ExactnessError as ExactnessError,
        PluginError as PluginError,
        RecdError as RecdError,
        RegistryError as RegistryError,
        SetupError as SetupError,
    )
    from recd_plugins.runtime.folders import locked_folder as locked_folder
    from recd_plugins.runtime.files import (
        check_regular as check_regular,
        check_writable as check_writable,
        finite as finite,
        json_text as json_text,
        new_file as new_file,
        parse_json as parse_json,
        read_note as read_note,
        real_path as real_path,
        why_not as why_not,
        without_remains as without_remains,
        write_figure as write_figure,
        write_json as write_json,
        write_note as write_note,
        write_text as write_text,
    )
    from recd_plugins.config.hookspecs import hookimpl as hookimpl
    from recd_plugins.report.html_page import (
        Html as Html,
        element as element,
        html_page as html_page,
        html_section as html_section,
        html_table as html_table,
    )
    from recd_plugins.interfaces import (
        MOST_UNKNOWN as MOST_UNKNOWN,
        Cache as Cache,
        Callback as Callback,
        Candidate as Candidate,
        Choice as Choice,
        Chooser as Chooser,
        Converter as Converter,
        Dataset as Dataset,
        DatasetWrapper as DatasetWrapper,
        Evaluation as Evaluation,
        FeatureLookups as FeatureLookups,
        FeatureSchema as FeatureSchema,
        Feed as Feed,
        Ingestion as Ingestion,
        Kind as Kind,
        LookupKernels as LookupKernels,
        Lookups as Lookups,
        Metric as Metric,
        Model as Model,
        ModelFeatures as ModelFeatures,
        Offered as Offered,
        Optimizer as Optimizer,
        Origin as Origin,
        Pipeline as Pipeline,
        PlanContext as PlanContext,
        Plugin as Plugin,
        PluginOptions as PluginOptions,
        Pooling as Pooling,
        Preprocessing as Preprocessing,
        Reader as Reader,
        RowMemory as RowMemory,
        Rows as Rows,
        RowUpdate as RowUpdate,
        RunBatch as RunBatch,
        RunEnd as RunEnd,
        RunEvaluation as RunEvaluation,
        RunInterruption as RunInterruption,
        RunReport as RunReport,
        RunStart as RunStart,
        RunStep as RunStep,
        ScoredBatch as ScoredBatch,
        SearchContext as SearchContext,
        Section as Section,
        SessionKeys as SessionKeys,
        SharderArguments as SharderArguments,
        Sharding as Sharding,
        Split as Split,
        StepShape as StepShape,
        Table as Table,
        TableStrategy as TableStrategy,
        TargetPooling as TargetPooling,
        TrainedRun as TrainedRun,
        TrainingData as TrainingData,
        TrainPipeline as TrainPipeline,
    )
    from recd_plugins.interfaces.callback import Quality as Quality
    from recd_plugins.interfaces.ingestion import (
        BatchBlock as BatchBlock,
        ReadTask as ReadTask,
        State as State,
        TaskReader as TaskReader,
    )
    from recd_plugins.config.manager import API_VERSION as API_VERSION
    from recd_plugins.model.build import build_model as build_model
    from recd_plugins.model.deferred_tables import deferred_tables as deferred_tables
    from recd_plugins.model.dlrm import DLRM as DLRM
    from recd_plugins.model.sequence_pooling import SequencePooling as SequencePooling
    from recd_plugins.interfaces.model_tables import (
        table_name as table_name,
        tables_of as tables_of,
    )
    from recd_plugins.runtime.imports import optional_library as optional_library
    from recd_plugins.report.output import (
        error_console as error_console,
        output_console as output_console,
    )
    from recd_plugins.planning.compute import measure_compute as measure_compute
    from recd_plugins.planning.step_cost import Compute as Compute
    from recd_plugins.planning.plan_mode import (
        Measurement as Measurement,
        PlanAnswer as PlanAnswer,
        PlanMode as PlanMode,
        PlanQuestion as PlanQuestion,
        TablesPlan as TablesPlan,
        measure_collectives as measure_collectives,
    )
    from recd_plugins.planning.choosing import prepare as prepare
    from recd_plugins.planning.prepared import Prepared as Prepared
    from recd_plugins.planning.profile import gradients_sent_once as gradients_sent_once
    from recd_plugins.planning.report import topology_line as topology_line
    from recd_plugins.planning.setting import RegistryData as RegistryData
    from recd_plugins.planning.step_cost import (
        COLLECTIVES as COLLECTIVES,
        EVERY_RANK as EVERY_RANK,
        ID_BYTES as ID_BYTES,
        NUMBER_BYTES as NUMBER_BYTES,
        bytes_of_tables as bytes_of_tables,
        collective_seconds as collective_seconds,
        estimate_step_cost as estimate_step_cost,
        fit_costs as fit_costs,
        predict_stages as predict_stages,
        shards_of as shards_of,
    )
    from recd_plugins.planning.study import (
        ShardableModel as ShardableModel,
        data_of_model as data_of_model,
        report_side as report_side,
        with_plugins as with_plugins,
    )
    from recd_plugins.planning.topologies import (
        FILE_BYTES_PER_SECOND as FILE_BYTES_PER_SECOND,
        TopologySpec as TopologySpec,
        default_topology as default_topology,
        load_topology as load_topology,
        this_machine as this_machine,
    )
    from recd_plugins.report.plots import (
        COLORS as COLORS,
        GREY as GREY,
        plot_style as plot_style,
        svg_of as svg_of,
    )
    from recd_plugins.report.tables import text_table as text_table
    from recd_plugins.interfaces.plugin import (
        plugin_call as plugin_call,
        plugin_items as plugin_items,
    )
    from recd_plugins.runtime.processes import (
        end_with_parent as end_with_parent,
        portable as portable,
    )
    from recd_plugins.report.progress import (
        progress_bars as progress_bars,
        row_progress as row_progress,
    )
    from recd_plugins.config import (
        ModelSpec as ModelSpec,
        RunConfig as RunConfig,
        TrainingSpec as TrainingSpec,
        at_entry as at_entry,
    )
    from recd_plugins.config.from_file import load_registry as load_registry
    from recd_plugins.runtime.folders import put as put, scratch_folder as scratch_folder
    from recd_plugins.sharding.exact_modules import (
        ExactShardedEmbeddingBagCollection as ExactShardedEmbeddingBagCollection,
    )
    from recd_plugins.sharding.batch_form import refuse_inverse_indices as refuse_inverse_indices
    from recd_plugins.sharding.byte_counter import (
        CollectiveBytes as CollectiveBytes,
        lookup_ids as lookup_ids,
    )
    from recd_plugins.sharding.coalesced.input_dist import unique_ids as unique_ids
    from recd_plugins.sharding.batch_form import ExactSequenceContext as ExactSequenceContext
    from recd_plugins.sharding.guards import guard as guard
    from recd_plugins.sharding.overlap import LookupAhead as LookupAhead
    from recd_plugins.sharding.pipeline import build_train_pipeline as build_train_pipeline
    from recd_plugins.sharding.exact_modules import (
        ExactShardedEmbeddingCollection as ExactShardedEmbeddingCollection,
    )
    from recd_plugins.sharding.sharders import (
        ExactEmbeddingBagCollectionSharder as ExactEmbeddingBagCollectionSharder,
        ExactEmbeddingCollectionSharder as ExactEmbeddingCollectionSharder,
        fused_params as fused_params,
        stock_sharders as stock_sharders,
    )
    from recd_plugins.sparse import (
        InverseKeyedJaggedTensor as InverseKeyedJaggedTensor,
        PartialInverseKeyedJaggedTensor as PartialInverseKeyedJaggedTensor,
    )
    from recd_plugins.sparse.dedup import Deduplicator as Deduplicator, JaggedColumn as JaggedColumn
    from recd_plugins.sparse.dictionaries import BrokenListError as BrokenListError
    from recd_plugins.sparse.from_columns import (
        ikjts_from_columns as ikjts_from_columns,
        ikjts_from_dictionaries as ikjts_from_dictionaries,
        kjt_from_columns as kjt_from_columns,
        partial_from_columns as partial_from_columns,
        partial_from_dictionaries as partial_from_dictionaries,
    )
    from recd_plugins.sparse.index_select import jagged_index_select as jagged_index_select
    from recd_plugins.sparse.jagged import (
        offsets_of as offsets_of,
        positions_of_ranges as positions_of_ranges,
        rounded_borders as rounded_borders,
    )
    from recd_plugins.sparse.partial import RowPacker as RowPacker
    from recd_plugins.training.assembly import Variant as Variant, assemble as assemble
    from recd_plugins.training.trainer import BatchSource as BatchSource
    from recd_plugins.training.measurement import StepProfile as StepProfile
    from recd_plugins.training.callbacks import Callbacks as Callbacks
    from recd_plugins.training.checkpoint import Checkpoints as Checkpoints
    from recd_plugins.training.checkpoint_dcp import table_weights as table_weights
    from recd_plugins.training.checkpoint_files import (
        Progress as Progress,
        chosen_checkpoint as chosen_checkpoint,
    )
    from recd_plugins.training.result import Spread as Spread
    from recd_plugins.training.evaluation import (
        Metrics as Metrics,
        Predictions as Predictions,
        tie_groups as tie_groups,
    )
    from recd_plugins.training.identity import check_same_preprocessing as check_same_preprocessing
    from recd_plugins.training.session import (
        refuse_existing as refuse_existing,
        refuse_other_names as refuse_other_names,
        steps_in_turns as steps_in_turns,
        write_topology as write_topology,
    )
    from recd_plugins.training.measurement import peak_bytes as peak_bytes
    from recd_plugins.training.optimizer import (
        LearningRates as LearningRates,
        build_optimizer as build_optimizer,
    )
    from recd_plugins.training.rank_state import (
        copy_weights as copy_weights,
        first_weights as first_weights,
    )
    from recd_plugins.training.result import (
        figure_text as figure_text,
        figure_words as figure_words,
        figures_of as figures_of,
        quality_advice as quality_advice,
        worse_than_base_rate as worse_than_base_rate,
    )
    from recd_plugins.training.identity import load_fitted as load_fitted
    from recd_plugins.training.session import calibration_job as calibration_job
    from recd_plugins.training.trained import (
        AbsentData as AbsentData,
        Trained as Trained,
        TrainedJob as TrainedJob,
        load_trained as load_trained,
        on_ranks as on_ranks,
        say_other_data as say_other_data,
        unchecked_model as unchecked_model,
        whole_model as whole_model,
        with_trained_columns as with_trained_columns,
    )
    from recd_plugins.training.trainer import Job as Job
    from recd_plugins.runtime.imports import silence_upstream as silence_upstream
    from recd_plugins.interfaces.batch import (
        STALL_CAUSES as STALL_CAUSES,
        Batch as Batch,
        MakingTimes as MakingTimes,
        ModelInput as ModelInput,
        Placement as Placement,
    )
    from recd_plugins.interfaces.step_cost import (
        Channel as Channel,
        CollectiveKind as CollectiveKind,
    )
    from recd_plugins.interfaces.step_cost import (
        CollectiveRate as CollectiveRate,
        CollectiveRates as CollectiveRates,
    )
    from recd_plugins.interfaces.data_profile import (
        DataProfile as DataProfile,
        DistinctGradients as DistinctGradients,
        DistinctIds as DistinctIds,
    )
    from recd_plugins.runtime.versions import Internal as Internal
    from recd_plugins.interfaces.rows import Storage as Storage
    from recd_plugins.interfaces.step_cost import (
        STAGES as STAGES,
        Stage as Stage,
        StageTimes as StageTimes,
    )
    from recd_plugins.interfaces.data_profile import (
        FeatureStatistics as FeatureStatistics,
        TableStatistics as TableStatistics,
        dedupe_factor as dedupe_factor,
        least_ids_saved as least_ids_saved,
    )
    from recd_plugins.interfaces.step_cost import (
        StageCosts as StageCosts,
        StepCost as StepCost,
    )
    from recd_plugins.runtime.text import (
        did_you_mean as did_you_mean,
        shortened as shortened,
    )
    from recd_plugins.runtime.folders import (
        WorkFolder as WorkFolder,
        machine_start as machine_start,
        work_folder as work_folder,
    )


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
__all__ = sorted(_HOMES)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, there = _HOMES[name]
        found = globals()[name] = getattr(import_module(module), there)
        return found
