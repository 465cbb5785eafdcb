"""Numba loops over ids and rows for coalescing on CPU.

On one CPU core, gathering 53,000 rows of 64 scalars takes 0.5 ms, but 5 ms with
``torch.index_select``. Summing their gradients takes 0.5 ms, but 20 ms with PyTorch.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

u64 = np.uint64
_MULTIPLIER = u64(0x9E3779B97F4A7C15)
_HIGH = u64(32)


@numba.njit(cache=True, nogil=True)
def gather(rows: Any, index: Any, out: Any) -> None:
    """Copy rows ``[R, D]`` by index: ``out[i] = rows[index[i]]``."""
    for position in range(len(index)):
        row = index[position]
        for scalar in range(rows.shape[1]):
            out[position, scalar] = rows[row, scalar]


@numba.njit(cache=True, nogil=True)
def add_back(gradients: Any, index: Any, out: Any) -> None:
    """Compute ``out[index[i]] += gradients[i]`` for ``out`` ``[R, D]``."""
    for position in range(len(index)):
        row = index[position]
        for scalar in range(out.shape[1]):
            out[row, scalar] += gradients[position, scalar]


@numba.njit(cache=True, nogil=True)
def pool(rows: Any, index: Any, offsets: Any, weights: Any, out: Any) -> None:
    """Add the pooled rows of each bag to ``out``.

    Args:
        rows: ``[R, D]``.
        index: int64 ``[n]``, the row of each id.
        offsets: int64 ``[num_bags + 1]``, start of each bag in ``index``.
        weights: ``[n]``, the weight of each id.
        out: output ``[num_bags, D]``.
    """
    for bag in range(len(offsets) - 1):
        for position in range(offsets[bag], offsets[bag + 1]):
            row, weight = index[position], weights[position]
            for scalar in range(rows.shape[1]):
                out[bag, scalar] += weight * rows[row, scalar]


@numba.njit(cache=True, nogil=True)
def spread(gradients: Any, index: Any, offsets: Any, weights: Any, out: Any) -> None:
    """Compute the backward pass of ``pool``, and add the row gradients to ``out``, ``[R, D]``."""
    for bag in range(len(offsets) - 1):
        for position in range(offsets[bag], offsets[bag + 1]):
            row, weight = index[position], weights[position]
            for scalar in range(out.shape[1]):
                out[row, scalar] += weight * gradients[bag, scalar]


@numba.njit(cache=True, nogil=True)
def number_rows(rows: Any, slots: Any, numbers: Any, distinct: Any) -> Any:
    """Number the distinct rows from 0, in order of first occurrence.

    Args:
        rows: integers ``[n, D]``.
        slots: int32 scratch array; its length is a power of two and at least 2 n.
        numbers: output ``[n]``, the number of each row.
        distinct: output ``[n, D]``, the distinct rows; unused rows at the end keep their values.

    Returns:
        The number of distinct rows.
    """
    mask = u64(len(slots) - 1)
    slots[:] = -1
    count = 0
    for position in range(len(rows)):
        mixed = u64(0)
        for word in range(rows.shape[1]):
            mixed = (mixed ^ u64(rows[position, word])) * _MULTIPLIER
            mixed ^= mixed >> _HIGH
        slot = mixed & mask
        while True:
            number = slots[slot]
            if number < 0:
                number = count
                slots[slot] = count
                for word in range(rows.shape[1]):
                    distinct[count, word] = rows[position, word]
                count += 1
                break
            equal = True
            for word in range(rows.shape[1]):
                if distinct[number, word] != rows[position, word]:
                    equal = False
                    break
            if equal:
                break
            slot = (slot + u64(1)) & mask
        numbers[position] = number
    return count
