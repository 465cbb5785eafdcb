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
    """The start of a run, as one rank sees it.

    Attributes:
        rank: of this process.
        world_size: ranks.
        step: optimizer steps done before; 0 unless the run goes on from a checkpoint.
        expected_steps: at which it ends, those before counted in.
        tables: of the model.
        claimed: names of the features or tables that the plugin's entry is for; empty where its
            kind claims none.
        step_samples: rows of a step, of all ranks.
        registry: the text of the registry file.
        settings: values in its place, ``KEY=VALUE``, as ``recd run`` takes them, and
            ``--sharding NAME``.
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
class RunBatch:
    """A batch that this rank was trained on.

    Attributes:
        rank: of this process.
        step: the step it was for, from 1.
        batch: as the loader made it, in host memory.
    """

    rank: int
    step: int
    batch: ModelInput

    def ids(self, feature: str) -> Tensor:
        """The ids that this rank looked up for a sparse feature, int64 ``[num_ids]``.

        Of a deduplicated feature, those of the unique rows.
        """
        batch = self.batch
        for kjt in (batch.sparse_features, batch.replicated_features, batch.sequence_features):
            if kjt is not None and feature in kjt.keys():  # noqa: SIM118 (a KJT is no dict)
                return kjt[feature].values()
        raise KeyError(feature)


@dataclass(frozen=True)
class RunStep:
    """An optimizer step that is done.

    Attributes:
        rank: of this process.
        step: how many are done.
        loss: of this rank's batch, a scalar where the model is. To read it waits for the device.
        learning_rate: that ``training`` and its schedule had for it; None where nobody says.
    """

    rank: int
    step: int
    loss: Tensor
    learning_rate: float | None = None


@dataclass(frozen=True)
class Quality:
    """Figures over the samples that were seen.

    Attributes:
        normalized_entropy: log loss over that of predicting the mean label; lower is better. NaN
            where all labels are the same.
        auc: area under the ROC curve; NaN likewise.
        num_samples: samples of all ranks.
        log_loss: the mean over samples, in nats.
        calibration: the sum of predictions over that of labels; 0 where all labels are.
    """

    normalized_entropy: float
    auc: float
    num_samples: int
    log_loss: float = math.nan
    calibration: float = math.nan


@dataclass(frozen=True)
class RunEvaluation:
    """A split that was evaluated.

    Attributes:
        rank: of this process.
        step: optimizer steps done before.
        split: which.
        quality: over the samples of all ranks, the same on each.
        metrics: figures of the metrics of the registry file, by name.
    """

    rank: int
    step: int
    split: Split
    quality: Quality
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInterruption:
    """The end of a run that a signal ended before its time.

    Attributes:
        rank: of this process.
        step: optimizer steps done; a checkpoint of them is written where the run keeps some.
        by: the signal's name, ``SIGINT``, ``SIGTERM`` or ``SIGHUP``.
    """

    rank: int
    step: int
    by: str


@dataclass(frozen=True)
class RunEnd:
    """The end of a run that nothing ended before its time.

    Attributes:
        rank: of this process.
        step: optimizer steps done.
        losses: by step, the mean over ranks, those before a checkpoint too; NaN where nobody kept
            them.
    """

    rank: int
    step: int
    losses: tuple[float, ...]


class Callback(Plugin, ABC):
    """Looks on while a model is trained, on every rank: no result depends on it.

    Each method may be left out. A plugin of another kind that is a subclass of this one too is
    called as well.
    """

    kind: ClassVar[str] = "callback"

    def on_start(self, start: RunStart) -> None:
        """See that training begins; first of all."""

    def on_batch(self, batch: RunBatch) -> None:
        """See a batch once it was trained on, before ``on_step``: what was read ahead is not."""

    def on_step(self, step: RunStep) -> None:
        """See a step once it is done."""

    def on_evaluate(self, evaluation: RunEvaluation) -> None:
        """See how good the model is, where a split is evaluated; more than once with validation."""

    def on_interrupt(self, interruption: RunInterruption) -> None:
        """See that a signal ends the run here, in place of ``on_end``."""

    def on_end(self, end: RunEnd) -> None:
        """See that the run is over; last of all."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint is to hold of this rank: a JSON object, empty for nothing.

        Called after ``on_step`` of the checkpoint's step.
        """
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what ``state_dict`` gave, after ``on_start``.

        Args:
            states: of each rank of the run that wrote the checkpoint, in their order. There may
                have been more ranks or fewer than now.

        Raises:
            RecdError: they are none that this plugin can go on from.
        """
        raise RecdError(
            f"{self.name} has no state, and the checkpoint has one of it ({len(states)} ranks); "
            "go on with the version of it that wrote the checkpoint"
        )


@dataclass(frozen=True)
class ScoredBatch:
    """An evaluated batch of one rank, in host memory.

    Attributes:
        logits: of its samples, float32 ``[B]``.
        labels: float32 ``[B]``.
        sessions: int64 ``[B]``, equal where samples are of one session, on all ranks; None
            where the dataset does not say.
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

    A state is whatever the plugin needs to know of the samples that a rank has seen. It travels to
    rank 0 by pickle, where ``results`` sees those of all ranks.
    """

    kind: ClassVar[str] = "metric"

    @abstractmethod
    def start(self) -> Any:
        """The state of a rank that has seen no sample."""

    @abstractmethod
    def update(self, state: Any, batch: ScoredBatch) -> Any:
        """The state with one batch more; ``state`` may be changed in place, the batch may not."""

    @abstractmethod
    def results(self, states: Sequence[Any]) -> Mapping[str, float]:
        """Figures of all samples by name, one or more; the same wherever the samples were seen.

        Args:
            states: of each rank. A rank may have seen no sample, but not all of them.
        """


class RunReport(ABC):
    """A file that ``recd run`` writes of a run, besides ``--json``; ``register_reports`` adds it.

    A subclass is made without arguments. Its module imports neither torch nor torchrec at the top,
    as ``recd run --help`` shows every one.

    Attributes:
        flag: the option that names the file, as ``--markdown``.
        help: of the option.
    """

    flag: ClassVar[str]
    help: ClassVar[str]

    @abstractmethod
    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        """Write the file, once a run or a comparison is over, on rank 0.

        Args:
            path: where to; found writable before the run.
            report: what ``--json`` writes.
        """


class TrainPipeline(Protocol):
    """Trains a model batch by batch, as TorchRec's ``TrainPipeline`` does."""

    def progress(self, dataloader_iter: Iterator[Any], /) -> Any:
        """One step: ``zero_grad``, forward, backward, ``optimizer.step``.

        ``zero_grad`` is called in the same call, before the backward pass: there tables take the
        learning rate of the step. Where ``model.training`` is false, the forward pass alone.
        Batches are trained in the order of the iterator, each with the weights that the step before
        left; some may be taken ahead. Another iterator may come when one has ended.

        Returns:
            What the model returned besides its loss, of the batch that was trained.

        Raises:
            StopIteration: every batch of the iterator is trained.
        """


class Pipeline(Plugin, ABC):
    """Makes what trains the sharded model batch by batch. It changes when, never what.

    Without one, a run has TorchRec's ``TrainPipelineSparseDist``, in which caches may look ahead.
    """

    kind: ClassVar[str] = "pipeline"

    @abstractmethod
    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        """A pipeline over a model, on every rank.

        Args:
            model: sharded, a ``DistributedModelParallel``; returns its loss and an output.
            optimizer: of all its parameters.
            device: of this rank; batches come in host memory.

        Raises:
            RecdError: it does not suit the model or the device.
        """
