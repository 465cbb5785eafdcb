"""Computes prediction quality and metrics over the rows of all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.compat.lookup_kernels import steps_kept
from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.config.schema import ValidationSpec
from recd_plugins.data.loader import EveryRow
from recd_plugins.data.prepared import PreparedModel
from recd_plugins.interfaces import Metric, ScoredBatch, Split, TrainPipeline
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.callback import Quality, RegressionQuality
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.interfaces.tasks import Task, TaskType
from recd_plugins.model.build import model_code
from recd_plugins.runtime import activity
from recd_plugins.runtime.errors import PluginError, Problem, RecdError, RegistryError
from recd_plugins.runtime.rank_agreement import together
from recd_plugins.runtime.text import metric_words
from recd_plugins.training.checkpoint_files import ValidationCurve
from recd_plugins.training.finite import FiniteRun
from recd_plugins.training.progress_bar import progress_bar
from recd_plugins.training.quality import measure, measure_tasks

#: Quality of a split (None if it is empty), and a map from metric name to value.
Measured = tuple[Quality | None, Mapping[str, float]]
# A metric named calibration, as TorchRec's is, replaces the built-in one.
_OF_QUALITY = {field.name for field in fields(Quality)} - {"calibration", "tasks", "loss"}
_OF_LABEL = ("normalized_entropy", "auc", "log_loss", "calibration")
#: Built-in metrics of each type of label.
_FIGURES: dict[TaskType, tuple[str, ...]] = {
    "binary": _OF_LABEL,
    "weighted": _OF_LABEL,
    "regression": tuple(f.name for f in fields(RegressionQuality) if f.name != "num_samples"),
}


def splits_of(registry: RunConfig) -> tuple[Split, ...]:
    """Return the names of the dataset splits that a run reads."""
    return registry.dataset.splits() if registry.training.evaluate else ("train",)


def validated_split(registry: RunConfig) -> Split:
    """Return the split that ``training.validation`` evaluates."""
    return "validation" if "validation" in splits_of(registry) else "test"


def step_code(registry: RunConfig, pipeline: TrainPipeline, model: nn.Module) -> ExitStack:
    """Return a context in which errors of a step name the plugins of model and pipeline."""
    stack = ExitStack()
    stack.enter_context(model_code(registry, model))
    for entry in registry.entries("pipeline"):
        stack.enter_context(plugin_call(entry.plugin, "progress", type(pipeline)))
    return stack


def steps(
    pipeline: TrainPipeline, batches: Iterator[Any], registry: RunConfig, model: nn.Module
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run the pipeline and yield the loss (scalar), logits and labels (``[B]``) of each batch."""
    with suppress(StopIteration):
        while True:
            with step_code(registry, pipeline, model):
                output = pipeline.progress(batches)
            yield output


def evaluate(
    prepared: PreparedModel,
    dmp: DistributedModelParallel,
    pipeline: TrainPipeline,
    rank: int,
    world_size: int,
    device: torch.device,
    finite: FiniteRun,
    split: Split = "test",
) -> Measured:
    """Return quality and metrics on a split; (None, {}) if the run does not evaluate it.

    All ranks must call this. Rows that pad a batch are scored but not counted.
    """
    registry = prepared.registry
    if split not in splits_of(registry):
        return None, {}
    entries = registry.entries("metric")
    tasks = registry.dataset.schema().tasks
    predictions, metrics = Predictions(tasks=tasks), Metrics(registry.path, entries, tasks)
    losses: list[Tensor] = []
    dmp.eval()
    with (
        EveryRow(prepared, rank, world_size, split, device, sessions=bool(entries)) as batches,
        steps_kept(dmp.module),
        torch.no_grad(),
        activity.doing("evaluating"),
        progress_bar(rank, split, 0, len(batches)) as advance,
    ):
        waiting: deque[tuple[int, Tensor | None]] = deque()
        outputs = steps(pipeline, _noted(batches, waiting), registry, dmp.module)
        for loss, logits, labels in outputs:
            count, sessions = waiting.popleft()
            counted = None if sessions is None else sessions[:count]
            predictions.update(logits[:count], labels[:count])
            if count:
                metrics.update(logits[:count], labels[:count], counted)
            losses.append(loss)
            advance(loss)
    finite.losses(losses, of=f" of the {split} split")
    with activity.doing("measuring quality", long=True):  # rank 0 has the rows of all
        return predictions.summarize(), metrics.results()


def _noted(
    batches: Iterable[tuple[ModelInput, int]], waiting: deque[tuple[int, Tensor | None]]
) -> Iterator[ModelInput]:
    """Yield each batch; append its (number of rows, session ids) to ``waiting``."""
    for batch, count in batches:
        waiting.append((count, batch.sessions))
        yield batch


