"""``registry.yaml``: which plugins a training run uses, and with which options."""

from recd_plugins.registry.entries import Entry, at_entry
from recd_plugins.registry.run_config import RunConfig
from recd_plugins.registry.schema import (
    ModelSpec,
    RegistrySpec,
    TableSpec,
)
from recd_plugins.registry.training_spec import CheckpointSpec, TrainingSpec

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
