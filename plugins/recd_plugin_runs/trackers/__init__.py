"""Trackers: send a run's figures to files, TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugin_runs.trackers.destinations import Csv, JsonLines, MlFlow, TensorBoard, WandB
from recd_plugins.api import Plugin, hookimpl

REQUIRES_API = 2


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Csv, JsonLines, TensorBoard, WandB, MlFlow]
