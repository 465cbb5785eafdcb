"""``trackers.mlflow``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from recd_plugin_trackers.settings import config_of
from recd_plugin_trackers.tracker import Tracker, TrackerOptions
from recd_plugins.api import RunStart, optional_library

_STATUS = {"completed": "FINISHED", "interrupted": "KILLED"}


class MlFlow(Tracker):
    """Figures of a run to MLflow."""

    name = "trackers.mlflow"
    free_options = frozenset({"tracking_uri", "experiment", "run", "every"})

    class Options(TrackerOptions):
        """Where to, and how often."""

        tracking_uri: str | None = Field(
            default=None,
            description="Server, database or folder of MLflow; null takes MLFLOW_TRACKING_URI.",
        )
        experiment: str = Field(default="recd", description="Experiment, made where it is missing.")
        run: str | None = Field(default=None, description="Name of the run; null takes a new one.")

    options: Options

    def begin(self, start: RunStart, kept: int | None, more: Mapping[str, Any]) -> None:
        """A run that goes on is the same there, too."""
        tracking = optional_library("mlflow.tracking", "mlflow", self.name)
        self._client = client = tracking.MlflowClient(self.options.tracking_uri)
        self._last: dict[str, int] = {}
        if kept is not None:
            self._id = more["run"]
            client.update_run(self._id, status="RUNNING")
            # It keeps two values of one step; the same ones come again.
            for name in client.get_run(self._id).data.metrics:
                history = client.get_metric_history(self._id, name)
                self._last[name] = max(each.step for each in history)
            return
        experiment = client.get_experiment_by_name(self.options.experiment)
        number = (
            client.create_experiment(self.options.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        self._id = client.create_run(number, run_name=self.options.run).info.run_id
        for name, value in _flat(config_of(start)).items():
            client.log_param(self._id, name, value[:_LONGEST])
        client.log_text(self._id, start.registry, "registry.yaml")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A value of each figure that is new."""
        entities = optional_library("mlflow.entities", "mlflow", self.name)
        now = int(time.time() * 1e3)
        metrics = [
            entities.Metric(name, value, now, step)
            for name, value in figures.items()
            if step > self._last.get(name, -1)
        ]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    def more_state(self) -> Mapping[str, Any]:
        """Which run it is there."""
        return {"run": self._id}

    def close(self, how: str) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._id, _STATUS[how])


#: Letters of a parameter, and of its name, that every store of MLflow takes.
_LONGEST = 250


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Values by where they stand, under names that MLflow takes: it reads / as that of a path."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = [(f"{name}.{index}", item) for index, item in enumerate(value)]
    if not items:
        kept = "".join(c if c.isalnum() or c in "_-. " else "_" for c in name)[:_LONGEST]
        return {kept: str(value)}
    return {key: text for key, item in items for key, text in _flat(item, key).items()}