class Predictions:
    """Stores the logits and labels of this rank, with 8 bytes per row and task.

    ``window`` is the number of newest rows to keep, rounded to full batches; None keeps all.
    ``tasks`` are the tasks of multi-task training, if there are several labels. ``num_samples`` is
    the number of rows currently stored.
    """

    def __init__(self, window: int | None = None, tasks: Sequence[Task] = ()) -> None:
        self._window, self._tasks = window, tuple(tasks)
        self._kept: deque[Tensor] = deque()
        self.num_samples = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits and labels of one batch, ``[B]`` each, or ``[B, T]`` of T tasks."""
        # Kept on the device, because a copy to the host would wait for the step.
        pair = torch.stack([logits.float(), labels.float()])
        self._kept.append(pair)
        self.num_samples += pair.shape[1]
        if self._window is None:
            return
        while self.num_samples - self._kept[0].shape[1] >= self._window:
            self.num_samples -= self._kept.popleft().shape[1]

    def summarize(self) -> Quality | None:
        """Return the quality over all ranks; None if no rank has rows. All ranks must call this."""
        empty = torch.zeros(2, 0, len(self._tasks)) if self._tasks else torch.zeros(2, 0)
        mine = torch.cat(list(self._kept), dim=1).cpu() if self._kept else empty
        everyone = _gathered(mine.numpy())
        return together(lambda: None if everyone is None else self._of_all(everyone))[0]

    def _of_all(self, ranks: Iterable[Any]) -> Quality | None:
        logits, labels = torch.cat([torch.from_numpy(rank) for rank in ranks], dim=1).double()
        if not len(labels):
            return None
        return (
            measure_tasks(self._tasks, logits, labels) if self._tasks else measure(logits, labels)
        )


def _gathered(mine: Any) -> list[Any] | None:
    """Return the values of all ranks on rank 0, and None on other ranks."""
    first = dist.get_rank() == 0
    everyone: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(mine, everyone)
    return everyone


class Metrics:
    """Computes the metric plugins of a run config for one split on one rank.

    With several tasks, plugins measure each binary and weighted task over the rows that have its
    label. The names of the results then start with the task, as in ``click.ndcg``.
    """

    def __init__(
        self, path: Path, entries: Sequence[Entry[Metric]], tasks: Sequence[Task] = ()
    ) -> None:
        self._path, self._tasks = path, tuple(tasks)
        #: Metric plugins, each with the column and the task that it measures.
        measured = [(n, task) for n, task in enumerate(tasks) if not task.is_regression]
        self._entries = [
            (entry, *of) for of in (measured if tasks else [(0, None)]) for entry in entries
        ]
        self._states = [entry.plugin.start() for entry, *_ in self._entries]
        self._num_samples = 0

    def update(self, logits: Tensor, labels: Tensor, sessions: Tensor | None = None) -> None:
        """Update all metrics with the logits, labels (``[B]`` or ``[B, T]``) and session ids."""
        self._num_samples += len(labels)
        if not self._entries:
            return
        logits, labels = logits.detach().cpu().float(), labels.detach().cpu().float()
        for i, (entry, column, task) in enumerate(self._entries):
            batch = ScoredBatch(logits, labels, sessions)
            if task is not None:
                known = ~labels[:, column].isnan()
                batch = ScoredBatch(
                    logits[known, column],
                    task.targets(labels[known, column]),
                    None if sessions is None else sessions[known],
                )
            with at_entry(self._path, entry), plugin_call(entry.plugin, "update"):
                self._states[i] = entry.plugin.update(self._states[i], batch)

    def results(self) -> dict[str, float]:
        """Return a dict from metric to its value over all ranks. All ranks must call this."""
        if not self._entries:
            return {}
        everyone = _gathered((self._num_samples, self._states))
        return together(lambda: {} if everyone is None else self._of_all(everyone))[0]

    def _of_all(self, ranks: Sequence[tuple[int, list[Any]]]) -> dict[str, float]:
        found: dict[str, float] = {}
        if not any(num_samples for num_samples, _ in ranks):
            return found
        for i, (entry, _, task) in enumerate(self._entries):
            with at_entry(self._path, entry), plugin_call(entry.plugin, "results"):
                results = entry.plugin.results([states[i] for _, states in ranks])
            where = f"{self._path}:{entry.line} {entry.field}"
            for metric, value in results.items():
                name = metric if task is None else f"{task.name}.{metric}"
                if name in found or metric in _OF_QUALITY:
                    raise PluginError(
                        f"{where}: metric {name!r} of plugin {entry.plugin.name!r} has the name of "
                        "a built-in metric or of another plugin's metric. Return another name "
                        "from results()."
                    )
                if not math.isfinite(value):
                    click.echo(
                        f"{where}: metric {name!r} of plugin {entry.plugin.name!r} is {value}, not "
                        "a finite number",
                        err=True,
                    )
                found[name] = float(value)
        return found


def check_evaluation(registry: RunConfig) -> None:
    """Raise ``RegistryError`` if metrics or validation are configured without a test split."""
    has_test, metrics = "test" in splits_of(registry), registry.entries("metric")
    why = f"dataset {registry.dataset.name!r} has no test split"
    remedy = "configure a test split in dataset.options"
    if not registry.training.evaluate:
        why, remedy = "training.evaluate is false", "set training.evaluate to true"
    wrong = [
        (
            entry.line,
            entry.field,
            f"{entry.plugin.name} needs a test split, but {why}. Remove this entry, or {remedy}.",
        )
        for entry in metrics
        if not has_test
    ]
    if (spec := registry.training.validation) is not None:
        known, tasks = [*_FIGURES["binary"]], registry.dataset.known_tasks()
        if validated_split(registry) not in splits_of(registry):
            text = f"validation needs a test split, but {why}. Remove this section, or {remedy}."
            wrong.append((0, "training.validation", text))
        elif tasks and not _is_of_task(spec.metric, tasks, bool(metrics)):
            names = [f"{task.name}.{name}" for task in tasks for name in _FIGURES[task.type]]
            text = (
                f"metric {spec.metric!r} belongs to no label of this dataset. Use one of: "
                f"{', '.join(map(repr, ['loss', *names]))}."
            )
            wrong.append((0, "training.validation", text))
        elif not tasks and spec.metric is not None and spec.metric not in known and not metrics:
            text = (
                f"metric {spec.metric!r} is not a built-in metric ({', '.join(map(repr, known))}), "
                "and the section metrics: is empty. Use a built-in metric, or add a metric "
                "plugin."
            )
            wrong.append((0, "training.validation", text))
    if wrong:
        raise RegistryError([Problem(str(registry.path), *each) for each in wrong])


def _is_of_task(metric: str | None, tasks: Sequence[Task], more: bool) -> bool:
    """Return whether a metric belongs to a task. ``more``: metric plugins may add metrics."""
    if metric in (None, "loss"):
        return True
    name, _, of_task = str(metric).rpartition(".")
    return any(
        task.name == name and (of_task in _FIGURES[task.type] or (more and not task.is_regression))
        for task in tasks
    )


class Validation:
    """Schedules the validations of a run and stores their results."""

    def __init__(
        self,
        spec: ValidationSpec,
        before: ValidationCurve | None = None,
        step: int = 0,
        *,
        split: Split = "test",
        epoch_steps: int = 1,
        tasks: Sequence[Task] = (),
    ) -> None:
        self._spec, self._step, self.split, self._epoch_steps = spec, step, split, epoch_steps
        self.every = spec.every or epoch_steps
        self.metric = spec.metric or ("loss" if tasks else "normalized_entropy")
        self.curve = ValidationCurve(self.metric, spec.best)
        if before is not None and (before.metric, before.mode) == (self.metric, spec.best):
            self.curve = before
        best = self.curve.best
        known = {} if best is None else {self.metric: self.curve.values[best]}
        self._figures: Mapping[str, float | None] = known

    def due(self, step: int) -> bool:
        """Return True if a validation is due at this step."""
        return step % self.every == 0 and not self.is_measured(step)

    def is_measured(self, step: int) -> bool:
        """Return True if ``step`` is the last validated step."""
        return step in self.curve.steps[-1:]

    @property
    def stops(self) -> bool:
        """Return True after ``patience`` validations without improvement, which end the run."""
        patience, curve = self._spec.patience, self.curve
        if patience is None or not curve.steps or curve.steps[-1] < self._step:
            return False
        # The validation of an earlier run's last step does not count.
        due = [at for at, step in enumerate(curve.steps) if step % self.every == 0]
        values = [curve.values[at] for at in due]
        return replace(curve, steps=due, values=values).stale >= patience

    @property
    def advice(self) -> str:
        """Return how to continue a run that ended by ``training.validation.patience``."""
        stale, patience = self.curve.stale, self._spec.patience
        return (
            f"There is nothing to train: training.validation.patience ({patience}) was reached at "
            f"step {self._step}; the best step was {self.curve.best_step}. To continue, set "
            f"patience to more than {stale}, or to null"
        )

    def add(self, step: int, measured: Measured) -> bool:
        """Add the results of a step; return True if they are the best so far."""
        values = _figures(measured)
        if self.metric not in values:
            raise RecdError(
                f"training.validation.metric: no metric is named {self.metric!r}. "
                + (
                    f"Use one of: {', '.join(map(repr, values))}."
                    if values
                    else f"The {self.split} split has no rows. Use a larger {self.split} split."
                )
            )
        value = float(values[self.metric])
        self.curve = self.curve.with_value(step, value if math.isfinite(value) else None)
        if self.curve.best_step != step:
            return False
        self._figures = values
        return True

    def line(self, measured: Measured) -> str:
        """Return a line of text about the last validation."""
        step = self.curve.steps[-1]
        rows, shown = _shown(measured, self.metric)
        best = "" if self.curve.best is None else f"; best after step {self.curve.best_step}"
        if self.curve.best_step == step:
            best = " (the best so far)"
        return f"step {step}, {rows:,} rows of the {self.split} split: {shown}{best}"

    @property
    def stopped(self) -> str:
        """Return a line of text that says why the run stops early."""
        curve = self.curve
        used = f". Test metrics and recd predict use step {curve.best_step}"
        return (
            f"stopped early after step {curve.steps[-1]}: {metric_words(curve.metric)} has not "
            f"improved for {curve.stale} validation{'s' * (curve.stale > 1)}"
            f"{'' if curve.best is None else used}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the validated steps as JSON values, with all figures of a validation split."""
        own = {} if self.split == "test" else {"figures": self._figures}
        best = {"best_step": self.curve.best_step, "stopped_early": self.stops}
        return {**asdict(self.curve), **best, **own}

    def __str__(self) -> str:
        curve = self.curve
        if curve.best is None:
            best = f"no validation had a finite {metric_words(curve.metric)}"
        else:
            best = (
                f"the best {metric_words(curve.metric)} of the validations was "
                f"{curve.values[curve.best]:.5f}, after step {curve.best_step}"
            )
        if curve.best is None:
            return best
        text = f"{best}. Test figures are those of step {curve.best_step}"
        if self.split == "test":
            text += (
                ", and optimistic, because the test split selected this step. For unbiased "
                "figures, add a validation split to the dataset"
            )
        is_later = self.curve.steps[-1] >= 2 * self._epoch_steps
        if is_later and curve.steps[curve.best] <= self._epoch_steps and not self.stops:
            text += (
                "\nThe model overfits after the first epoch. Set training.epochs: 1, or set "
                "training.validation.patience to stop early"
            )
        return text


