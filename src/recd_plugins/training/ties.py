"""Scores that count as equal in AUC and ranking metrics."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Scores this close are equal: 16 float32 roundings, relative to the score or absolute below 1.
TOLERANCE = 16 * float(np.finfo(np.float32).eps)
# A dense sample has chains of close scores that reach from end to end, so they are cut.
_LONGEST = 2 * TOLERANCE


def tie_groups(scores: NDArray[np.floating]) -> NDArray[np.int64]:
    """Number the distinct scores in ascending order, taking scores apart by rounding as equal.

    The logits of two equal rows differ in their last bits when the rows stand at different places
    of a batch. Neighbours in sorted order closer than ``TOLERANCE`` share a group. A chain of
    neighbours is cut into groups of at most twice ``TOLERANCE``, so two close scores in a
    longer chain may be told apart.

    Args:
        scores: logits or other scores ``[N]``, infinite ones included, without NaN.

    Returns:
        ``[N]``, from 0; the larger of two numbers belongs to the larger score.
    """
    values, place = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    if not len(values):
        return place
    size = np.maximum(1, np.minimum(np.abs(values[1:]), np.abs(values[:-1])))
    starts = np.r_[True, np.diff(values) > TOLERANCE * size]
    first = values[starts][np.cumsum(starts) - 1]
    with np.errstate(invalid="ignore"):  # an infinite score is a group of its own
        cell = (values - first) // (_LONGEST * np.maximum(1, np.abs(first)))
    starts[1:] |= np.diff(np.nan_to_num(cell)) > 0
    groups: NDArray[np.int64] = (np.cumsum(starts) - 1)[place]
    return groups
