"""Tensors that lie one after the other in memory: many small ones worked on as one, uncopied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def tensors_of(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Tensors of one-dimensional arrays, without a copy; slices of one array share one storage."""
    base = arrays[0].base if arrays else None
    if base is None or any(a.base is not base or a.dtype != base.dtype for a in arrays):
        return [torch.from_numpy(array) for array in arrays]
    whole, start = torch.from_numpy(base).flatten(), _address(base)
    places = ((_address(array) - start) // array.itemsize for array in arrays)
    return [whole[at : at + len(array)] for at, array in zip(places, arrays, strict=True)]


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor of ``parts`` in their order, without a copy; None where they do not lie so.

    Args:
        parts: one or more tensors of one dimension and one dtype.
    """
    filled = [part for part in parts if part.numel()]
    if not filled:
        return parts[0]
    storage = filled[0].untyped_storage().data_ptr()
    start = end = filled[0].storage_offset()
    for part in filled:
        if (
            part.untyped_storage().data_ptr() != storage
            or part.storage_offset() != end
            or not part.is_contiguous()
        ):
            return None
        end += part.numel()
    return filled[0].as_strided((end - start,), (1,), start)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
