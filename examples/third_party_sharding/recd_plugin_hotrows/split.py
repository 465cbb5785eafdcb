"""Splits the ids of a batch into hot ids, looked up locally, and cold ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.types import LazyAwaitable

from recd_plugins.api import batch_forms


class Split(NamedTuple):
    """A batch split into ids of rows with copies on every rank (hot) and without copies (cold).

    Attributes:
        features: all ids.
        order: index of each id's row in the concatenation of cold and hot rows, int64.
        slots: index of each hot id's copy, int64 ``[num_hot]``.
    """

    features: KeyedJaggedTensor
    order: Tensor
    slots: Tensor


@dataclass
class HotContext(batch_forms.ExactSequenceContext):
    split: Split | None = None


class Joined(LazyAwaitable[dict[str, JaggedTensor]]):
    """Awaitable output that merges embeddings from local copies and from the sharded tables."""

    def __init__(self, split: Split, cold: Any, hot: Tensor) -> None:
        super().__init__()
        self._split, self._cold, self._hot = split, cold, hot

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        features, cold = self._split.features, self._cold.wait()
        keys = features.keys()
        rows = torch.cat([*(cold[key].values() for key in keys), self._hot])
        parts = rows.index_select(0, self._split.order).split(features.length_per_key())
        return {
            key: JaggedTensor(values=part, lengths=features[key].lengths())
            for key, part in zip(keys, parts, strict=True)
        }


def split(
    features: KeyedJaggedTensor, first: Mapping[str, int], hot: Tensor
) -> tuple[Split, KeyedJaggedTensor]:
    """Split a batch. Return the split, and the ids to look up in the sharded tables.

    A row's key is its index in the concatenation of all tables. Hot rows have copies on every rank.

    Args:
        features: ids of the batch. Features that are not in ``first`` are ignored.
        first: key of row 0 of each feature's table.
        hot: keys of the hot rows, ascending, int64 ``[num_copies]``.
    """
    features = features.permute([features.keys().index(feature) for feature in first])
    values = features.values()
    starts = torch.tensor([*first.values()], device=values.device)
    per_key = torch.tensor(features.length_per_key(), device=values.device)
    keys = values + starts.repeat_interleave(per_key)
    slots = torch.searchsorted(hot, keys).clamp_(max=len(hot) - 1)
    is_hot = hot[slots] == keys
    order = torch.cat([(~is_hot).nonzero(), is_hot.nonzero()]).view(-1).argsort()
    num_cold = torch.nn.functional.pad((~is_hot).cumsum(0), (1, 0))
    lengths = num_cold[features.offsets()].diff().to(features.lengths().dtype)
    cold = KeyedJaggedTensor(features.keys(), values[~is_hot], lengths=lengths)
    return Split(features, order, slots[is_hot]), cold
