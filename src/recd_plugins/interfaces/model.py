"""Kind ``model``: what is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn


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
