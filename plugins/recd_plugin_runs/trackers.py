"""Trackers record the metrics of a run in files, TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from recd_plugins.api import (
    Callback,
    Plugin,
    PluginOptions,
    RunEnd,
    RunEvaluation,
    RunInterruption,
    RunStart,
    RunStep,
    file_utils,
    hookimpl,
    imports,
)

if TYPE_CHECKING:
    from torch import Tensor


def _local(path: object) -> object:
    if "://" in str(path):
        raise ValueError(f"{path} is a URL, not a local path. Use a local path.")
    there = isinstance(path, str | Path) and Path(path).exists()
    if there and not (Path(str(path)).is_file() or Path(str(path)).is_dir()):
        raise ValueError(f"{path} is a pipe or a device. Use a regular file or a folder.")
    return path


REQUIRES_API = 2
#: A local file or folder.
LocalPath = Annotated[Path, BeforeValidator(_local)]


class TrackerOptions(PluginOptions):
    """Options that all trackers have."""

    every: int = Field(
        default=10,
        gt=0,
        description="Training steps per record.",
    )


class Tracker(Callback):
    """Callback that records metrics of training steps and evaluations.

    A resumed run appends to its records.
    """

    class Options(TrackerOptions):
        pass

    options: TrackerOptions

    @abstractmethod
    def begin(self, start: RunStart, kept: Mapping[str, Any] | None) -> None:
        """Open this tracker's log before the first step.

        ``kept`` is the state of this tracker in the checkpoint that the run resumes from, or None.
        """

    @abstractmethod
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the metrics after a training step, keyed by name."""

    def close(self, *, completed: bool) -> None:
        """Close this tracker's log. ``completed`` is False if the run failed or was interrupted."""

    def more_state(self) -> Mapping[str, Any]:
        """Return JSON values to store in the checkpoint, which ``begin`` needs to resume."""
        return {}

    def on_start(self, start: RunStart) -> None:
        """Call ``begin``, unless the state of a checkpoint will be loaded first."""
        self._start, self._writes = start, start.rank == 0
        self._total: Tensor | float = 0.0
        self._steps = 0
        self._rate: float | None = None
        self._began = False
        self._since: float | None = None
        if start.step == 0:
            self._begin()

    def on_step(self, step: RunStep) -> None:
        if not self._writes:
            return
        import torch

        self._total = step.loss.to(torch.float64) + self._total
        self._steps += 1
        if self._since is None:  # the first step compiles, or fills a pipeline
            self._since, self._timed = time.perf_counter(), 0
        else:
            self._timed += 1
        self._rate = step.learning_rate
        if step.step % self.options.every == 0:
            self._write_steps(step.step)

    def on_evaluate(self, evaluation: RunEvaluation) -> None:
        figures = {**evaluation.quality.figures(), **evaluation.metrics}
        of_split = {f"{evaluation.split}_{name}": float(each) for name, each in figures.items()}
        self._write(evaluation.step, of_split)
        if self._since is not None:  # exclude the time of the evaluation from the step time
            self._since, self._timed = time.perf_counter(), 0

    def on_interrupt(self, interruption: RunInterruption) -> None:  # noqa: ARG002
        self._close(completed=False)

    def on_end(self, end: RunEnd) -> None:
        if self._steps:
            self._write_steps(end.step)
        self._close(completed=True)

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's training steps that are not recorded yet, for the checkpoint."""
        if not self._writes:
            return {}
        self._begin()
        pending = {"steps": self._steps, "total": float(self._total), "rate": self._rate}
        return {**pending, **self.more_state()}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        if self._writes and (state := states[0]):
            self._steps, self._total = state["steps"], state["total"]
            self._rate = state.get("rate")
            self._begin(state)

    def _write_steps(self, step: int) -> None:
        figures = {"loss": float(self._total) / self._steps}
        if self._rate is not None:
            figures["learning_rate"] = self._rate
        now = time.perf_counter()
        if self._start.step_samples and self._since is not None and self._timed:
            each = (now - self._since) / self._timed
            figures["samples_per_second"] = self._start.step_samples / each
        self._write(step, figures)
        self._total, self._steps = 0.0, 0
        self._since, self._timed = now, 0

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._writes:
            self._begin()
            self.write(step, figures)

    def _close(self, *, completed: bool) -> None:
        if self._writes:
            self._begin()
            self.close(completed=completed)

    def _begin(self, kept: Mapping[str, Any] | None = None) -> None:
        """Call ``begin`` if it was not called yet. ``kept`` can be missing in a checkpoint."""
        if self._writes and not self._began:
            self._began = True
            self.begin(self._start, kept)


