"""Contexts of a batch in sharded modules, and batches without rows.

TorchRec (1.6 to 1.9) divides by the number of rows of sequences and of deduplicated bags. A batch
without rows, as a rank may have at the end of its data, gets an empty row on its way in, which is
taken out again.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins.sharding.coalesced.input_dist import Coalesced


@dataclass
class _ExactContext:
    """What stays on this rank, in a context of TorchRec's.

    Attributes:
        coalesced: of a coalesced batch.
        no_rows: whether an empty row was put into a batch without any.
    """

    coalesced: Coalesced | None = None
    no_rows: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until ``stream`` is done with it."""
        super().record_stream(stream)  # type: ignore[misc]
        if self.coalesced is not None:
            self.coalesced.record_stream(stream)


@dataclass
class ExactBagContext(_ExactContext, EmbeddingBagCollectionContext):
    """The context of a batch of bags."""


@dataclass
class ExactSequenceContext(_ExactContext, EmbeddingCollectionContext):
    """The context of a batch of sequences."""

    def __post_init__(self) -> None:
        if not is_dataclass(EmbeddingCollectionContext):  # TorchRec 1.6
            EmbeddingCollectionContext.__init__(self)


def set_stored_rows(ctx: Any, features: KJTList) -> None:
    """Tell the context how many rows of a deduplicated batch each rank sent.

    A context that ``attach`` of a train pipeline made anew for a batch that was sent before does
    not know (TorchRec 1.6 to 1.9).
    """
    if not getattr(ctx, "variable_batch_per_feature", False):
        return
    for kjt, context in zip(features, ctx.sharding_contexts, strict=False):
        strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else []
        if context is not None and strides and not context.batch_size_per_rank_per_feature:
            context.batch_size_per_rank_per_feature = [
                list(each) for each in zip(*strides, strict=True)
            ]


def num_rows(features: KeyedJaggedTensor) -> int:
    """Return the rows of the batch, all of them if it is deduplicated."""
    indices = features.inverse_indices_or_none()
    return features.stride() if indices is None else indices[1].shape[1]


def with_an_empty_row(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a batch without rows with one empty row for each feature, in the same form."""
    keys, indices = features.keys(), features.inverse_indices_or_none()
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=keys,
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths().new_zeros(len(keys)),
        stride=None if variable else 1,
        stride_per_key_per_rank=[[1]] * len(keys) if variable else None,
        inverse_indices=indices and (indices[0], indices[1].new_zeros(len(keys), 1)),
    )


def pooled_without_rows(embeddings: KeyedTensor) -> KeyedTensor:
    """Take the empty row out of the output of bags."""
    return KeyedTensor(
        keys=embeddings.keys(),
        length_per_key=embeddings.length_per_key(),
        values=embeddings.values()[:0],
    )


def without_rows(embeddings: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Take the empty row out of the output of sequences."""
    return {
        name: JaggedTensor(
            rows.values(), weights=rows.weights_or_none(), lengths=rows.lengths()[:0]
        )
        for name, rows in embeddings.items()
    }
