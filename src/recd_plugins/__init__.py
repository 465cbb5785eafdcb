"""Plugins that reduce the cost of TorchRec training without changing its results."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.config import RunConfig
    from recd_plugins.config.from_file import load_registry
    from recd_plugins.drop_in.dedup import Dedup
    from recd_plugins.drop_in.pooled_sequences import PooledSequences
    from recd_plugins.drop_in.wrap import wrap
    from recd_plugins.model.deferred_tables import deferred_tables
    from recd_plugins.model.request_model import RequestModel, request_rows
    from recd_plugins.planning.choosing import prepare
    from recd_plugins.runtime.versions import __version__
    from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
    from recd_plugins.sharding.guards import guard
    from recd_plugins.sharding.table_report import describe_tables
    from recd_plugins.training.checkpoint import Checkpoints
    from recd_plugins.training.evaluation import Predictions
    from recd_plugins.training.optimizer import LearningRates, build_optimizer
    from recd_plugins.training.rank_state import copy_weights, first_weights
    from recd_plugins.training.trainer import BatchSource

# Imported on first use, so that ``import recd_plugins`` does not import torch.
_HOME = {
    "BatchSource": "training.trainer",
    "Checkpoints": "training.checkpoint",
    "CollectiveBytes": "sharding.byte_counter",
    "LearningRates": "training.optimizer",
    "Predictions": "training.evaluation",
    "build_optimizer": "training.optimizer",
    "copy_weights": "training.rank_state",
    "deferred_tables": "model.deferred_tables",
    "first_weights": "training.rank_state",
    "guard": "sharding.guards",
    "lookup_ids": "sharding.byte_counter",
    "Dedup": "drop_in.dedup",
    "PooledSequences": "drop_in.pooled_sequences",
    "RequestModel": "model.request_model",
    "RunConfig": "config",
    "__version__": "runtime.versions",
    "describe_tables": "sharding.table_report",
    "load_registry": "config.from_file",
    "prepare": "planning.choosing",
    "request_rows": "model.request_model",
    "wrap": "drop_in.wrap",
}

__all__ = [
    "BatchSource",
    "Checkpoints",
    "CollectiveBytes",
    "Dedup",
    "LearningRates",
    "PooledSequences",
    "Predictions",
    "RequestModel",
    "RunConfig",
    "__version__",
    "build_optimizer",
    "copy_weights",
    "deferred_tables",
    "describe_tables",
    "first_weights",
    "guard",
    "load_registry",
    "lookup_ids",
    "prepare",
    "request_rows",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