class FileTracker(Tracker):
    """Writes a file with a header line and one line per record."""

    free_options = frozenset({"path", "every"})

    class Options(TrackerOptions):
        path: LocalPath = Field(description="File. An existing file of an earlier run is renamed.")

    options: Options

    @abstractmethod
    def head(self, start: RunStart) -> str:
        """Return the header line of a new file."""

    def begin(self, start: RunStart, kept: Mapping[str, Any] | None) -> None:
        """Open the file. To resume, remove records written after the checkpoint.

        If the last record differs from the checkpoint's, the file belongs to another run and is
        renamed.
        """
        path = self.options.path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        self._records: int = 0 if kept is None else kept["records"]
        self._last: Mapping[str, float] = {} if kept is None else kept.get("last", {})
        whole = len(lines) == 1 if not self._records else len(lines) > self._records
        if kept is not None and whole and self._ends_with_last(lines):
            file_utils.write_text(path, "".join(lines[: 1 + self._records]))
            return
        number, aside = 1, None
        while path.exists():  # run.csv becomes run.1.csv
            aside = path.with_name(f"{path.stem}.{number}{path.suffix}")
            if not aside.exists():
                path.rename(aside)
            number += 1
        if kept is not None and (aside or self._records):
            print(
                f"{path}: the file lacks the {self._records} records written before the checkpoint"
                f"{f' and was renamed to {aside}' if aside else ''}. A new file begins here.",
                file=sys.stderr,
            )
        self._records = 0
        self.append(self.head(start))

    def append(self, line: str) -> None:
        with self.options.path.open("a", encoding="utf-8", newline="") as file:
            file.write(line)

    @abstractmethod
    def parse(self, head: str, line: str) -> Mapping[str, Any]:
        """Parse a line of the file to a record. ``head`` is the header line."""

    def _ends_with_last(self, lines: Sequence[str]) -> bool:
        """Return whether the last line has the metrics of the checkpoint's last record."""
        if not self._last:
            return True
        try:
            found = self.parse(lines[0], lines[self._records])
            return all(float(found[name]) == value for name, value in self._last.items())
        except (KeyError, TypeError, ValueError):  # the line of another run
            return False

    def stamped(self, step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Add the step and the time to metrics, and count the record."""
        self._records += 1
        self._last = {"step": step} | {
            name: value
            for name, value in figures.items()
            if name != "samples_per_second" and math.isfinite(value)
        }
        return {"step": step, "time": round(time.time(), 3), **figures}

    def more_state(self) -> Mapping[str, Any]:
        return {"records": self._records, "last": self._last}


_FIRST = ("step", "time", "loss", "learning_rate", "samples_per_second")


class Csv(FileTracker):
    """Writes metrics of a run to a CSV file, one row per record."""

    name = "trackers.csv"

    def head(self, start: RunStart) -> str:  # noqa: ARG002
        return _text([_FIRST])

    def parse(self, head: str, line: str) -> Mapping[str, Any]:
        columns, values = csv.reader([head, line])
        return dict(zip(columns, values, strict=False))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        path = self.options.path
        with path.open(encoding="utf-8", newline="") as file:
            columns = next(csv.reader(file))
        if new := [name for name in figures if name not in columns]:
            _, *rows = csv.reader(io.StringIO(path.read_text("utf-8")))
            columns += new
            table = [columns, *([*row, *[""] * len(new)] for row in rows)]
            file_utils.write_text(path, _text(table))
        record = self.stamped(step, figures)
        self.append(_text([[record.get(name, "") for name in columns]]))


def _text(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


class JsonLines(FileTracker):
    """Writes metrics of a run to a file, one JSON object per line."""

    name = "trackers.jsonl"

    def head(self, start: RunStart) -> str:
        return json.dumps({"registry": start.registry, "settings": list(start.settings)}) + "\n"

    def parse(self, head: str, line: str) -> Mapping[str, Any]:  # noqa: ARG002
        found: Mapping[str, Any] = json.loads(line)
        return found

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        record = file_utils.finite(self.stamped(step, figures))
        self.append(json.dumps(record, allow_nan=False) + "\n")


def config_of(start: RunStart) -> dict[str, Any]:
    """Return the values of the registry file, with overrides, to record as the run's config."""
    from ruamel.yaml import YAML

    return {**(YAML(typ="safe").load(start.registry) or {}), "settings": list(start.settings)}


class TensorBoard(Tracker):
    """Writes metrics of a run as TensorBoard scalars."""

    name = "trackers.tensorboard"
    free_options = frozenset({"path", "every"})

    class Options(TrackerOptions):
        path: LocalPath = Field(
            description="Folder for event files, to pass to tensorboard --logdir."
        )

    options: Options

    def begin(self, start: RunStart, kept: Mapping[str, Any] | None) -> None:
        imports.optional_library("tensorboard", "tensorboard", self.name)
        from torch.utils.tensorboard import SummaryWriter

        # Events of an earlier run in this folder are hidden.
        first = 0 if kept is None else start.step + 1
        self._writer = SummaryWriter(str(self.options.path), purge_step=first)
        if kept is None:
            text = "\n".join([start.registry, *(f"# {each}" for each in start.settings)])
            self._writer.add_text("registry", f"```yaml\n{text}\n```", 0)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def more_state(self) -> Mapping[str, Any]:
        self._writer.flush()
        return {}

    def close(self, *, completed: bool) -> None:  # noqa: ARG002
        self._writer.close()


class WandB(Tracker):
    """Sends metrics of a run to Weights & Biases."""

    name = "trackers.wandb"
    free_options = frozenset({"project", "run", "folder", "mode", "every"})

    class Options(TrackerOptions):
        project: str = Field(description="Weights & Biases project.")
        run: str | None = Field(
            default=None, description="Name of the run; null lets Weights & Biases choose one."
        )
        folder: Path = Field(default=Path("."), description="Parent of the wandb/ folder.")
        mode: Literal["online", "offline"] = Field(
            default="online",
            description="online sends metrics during the run. offline stores them for `wandb "
            "sync`.",
        )

    options: Options

    def begin(self, start: RunStart, kept: Mapping[str, Any] | None) -> None:
        wandb = imports.optional_library("wandb", "wandb", self.name)
        options = self.options
        options.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=options.project,
            name=options.run,
            dir=str(options.folder),
            mode=options.mode,
            id=(kept or {}).get("run"),
            resume=None if kept is None or options.mode == "offline" else "allow",
            config=config_of(start),
            settings=wandb.Settings(console="off"),
        )
        # W&B rejects steps before its latest step. Repeated steps have the same figures.
        self._first = self._run.step if kept is not None else 0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if step >= self._first:
            self._run.log(dict(figures), step=step)

    def more_state(self) -> Mapping[str, Any]:
        return {"run": self._run.id}

    def close(self, *, completed: bool) -> None:
        self._run.finish(exit_code=int(not completed))


