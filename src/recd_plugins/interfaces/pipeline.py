"""Kind ``pipeline``: how the steps of training overlap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


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
