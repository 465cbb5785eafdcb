"""The contexts of a batch in sharded modules, from its input dist to its output."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext

from recd_plugins.distributed.coalesced.input_dist import Coalesced


@dataclass
class _KeepsCoalesced:
    """What of a batch stays on its rank, in a context of TorchRec's.

    Attributes:
        coalesced: of a coalesced batch.
        no_rows: whether the batch has none, and an empty one was put there: TorchRec (1.6 to 1.9)
            divides by the number of rows.
    """

    coalesced: Coalesced | None = None
    no_rows: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until ``stream`` is done with it."""
        super().record_stream(stream)  # type: ignore[misc]
        if self.coalesced is not None:
            self.coalesced.record_stream(stream)


@dataclass
class ExactBagContext(_KeepsCoalesced, EmbeddingBagCollectionContext):
    """The context of a batch of bags."""


def set_stored_rows(ctx: Any, features: KJTList) -> None:
    """Have the context know how many rows of a deduplicated batch each rank sent.

    A context that ``attach`` of a train pipeline made anew for a batch that was sent before does
    not (TorchRec 1.6 to 1.9).
    """
    if not getattr(ctx, "variable_batch_per_feature", False):
        return
    for kjt, context in zip(features, ctx.sharding_contexts, strict=False):
        strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else []
        if context is not None and strides and not context.batch_size_per_rank_per_feature:
            context.batch_size_per_rank_per_feature = [
                list(each) for each in zip(*strides, strict=True)
            ]


@dataclass
class ExactSequenceContext(_KeepsCoalesced, EmbeddingCollectionContext):
    """The context of a batch of sequences."""

    def __post_init__(self) -> None:
        if not is_dataclass(EmbeddingCollectionContext):  # TorchRec 1.6
            EmbeddingCollectionContext.__init__(self)
