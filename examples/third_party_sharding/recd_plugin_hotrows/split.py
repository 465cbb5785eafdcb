"""Batches of which ids of hot rows stay on their rank."""

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
    """A batch: all ids, where each one's row is among cold ones and then hot ones, and slots."""

    features: KeyedJaggedTensor
    order: Tensor
    slots: Tensor


@dataclass
class HotContext(batch_forms.ExactSequenceContext):
    split: Split | None = None


class Joined(LazyAwaitable[dict[str, JaggedTensor]]):
    """Rows of all ids, by feature."""

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
    """A batch, and what of it is cold.

    Args:
        features: of the collection, and perhaps others.
        first: the key of row 0 of each feature's table.
        hot: the keys of hot rows, ascending; a slot is a place in it.
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
