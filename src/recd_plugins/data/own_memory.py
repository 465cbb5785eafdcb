"""A look at whether batches have memory of their own: others are taken while one is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from recd_plugins.errors import PluginError
from recd_plugins.values.model_input import ModelInput

# More than a pipeline takes ahead.
_LOOKED_AT = 8


class OwnMemory:
    """The first batch of a reader, kept until those after it are made.

    Args:
        makers: names of the plugins that make batches, for the message.
    """

    def __init__(self, makers: Sequence[str]) -> None:
        self._makers = makers
        self._seen = 0
        self._first: list[Tensor] = []
        self._copies: list[Tensor] = []

    def check(self, batch: ModelInput) -> None:
        """Look at the next batch.

        Raises:
            PluginError: the first one has become another by it.
        """
        if self._seen == _LOOKED_AT:
            self._first, self._copies = [], []
        self._seen += 1
        if self._seen > _LOOKED_AT:
            return
        if self._seen == 1:
            self._first = [*_tensors(batch)]
            self._copies = [each.clone() for each in self._first]
            return
        # A model may write to its batch, which is memory that no other batch has.
        memory = {each.untyped_storage().data_ptr() for each in _tensors(batch)}
        for first, copy in zip(self._first, self._copies, strict=True):
            shared = first.untyped_storage().data_ptr() in memory
            if shared and not torch.allclose(first, copy, rtol=0, atol=0, equal_nan=True):
                raise PluginError(
                    f"{' or '.join(self._makers)}: batch {self._seen} was written over batch 1, "
                    "which may be in training then: return tensors of their own with each batch"
                )


def _tensors(batch: ModelInput) -> Iterator[Tensor]:
    for features in (batch.sparse_features, batch.replicated_features, batch.sequence_features):
        if features is not None:
            yield from (features.values(), features.lengths())
            if (weights := features.weights_or_none()) is not None:
                yield weights
    yield from (batch.dense_features, batch.labels)
    # Noted as asked for, of a batch that the model does not get: it gets a copy with its times.
    yield from batch.inverse_lookup.values()
