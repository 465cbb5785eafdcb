"""Base classes of model plugins and pooling plugins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.interfaces.tasks import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torchrec.sparse.jagged_tensor import JaggedTensor

    PoolingGroup = tuple[Sequence[nn.Module], Sequence[JaggedTensor]]


@dataclass(frozen=True)
class ModelFeatures:
    """Feature and table names that a model plugin builds its modules from.

    Attributes:
        dense: feature of each column of ``batch.dense_features``, after preprocessing.
        pooled: sparse features for an EmbeddingBagCollection, in the order of the dataset.
        sequence: sparse features that ``pooling`` entries match, for an EmbeddingCollection and
            SequencePooling.
        replicated: names or patterns of tables that a ``sharding`` entry replicates.
        positive_counts: function of a feature and its table's number of rows. Returns int64
            ``[num_embeddings]``, the number of training rows with label 1 that contain each id. Put
            the result into a buffer, since it is all zeros when a checkpoint is loaded. None
            without data. With ``tasks``, the label is that of the first task.
        tasks: tasks of multi-task training; empty for one label.
    """

    dense: tuple[str, ...]
    pooled: tuple[str, ...]
    sequence: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    positive_counts: Callable[[str, int], NDArray[np.int64]] | None = field(
        default=None, compare=False
    )
    tasks: tuple[Task, ...] = ()

    @property
    def num_dense(self) -> int:
        """Return the number of columns of ``batch.dense_features``."""
        return len(self.dense)

    def replicates(self, table: str) -> bool:
        """Return whether a pooled table is replicated on every rank.

        TorchRec's data-parallel kernels do not support deduplicated input. Put replicated tables
        into a separate EmbeddingBagCollection that looks up ``batch.replicated_features``.
        """
        return any(fnmatchcase(table, pattern) for pattern in self.replicated)


class Model(Plugin, ABC):
    """Builds the model to train, in place of the built-in model."""

    kind: ClassVar[str] = "model"

    #: Whether the model predicts each task of ``ModelFeatures.tasks``, with ``[B, T]`` logits.
    multi_task: ClassVar[bool] = False

    @abstractmethod
    def build(self, features: ModelFeatures) -> nn.Module:
        """Return an unsharded model. Draw initial weights from torch's default generator.

        ``forward`` accepts a ``ModelInput`` and returns ``loss, (loss, logits, labels)``. The loss
        is the mean over the batch, a scalar. The inner tuple contains detached tensors, with
        logits ``[B]`` and ``batch.labels``. With T tasks, both are ``[B, T]``, and
        ``recd_plugins.api.tasks.total_loss`` computes the loss.

        EmbeddingBagCollections look up ``batch.sparse_features`` or ``batch.replicated_features``.
        EmbeddingCollections look up ``batch.sequence_features``, and SequencePooling pools the
        output. Planning also calls ``build`` on the meta device, and with tables of one row.
        """


class Pooling(Plugin, ABC):
    """Builds one module per sequence feature that pools the feature's embeddings."""

    kind: ClassVar[str] = "pooling"

    #: Whether each parameter gets a gradient in every step, even if all sequences are empty. False
    #: costs a collective per step.
    always_trained: ClassVar[bool] = False

    @abstractmethod
    def build(self, embedding_dim: int) -> nn.Module:
        """Return a module that pools a ``torchrec.JaggedTensor`` over unique rows.

        The module maps values ``[num_values, embedding_dim]`` to ``[num_rows, embedding_dim]``,
        with zeros for empty rows. An output vector must depend only on the values of its row.
        """

    def pool(self, modules: Sequence[nn.Module], sequences: Sequence[JaggedTensor]) -> Tensor:
        """Pool several features that share inverse indices. Override this method for speed.

        Args:
            modules: results of ``build``, one per feature.
            sequences: embeddings of each feature, all with the same number of rows.

        Returns:
            ``[num_rows, num_features, embedding_dim]``.
        """
        pooled = [module(rows) for module, rows in zip(modules, sequences, strict=True)]
        return _stacked(pooled, sequences[0].lengths().numel(), sequences[0].values().shape[1])

    def pool_groups(self, groups: Sequence[PoolingGroup]) -> list[Tensor]:
        """Return ``pool(*group)`` of each group. Override this method for speed."""
        return [self.pool(modules, sequences) for modules, sequences in groups]


class TargetPooling(Pooling):
    """Pooling that depends on each row's target item, as in DIN (arXiv 1706.06978).

    A module from ``build`` is called as ``module(sequence, targets, inverse)`` with the arguments
    of ``pool_for`` for its feature, and returns ``[B, embedding_dim]``.
    """

    @property
    @abstractmethod
    def target(self) -> str:
        """Name of the feature that contains the id of the target item."""

    def pool_for(
        self,
        modules: Sequence[nn.Module],
        sequences: Sequence[JaggedTensor],
        targets: Tensor,
        inverse: Tensor | None,
    ) -> Tensor:
        """Pool several features that share inverse indices, for the targets of all B rows.

        Args:
            modules: results of ``build``, one per feature.
            sequences: embeddings of each feature over unique rows.
            targets: target vectors, ``[B, embedding_dim]``.
            inverse: index of the unique row of each batch row, int64 ``[B]``; None if ``sequences``
                has all B rows.

        Returns:
            ``[B, num_features, embedding_dim]``, with zeros for empty sequences.
        """
        pooled = [
            module(rows, targets, inverse) for module, rows in zip(modules, sequences, strict=True)
        ]
        return _stacked(pooled, targets.shape[0], targets.shape[1])


def _stacked(pooled: Sequence[Tensor], num_rows: int, embedding_dim: int) -> Tensor:
    import torch

    for vectors in pooled:
        if vectors.shape != (num_rows, embedding_dim):
            raise ValueError(
                f"a pooling module returned the shape {list(vectors.shape)}. Return one vector per "
                f"row, [num_rows, embedding_dim] = {[num_rows, embedding_dim]}"
            )
    return torch.stack(list(pooled), dim=1)
