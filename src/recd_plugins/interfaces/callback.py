"""Kinds ``callback``, ``metric`` and ``pipeline``, and files that a run writes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    """The start of a run on one rank.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        step: optimizer steps done before; 0 unless the run is resumed.
        expected_steps: steps at the end, including those before.
        tables: of the model.
        claimed: features or tables of the plugin's entry; empty for kinds without patterns.
        step_samples: rows of a step on all ranks.
        registry: text of the registry file.
        settings: ``KEY=VALUE`` overrides of ``recd run``, and ``--sharding NAME``.
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


@dataclass(frozen=True)
class RunEvent:
    """Something that happened on a rank.

    Attributes:
        rank: of this process.
        step: optimizer steps done.
    """

    rank: int
    step: int


@dataclass(frozen=True)
class RunBatch(RunEvent):
    """A batch from the loader that this rank was trained on, in host memory, as step ``step``."""

    batch: ModelInput

    def ids(self, feature: str) -> Tensor:
        """Return the ids that this rank looked up for a sparse feature, int64 ``[num_ids]``.

        For a deduplicated feature, those of the unique rows.
        """
        batch = self.batch
        for kjt in (batch.sparse_features, batch.replicated_features, batch.sequence_features):
            if kjt is not None and feature in kjt.keys():  # noqa: SIM118 (a KJT is no dict)
                return kjt[feature].values()
        raise KeyError(feature)


@dataclass(frozen=True)
class RunStep(RunEvent):
    """A finished optimizer step.

    Attributes:
        loss: of this rank's batch, a scalar on the model's device; reading it waits for the device.
        learning_rate: from ``training`` and its schedule, if known.
    """

    loss: Tensor
    learning_rate: float | None = None


@dataclass(frozen=True)
class Quality:
    """Figures over evaluated samples.

    Attributes:
        normalized_entropy: log loss over that of predicting the mean label; lower is better. NaN
            if all labels are equal.
        auc: area under the ROC curve; NaN likewise.
        num_samples: samples of all ranks.
        log_loss: the mean over samples, in nats.
        calibration: sum of predictions over sum of labels; 0 if all labels are.
    """

    normalized_entropy: float
    auc: float
    num_samples: int
    log_loss: float = math.nan
    calibration: float = math.nan


@dataclass(frozen=True)
class RunEvaluation(RunEvent):
    """An evaluated split.

    Attributes:
        split: its name.
        quality: over the samples of all ranks, the same on each.
        metrics: figures of the registry's metrics, by name.
    """

    split: Split
    quality: Quality
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInterruption(RunEvent):
    """The end of a run by the signal ``SIGINT``, ``SIGTERM`` or ``SIGHUP``."""

    by: str


@dataclass(frozen=True)
class RunEnd(RunEvent):
    """The regular end of a run, with the mean loss over ranks of every step; NaN if unknown."""

    losses: tuple[float, ...]


class Callback(Plugin, ABC):
    """Observes training on every rank, without changing it. Every method is optional.

    Plugins of other kinds that are also subclasses of this one are called, too.
    """

    kind: ClassVar[str] = "callback"

    def on_start(self, start: RunStart) -> None:
        """Called first, when training begins."""

    def on_batch(self, batch: RunBatch) -> None:
        """Called with each trained batch, before ``on_step``."""

    def on_step(self, step: RunStep) -> None:
        """Called after each step."""

    def on_evaluate(self, evaluation: RunEvaluation) -> None:
        """Called after each evaluation, and so after each validation."""

    def on_interrupt(self, interruption: RunInterruption) -> None:
        """Called in place of ``on_end`` if a signal ends the run."""

    def on_end(self, end: RunEnd) -> None:
        """Called last, when the run is over."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return this rank's state for a checkpoint: a JSON object, or empty.

        Called after ``on_step`` of the checkpoint's step.
        """
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore ``state_dict``, after ``on_start``.

        Args:
            states: of each rank of the run that wrote the checkpoint, which may have had another
                number of ranks.

        Raises:
            RecdError: the states do not fit this plugin.
        """
        raise RecdError(
            f"{self.name} has no state, and the checkpoint has one of it ({len(states)} ranks); "
            "go on with the version of it that wrote the checkpoint"
        )


@dataclass(frozen=True)
class ScoredBatch:
    """An evaluated batch of one rank, in host memory.

    Attributes:
        logits: float32 ``[B]``.
        labels: float32 ``[B]``.
        sessions: int64 ``[B]``, equal for samples of one session on all ranks; None if unknown.
    """

    logits: Tensor
    labels: Tensor
    sessions: Tensor | None = None

    @property
    def predictions(self) -> Tensor:
        """Probabilities, float64 ``[B]``."""
        return self.logits.double().sigmoid()


class Metric(Plugin, ABC):
    """Measures the predictions of an evaluated split.

    A state holds what the plugin needs of a rank's samples. It is pickled to rank 0, where
    ``results`` gets those of all ranks.
    """

    kind: ClassVar[str] = "metric"

    @abstractmethod
    def start(self) -> Any:
        """Return the state of a rank without samples."""

    @abstractmethod
    def update(self, state: Any, batch: ScoredBatch) -> Any:
        """Return the state with one more batch; may change ``state`` in place, not the batch."""

    @abstractmethod
    def results(self, states: Sequence[Any]) -> Mapping[str, float]:
        """Return one or more figures by name, whatever rank saw which sample.

        Args:
            states: of each rank; some may have no sample, but not all.
        """


class RunReport(ABC):
    """A file that ``recd run`` writes besides ``--json``; added by ``register_reports``.

    A subclass is made without arguments. Its module imports neither torch nor torchrec at the top.

    Attributes:
        flag: option that names the file, such as ``--markdown``.
        help: of the option.
    """

    flag: ClassVar[str]
    help: ClassVar[str]

    @abstractmethod
    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        """Write the file at the end of a run or a comparison, on rank 0.

        Args:
            path: of the file; checked before the run.
            report: the content of ``--json``.
        """


class TrainPipeline(Protocol):
    """Trains a model batch by batch, as TorchRec's ``TrainPipeline`` does."""

    def progress(self, dataloader_iter: Iterator[Any], /) -> Any:
        """Do one step: ``zero_grad``, forward, backward, ``optimizer.step``.

        ``zero_grad`` comes in this call before the backward pass: there tables take the learning
        rate of the step. If ``model.training`` is false, only the forward pass runs. Batches are
        trained in order, each with the weights of the step before; some may be taken ahead. After
        the end of an iterator another may follow.

        Returns:
            The model's output besides its loss, for the trained batch.

        Raises:
            StopIteration: all batches are trained.
        """


class Pipeline(Plugin, ABC):
    """Builds the train pipeline of the sharded model. It changes timing, never results.

    The default is TorchRec's ``TrainPipelineSparseDist``, in which caches may look ahead.
    """

    kind: ClassVar[str] = "pipeline"

    @abstractmethod
    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        """Return a pipeline, on every rank.

        Args:
            model: a ``DistributedModelParallel`` that returns its loss and an output.
            optimizer: of all its parameters.
            device: of this rank; batches come in host memory.

        Raises:
            RecdError: it does not suit the model or the device.
        """
