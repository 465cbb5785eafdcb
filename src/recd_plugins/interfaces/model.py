"""Kinds ``model`` and ``pooling``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torchrec.sparse.jagged_tensor import JaggedTensor

    PoolingGroup = tuple[Sequence[nn.Module], Sequence[JaggedTensor]]


@dataclass(frozen=True)
class ModelFeatures:
    """Inputs of a model, from the dataset and the registry file.

    Attributes:
        num_dense: columns of ``batch.dense_features``, after preprocessing.
        pooled: sparse features without a pooling entry, in the order of the dataset; for an
            EmbeddingBagCollection.
        sequence: sparse features with one; for an EmbeddingCollection and SequencePooling.
        replicated: names or patterns of tables that a sharding entry replicates.
        positive_counts: maps a feature and the rows of its table to the number of lookups in
            positive rows of the training split, int64 ``[num_embeddings]``; reads the split once.
            None without data, and zeros for a trained model. Keep the result in a buffer, so that
            checkpoints have it.
    """

    num_dense: int
    pooled: tuple[str, ...]
    sequence: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    positive_counts: Callable[[str, int], NDArray[np.int64]] | None = field(
        default=None, compare=False
    )

    def replicates(self, table: str) -> bool:
        """Return whether each rank holds a bag table whole.

        TorchRec's data-parallel kernels take no deduplicated input: such tables need an
        EmbeddingBagCollection of their own, fed ``batch.replicated_features``.
        """
        return any(fnmatchcase(table, pattern) for pattern in self.replicated)


class Model(Plugin, ABC):
    """Builds the model to train, in place of the built-in one."""

    kind: ClassVar[str] = "model"

    @abstractmethod
    def build(self, features: ModelFeatures) -> nn.Module:
        """Return an unsharded model with initial weights from torch's generator.

        ``forward`` takes a ``ModelInput`` and returns ``loss, (loss, logits, labels)``: the mean
        loss of the batch, a scalar, and detached the loss, logits ``[B]`` and ``batch.labels``.
        EmbeddingBagCollections get ``batch.sparse_features``, replicated ones
        ``batch.replicated_features``; EmbeddingCollections get ``batch.sequence_features``, and a
        SequencePooling pools their vectors.

        Every rank builds the same model from the same seed. Planning builds it on the meta device,
        and once with tables of one row to count its compute.
        """


class Pooling(Plugin, ABC):
    """Builds the modules that pool sequence features, one per feature.

    Features of pooling entries are looked up in an EmbeddingCollection, others in an
    EmbeddingBagCollection.
    """

    kind: ClassVar[str] = "pooling"

    #: Whether each parameter gets a gradient in every step, even if all sequences are empty. Unless
    #: all poolings of a run set it, ranks exchange in each step which parameters got one. A wrong
    #: value ends the run.
    always_trained: ClassVar[bool] = False

    #: Whether all rows of a sequence get bit-equal gradients, as with sum and mean. Only plans use
    #: it: equal gradients are sent once over gloo either way.
    equal_gradients: ClassVar[bool] = False

    @abstractmethod
    def build(self, embedding_dim: int) -> nn.Module:
        """Return a module from a ``torchrec.JaggedTensor`` over unique rows to a vector per row.

        The module maps ``[num_values, embedding_dim]`` to ``[num_rows, embedding_dim]``, with zeros
        for empty rows. A vector depends on its row alone; the caller repeats it for duplicates.
        """

    def pool(self, modules: Sequence[nn.Module], sequences: Sequence[JaggedTensor]) -> Tensor:
        """Pool features of one entry whose rows are deduplicated together.

        Override it if one call is faster than one per feature; results must be equal.

        Args:
            modules: from ``build``, one per feature.
            sequences: embeddings of each feature, all with the same number of rows.

        Returns:
            ``[num_rows, num_features, embedding_dim]``.
        """
        pooled = [module(rows) for module, rows in zip(modules, sequences, strict=True)]
        return _stacked(pooled, sequences[0].lengths().numel(), sequences[0].values().shape[1])

    def pool_groups(self, groups: Sequence[PoolingGroup]) -> list[Tensor]:
        """Pool all groups of one entry; results are those of ``pool``.

        Override it if one call is faster, as with attention that pads rows of similar lengths
        together.

        Args:
            groups: arguments of ``pool`` for each group; groups differ in their number of rows.
        """
        return [self.pool(modules, sequences) for modules, sequences in groups]


class TargetPooling(Pooling):
    """A pooling that also depends on each row's target item, as DIN's (arXiv 1706.06978).

    Modules of ``build`` are called as ``module(sequences, targets, inverse)``, as ``pool_for``
    describes for one feature, and return ``[B, embedding_dim]``.
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
            modules: from ``build``, one per feature.
            sequences: embeddings of each feature over unique rows.
            targets: vector of the target of each row, ``[B, embedding_dim]``.
            inverse: unique row of each row, int64 ``[B]``; None if ``sequences`` has all B rows.

        Returns:
            ``[B, num_features, embedding_dim]``, zeros for empty sequences.
        """
        pooled = [
            module(rows, targets, inverse) for module, rows in zip(modules, sequences, strict=True)
        ]
        return _stacked(pooled, targets.shape[0], targets.shape[1])


def _stacked(pooled: Sequence[Tensor], num_rows: int, embedding_dim: int) -> Tensor:
    import torch

    for index, vectors in enumerate(pooled, start=1):
        if tuple(getattr(vectors, "shape", ())) != (num_rows, embedding_dim):
            is_tensor = isinstance(vectors, torch.Tensor)
            found: Any = list(vectors.shape) if is_tensor else type(vectors).__name__
            raise ValueError(
                f"module {index} of {len(pooled)} gave {found}; expected [num_rows, embedding_dim]"
                f", which is {[num_rows, embedding_dim]}: one vector for each row of a sequence, "
                "not for each of its values"
            )
    return torch.stack(list(pooled), dim=1)
