"""Kinds ``model`` and ``pooling``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torchrec.sparse.jagged_tensor import JaggedTensor

    PoolingGroup = tuple[Sequence[nn.Module], Sequence[JaggedTensor]]


@dataclass(frozen=True)
class ModelFeatures:
    """What a model is fed, as the dataset and the registry file say.

    Attributes:
        num_dense: columns of ``batch.dense_features``; preprocessing may widen features.
        pooled: sparse features that no pooling entry names, in the order of the dataset: for an
            EmbeddingBagCollection.
        sequence: sparse features that one does: for an EmbeddingCollection and SequencePooling.
        replicated: names or patterns of the tables that a sharding entry replicates.
        positive_counts: from a feature and the rows of its table to how often the positive rows of
            the training split look up each, int64 ``[num_embeddings]``; reads that split, once.
            None where there is no data. What a model makes of it belongs into a buffer, so that
            checkpoints have it: a trained model that goes on without its data is made of zeros.
    """

    num_dense: int
    pooled: tuple[str, ...]
    sequence: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    positive_counts: Callable[[str, int], NDArray[np.int64]] | None = field(
        default=None, compare=False
    )

    def replicates(self, table: str) -> bool:
        """Whether a table of bags is whole on every rank.

        TorchRec's data-parallel kernels take no deduplicated input: such tables need an
        EmbeddingBagCollection of their own, fed ``batch.replicated_features``.
        """
        return any(fnmatchcase(table, pattern) for pattern in self.replicated)


class Model(Plugin, ABC):
    """Makes the model that is trained. Its tables, and what it computes, are read off the module.

    A registry file without ``use`` in its section ``model`` has the built-in one.
    """

    kind: ClassVar[str] = "model"

    @abstractmethod
    def build(self, features: ModelFeatures) -> nn.Module:
        """A model that is not sharded, with initial weights drawn from torch's generator.

        Its ``forward`` takes a ``ModelInput`` and returns ``loss, (loss, logits, labels)``: the
        mean loss of the batch, a scalar, and detached the loss again, the logits ``[B]`` and
        ``batch.labels``. EmbeddingBagCollections are fed ``batch.sparse_features``, or where they
        are replicated ``batch.replicated_features``; EmbeddingCollections
        ``batch.sequence_features``, whose vectors a SequencePooling pools.

        Every rank makes the same model, from the same seed. A plan makes it on the meta device,
        where tensors have no values, and once more with tables of one row each, to count what it
        computes.
        """


class Pooling(Plugin, ABC):
    """Makes the modules that pool sequence features, one a feature.

    A feature that a pooling entry names is looked up in an EmbeddingCollection; the others are
    pooled by an EmbeddingBagCollection.
    """

    kind: ClassVar[str] = "pooling"

    #: Whether each parameter of its modules gets a gradient in every step, where all sequences are
    #: empty too. Unless all poolings of a run say so, ranks tell one another in each step which
    #: parameters got one; a parameter that gets none, though it was said, ends the run.
    always_trained: ClassVar[bool] = False

    #: Whether all rows of a sequence get the same gradient, bit for bit, as those of a sum or a
    #: mean do. Plans reckon with it: over gloo equal gradients are sent once, said here or not.
    equal_gradients: ClassVar[bool] = False

    @abstractmethod
    def build(self, embedding_dim: int) -> nn.Module:
        """A module from a ``torchrec.JaggedTensor`` to one vector a row.

        The module takes embeddings ``[num_values, embedding_dim]`` over unique rows and returns
        ``[num_rows, embedding_dim]``, zeros for an empty row. A row's vector depends on that row
        alone: the caller repeats it for the duplicates.
        """

    def pool(self, modules: Sequence[nn.Module], sequences: Sequence[JaggedTensor]) -> Tensor:
        """Pool a group: features of one entry whose rows are deduplicated together.

        Override it where one call for the group costs less than one a feature. The vectors must be
        those that ``modules`` give one by one, whose parameters these are.

        Args:
            modules: what ``build`` made for each feature.
            sequences: embeddings of each feature; all have equally many rows.

        Returns:
            ``[num_rows, num_features, embedding_dim]``.
        """
        pooled = [module(rows) for module, rows in zip(modules, sequences, strict=True)]
        return _stacked(pooled, sequences[0].lengths().numel(), sequences[0].values().shape[1])

    def pool_groups(self, groups: Sequence[PoolingGroup]) -> list[Tensor]:
        """Pool all groups of one entry.

        Override it where one call for all of them costs less than one each, as attention does,
        which pads rows of like lengths together. The vectors must be those of ``pool``.

        Args:
            groups: for each group what ``pool`` takes; groups differ in their number of rows.

        Returns:
            For each group what ``pool`` returns.
        """
        return [self.pool(modules, sequences) for modules, sequences in groups]


class TargetPooling(Pooling):
    """A pooling whose vectors depend on the item of each row too, as DIN's (arXiv 1706.06978).

    ``build`` makes a module that is called as ``module(sequences, targets, inverse)`` and does what
    ``pool_for`` describes for one feature, ``[B, embedding_dim]``.
    """

    @property
    @abstractmethod
    def target(self) -> str:
        """The feature whose vector is the target."""

    def pool_for(
        self,
        modules: Sequence[nn.Module],
        sequences: Sequence[JaggedTensor],
        targets: Tensor,
        inverse: Tensor | None,
    ) -> Tensor:
        """Pool a group for the targets of all B rows.

        Args:
            modules: what ``build`` made for each feature.
            sequences: embeddings of each feature over unique rows.
            targets: the target's vector of each row, ``[B, embedding_dim]``.
            inverse: the unique row of each row, int64 ``[B]``; None where ``sequences`` has all B
                rows, in their order.

        Returns:
            ``[B, num_features, embedding_dim]``: of each row its sequence seen by its target, zeros
            where the sequence is empty.
        """
        pooled = [
            module(rows, targets, inverse) for module, rows in zip(modules, sequences, strict=True)
        ]
        return _stacked(pooled, targets.shape[0], targets.shape[1])


def _stacked(pooled: Sequence[Tensor], num_rows: int, embedding_dim: int) -> Tensor:
    """The vectors that modules give, feature by feature; what calls a pooling names it."""
    import torch

    for index, vectors in enumerate(pooled, start=1):
        shape = tuple(getattr(vectors, "shape", ()))
        if shape != (num_rows, embedding_dim):
            found = list(shape) if isinstance(vectors, torch.Tensor) else type(vectors).__name__
            raise ValueError(
                f"module {index} of {len(pooled)} gave {found}; expected [num_rows, "
                f"embedding_dim], which is {[num_rows, embedding_dim]}: one vector for each row of "
                "a sequence, not for each of its values"
            )
    return torch.stack(list(pooled), dim=1)
