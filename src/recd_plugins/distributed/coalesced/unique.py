"""Unique ids with inverse, of several stretches of ids at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recd_plugins.distributed.coalesced.kernels import number_ids


class Unique(NamedTuple):
    """The distinct ids of stretches.

    Attributes:
        ids: distinct ids, stretch after stretch; on CPU in the order in which they occur, elsewhere
            sorted.
        counts: how many each stretch has.
        inverse: int64 ``[n]``, the place of each id among the distinct ones of its stretch.
    """

    ids: Tensor
    counts: list[int]
    inverse: Tensor


def unique_ids(ids: Tensor, sizes: Sequence[int]) -> Unique:
    """The distinct ids of each stretch of ``ids``.

    Any integer may be an id: whether a table has that row is not looked at.

    Args:
        ids: int32 or int64 ``[n]``.
        sizes: of the stretches; their sum is n.
    """
    if ids.device.type == "cpu":
        return _by_hash(ids, sizes)
    return by_sorting(ids, sizes)


def _by_hash(ids: Tensor, sizes: Sequence[int]) -> Unique:
    unique, inverse = torch.empty_like(ids), torch.empty(len(ids), dtype=torch.int64)
    counts = np.empty(len(sizes), np.int64)
    largest = max(1, *sizes)
    slots = np.empty(1 << (2 * largest - 1).bit_length(), np.int32)
    number_ids(
        ids.contiguous().numpy(),
        np.asarray(sizes, np.int64),
        slots,
        unique.numpy(),
        inverse.numpy(),
        counts,
    )
    return Unique(unique[: int(counts.sum())], counts.tolist(), inverse)


def by_sorting(ids: Tensor, sizes: Sequence[int]) -> Unique:
    """The same on any device, by two stable sorts; waits for the device once."""
    stretches = torch.arange(len(sizes), device=ids.device).repeat_interleave(
        torch.tensor(sizes, device=ids.device), output_size=len(ids)
    )
    order = torch.sort(ids, stable=True).indices
    order = order.index_select(0, torch.sort(stretches.index_select(0, order), stable=True).indices)
    ids, stretches = ids.index_select(0, order), stretches.index_select(0, order)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = (ids[1:] != ids[:-1]) | (stretches[1:] != stretches[:-1])
    per_stretch = torch.zeros(len(sizes), dtype=torch.int64, device=ids.device)
    per_stretch.index_add_(0, stretches, is_first.long())
    first_of_stretch = per_stretch.cumsum(0) - per_stretch
    inverse = torch.empty_like(order)
    inverse[order] = is_first.cumsum(0) - 1 - first_of_stretch.index_select(0, stretches)
    return Unique(ids[is_first], per_stretch.tolist(), inverse)
