"""Base classes of callback, metric and train pipeline plugins, and of run reports."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from recd_plugins.interfaces.dataset import Split
from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.interfaces.rows import Table
from recd_plugins.runtime.errors import RecdError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from recd_plugins.interfaces.batch import ModelInput


@dataclass(frozen=True)
class RunStart:
    """Information about a run, passed to ``Callback.on_start`` on each rank.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
        step: number of finished optimizer steps; above 0 in a resumed run.
        expected_steps: number of optimizer steps at the end of the run.
        tables: tables of the model.
        claimed: features or tables that match the patterns of the plugin's registry.yaml entry;
            empty for plugin kinds without patterns.
        step_samples: number of rows per step, summed over all ranks.
        registry: text of the registry file.
        settings: ``KEY=VALUE`` and ``--sharding NAME`` arguments of ``recd run``.
        model: the ``DistributedModelParallel``, whose attribute ``plan`` is the sharding plan.
            Callbacks must not change it.
        optimizer: optimizer of all parameters.
        config: the ``RunConfig``, with fitted plugins.
    """

    rank: int
    world_size: int
    step: int
    expected_steps: int
    tables: tuple[Table, ...]
    claimed: tuple[str, ...]
    step_samples: int = 0
    registry: str = ""
    settings: tuple[str, ...] = ()
    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    config: Any = None


@dataclass(frozen=True)
class RunEvent:
    """Base class of events, with the rank and the number of finished optimizer steps."""

    rank: int
    step: int


@dataclass(frozen=True)
class RunBatch(RunEvent):
    """Event with the batch that this rank trained, in host memory."""

    batch: ModelInput

    def ids(self, feature: str) -> Tensor:
        """Return the ids that this rank looked up for a feature, int64 ``[num_ids]``.

        For a deduplicated feature, these are the ids of the unique rows.
        """
        batch = self.batch
        for kjt in (batch.sparse_features, batch.replicated_features, batch.sequence_features):
            if kjt is not None and feature in kjt.keys():  # noqa: SIM118 (a KJT is no dict)
                return kjt[feature].values()
        raise KeyError(feature)


@dataclass(frozen=True)
class RunStep(RunEvent):
    """Event after an optimizer step.

    Attributes:
        loss: loss of this rank's batch, a scalar on the model's device; reading it synchronizes.
        learning_rate: learning rate of the ``training`` section after its schedule; None if
            unknown.
    """

    loss: Tensor
    learning_rate: float | None = None


@dataclass(frozen=True)
class Quality:
    """Quality metrics of predictions. Some are NaN if all labels are equal.

    Attributes:
        normalized_entropy: log loss divided by the log loss of predicting the mean label.
        auc: area under the ROC curve.
        num_samples: number of samples on all ranks.
        log_loss: mean over samples, in nats.
        calibration: sum of predictions divided by sum of labels; 0 without positive labels.
        tasks: quality of each task in multi-task training, by name. Then the fields of one label
            are NaN.
        loss: weighted sum of the tasks' losses; None without tasks.
        bins: number of rows, mean prediction and mean label of up to 10 groups of rows with
            similar predictions, in ascending order of predictions.
    """

    normalized_entropy: float
    auc: float
    num_samples: int
    log_loss: float = math.nan
    calibration: float = math.nan
    bins: tuple[tuple[int, float, float], ...] = ()
    tasks: Mapping[str, Quality | RegressionQuality] = field(default_factory=dict)
    loss: float | None = None

    def figures(self) -> dict[str, Any]:
        """Return a dict from metric name to its value, without the bins.

        With tasks, the names are ``loss`` and ``TASK.METRIC``, such as ``click.auc``.
        """
        if self.tasks:
            of_tasks = {
                f"{name}.{metric}": value
                for name, quality in self.tasks.items()
                for metric, value in quality.figures().items()
                if metric != "num_samples" or value != self.num_samples  # some have no label
            }
            return {"num_samples": self.num_samples, "loss": self.loss, **of_tasks}
        values = asdict(self)
        for name in ("bins", "tasks", "loss"):
            del values[name]
        return values


@dataclass(frozen=True)
class RegressionQuality:
    """Quality metrics of a regression task.

    Attributes:
        num_samples: number of samples on all ranks that have a label.
        loss: mean loss of the task.
        rmse: root mean squared error of the predicted values.
        mae: mean absolute error of the predicted values.
        r2: share of the labels' variance that the predictions explain; NaN if all are equal.
    """

    num_samples: int
    loss: float
    rmse: float
    mae: float
    r2: float

    def figures(self) -> dict[str, Any]:
        """Return a dict from metric name to its value."""
        return asdict(self)


@dataclass(frozen=True)
class RunEvaluation(RunEvent):
    """Event with the result of an evaluation. ``metrics`` has the values of metric plugins.

    The split of a window of ``training.progressive_validation`` is ``train``.
    """

    split: Split
    quality: Quality
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInterruption(RunEvent):
    """Event when ``SIGINT``, ``SIGTERM`` or ``SIGHUP`` ends the run."""

    by: str


@dataclass(frozen=True)
class RunEnd(RunEvent):
    """Event at the end of a run. ``losses`` has each step's mean over ranks; NaN if unknown."""

    losses: tuple[float, ...]


