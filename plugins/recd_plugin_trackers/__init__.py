"""Figures of a run while it goes on: to files, TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugin_trackers.csv_file import Csv
from recd_plugin_trackers.json_lines import JsonLines
from recd_plugin_trackers.mlflow_run import MlFlow
from recd_plugin_trackers.tensorboard import TensorBoard
from recd_plugin_trackers.wandb_run import WandB
from recd_plugins.api import Plugin, hookimpl

REQUIRES_API = 2


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Csv, JsonLines, TensorBoard, WandB, MlFlow]
