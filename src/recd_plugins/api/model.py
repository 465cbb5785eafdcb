"""The built-in model, its tables by name, and what trains them.

For plans and benchmarks. Needs torch and TorchRec.
"""

from recd_plugins.model.build import build_model
from recd_plugins.model.deferred_tables import deferred_tables
from recd_plugins.model.dlrm import DLRM
from recd_plugins.model.interactions import CrossInteraction
from recd_plugins.model.sequence_pooling import SequencePooling
from recd_plugins.model_tables import table_name, tables_of
from recd_plugins.planning.prepare import prepare
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.weights import copy_weights, first_weights

__all__ = [
    "DLRM",
    "CrossInteraction",
    "SequencePooling",
    "build_model",
    "build_optimizer",
    "copy_weights",
    "deferred_tables",
    "first_weights",
    "prepare",
    "table_name",
    "tables_of",
]
