"""Public API for plugin packages. Test helpers are in ``recd_plugins.testing``.

Names are imported when they are first used, so a module that declares plugins does not import
torch.

A plugin module can set ``REQUIRES_API = 6`` to require a version of this API. An older recd-plugins
then rejects the plugin package when a registry file uses it.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.cli import options as cli_options
    from recd_plugins.cli.init import write_registry
    from recd_plugins.compat import lookup_kernels, portable_kernels
    from recd_plugins.config import RunConfig, at_entry
    from recd_plugins.config import device as devices
    from recd_plugins.config.from_file import load_registry
    from recd_plugins.config.hookspecs import hookimpl
    from recd_plugins.config.manager import API_VERSION
    from recd_plugins.data import arrow, ipc, list_dict, parquet
    from recd_plugins.data import prepared as prepared_data
    from recd_plugins.data import preprocess as transforms
    from recd_plugins.data import reader as readers
    from recd_plugins.data import row_pipeline as row_pipelines
    from recd_plugins.data import rows as row_tables
    from recd_plugins.data import stalls as stall_meter
    from recd_plugins.data import statistics as column_statistics
    from recd_plugins.data import storage as object_stores
    from recd_plugins.data import table_writer as parquet_writer
    from recd_plugins.data import workers as reader_workers
    from recd_plugins.data.access import measure_access
    from recd_plugins.data.loader import read_task
    from recd_plugins.data.plain import PlainConverter
    from recd_plugins.data.row_filter import Condition
    from recd_plugins.data.row_pipeline import lower
    from recd_plugins.interfaces import (
        MOST_UNKNOWN,
        Cache,
        Callback,
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
        Section,
        SessionKeys,
        SharderArguments,
        Sharding,
        Split,
        StepShape,
        StreamReader,
        Table,
        TableStrategy,
        TargetPooling,
        TrainedRun,
        TrainingData,
        TrainPipeline,
        access,
        distributions,
        model_tables,
        tasks,
    )
    from recd_plugins.interfaces import batch as batch_types
    from recd_plugins.interfaces import data_profile as data_profiles
    from recd_plugins.interfaces import ingestion as feeds
    from recd_plugins.interfaces import sharding as choosing
    from recd_plugins.interfaces import step_cost as stage_costs
    from recd_plugins.interfaces.access import AccessProfile, TableAccess
    from recd_plugins.interfaces.batch import Batch, ModelInput
    from recd_plugins.interfaces.callback import Quality
    from recd_plugins.interfaces.plugin import plugin_call, plugin_items
    from recd_plugins.interfaces.rows import Storage
    from recd_plugins.interfaces.tables import AccessOptions
    from recd_plugins.model import stored_gradients
    from recd_plugins.model.build import build_model
    from recd_plugins.model.request_model import CandidateBatch, RequestModel, UserBatch, UserSide
    from recd_plugins.model.sequence_pooling import SequencePooling
    from recd_plugins.planning import plan_mode as plan_modes
    from recd_plugins.planning import step_cost as step_costs
    from recd_plugins.planning import study, topologies
    from recd_plugins.planning.choosing import prepare
    from recd_plugins.planning.compute import measure_compute
    from recd_plugins.planning.plan_context import RegistryData
    from recd_plugins.planning.prepared import Prepared
    from recd_plugins.planning.report import topology_line
    from recd_plugins.report import html_page, plots
    from recd_plugins.report import output as consoles
    from recd_plugins.report import progress as progress_bars
    from recd_plugins.report.tables import text_table
    from recd_plugins.runtime import files as file_utils
    from recd_plugins.runtime import folders, imports, machine, processes, rank_agreement, watch
    from recd_plugins.runtime import launch as launcher
    from recd_plugins.runtime import text as text_utils
    from recd_plugins.runtime.activity import doing
    from recd_plugins.runtime.errors import (
        DataError,
        ExactnessError,
        PluginError,
        RecdError,
        SetupError,
    )
    from recd_plugins.sharding import batch_form as batch_forms
    from recd_plugins.sharding.changed_rows import ChangedRows
    from recd_plugins.sharding.coalesced.input_dist import unique_ids
    from recd_plugins.sharding.exact_modules import (
        ExactShardedEmbeddingBagCollection,
        ExactShardedEmbeddingCollection,
    )
    from recd_plugins.sharding.overlap import LookupAhead
    from recd_plugins.sharding.sharders import (
        ExactEmbeddingBagCollectionSharder,
        ExactEmbeddingCollectionSharder,
    )
    from recd_plugins.sparse import dedup, from_columns, jagged
    from recd_plugins.sparse import overlap as memory_intrinsics
    from recd_plugins.sparse.dictionaries import BrokenListError
    from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
    from recd_plugins.sparse.index_select import jagged_index_select
    from recd_plugins.sparse.partial import RowPacker
    from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor
    from recd_plugins.sparse.request_rows import RequestRows
    from recd_plugins.training import identity as run_identity
    from recd_plugins.training import measurement as measurements
    from recd_plugins.training import result as run_results
    from recd_plugins.training import run_folders
    from recd_plugins.training import session as sessions
    from recd_plugins.training import sharded_model as sharded_models
    from recd_plugins.training import trained as trained_models
    from recd_plugins.training.checkpoint_dcp import table_weights
    from recd_plugins.training.checkpoint_state import common_name
    from recd_plugins.training.quality import measure as measure_quality
    from recd_plugins.training.quality import measure_tasks, tie_groups
    from recd_plugins.training.trainer import Job


def _homes() -> dict[str, tuple[str, str]]:
    """Return a dict from public name to its module and its name in that module.

    Parses the imports under ``TYPE_CHECKING`` above, which do not run.
    """
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
        package = import_module(module)
        if not hasattr(package, there):  # a submodule that is not imported yet
            import_module(f"{module}.{there}")
        found = globals()[name] = getattr(package, there)
        return found