class MlFlow(Tracker):
    """Sends metrics of a run to MLflow."""

    name = "trackers.mlflow"
    free_options = frozenset({"tracking_uri", "experiment", "run", "every"})

    class Options(TrackerOptions):
        tracking_uri: str | None = Field(
            default=None,
            description="MLflow server, database or folder; null uses MLFLOW_TRACKING_URI.",
        )
        experiment: str = Field(
            default="recd", description="MLflow experiment. Created if missing."
        )
        run: str | None = Field(
            default=None, description="Name of the run; null lets MLflow choose one."
        )

    options: Options

    def begin(self, start: RunStart, kept: Mapping[str, Any] | None) -> None:
        tracking = imports.optional_library("mlflow.tracking", "mlflow", self.name)
        self._client = client = tracking.MlflowClient(self.options.tracking_uri)
        self._last: dict[str, int] = {}
        if kept is not None:
            self._id = kept["run"]
            client.update_run(self._id, status="RUNNING")
            # MLflow stores both values of a repeated step. Repeated steps have the same figures.
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
        entities = imports.optional_library("mlflow.entities", "mlflow", self.name)
        now = int(time.time() * 1e3)
        metrics = [
            entities.Metric(name, value, now, step)
            for name, value in figures.items()
            if step > self._last.get(name, -1)
        ]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    def more_state(self) -> Mapping[str, Any]:
        return {"run": self._id}

    def close(self, *, completed: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if completed else "KILLED")


#: Maximum length of a parameter name or value in every MLflow store.
_LONGEST = 250


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Flatten nested values to a dict with dotted keys, in characters that MLflow accepts."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = [(f"{name}.{index}", item) for index, item in enumerate(value)]
    if not items:
        kept = "".join(c if c.isalnum() or c in "_-. " else "_" for c in name)[:_LONGEST]
        return {kept: str(value)}
    return {key: text for key, item in items for key, text in _flat(item, key).items()}


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Csv, JsonLines, TensorBoard, WandB, MlFlow]
