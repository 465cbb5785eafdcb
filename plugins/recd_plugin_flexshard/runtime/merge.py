"""Embeddings of the tiers, merged into the order of the ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_flexshard.runtime.flex import FlexLookup
from recd_plugin_flexshard.runtime.split import TierSplit


class TieredAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """What the sharded collection returns: every feature in the order of its ids.

    Args:
        split: of the batch.
        cold: embeddings of the ids that have no copy, and of untiered features.
        hot: embeddings, ``[num_hot, embedding_dim]``; None without hot rows.
        flex: their lookup; None without flex rows.
        need_indices: give the ids as the JaggedTensors' weights.
    """

    def __init__(
        self,
        split: TierSplit,
        cold: LazyAwaitable[dict[str, JaggedTensor]],
        hot: Tensor | None,
        flex: FlexLookup | None,
        need_indices: bool,
    ) -> None:
        super().__init__()
        self._split = split
        self._cold = cold
        self._hot = hot
        self._flex = flex
        self._need_indices = need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        split = self._split
        output = dict(self._cold.wait())
        features = split.index.features
        tiers = [output[name].values() for name in features]
        sources = list(torch.split(split.cold_source, [len(tier) for tier in tiers]))
        if self._hot is not None:
            tiers.append(self._hot)
            sources.append(split.hot_source)
            self._hot = None  # the caller may keep this object
        if self._flex is not None:
            tiers.append(self._flex.wait())
            sources.append(split.flex_source)
        merged = _TierMerge.apply(sources, *tiers)  # type: ignore[no-untyped-call]
        values = torch.split(merged, split.ids_per_feature)
        ids = torch.split(split.ids, split.ids_per_feature)
        for number, name in enumerate(features):
            output[name] = JaggedTensor(
                values=values[number],
                lengths=split.lengths[number],
                weights=ids[number] if self._need_indices else None,
            )
        return output


class _TierMerge(torch.autograd.Function):
    """Rows of several matrices in one, at the places that ``sources`` has of them."""

    @staticmethod
    def forward(ctx: Any, sources: list[Tensor], *tiers: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        merged = tiers[0].new_empty(sum(map(len, tiers)), tiers[0].shape[1])
        # Not concatenated first, which would hold all embeddings once more.
        for source, tier in zip(sources, tiers, strict=True):
            merged.index_copy_(0, source, tier)
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient.index_select(0, source) for source in ctx.saved_tensors)
