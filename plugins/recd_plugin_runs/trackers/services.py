"""A registry file as trackers show it: nested values."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from recd_plugin_runs.trackers.tracker import LocalPath, Tracker, TrackerOptions
from recd_plugins.api import RunStart, optional_library


def config_of(start: RunStart) -> dict[str, Any]:
    """What the registry file says, and what was set in place of it."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe").load(start.registry)
    except YAMLError:  # of a start that a program made
        found = None
    values = found if isinstance(found, dict) else {}
    return {**values, "settings": list(start.settings)}


class TensorBoard(Tracker):
    """Figures of a run as scalars of TensorBoard."""

    name = "trackers.tensorboard"
    free_options = frozenset({"path", "every"})

    class Options(TrackerOptions):
        """Where to, and how often."""

        path: LocalPath = Field(
            description="Folder of event files, as tensorboard --logdir takes it."
        )

    options: Options

    def begin(self, start: RunStart, kept: int | None, more: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Events of later steps are marked as void; those of another run get a folder."""
        optional_library("tensorboard", "tensorboard", self.name)
        from torch.utils.tensorboard import SummaryWriter

        if kept is None:
            _set_aside(self.options.path)
        first = 0 if kept is None else start.step + 1
        self._writer = SummaryWriter(str(self.options.path), purge_step=first)
        if kept is None:
            text = "\n".join([start.registry, *(f"# {each}" for each in start.settings)])
            self._writer.add_text("registry", f"```yaml\n{text}\n```", 0)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A scalar of each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """On disk."""
        self._writer.flush()

    def close(self, how: str) -> None:  # noqa: ARG002
        """No more of it."""
        self._writer.close()


def _set_aside(folder: Path) -> None:
    """Move events of an earlier run, which ours would void, to a folder that is shown beside it."""
    events = [*folder.glob("events.out.tfevents.*")]
    number = 1
    while (aside := folder / f"earlier.{number}").exists():
        number += 1
    if events:
        aside.mkdir()
        for each in events:
            each.rename(aside / each.name)
        print(f"{folder}: events of an earlier run are in {aside} now", file=sys.stderr)


class WandB(Tracker):
    """Figures of a run to Weights & Biases."""

    name = "trackers.wandb"
    free_options = frozenset({"project", "run", "folder", "mode", "every"})

    class Options(TrackerOptions):
        """Where to, and how often."""

        project: str = Field(description="Project of Weights & Biases.")
        run: str | None = Field(default=None, description="Name of the run; null takes a new one.")
        folder: Path = Field(default=Path("."), description="Folder in which it puts its wandb/.")
        mode: Literal["online", "offline"] = Field(
            default="online", description="Whether it sends, or leaves that to `wandb sync`."
        )

    options: Options

    def begin(self, start: RunStart, kept: int | None, more: Mapping[str, Any]) -> None:
        """A run that goes on is the same there, too."""
        wandb = optional_library("wandb", "wandb", self.name)
        options = self.options
        options.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=options.project,
            name=options.run,
            dir=str(options.folder),
            mode=options.mode,
            id=more.get("run"),
            resume=None if kept is None or options.mode == "offline" else "allow",
            config=config_of(start),
            settings=wandb.Settings(console="off"),
        )
        # It takes no steps from before those that it has; the same figures come again.
        self._first = self._run.step if kept is not None else 0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A step of its history."""
        if step >= self._first:
            self._run.log(dict(figures), step=step)

    def more_state(self) -> Mapping[str, Any]:
        """Which run it is there."""
        return {"run": self._run.id}

    def close(self, how: str) -> None:
        """Send what is left."""
        self._run.finish(exit_code=0 if how == "completed" else 1)


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
