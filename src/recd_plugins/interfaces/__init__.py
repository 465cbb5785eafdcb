"""The six kinds of parts, one abstract class a file."""

from recd_plugins.interfaces.cache import Cache
from recd_plugins.interfaces.converter import Converter
from recd_plugins.interfaces.dataset import (
    Dataset,
    FeatureSchema,
    Origin,
    Reader,
    Rows,
    SessionKeys,
    Split,
)
from recd_plugins.interfaces.plugin import Plugin, PluginOptions
from recd_plugins.interfaces.pooling import Pooling, TargetPooling
from recd_plugins.interfaces.preprocessing import Preprocessing
from recd_plugins.interfaces.setting import Setting, TrainingData
from recd_plugins.interfaces.sharding import Sharding, Table

__all__ = [
    "Cache",
    "Converter",
    "Dataset",
    "FeatureSchema",
    "Origin",
    "Plugin",
    "PluginOptions",
    "Pooling",
    "Preprocessing",
    "Reader",
    "Rows",
    "SessionKeys",
    "Setting",
    "Sharding",
    "Split",
    "Table",
    "TargetPooling",
    "TrainingData",
]
