"""What converters make and preprocessing transforms: one batch of rows in logical form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor


@dataclass(frozen=True)
class Batch(Pipelineable):
    """One batch of B rows. Every sparse feature stands in it once.

    Attributes:
        dense_features: ``[B, num_dense]``, float32; before preprocessing maybe float64.
        labels: float32 ``[B]``.
        kjt: the features that are not deduplicated, or None where all are.
        ikjts: deduplicated features, one entry a group that shares its inverse lookup.
        partials: features whose rows share ids with the row before.
    """

    dense_features: Tensor
    labels: Tensor
    kjt: KeyedJaggedTensor | None = None
    ikjts: tuple[InverseKeyedJaggedTensor, ...] = ()
    partials: tuple[PartialInverseKeyedJaggedTensor, ...] = ()

    def __post_init__(self) -> None:
        # What yields them is at its end when they are looked at.
        object.__setattr__(self, "ikjts", tuple(self.ikjts))
        object.__setattr__(self, "partials", tuple(self.partials))

    @property
    def batch_size(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return replace(
            self,
            dense_features=self.dense_features.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            kjt=None if self.kjt is None else self.kjt.to(device, non_blocking=non_blocking),
            ikjts=tuple(ikjt.to(device, non_blocking=non_blocking) for ikjt in self.ikjts),
            partials=tuple(part.to(device, non_blocking=non_blocking) for part in self.partials),
        )

    def pin_memory(self) -> Self:
        return replace(
            self,
            dense_features=self.dense_features.pin_memory(),
            labels=self.labels.pin_memory(),
            kjt=None if self.kjt is None else self.kjt.pin_memory(),
            ikjts=tuple(ikjt.pin_memory() for ikjt in self.ikjts),
            partials=tuple(partial.pin_memory() for partial in self.partials),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense_features.record_stream(stream)
        self.labels.record_stream(stream)
        if self.kjt is not None:
            self.kjt.record_stream(stream)
        for ikjt in self.ikjts:
            ikjt.record_stream(stream)
        for partial in self.partials:
            partial.record_stream(stream)
