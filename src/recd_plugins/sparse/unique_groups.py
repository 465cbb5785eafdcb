"""Deduplication of a KeyedJaggedTensor's rows on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sparse.dedup import Deduplicator
from recd_plugins.sparse.jagged import readable


@dataclass(frozen=True)
class UniqueGroup:
    """U distinct rows of a group of F features, in the order of first occurrence.

    Attributes:
        values: ids of the distinct rows, feature by feature.
        lengths: lengths of the distinct rows, feature by feature, ``[F * U]``.
        inverse_lookup: index of the distinct row of each batch row, int64 ``[B]``.
        weights: weights of ``values``, or None.
    """

    values: Tensor
    lengths: Tensor
    inverse_lookup: Tensor
    weights: Tensor | None


def check_features(kjt: KeyedJaggedTensor, keys: Sequence[str]) -> None:
    """Raise ValueError if the KJT has a variable batch per feature, or lacks one of ``keys``."""
    if kjt.variable_stride_per_key():
        raise ValueError("the KJT has a variable batch per feature (VBE). Pass a KJT without VBE")
    if unknown := sorted(set(keys) - set(kjt.keys())):
        raise ValueError(
            f"the KJT has no feature {unknown[0]!r}, only {', '.join(map(repr, kjt.keys()))}"
        )


def deduplicate(
    kjt: KeyedJaggedTensor,
    groups: Sequence[Sequence[str]],
    deduplicator: Deduplicator | None = None,
) -> list[UniqueGroup]:
    """Return each group's distinct rows, which differ in a value or weight of any feature.

    A given ``deduplicator`` reuses its working memory.

    Raises:
        ValueError: a feature is unknown, the KJT has a variable batch per feature (VBE), or the
            weights require a gradient.
    """
    check_features(kjt, [key for group in groups for key in group])
    weights = kjt.weights_or_none()
    if weights is not None and weights.requires_grad:
        raise ValueError(
            "the KJT has weights that require a gradient, but duplicate rows would share "
            "weights. Call detach() on the weights"
        )
    tensors = [kjt.values(), *([] if weights is None else [weights])]
    buffers = [readable(tensor).numpy() for tensor in tensors]
    stride, offsets = kjt.stride(), kjt.offsets().cpu().numpy()
    place = {key: index * stride for index, key in enumerate(kjt.keys())}
    columns = [
        [
            (buffer, offsets[place[key] : place[key] + stride + 1])
            for buffer in buffers
            for key in group
        ]
        for group in groups
    ]
    results = []
    for unique in (deduplicator or Deduplicator())(columns, stride):
        found = [torch.from_numpy(array) for array in unique.values]
        if len(found) < len(buffers):  # buffers of one dtype share an array
            found = list(found[0].tensor_split(2))
        # The weight columns come second, with the same lengths.
        lengths = torch.from_numpy(unique.lengths[: unique.lengths.size // len(buffers)])
        values, *of_weights = (
            new.to(old.device, old.dtype) for new, old in zip(found, tensors, strict=True)
        )
        results.append(
            UniqueGroup(
                values=values,
                lengths=lengths.to(kjt.lengths()),
                inverse_lookup=torch.from_numpy(unique.inverse_lookup).to(values.device),
                weights=of_weights[0] if of_weights else None,
            )
        )
    return results
