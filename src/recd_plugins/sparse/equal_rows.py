"""Which rows of a group of jagged features are equal, by torch operations on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recd_plugins.sparse.jagged import positions_of_rows

#: Multipliers of splitmix64, as int64.
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


def first_equal_rows(
    columns: Sequence[tuple[Tensor, Tensor]], num_rows: int
) -> tuple[Tensor, Tensor]:
    """Find the rows that are equal in every column, bit by bit.

    Rows are brought together by a hash and then compared: a collision costs time, never exactness.

    Args:
        columns: values (integers, or floating-point numbers, which compare by their bits) and the
            offsets ``[num_rows + 1]`` of their rows, which need not start at 0.
        num_rows: B.

    Returns:
        ``first_rows``, int64 ``[U]``: where each unique row occurs first, ascending; and
        ``inverse_lookup``, int64 ``[B]``.
    """
    device = columns[0][1].device
    columns = [(_bits(values), offsets) for values, offsets in columns]
    first = torch.arange(num_rows, device=device)
    # Equal rows have equal hashes, so they always move to the next round together; the first row
    # of each hash never moves: every round settles some rows.
    unsettled, seed = first, 0
    while unsettled.numel():
        hashes, codes = torch.unique(
            _hash_rows(columns, unsettled, seed), return_inverse=True, sorted=False
        )
        leaders = torch.full_like(hashes, num_rows).scatter_reduce_(0, codes, unsettled, "amin")
        candidates = leaders.index_select(0, codes)
        equal = _rows_equal(columns, unsettled, candidates)
        first = first.index_copy(0, unsettled[equal], candidates[equal])
        unsettled, seed = unsettled[~equal], seed + 1
    is_first = first == torch.arange(num_rows, device=device)
    number = torch.cumsum(is_first, 0) - 1
    return is_first.nonzero().flatten(), number.index_select(0, first)


def _bits(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _mix(numbers: Tensor) -> Tensor:
    """The finalizer of splitmix64, with shifts that fill with the sign: still a good mixer."""
    numbers = (numbers ^ (numbers >> 30)) * _MIX_1
    numbers = (numbers ^ (numbers >> 27)) * _MIX_2
    return numbers ^ (numbers >> 31)


def _hash_rows(columns: Sequence[tuple[Tensor, Tensor]], rows: Tensor, seed: int) -> Tensor:
    total = torch.full_like(rows, seed)
    for values, offsets in columns:
        positions, lengths = positions_of_rows(offsets, rows)
        starts = torch.repeat_interleave(offsets.long().index_select(0, rows), lengths)
        mixed = _mix(values.index_select(0, positions).long() + (positions - starts + 1) * _STEP)
        sums = torch.cat([mixed.new_zeros(1), torch.cumsum(_mix(mixed + seed), 0)])
        ends = torch.cumsum(lengths, 0)
        row_sums = sums.index_select(0, ends) - sums.index_select(0, ends - lengths)
        total = _mix(total * _STEP + row_sums + lengths)
    return total


def _rows_equal(columns: Sequence[tuple[Tensor, Tensor]], left: Tensor, right: Tensor) -> Tensor:
    """Whether row ``left[i]`` equals row ``right[i]`` in every column, bool ``[n]``."""
    equal = torch.ones_like(left, dtype=torch.bool)
    for _, offsets in columns:
        lengths = torch.diff(offsets)
        equal &= lengths.index_select(0, left) == lengths.index_select(0, right)
    same = equal.nonzero().flatten()
    for values, offsets in columns:
        left_positions, lengths = positions_of_rows(offsets, left[same])
        right_positions, _ = positions_of_rows(offsets, right[same])
        differ = values.index_select(0, left_positions) != values.index_select(0, right_positions)
        rows_that_differ = torch.repeat_interleave(same, lengths)[differ]
        equal[rows_that_differ] = False
    return equal
