"""Kind ``pooling``: a sequence of embeddings becomes one vector a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from torch import nn


class Pooling(Plugin, ABC):
    """Makes the module that pools one sequence feature.

    A feature that a pooling entry names is looked up in an EmbeddingCollection; the others are
    pooled by an EmbeddingBagCollection.
    """

    kind: ClassVar[str] = "pooling"

    @abstractmethod
    def build(self, embedding_dim: int) -> nn.Module:
        """A module from a ``torchrec.JaggedTensor`` to one vector a row.

        The module takes embeddings ``[num_values, embedding_dim]`` over unique rows and returns
        ``[num_rows, embedding_dim]``, zeros for an empty row. A row's vector depends on that row
        alone: the caller repeats it for the duplicates.
        """
