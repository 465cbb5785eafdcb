"""Kind ``metric``: a figure of how good predictions are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


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