class ProgressiveValidation:
    """Prediction quality of consecutive windows of training steps.

    The rows of a batch are predicted before the batch is trained, by the forward pass of the step.

    Args:
        every: number of steps in a window. A resumed run begins with the rest of a window.
        tasks: tasks of multi-task training.

    Attributes:
        windows: JSON values of each window: its last step, and its metrics.
    """

    def __init__(self, every: int, tasks: Sequence[Task]) -> None:
        self._every, self._tasks = every, tasks
        self._predictions = Predictions(tasks=tasks)
        self.windows: list[dict[str, Any]] = []

    def update(self, step: int, logits: Tensor, labels: Tensor) -> Measured | None:
        """Add a training step. Return the results if it ends a window. All ranks must call this."""
        self._predictions.update(logits, labels)
        if step % self._every:
            return None
        measured = self._predictions.summarize(), dict[str, float]()
        self._predictions = Predictions(tasks=self._tasks)
        self.windows.append({"step": step, **_figures(measured)})
        return measured

    @staticmethod
    def line(step: int, measured: Measured) -> str:
        """Return a line of text about a window."""
        rows, shown = _shown(measured)
        return f"step {step}, {rows:,} rows before they were trained: {shown}"


def _shown(measured: Measured, metric: str = "loss") -> tuple[int, str]:
    """Return the number of rows and a text of figures; with tasks, only the main ones."""
    figures = _figures(measured)
    rows = int(figures.pop("num_samples"))
    if measured[0] is not None and measured[0].tasks:  # the others are in the run's results
        figures = {
            name: value
            for name, value in figures.items()
            if name in ("loss", metric) or name.endswith((".auc", ".log_loss", ".rmse"))
        }
    return rows, ", ".join(f"{metric_words(name)} {value:.5f}" for name, value in figures.items())


def _figures(measured: Measured) -> dict[str, float]:
    quality, metrics = measured
    return {**({} if quality is None else quality.figures()), **metrics}
