"""The contexts of a batch in sharded modules, from its input dist to its output."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
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


@dataclass
class ExactSequenceContext(_KeepsCoalesced, EmbeddingCollectionContext):
    """The context of a batch of sequences."""

    def __post_init__(self) -> None:
        if not is_dataclass(EmbeddingCollectionContext):  # TorchRec 1.6
            EmbeddingCollectionContext.__init__(self)
