"""Tensors of a batch in one buffer, so that a single copy moves all of them to a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sparse.movable import Movable

# Tensors are aligned to cache lines, as torch's own memory is.
_ALIGNMENT = 64
_OF_KJT = ("_values", "_weights", "_lengths", "_offsets", "_inverse_indices")


def has_known_tensors(value: object) -> bool:
    """Return whether ``value`` is a Tensor, Movable or KeyedJaggedTensor (no subclass)."""
    return isinstance(value, Tensor | Movable) or type(value) is KeyedJaggedTensor


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy with ``function`` applied to the tensors that ``value.to`` would move.

    Args:
        value: Tensor, KeyedJaggedTensor or Movable.
        function: called once per tensor and occurrence.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):  # names and tensor of inverse indices
        return tuple(map_tensors(each, function) for each in value)
    if not has_known_tensors(value):
        return value
    names = value.TENSORS if isinstance(value, Movable) else _OF_KJT
    clone = copy.copy(value)
    vars(clone).update({n: map_tensors(getattr(value, n), function) for n in names})
    return clone


def pack(tensors: Sequence[Tensor], *, pin_memory: bool) -> list[Tensor]:
    """Copy CPU tensors into one buffer, in pinned memory if ``pin_memory`` is set."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin_memory)
    copies = []
    for tensor, start in zip(tensors, starts, strict=False):
        part = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(part.copy_(tensor))
    return copies


def move(
    tensors: Sequence[Tensor], device: torch.device, *, non_blocking: bool
) -> list[Tensor] | None:
    """Copy CPU tensors of one buffer to ``device`` with one copy.

    Returns:
        Views of one tensor on ``device``. None if the tensors are not adjacent in one buffer.
    """
    storage = tensors[0].untyped_storage()
    starts = [each.storage_offset() * each.element_size() for each in tensors]
    ends = [start + each.nbytes for start, each in zip(starts, tensors, strict=True)]
    first = min(starts)
    num_bytes = -(-(max(ends) - first) // 8) * 8  # whole elements of each dtype
    gaps = num_bytes - sum(each.nbytes for each in tensors)
    if (
        any(each.device.type != "cpu" or not each.is_contiguous() for each in tensors)
        or any(each.untyped_storage().data_ptr() != storage.data_ptr() for each in tensors)
        or any(start % 8 for start in starts)
        or first + num_bytes > storage.nbytes()
        or not 0 <= gaps <= _ALIGNMENT * len(tensors)
    ):
        return None
    itemsize = tensors[0].element_size()
    source = tensors[0].as_strided((num_bytes // itemsize,), (1,), first // itemsize)
    there = source.to(device, non_blocking=non_blocking)
    moved: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        own = [n for n in range(len(tensors)) if tensors[n].dtype == dtype]
        own.sort(key=lambda n: (starts[n], ends[n]))
        # Splitting needs one operator for all tensors of a dtype. Every second part is a gap.
        bounds = [first, *(bound for n in own for bound in (starts[n], ends[n])), first + num_bytes]
        sizes = [(end - start) // dtype.itemsize for start, end in pairwise(bounds)]
        if min(sizes) < 0:
            return None
        typed = there if there.dtype == dtype else there.view(dtype)
        for n, part in zip(own, typed.split_with_sizes(sizes)[1::2], strict=True):
            moved[n] = part if tensors[n].dim() == 1 else part.view(tensors[n].shape)
    return [moved[number] for number in range(len(tensors))]