class Callback(Plugin, ABC):
    """Observes training on every rank, without effect on results. Every method is optional.

    Plugins of other kinds may also derive from this class.
    """

    kind: ClassVar[str] = "callback"

    def on_start(self, start: RunStart) -> None:
        """Observe the start of training."""

    def on_batch(self, batch: RunBatch) -> None:
        """Observe the batch of a finished step. Called before ``on_step``."""

    def on_step(self, step: RunStep) -> None:
        """Observe a finished step."""

    def on_evaluate(self, evaluation: RunEvaluation) -> None:
        """Observe an evaluation or validation."""

    def on_interrupt(self, interruption: RunInterruption) -> None:
        """Observe that a signal ends the run. ``on_end`` is not called in this case."""

    def on_end(self, end: RunEnd) -> None:
        """Observe the regular end of the run."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return this rank's state for a checkpoint as a JSON object. Called after ``on_step``."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state from a checkpoint. Called after ``on_start``.

        Args:
            states: results of ``state_dict`` on each rank that wrote the checkpoint. The number of
                ranks may have changed since then.

        Raises:
            RecdError: the plugin cannot restore these states.
        """
        raise RecdError(
            f"callback {self.name!r} cannot load a state, but the checkpoint contains its state "
            f"from {len(states)} ranks. Resume with the version of the callback that wrote the "
            "checkpoint"
        )


@dataclass(frozen=True)
class ScoredBatch:
    """Predictions and labels of an evaluated batch of one rank, in host memory.

    Attributes:
        logits: float32 ``[B]``.
        labels: float32 ``[B]``.
        sessions: int64 ``[B]``, id of each sample's request, or else session; None if unknown.
    """

    logits: Tensor
    labels: Tensor
    sessions: Tensor | None = None

    @property
    def predictions(self) -> Tensor:
        """Return the predicted probabilities, float64 ``[B]``."""
        return self.logits.double().sigmoid()


class Metric(Plugin, ABC):
    """Computes metrics from the predictions of an evaluated split.

    Each rank updates its own state, of any picklable type. Rank 0 receives all states and calls
    ``results``.
    """

    kind: ClassVar[str] = "metric"

    @abstractmethod
    def start(self) -> Any:
        """Return the initial state of this rank."""

    @abstractmethod
    def update(self, state: Any, batch: ScoredBatch) -> Any:
        """Return the state after one more batch. May modify ``state``, but not ``batch``."""

    @abstractmethod
    def results(self, states: Sequence[Any]) -> Mapping[str, float]:
        """Return a dict from metric name to value, independent of how ranks share the samples.

        Args:
            states: states of all ranks; some ranks may have no samples.
        """


class RunReport(ABC):
    """Writes a report file of ``recd run``. Packages register it with ``register_reports``.

    The module of a subclass must not import torch or torchrec at the top level.

    Attributes:
        flag: command-line option for the file path, such as ``--markdown``.
        help: help text of the option.
    """

    flag: ClassVar[str]
    help: ClassVar[str]

    @abstractmethod
    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        """Write ``report``, the JSON report of ``recd run``, to ``path``. Called on rank 0."""


class TrainPipeline(Protocol):
    """Trains a model batch by batch, as TorchRec's ``TrainPipeline`` does."""

    def progress(self, dataloader_iter: Iterator[Any], /) -> Any:
        """Run one step: ``zero_grad``, forward, backward, ``optimizer.step``.

        Call ``zero_grad`` before the backward pass, because this call sets the learning rate of the
        tables. If ``model.training`` is false, run only the forward pass. Batches may be
        prefetched, but each step must use the weights after the previous step. Later calls may
        pass another iterator.

        Returns:
            The second element of the model's output, which follows the loss.

        Raises:
            StopIteration: no batch is left to train.
        """


class Pipeline(Plugin, ABC):
    """Builds the train pipeline. A pipeline may change the timing of steps, but not results."""

    kind: ClassVar[str] = "pipeline"

    @abstractmethod
    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        """Return this rank's pipeline.

        Args:
            model: a ``DistributedModelParallel`` that returns ``(loss, output)``.
            optimizer: optimizer of all parameters.
            device: device of this rank. Batches are in host memory.

        Raises:
            RecdError: the pipeline does not support the model or the device.
        """
