"""Kind ``callback``: what looks on while a model is trained."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from recd_plugins.errors import RecdError
from recd_plugins.interfaces.dataset import Split
from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.values.rows import Table

if TYPE_CHECKING:
    from torch import Tensor

    from recd_plugins.values.batch import ModelInput


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
