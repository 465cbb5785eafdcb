"""A loaded ``registry.yaml``: what it says, and the plugins that it names.

For commands, studies and benchmarks. Needs no torch until the registry is prepared for a model.
"""

from recd_plugins.data.wrapped_dataset import RegistryLookups, wrapped_dataset
from recd_plugins.manager import installed_plugin
from recd_plugins.planning.prepared import Prepared
from recd_plugins.plugin_call import plugin_call, plugin_items
from recd_plugins.registry import ModelSpec, RunConfig, TrainingSpec, at_entry
from recd_plugins.registry.from_file import load_registry
from recd_plugins.words import did_you_mean, shortened

__all__ = [
    "ModelSpec",
    "Prepared",
    "RegistryLookups",
    "RunConfig",
    "TrainingSpec",
    "at_entry",
    "did_you_mean",
    "installed_plugin",
    "load_registry",
    "plugin_call",
    "plugin_items",
    "shortened",
    "wrapped_dataset",
]
