"""Operations on rows of jagged tensors that TorchRec and torch lack, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """Where rows start and end, ``[num_rows + 1]`` from 0, in the dtype of ``lengths``."""
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, dtype=lengths.dtype, out=offsets[1:])
    return offsets


def positions_of_rows(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where the values of some rows stand.

    Args:
        offsets: integer ``[num_rows + 1]``.
        rows: rows to take, integer ``[n]``, in any order, repeats allowed.

    Returns:
        Positions of the values of ``rows`` one row after the other, int64, and the lengths ``[n]``
        of these rows in the dtype of ``offsets``.
    """
    starts = offsets.index_select(0, rows)
    lengths = offsets.index_select(0, rows + 1) - starts
    return positions_of_ranges(starts, lengths), lengths


def positions_of_ranges(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """The positions from ``starts[i]`` up to ``starts[i] + lengths[i]``, one range after the other.

    Args:
        starts: integer ``[n]``.
        lengths: integer ``[n]``.
        total: the sum of ``lengths``; where it is known, nothing waits for a device.

    Returns:
        int64 ``[total]``.
    """
    ends = torch.cumsum(lengths, 0)
    shift = torch.repeat_interleave(starts.long() - (ends - lengths), lengths, output_size=total)
    return torch.arange(shift.numel(), device=starts.device) + shift


def runs_of_equal_rows(columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Which rows differ from the row before in any column.

    Args:
        columns: one or more, ``[B]``.

    Returns:
        ``first_rows``, int64 ``[U]``: where each run of equal rows begins, ascending; and the run
        of each row, int64 ``[B]``.
    """
    begins = torch.zeros_like(columns[0], dtype=torch.bool)
    begins[:1] = True
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins.nonzero().flatten(), torch.cumsum(begins, 0) - 1
