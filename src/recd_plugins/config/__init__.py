"""Parsing and validation of ``registry.yaml``, the configuration file of a training run."""

from recd_plugins.config.entries import Entry, at_entry
from recd_plugins.config.run_config import RunConfig
from recd_plugins.config.schema import (
    CheckpointSpec,
    ModelSpec,
    RegistrySpec,
    TableSpec,
    TrainingSpec,
)

__all__ = [
    "CheckpointSpec",
    "Entry",
    "ModelSpec",
    "RegistrySpec",
    "RunConfig",
    "TableSpec",
    "TrainingSpec",
    "at_entry",
]
