"""Tensors that lie one after the other in memory: many small ones worked on as one, uncopied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def tensors_of(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Tensors of one-dimensional arrays, without a copy; slices of one array share one storage."""
    bases: dict[int, tuple[Tensor, int]] = {}
    tensors = []
    for array in arrays:
        base = array.base
        if (
            not isinstance(base, np.ndarray)
            or base.ndim != 1
            or base.dtype != array.dtype
            or not (base.flags.c_contiguous and array.flags.c_contiguous)
        ):
            tensors.append(torch.from_numpy(array))
            continue
        if id(base) not in bases:
            bases[id(base)] = torch.from_numpy(base), _address(base)
        whole, start = bases[id(base)]
        at = (_address(array) - start) // array.itemsize if array.size else 0
        tensors.append(whole[at : at + array.size])
    return tensors


def adjacent_runs(parts: Sequence[Tensor]) -> list[int]:
    """How many of ``parts``, in their order, lie one after the other: the longest such runs.

    Args:
        parts: tensors of one dimension and one dtype.
    """
    runs: list[int] = []
    storage, end = 0, -1
    for part in parts:
        if not part.numel() and runs:
            runs[-1] += 1
            continue
        its_storage, start = part.untyped_storage().data_ptr(), int(part.storage_offset())
        if its_storage == storage and start == end and part.is_contiguous():
            runs[-1] += 1
        else:
            runs.append(1)
        storage, end = its_storage, start + part.numel() if part.is_contiguous() else -1
    return runs


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
