"""Expands pooled embeddings of unique rows to all rows of a batch on a GPU, with one gather.

TorchRec (1.6 to 1.9) uses FBGEMM's ``batch_index_select_dim0``, whose backward pass launches about
14 kernels, and then permutes the columns.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import (
    ShardedEmbeddingBagCollection,
    VariableBatchEmbeddingBagCollectionAwaitable,
)
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin
from torchrec.sparse.jagged_tensor import KeyedTensor

from recd_plugins.sharding.coalesced.input_dist import numbers_on
from recd_plugins.sparse.index_select import index_select


class BagExpansion:
    """Expands the embeddings of one module, in which all features have the same width.

    The backward pass sums gradients per unique row. The last bits may differ from run to run.
    """

    def __init__(self, sharded: ShardedEmbeddingBagCollection) -> None:
        self._sharded, self._order = sharded, list[int]()

    @staticmethod
    def supports(sharded: ShardedEmbeddingBagCollection) -> bool:
        on_gpu = sharded._device is not None and sharded._device.type == "cuda"
        return on_gpu and len(set(sharded._uncombined_embedding_dims)) == 1

    def expand(self, unique: VariableBatchEmbeddingBagCollectionAwaitable) -> KeyedTensor:
        """Wait for the embeddings of unique rows, and return those of all rows."""
        sharded = self._sharded
        sources = [each.wait() for each in unique._awaitables]
        for resized in unique._resize_awaitables or ():
            resized.wait()
        if not self._order:
            permute = sharded._permute_op._permute
            features = sharded._inverse_indices_permute_indices
            self._features = permute if features is None else features.index_select(0, permute)
            self._order = permute.tolist()
        inverse, num_rows = unique._inverse_indices[1], unique._batch_size_per_feature_pre_a2a
        starts = [0, *accumulate(num_rows)]
        first = numbers_on(inverse.device, [starts[number] for number in self._order])
        places = inverse.T.index_select(1, self._features) + first
        rows = sources[0] if len(sources) == 1 else torch.cat(sources)
        rows = rows.view(-1, sharded._uncombined_embedding_dims[0])
        return KeyedTensor(
            keys=sharded._embedding_names,
            length_per_key=sharded._embedding_dims,
            values=index_select(rows, places.flatten()).view(len(places), -1),
        )


class ExpandedBags(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]):
    """Awaitable of the embeddings of all rows."""

    def __init__(
        self, unique: VariableBatchEmbeddingBagCollectionAwaitable, expansion: BagExpansion
    ) -> None:
        super().__init__()
        self._unique, self._expansion = unique, expansion

    def _wait_impl(self) -> KeyedTensor:
        return self._expansion.expand(self._unique)
