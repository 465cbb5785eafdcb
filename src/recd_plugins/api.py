"""The API of plugins: what a package of plugins imports, besides ``recd_plugins.testing``.

A module of plugins may say which version it needs; an older recd-plugins then refuses the package,
by name, where a registry file uses it::

    from recd_plugins.api import Preprocessing, hookimpl

    REQUIRES_API = 1
"""

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
    Cache,
    Converter,
    Dataset,
    DatasetWrapper,
    FeatureLookups,
    FeatureSchema,
    Feed,
    Ingestion,
    Lookups,
    Origin,
    Plugin,
    PluginOptions,
    Pooling,
    Preprocessing,
    Reader,
    RowMemory,
    Rows,
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
)
from recd_plugins.plugin_check import API_VERSION

__all__ = [
    "API_VERSION",
    "Cache",
    "Converter",
    "DataError",
    "Dataset",
    "DatasetWrapper",
    "ExactnessError",
    "FeatureLookups",
    "FeatureSchema",
    "Feed",
    "Ingestion",
    "Lookups",
    "Origin",
    "Plugin",
    "PluginError",
    "PluginOptions",
    "Pooling",
    "Preprocessing",
    "Reader",
    "RecdError",
    "RegistryError",
    "RowMemory",
    "Rows",
    "Section",
    "SessionKeys",
    "Setting",
    "SetupError",
    "SharderArguments",
    "Sharding",
    "Split",
    "StepShape",
    "Table",
    "TablePart",
    "TargetPooling",
    "TrainedRun",
    "TrainingData",
    "hookimpl",
]
