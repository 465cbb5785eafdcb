"""Borders of buckets, in a precision that does not depend on how a column is stored."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded_borders(borders: Tensor) -> Tensor:
    """Return borders as float32 if that keeps them apart, else as float64.

    Values are compared in the dtype of the borders. So 0.1 is in one bucket, whether its column is
    stored as float32, float64 or text.

    Args:
        borders: float64 ``[N]``, in any order.
    """
    rounded = borders.float()
    apart = len(torch.unique(rounded)) == len(torch.unique(borders))
    return rounded if apart else borders.double()
